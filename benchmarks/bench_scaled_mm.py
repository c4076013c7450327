"""scaled_mm, FP8 by FP8: cufp8 against cuBLASLt through torch._scaled_mm, DeepGEMM, and F.linear in bfloat16; and
layers that quantise x and then multiply (FP8_DYNAMIC, NVFP4, MXFP4, MXFP8), against those of the same weights and
16-bit x, and F.linear.

Schemes: tensor-fast, one scale each and sums in the tensor cores' registers; row-fast, a scale per token and channel;
row-full, the same with float32 sums every 128 of k. All get the same codes. DeepGEMM knows scales of blocks alone: it
is given those of the tokens, and those of the channels are multiplied in after the timing. F.linear gets both operands
dequantised to bfloat16.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import cufp8
from cufp8 import formats, kernels, runtime
from cufp8.bench.linear import Weights, acceptable, on_cupy
from cufp8.bench.linear import ours as ours_16bit
from cufp8.bench.linear import torch_linear as linear_of_torch
from cufp8.bench.measure import Contender, Measured, measure, normal, relative_l2, without_arrays
from cufp8.bench.results import TORCH

MANY = [
    (4096, 4096, 4096),
    (8192, 8192, 8192),
    (4096, 7168, 16384),
    (4096, 24576, 1536),
    (4096, 4096, 7168),
    (2048, 28672, 8192),
]
FEW_SHAPES, FEW_ROWS = [(14336, 4096), (4096, 14336), (7168, 16384), (28672, 8192)], [1, 16, 64, 128, 256, 512]
PROBLEMS = MANY + [(m, n, k) for n, k in FEW_SHAPES for m in FEW_ROWS]
SCHEMES = ["tensor-fast", "row-fast", "row-full"]
LAYERS = [(1, 4096, 4096), (16, 4096, 4096), (1, 14336, 4096), (16, 14336, 4096), (64, 14336, 4096), (256, 14336, 4096)]
LAYERS += [(1024, 8192, 8192), (4096, 8192, 8192)]
# Schemes of layers -> what makes their weights, and where they are measured.
QUANTIZERS: dict[str, Callable[[Any], cufp8.QuantizedTensor]] = {
    scheme: partial(cufp8.quantize, scheme=scheme) for scheme in ("NVFP4", "MXFP4", "MXFP8")
}
BLOCK_LAYERS = [(m, 4096, 4096) for m in (1, 16, 256)] + [(m, 14336, 4096) for m in (1, 64, 256)]
LAYER_CELLS = [
    *(("FP8_DYNAMIC", *cell) for cell in LAYERS),
    *((scheme, *cell) for cell in BLOCK_LAYERS for scheme in QUANTIZERS),
]
QUICK = [MANY[0], (16, 14336, 4096), (256, 14336, 4096)]
RIVAL = TORCH["bfloat16"]
LARGEST_ERROR = 0.1  # sums of 13 bits behind the point: torch._scaled_mm's come to 0.065


def quantized(codes: Any, scale: Any) -> cufp8.QuantizedTensor:
    return cufp8.QuantizedTensor(
        codes, scale, dtype="float8_e4m3fn", scale_dtype="float32", shape=codes.shape,
        block=(-1, -1) if scale.size == 1 else (1, -1), activations=True,
    )  # fmt: skip


class Operands:
    """Two a [m, k] and cold copies of b [n, k] in one scheme, and what is exact of some channels."""

    def __init__(self, weights: Weights, scheme: str, m: int) -> None:
        import cupy

        self.weights, self.m, self.by_row, self.fast = weights, m, scheme.startswith("row"), scheme.endswith("fast")
        both = weights.kept(("a", m), lambda: cufp8.quantize(normal((2 * m, weights.k), m, weights.k)))
        one = cupy.full((1, 1), weights.k**-0.5 / 64, np.float32)
        halves = slice(0, m), slice(m, 2 * m)
        self.a = [quantized(both.codes[h].copy(), both.scale[h].copy() if self.by_row else one) for h in halves]
        self.scale_b = weights.quantized.scale if self.by_row else one
        copies = weights.kept("codes of b", lambda: [weights.quantized.codes.copy() for _ in range(weights.copies)])
        self.b = [quantized(codes, self.scale_b) for codes in copies]

    def exact(self) -> Any:
        import cupy

        q, rows = self.weights.quantized, self.weights.checked
        table = self.weights.kept("values", lambda: cupy.asarray(values()))
        b = table[q.codes[rows]] * self.scale_b[rows if self.by_row else slice(None)]
        return cupy.concatenate([(table[a.codes] * a.scale) @ b.T for a in self.a])


def values() -> np.ndarray:
    import ml_dtypes

    return np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)


def torch_tensor(array: Any) -> Any:
    import torch

    return torch.from_dlpack(array)


def ours(queue: Any, of: Operands) -> Contender:
    n, k = of.weights.n, of.weights.k
    buffers = [queue.empty((of.m, n), "bfloat16") for _ in range(2)]

    def call(i: int) -> None:
        cufp8.scaled_mm(of.a[i % 2], of.b[i % len(of.b)], fast_accum=of.fast, out=buffers[i % 2])

    a = of.a[0]
    problem = kernels.ScaledProblem(a.dtype, a.dtype, "bfloat16", of.m, n, k, fast_accum=of.fast)
    return Contender("cufp8", call, buffers, kernel=kernels.pick(runtime.target(), problem).name)


def cublaslt(queue: Any, of: Operands) -> Contender:
    """torch._scaled_mm, by the name of its scheme."""
    import torch

    a = [torch_tensor(q.codes).view(torch.float8_e4m3fn) for q in of.a]
    b = [torch_tensor(q.codes).view(torch.float8_e4m3fn).t() for q in of.b]
    scale_a, scale_b = [torch_tensor(q.scale) for q in of.a], torch_tensor(of.scale_b).t().contiguous()
    if not of.by_row:
        scale_a, scale_b = [s.reshape(()) for s in scale_a], scale_b.reshape(())

    def call(i: int) -> Any:
        return torch._scaled_mm(
            a[i % 2], b[i % len(b)], scale_a[i % 2], scale_b, out_dtype=torch.bfloat16, use_fast_accum=of.fast
        )

    name = f"cublaslt-{'row' if of.by_row else 'tensor'}-{'fast' if of.fast else 'full'}"
    return Contender(name, call)


def deepgemm(queue: Any, of: Operands) -> Contender:
    import deep_gemm
    import torch

    n, k = of.weights.n, of.weights.k
    a = []
    for q in of.a:
        scale = torch_tensor(q.scale).expand(of.m, -(-k // 128)).contiguous()
        codes = torch_tensor(q.codes).view(torch.float8_e4m3fn)
        a.append((codes, deep_gemm.get_mn_major_tma_aligned_tensor(scale)))
    ones = torch.ones((-(-n // 128), -(-k // 128)), device="cuda")
    b = [(torch_tensor(q.codes).view(torch.float8_e4m3fn), ones) for q in of.b]
    buffers = [torch.empty((of.m, n), dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    scale_b = torch_tensor(of.scale_b).reshape(1, -1)

    def call(i: int) -> None:
        deep_gemm.fp8_gemm_nt(a[i % 2], b[i % len(b)], buffers[i % 2])

    return Contender("deepgemm", call, buffers, finish=lambda y: (y.float() * scale_b).to(torch.bfloat16))


def torch_linear(queue: Any, of: Operands) -> Contender:
    import cupy
    import torch

    table = torch_tensor(of.weights.kept("values", lambda: cupy.asarray(values()))).float()

    def widen(q: cufp8.QuantizedTensor) -> Any:
        y = torch.empty(q.shape, dtype=torch.bfloat16, device="cuda")
        codes, scale = torch_tensor(q.codes), torch_tensor(q.scale)
        for at in range(0, len(y), 2048):
            some = slice(at, at + 2048)
            y[some] = (table[codes[some].long()] * (scale[some] if len(scale) > 1 else scale)).to(y.dtype)
        return y

    x, count = [widen(q) for q in of.a], max(2, len(of.b) // 2)
    key = "row" if of.by_row else "tensor"
    w = of.weights.kept((RIVAL, key), lambda: [widen(of.b[i % len(of.b)]) for i in range(count)])
    linear = torch.nn.functional.linear
    return Contender(RIVAL, lambda i: linear(x[i % 2], w[i % count]))


BUILDERS: dict[str, Callable[[Any, Operands], Contender]] = {
    "cufp8": ours,
    **{f"cublaslt-{scheme}": cublaslt for scheme in SCHEMES},
    "deepgemm": deepgemm,
    RIVAL: torch_linear,
}


def names(scheme: str) -> list[str]:
    """The contenders of a scheme, in the order of their turns."""
    found = ["cufp8"]
    if importlib.util.find_spec("torch") is not None:
        found += [f"cublaslt-{scheme}", RIVAL]
        found += ["deepgemm"] * (scheme == "row-full" and importlib.util.find_spec("deep_gemm") is not None)
    return found


def group(bench: Any, scheme: str, m: int, n: int, k: int) -> dict[str, Measured | Exception]:
    """Measure all contenders of one problem and write its rows."""
    import cupy

    weights = bench.weights(n, k)
    of = Operands(weights, scheme, m)
    exact = of.exact()
    contenders, failed = [], {}
    for name in names(scheme):
        try:
            contenders.append(BUILDERS[name](bench.queue, of))
        except Exception as wrong:  # a rival that cannot be made must not take the group with it
            failed[name] = without_arrays(wrong)

    def error(contender: Contender, outputs: list[Any]) -> float:
        done = [contender.finish(y) if contender.finish else y for y in outputs]
        parts = [on_cupy(y)[:, weights.checked].astype(np.float64) for y in done]
        return acceptable(contender, relative_l2(cupy.concatenate(parts), exact), LARGEST_ERROR)

    measured = {**failed, **measure(bench.queue, contenders, error, bench.memory.hold)}
    ran = {name: result for name, result in measured.items() if isinstance(result, Measured)}
    bench.write("scaled_mm", [bench.row(name, r, scheme=scheme, m=m, n=n, k=k) for name, r in ran.items()])
    return measured


def layer_names(scheme: str) -> list[str]:
    """The contenders of a layer's cell: with `fast_accum` too where there is one, then those of 16-bit x."""
    fast = ["cufp8-fast"] * (scheme not in QUANTIZERS)
    return ["cufp8", *fast, f"cufp8-{scheme.removesuffix('_DYNAMIC').lower()}a16", RIVAL]


