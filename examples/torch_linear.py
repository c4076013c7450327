"""An nn.Linear of torch, served in FP8 on torch's stream; on the CPU without a GPU."""

import cufp8
from cufp8 import runtime

try:
    import torch
except ImportError:
    raise SystemExit("This example needs torch: pip install torch") from None

device = "cuda" if torch.cuda.is_available() and runtime.available() else "cpu"
linear = torch.nn.Linear(1024, 2048, device=device, dtype=torch.bfloat16)
x = torch.randn(4, 1024, device=device, dtype=torch.bfloat16)

layer = cufp8.Linear(linear.weight.detach(), linear.bias.detach(), device=device)
with torch.no_grad():
    y = layer(x)  # a torch tensor, where x is, allocated by torch
    exact = linear(x)

print(layer)
print(f"y: {y.dtype} on {y.device}")
print(f"relative error of y: {float((y - exact).float().norm() / exact.float().norm()):.3f}")
