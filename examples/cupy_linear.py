"""A CuPy weight and CuPy activations in bfloat16; nothing leaves the GPU."""

import cufp8
from cufp8 import runtime

if not runtime.available():
    raise SystemExit(f"This example needs a GPU: {runtime.why_not()}")

import cupy
import ml_dtypes
import numpy as np

rng = np.random.default_rng()
weights = cupy.asarray(rng.standard_normal((14336, 4096), np.float32))
x = cupy.asarray(rng.standard_normal((1, 4096), np.float32).astype(ml_dtypes.bfloat16))

layer = cufp8.Linear(weights)  # quantised on the GPU
y = layer(x)  # bfloat16, on CuPy's current stream

exact = x.astype(cupy.float32) @ weights.T
error = cupy.linalg.norm(y.astype(cupy.float32) - exact) / cupy.linalg.norm(exact)
print(layer)
print(f"{weights.size * 2 / 1e6:.1f} MB of bfloat16 became {layer.nbytes / 1e6:.1f} MB")
print(f"y: {y.dtype}, relative error {float(error):.3f}")