def layer_group(bench: Any, scheme: str, m: int, n: int, k: int) -> dict[str, Measured | Exception]:
    """Measure layers whose x is bfloat16. One that quantises x is exact where it multiplies x as quantised."""
    import cupy

    weights, queue, row = bench.weights(n, k), bench.queue, formats.SCHEMES[scheme]
    if scheme in QUANTIZERS:
        weights = weights.otherwise(QUANTIZERS[scheme])
    both = queue.array(normal((2 * m, k), m, k), "bfloat16")
    x = [both[:m], both[m:]]
    q = cufp8.quantize_activations(on_cupy(both), block=row.x_block, dtype=row.dtype, scale_dtype=row.scale_dtype)
    exact = {
        False: weights.product(on_cupy(both), weights.checked),
        True: weights.product(q.dequantize("float64"), weights.checked),
    }
    quantising, others = ("cufp8", "cufp8-fast"), layer_names(scheme)

    def dynamic(name: str) -> Contender:
        fast = name == "cufp8-fast"
        layers = weights.kept(
            (name, "layers"),
            lambda: [
                cufp8.Linear.from_quantized(weights.fresh(), scheme=scheme, fast_accum=fast)
                for _ in range(weights.copies)
            ],
        )
        buffers = [queue.empty((m, n), "bfloat16") for _ in range(2)]

        def call(i: int) -> None:
            layers[i % len(layers)](x[i % 2], out=buffers[i % 2])

        return Contender(name, call, buffers, kernel=layers[0].kernels(m))

    contenders = [dynamic(name) for name in others if name in quantising]
    contenders.append(ours_16bit(queue, weights, x, others[-2]))
    if importlib.util.find_spec("torch") is not None:
        contenders.append(linear_of_torch(weights, x, "bfloat16"))

    def error(contender: Contender, outputs: list[Any]) -> float:
        parts = [on_cupy(y)[:, weights.checked].astype(np.float64) for y in outputs]
        of = exact[contender.name in quantising]
        largest = None if scheme in QUANTIZERS else LARGEST_ERROR
        return acceptable(contender, relative_l2(cupy.concatenate(parts), of), largest)

    measured = measure(queue, contenders, error, bench.memory.hold)
    ran = {name: result for name, result in measured.items() if isinstance(result, Measured)}
    bench.write("scaled_mm", [bench.row(name, r, scheme=scheme, m=m, n=n, k=k) for name, r in ran.items()])
    return measured


