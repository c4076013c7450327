"""y = x @ w.T by cuBLAS: codes widened exactly, slice by slice, a product with float32 sums out, an epilogue.

No 16-bit value stands between the sum and y: the scale meets the float32 sum, then y is rounded once.
cuBLAS through CuPy refuses a capture, so KERNELS gives captured problems to other rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cufp8 import kernels, runtime
from cufp8.kernels import Launch, slice_rows

_SUMS = 1 << 26  # float32 sums held at once: 256 MiB
_CUDA_TYPES = {"float32": 0, "float16": 2, "bfloat16": 14}  # cudaDataType_t
_COMPUTE_32F, _COMPUTE_32F_PEDANTIC = 68, 69  # cublasComputeType_t; pedantic: never TF32
_ONE, _ZERO = np.ones(1, np.float32), np.zeros(1, np.float32)


def product(
    stream: int,
    x: int,
    x_stride: int,
    y: int,
    y_stride: int,
    *,
    codes: int,
    scale: int,
    bias: int,
    m: int,
    n: int,
    k: int,
    panels: int,
    x_dtype: str,
    out: int,
    device: int,
) -> None:
    """Queue the product on `stream`. Pointers are integers, strides count elements, `out` is an Out of linear.cuh.

    Takes a slice of the weight in x's dtype (at most kernels.SLICE_BYTES) and its sums; both go back to CuPy's
    pool of the stream when the work is queued.
    """
    import cupy
    from cupy.cuda import cublas

    units, steps = kernels.units_steps(n, k)
    pitch, rows = steps * kernels.STEP, min(-(-n // kernels.UNIT) * kernels.UNIT, slice_rows(x_dtype, k))
    tokens = min(m, max(1, _SUMS // rows))
    size = kernels.FLOATS[x_dtype].itemsize
    row = runtime.row("cublas")
    compute = _COMPUTE_32F_PEDANTIC if x_dtype == "float32" else _COMPUTE_32F
    y_size = list(kernels.FLOATS.values())[out].itemsize

    def launch(entry: str, grid: tuple[int, int, int], block: int, *fields: int) -> None:
        runtime.Launcher(row, Launch(entry, grid, block), device)(stream, *fields)

    with cupy.cuda.Device(device), runtime.stream(stream):
        wide: Any = cupy.cuda.alloc(rows * pitch * size)
        sums: Any = cupy.cuda.alloc(tokens * rows * 4)
        handle = cupy.cuda.device.get_cublas_handle()
        for first in range(0, n, rows):
            count = min(rows, n - first)
            launch(
                f"widen_{x_dtype}",
                (steps, -(-count // kernels.UNIT), 1),
                64,
                *(0, codes, 0, 0, wide.ptr, 0, 0, 0, n, k, steps, 0),
                *(*divmod(units, panels), first // kernels.UNIT, 0, 0),
            )
            for token in range(0, m, tokens):
                some = min(tokens, m - token)
                # Column-major for cuBLAS: sums.T [count, some] = wide [count, k] @ x.T [k, some].
                cublas.gemmEx(
                    handle, 1, 0, count, some, k,
                    _ONE.ctypes.data, wide.ptr, _CUDA_TYPES[x_dtype], pitch,
                    x + token * x_stride * size, _CUDA_TYPES[x_dtype], max(x_stride, 1),
                    _ZERO.ctypes.data, sums.ptr, _CUDA_TYPES["float32"], count, compute, -1,
                )  # fmt: skip
                launch(
                    "epilogue",
                    (some, -(-count // 256), 1),
                    256,
                    *(sums.ptr, 0, scale + 4 * first, bias + 4 * first if bias else 0),
                    *(y + (token * y_stride + first) * y_size, count, y_stride),
                    *(some, count, k, steps, out, 1, 0, 1, 0, 0),
                )
