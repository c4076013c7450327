"""y = x @ w.T with weights in few bits and 16-bit x: cufp8 against F.linear, and against rivals given.

A cell (n, k, m) has FP8A16 weights; `Weights` and `build` know any format.

Contenders are named as `results.OURS`, `EAGER` and `TORCH` have them. `cufp8-nopdl` is a chain without programmatic
dependent launch, `cufp8-invariant` has layers whose rows do not depend on m. `cufp8-eager` is for cells where another
kernel serves outside of captures: queued call by call while the GPU is kept busy, so that this too is GPU time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

import cufp8
from cufp8 import kernels, runtime
from cufp8.bench.measure import Contender, Measured, copies_for, measure, normal, relative_l2, without_arrays
from cufp8.bench.results import EAGER, TORCH
from cufp8.formats import FORMATS

if TYPE_CHECKING:
    from cufp8.bench.session import Session

LARGEST_ERROR = {"bfloat16": 1e-2, "float16": 2e-3}  # of contenders; rounding alone is 1.7e-3 and 2e-4
CHECKED_CHANNELS = 4096  # about so many, evenly spread
Builder = Callable[["Weights", list[Any]], Contender]


class Weights:
    """A random weight [n, k] that keeps the variance of x, its codes, and copies of it in any form a contender wants.

    Parameters
    ----------
    n, k, l2_bytes : int
    seed : int
        Another one, another weight.
    copies : int, optional
        Default: as many as keep it cold when calls cycle over them.
    quantize : callable
        Float weight -> QuantizedTensor.
    """

    def __init__(
        self,
        n: int,
        k: int,
        l2_bytes: int,
        seed: int = 0,
        copies: int | None = None,
        quantize: Callable[[Any], cufp8.QuantizedTensor] = cufp8.quantize,
    ) -> None:
        self.n, self.k, self._l2_bytes, self._seed, self._copies = n, k, l2_bytes, seed, copies
        w = normal((n, k), n, k, seed)
        w *= np.float32(k**-0.5)
        self.quantized = quantize(w)
        self.nbytes = self.quantized.nbytes
        self.copies = self._copies_of(self.nbytes)
        # An odd step meets each place of a tile in turn.
        self.checked = slice(None, None, -(-n // CHECKED_CHANNELS) | 1)
        self._kept: dict[Any, Any] = {}

    def _copies_of(self, nbytes: int) -> int:
        return self._copies or copies_for(nbytes, self._l2_bytes)

    def kept(self, key: Any, make: Callable[[], Any]) -> Any:
        """What `make` gives, made once for this weight: contenders of every M share their copies."""
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    def otherwise(self, quantize: Callable[[Any], cufp8.QuantizedTensor]) -> Weights:
        """The same float weight quantised by another function; made once."""
        return self.kept(quantize, lambda: Weights(self.n, self.k, self._l2_bytes, self._seed, self._copies, quantize))

    def fresh(self) -> cufp8.QuantizedTensor:
        """The same codes and scales in memory of their own."""
        q = self.quantized
        return cufp8.QuantizedTensor(
            q.codes.copy(),
            q.scale.copy(),
            dtype=q.dtype,
            scale_dtype=q.scale_dtype,
            shape=q.shape,
            block=q.block,
            global_scale=None if q.global_scale is None else q.global_scale.copy(),
        )

    def layers(self, pdl: bool = True, batch_invariant: bool = False) -> list[cufp8.Linear]:
        """`copies` layers, each with a weight at an address of its own."""

        def make() -> list[cufp8.Linear]:
            ways = {"pdl": pdl, "batch_invariant": batch_invariant}
            made = [cufp8.Linear.from_quantized(self.fresh(), **ways) for _ in range(self.copies)]
            starts = {layer._codes.data.ptr for layer in made}
            assert len(starts) == self.copies, "the layers share one weight: it would not be cold"
            return made

        return self.kept(("layers", pdl, batch_invariant), make)

    def dequantized(self, rows: slice) -> Any:
        """Rows of the weight that codes and scales stand for, in float64, by tables of the codes."""
        import cupy

        def values(codes: Any, dtype: str) -> Any:
            table = self.kept(("table", dtype), lambda: cupy.asarray(FORMATS[dtype].table.astype(np.float64)))
            return table[codes]

        q = self.quantized
        codes, high = q.codes[rows], q.block[0]
        if FORMATS[q.dtype].bits == 4:
            codes = cupy.stack([codes & 15, codes >> 4], axis=2).reshape(len(codes), -1)[:, : self.k]
        exact = values(codes, q.dtype)
        scale = q.scale[rows] if high == 1 else q.scale[cupy.arange(self.n)[rows] // high]
        if q.scale_dtype != "float32":
            scale = values(scale, q.scale_dtype)
        if scale.shape[1] > 1:
            scale = cupy.repeat(scale, q.block[1], axis=1)[:, : self.k]
        exact *= scale
        if q.global_scale is not None:
            exact *= q.global_scale[:, None] if len(q.global_scale) == 1 else q.global_scale[rows, None]
        return exact

    def torch_copies(self, dtype: str) -> list[Any]:
        """Torch tensors [n, k] of the dequantised weight, rounded to `dtype`."""
        import torch

        def make() -> list[Any]:
            kind = getattr(torch, dtype)
            first = torch.empty((self.n, self.k), dtype=kind, device="cuda")
            for at in range(0, self.n, 2048):
                rows = slice(at, min(at + 2048, self.n))
                first[rows] = torch.from_dlpack(self.dequantized(rows)).to(kind)
            return [first, *(first.clone() for _ in range(self._copies_of(first.nbytes) - 1))]

        return self.kept(("torch", dtype), make)

    def product(self, x: Any, rows: slice) -> Any:
        """x @ w[rows].T in float64 on the GPU; a CuPy array."""
        return x.astype(np.float64) @ self.dequantized(rows).T


def kernel(n: int, k: int, m: int, dtype: str, captured: bool, batch_invariant: bool = False) -> str | None:
    """The row of KERNELS that serves on this GPU; None without one."""
    if not runtime.available():
        return None
    problem = kernels.Problem(
        "FP8A16", (1, k), dtype, dtype, m, n, k,
        aligned16=k % 8 == 0, batch_invariant=batch_invariant, captured=captured,
    )  # fmt: skip
    return kernels.pick(runtime.target(), problem).name


def eager_differs(n: int, k: int, m: int, dtype: str) -> bool:
    """Whether another kernel serves outside of captures."""
    return kernel(n, k, m, dtype, True) != kernel(n, k, m, dtype, False)


def dtype_of(name: str) -> str:
    """The dtype of x that a contender's name tells."""
    return "float16" if name.endswith("fp16") else "bfloat16"