ENTRIES = [
    pytest.param(
        scheme, m, n, k, name,
        id=f"{scheme}-{n}x{k}-m{m}-{name}",
        marks=[pytest.mark.quick] if (m, n, k) in QUICK else [],
    )
    for n, k in dict.fromkeys((n, k) for _, n, k in PROBLEMS)
    for m in [of[0] for of in PROBLEMS if of[1:] == (n, k)]
    for scheme in SCHEMES
    for name in names(scheme)
]  # fmt: skip


@pytest.mark.parametrize(("scheme", "m", "n", "k", "contender"), ENTRIES)
def test_scaled_mm(bench: Any, replay: Any, scheme: str, m: int, n: int, k: int, contender: str) -> None:
    measured = bench.once((scheme, m, n, k), lambda: group(bench, scheme, m, n, k))
    replay(f"scaled_mm {scheme} {n} x {k}, M = {m}", measured[contender])


@pytest.mark.parametrize(
    ("scheme", "m", "n", "k", "contender"),
    [
        pytest.param(scheme, m, n, k, name, id=f"{scheme}-{n}x{k}-m{m}-{name}")
        for scheme, m, n, k in LAYER_CELLS
        for name in layer_names(scheme)
    ],
)
def test_scaled_layer(bench: Any, replay: Any, scheme: str, m: int, n: int, k: int, contender: str) -> None:
    measured = bench.once((scheme, m, n, k), lambda: layer_group(bench, scheme, m, n, k))
    replay(f"{scheme} layer {n} x {k}, M = {m}", measured[contender])
