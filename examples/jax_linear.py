"""Arrays of JAX in and out, eager; on the CPU where JAX has no GPU."""

import cufp8
from cufp8 import runtime

try:
    import jax
    import jax.numpy as jnp
except ImportError:
    raise SystemExit("This example needs JAX: pip install jax") from None

on_gpu = jax.default_backend() == "gpu" and runtime.available()
with jax.default_device(jax.devices(None if on_gpu else "cpu")[0]):
    weights = jax.random.normal(jax.random.key(0), (2048, 1024))
    x = jax.random.normal(jax.random.key(1), (4, 1024), dtype=jnp.bfloat16)

layer = cufp8.Linear(weights, device="cuda" if on_gpu else "cpu")
y = layer(x)  # a JAX array, where x is

exact = x.astype(jnp.float32) @ weights.T
print(layer)
print(f"y: {y.dtype} on {y.device}")
print(f"relative error of y: {float(jnp.linalg.norm(y - exact) / jnp.linalg.norm(exact)):.3f}")
