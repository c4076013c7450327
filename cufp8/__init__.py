"""8- and 4-bit linear layers, multiplied straight from their codes by CUDA kernels compiled where they run."""

from typing import TYPE_CHECKING, Any

from cufp8.activations import quantize_activations, rms_norm_quantize, silu_mul_quantize
from cufp8.block_scaled import from_128x4, pack_fp4, to_128x4, unpack_fp4
from cufp8.linear import Linear, fuse
from cufp8.matmul import scaled_mm
from cufp8.quantize import ErrorReport, QuantizedTensor, error_report, quantize
from cufp8.scaled_linear import calibrate

if TYPE_CHECKING:
    from cufp8.checkpoint import Checkpoint, CheckpointError, load

__version__ = "0.1.0"

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "ErrorReport",
    "Linear",
    "QuantizedTensor",
    "calibrate",
    "error_report",
    "from_128x4",
    "fuse",
    "load",
    "pack_fp4",
    "quantize",
    "quantize_activations",
    "rms_norm_quantize",
    "scaled_mm",
    "silu_mul_quantize",
    "to_128x4",
    "unpack_fp4",
]


def __getattr__(name: str) -> Any:
    # The reader of checkpoints is imported at its first use: it would take a tenth of the time of `import cufp8`.
    if name not in ("Checkpoint", "CheckpointError", "load"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from cufp8 import checkpoint

    return getattr(checkpoint, name)
