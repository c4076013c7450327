"""A float32 weight in NumPy, multiplied from its FP8 codes; on the GPU if there is one."""

import numpy as np

import cufp8

rng = np.random.default_rng(0)
weights = rng.standard_normal((2048, 1024), dtype=np.float32)
x = rng.standard_normal((4, 1024), dtype=np.float32)

layer = cufp8.Linear(weights)
y = layer(x)  # a NumPy array, wherever the layer lives

exact = x @ weights.T
print(layer)
print(f"{weights.nbytes / 1e6:.1f} MB of float32 became {layer.nbytes / 1e6:.1f} MB")
print(f"relative error of y: {np.linalg.norm(y - exact) / np.linalg.norm(exact):.3f}")