def ours(queue: Any, weights: Weights, x: list[Any], name: str) -> Contender:
    """cufp8 in one of its ways; outputs go to two buffers in turn, so that nothing is allocated."""
    dtype, m = dtype_of(name), len(x[0])
    invariant = name == "cufp8-invariant"
    layers = weights.layers(name != "cufp8-nopdl", invariant)
    buffers = [queue.empty((m, weights.n), dtype) for _ in range(2)]
    captured = name not in EAGER.values()

    def call(i: int) -> None:
        layers[i % len(layers)](x[i % 2], out=buffers[i % 2])

    if weights.quantized.block == (1, weights.k):
        serves = kernel(weights.n, weights.k, m, dtype, captured, invariant)
    else:  # cuBLAS knows no scales of blocks: the same in a graph and outside
        serves = layers[0].kernels(m, dtype)
    return Contender(name, call, buffers, kernel=serves, captured=captured, x_dtype=dtype)


def torch_linear(weights: Weights, x: list[Any], dtype: str) -> Contender:
    """`F.linear` on the dequantised weight in x's dtype: twice the bytes."""
    import torch

    copies = weights.torch_copies(dtype)
    linear = torch.nn.functional.linear
    return Contender(TORCH[dtype], lambda i: linear(x[i % 2], copies[i % len(copies)]), x_dtype=dtype)


def build(
    queue: Any, weights: Weights, x: Mapping[str, list[Any]], name: str, rivals: Mapping[str, Builder]
) -> Contender:
    """The contender of that name; `x` has two inputs for each dtype, `rivals` is as for `cell`."""
    dtype = dtype_of(name)
    if name in rivals:
        return rivals[name](weights, x[dtype])
    if name in TORCH.values():
        return torch_linear(weights, x[dtype], dtype)
    return ours(queue, weights, x[dtype], name)


def cell(
    session: Session, n: int, k: int, m: int, names: Iterable[str], rivals: Mapping[str, Builder] | None = None
) -> dict[str, Measured | Exception]:
    """Measure the contenders of one cell against each other.

    Parameters
    ----------
    session : Session
    n, k, m : int
    names : iterable of str
        Contenders, in the order of their turns.
    rivals : mapping, optional
        Name -> ``build(weights, [x, x])`` of contenders that are neither cufp8 nor torch; x is bfloat16 [m, k].

    Returns
    -------
    dict
        Contender name -> Measured, or the exception that kept it from running.
    """
    import cupy

    names, rivals = list(names), rivals or {}
    weights, queue = session.weights(n, k), session.queue
    drawn = normal((2 * m, k), m, k)
    pairs = {dtype: queue.array(drawn, dtype) for dtype in dict.fromkeys(map(dtype_of, names))}
    exact = {dtype: weights.product(on_cupy(both), weights.checked) for dtype, both in pairs.items()}
    x = {dtype: [both[:m], both[m:]] for dtype, both in pairs.items()}

    contenders, failed = [], {}
    for name in names:
        try:
            contenders.append(build(queue, weights, x, name, rivals))
        except Exception as wrong:  # a rival that cannot be made must not take the group with it
            failed[name] = without_arrays(wrong)

    def error(contender: Contender, outputs: list[Any]) -> float:
        if contender.finish is not None:
            outputs = [contender.finish(y) for y in outputs]
        parts = [on_cupy(y)[:, weights.checked].astype(np.float64) for y in outputs]
        return acceptable(contender, relative_l2(cupy.concatenate(parts), exact[contender.x_dtype]))

    return {**failed, **measure(queue, contenders, error, session.memory.hold)}


def on_cupy(y: Any) -> Any:
    """A torch or CuPy array on the GPU as CuPy's, without a copy."""
    import cupy

    return y if isinstance(y, cupy.ndarray) else cupy.from_dlpack(y)


def acceptable(contender: Contender, error: float, largest: float | None = None) -> float:
    """The error, if it is not larger than rounding explains.

    Raises
    ------
    AssertionError
        If it is, or is NaN.
    """
    if not error <= (largest or LARGEST_ERROR[contender.x_dtype]):
        raise AssertionError(f"{contender.name}: relative L2 error {error:.2e}")
    return error
