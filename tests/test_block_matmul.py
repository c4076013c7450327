"""scaled_mm of operands with block scales, FP4 and FP8, against float64: on the CPU and (marked gpu) on the device."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import reference
import reference_blocks as blocks
from test_interop import gpu_maker, libraries
from test_kernels import GRID_X, GRID_YZ, targets
from test_linear import Cases, assert_same_bits, capture, floats, synchronize
from test_quantize import late_copy
from test_scaled_linear import HOST_ACC

import cufp8
from cufp8 import kernels, runtime
from cufp8.formats import FLOATS
from cufp8.kernels import ARCHS, BLOCK_FORMATS, BlockProblem, pick

FORMATS = {name: dtypes for dtypes, name in BLOCK_FORMATS.items()}
PAIRS = list(itertools.product(FORMATS, repeat=2))
pairs = pytest.mark.parametrize("forms", PAIRS, ids="-".join)
SIZES = (
    (1, 1, 1), (1, 33, 16), (7, 64, 31), (16, 65, 32), (17, 8, 47), (32, 100, 48), (33, 129, 160), (64, 72, 77),
    (65, 1, 300), (130, 64, 513),
)  # fmt: skip


def size_of(form: str) -> int:
    return 16 if form == "nvfp4" else 32


def element_values(form: str) -> np.ndarray:
    """Of all codes, float64."""
    dtype = FORMATS[form][0]
    return blocks.FP4_VALUES if dtype == "float4_e2m1fn" else reference.ELEMENTS[dtype].values


@dataclass
class Side:
    """An operand on the host: codes one a byte, scale codes, global scales or None."""

    form: str
    codes: np.ndarray
    scale: np.ndarray
    factor: np.ndarray | None

    @property
    def values(self) -> np.ndarray:
        """float64."""
        wide = reference.VALUES[self.scale] if self.form == "nvfp4" else np.ldexp(1.0, self.scale.astype(int) - 127)
        wide = np.where(self.scale == (0x7F if self.form == "nvfp4" else 0xFF), np.nan, wide)
        each = np.repeat(wide, size_of(self.form), axis=1)[:, : self.codes.shape[1]]
        found = element_values(self.form)[self.codes] * each
        return found if self.factor is None else found * self.factor.astype(np.float64)[:, None]

    def tensor(self, put: Callable[[Any], Any] = lambda a: a) -> cufp8.QuantizedTensor:
        dtype, scale_dtype = FORMATS[self.form]
        codes = self.codes
        if dtype == "float4_e2m1fn":
            codes = blocks.pack(codes)
            if self.codes.shape[1] % 2:
                codes[:, -1] |= 0xF0  # beside the last code stands what is none
        return cufp8.QuantizedTensor(
            put(codes), put(self.scale), dtype=dtype, scale_dtype=scale_dtype, shape=self.codes.shape,
            block=(1, size_of(self.form)), global_scale=None if self.factor is None else put(self.factor),
            activations=True,
        )  # fmt: skip


def side(rng: np.random.Generator, form: str, rows: int, k: int, factors: int = 1) -> Side:
    values = element_values(form)
    codes = rng.choice(np.flatnonzero(np.isfinite(values)).astype(np.uint8), (rows, k))
    if form.startswith("mxfp8"):  # of all sizes alike; here of one, so that no sum is one product
        codes = reference.encode(rng.standard_normal((rows, k)) * 8, FORMATS[form][0])
    shape = rows, -(-k // size_of(form))
    if form != "nvfp4":
        return Side(form, codes, rng.integers(115, 130, shape, np.uint8), None)
    scale = rng.integers(0x10, 0x7F, shape, np.uint8)
    scale[rng.random(shape) < 0.05] = 0
    return Side(form, codes, scale, np.exp2(rng.uniform(-14, -8, factors)).astype(np.float32))


def exact(a: Side, b: Side, bias: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    x, w, offset = a.values, b.values, np.zeros(len(b.codes)) if bias is None else bias.astype(np.float64)
    with np.errstate(invalid="ignore"):
        return x @ w.T + offset, np.abs(x) @ np.abs(w).T + np.abs(offset)


# --- on the CPU -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("out_dtype", FLOATS)
@pairs
def test_against_float64(rng: np.random.Generator, forms: tuple[str, str], out_dtype: str) -> None:
    with Cases() as cases:
        for i, (m, n, k) in enumerate(SIZES):
            a, b = (side(rng, f, rows, k, rows if i % 2 else 1) for f, rows in zip(forms, (m, n), strict=True))
            bias = floats(rng, n) if i % 3 else None
            with cases(m, n, k):
                y = cufp8.scaled_mm(a.tensor(), b.tensor(), bias=bias, out_dtype=out_dtype)
                assert isinstance(y, np.ndarray)
                reference.assert_scaled_close(y, exact(a, b, bias), out_dtype, HOST_ACC)


def test_global_scales_of_all_sizes() -> None:
    """Neither their product nor that of one and the sum need be a float32."""
    check_factors(lambda a: a, lambda y: y)


def check_factors(put: Callable[[Any], Any], get: Callable[[Any], np.ndarray]) -> None:
    sizes = 2.0 ** np.array([-126, -90, -70, -30, -1, 0, 1, 30, 60, 90, 116])
    for code, scale in ((7, 0x7E), (1, 0x01)):  # 6 * 448 and 2^-1 * 2^-9
        codes, scales = np.full((len(sizes), 64), code, np.uint8), np.full((len(sizes), 4), scale, np.uint8)
        a = Side("nvfp4", codes, scales, sizes.astype(np.float32))
        with np.errstate(over="ignore"):
            want = (a.values @ a.values.T).astype(np.float32)
        got = get(cufp8.scaled_mm(a.tensor(put), a.tensor(put), out_dtype="float32"))
        np.testing.assert_array_equal(got, want, str(code))


def test_scales_at_the_ends() -> None:
    """Every e8m0 scale beside every other: a product whose scales alone are no float32 comes right."""
    check_ends(lambda a: a, lambda y: y)


def check_ends(put: Callable[[Any], Any], get: Callable[[Any], np.ndarray]) -> None:
    scale = np.arange(255, dtype=np.uint8)[:, None]
    for form, one in (("mxfp4", 5), ("mxfp8_e4m3fn", 1), ("mxfp8_e5m2", 0x7B), ("mxfp8_e5m2", 1)):
        codes = np.zeros((255, 32), np.uint8)
        codes[:, 3] = one
        a = Side(form, codes, scale, None)
        with np.errstate(over="ignore", under="ignore"):
            want = (a.values @ a.values.T).astype(np.float32)
        got = get(cufp8.scaled_mm(a.tensor(put), a.tensor(put), out_dtype="float32"))
        np.testing.assert_array_equal(got, want, form)


@pytest.mark.parametrize(
    "forms", [("nvfp4", "mxfp4"), ("mxfp8_e4m3fn", "nvfp4"), ("mxfp8_e5m2", "mxfp8_e5m2")], ids="-".join
)
def test_what_is_not_finite_stays_in_its_row(rng: np.random.Generator, forms: tuple[str, str]) -> None:
    a, b = spoilt(rng, forms)
    check_spoilt(a, b, cufp8.scaled_mm(a.tensor(), b.tensor()), HOST_ACC)


def spoilt(rng: np.random.Generator, forms: tuple[str, str]) -> tuple[Side, Side]:
    """A NaN in row 3 of a, in its last block, and in column 5."""
    a, b = (side(rng, f, rows, 70) for f, rows in zip(forms, (20, 40), strict=True))
    for of, row in ((a, 3), (b, 5)):
        if of.form.startswith("mxfp8"):
            of.codes[row, 69] = 0x7F
        else:
            of.scale[row, -1] = 0x7F if of.form == "nvfp4" else 0xFF
            of.codes[row, 64:] = 0
    return a, b


def check_spoilt(a: Side, b: Side, y: Any, acc: float) -> None:
    nan = np.zeros((20, 40), bool)
    nan[3], nan[:, 5] = True, True
    assert (np.isnan(reference.to_float64(y)) == nan).all()
    reference.assert_scaled_close(y, exact(a, b), "bfloat16", acc)


def test_activations_and_weights_of_floats(rng: np.random.Generator) -> None:
    """What a layer does, by hand; and 4-bit weights under activations of 8 bits."""
    x, w = floats(rng, (9, 100)), floats(rng, (20, 100))
    nv = {"block": (1, 16), "dtype": "float4_e2m1fn", "scale_dtype": "float8_e4m3fn"}
    mx8 = {"block": (1, 32), "scale_dtype": "float8_e8m0fnu"}
    for options, scheme in ((nv, "NVFP4A16"), (mx8, "MXFP8A16"), (mx8, "MXFP4A16"), (mx8, "NVFP4A16")):
        q, weight = cufp8.quantize_activations(x, **options), cufp8.quantize(w, scheme)
        y = cufp8.scaled_mm(q, weight, out_dtype="float32")
        values = q.dequantize("float64"), weight.dequantize("float64")
        reference.assert_scaled_close(
            y, (values[0] @ values[1].T, np.abs(values[0]) @ np.abs(values[1]).T), "float32", HOST_ACC
        )
        assert np.linalg.norm(y - x @ w.T) < 0.25 * np.linalg.norm(x @ w.T)
    layer = cufp8.Linear(w, scheme="NVFP4", device="cpu")
    assert_same_bits(layer(x), cufp8.scaled_mm(cufp8.quantize_activations(x, **nv), layer.weight, out_dtype="float32"))


def test_views_and_no_tokens_on_the_host(rng: np.random.Generator) -> None:
    a, b = side(rng, "mxfp4", 12, 40), side(rng, "mxfp8_e4m3fn", 20, 40)
    out = np.full((12, 33), np.nan, np.float32)
    y = cufp8.scaled_mm(a.tensor(lambda v: v[::-1].copy()[::-1]), b.tensor(), out_dtype="float32", out=out[:, 2:22])
    assert y.base is out and np.isnan(out[:, :2]).all() and np.isnan(out[:, 22:]).all()
    reference.assert_scaled_close(y, exact(a, b), "float32", HOST_ACC)
    none = side(rng, "nvfp4", 0, 40)
    assert cufp8.scaled_mm(none.tensor(), b.tensor()).shape == (0, 20)


def test_what_is_refused(rng: np.random.Generator) -> None:
    mm, a, b = cufp8.scaled_mm, side(rng, "nvfp4", 4, 64).tensor(), side(rng, "mxfp4", 6, 64).tensor()
    by_row = cufp8.quantize_activations(floats(rng, (6, 64)))
    for left, right in ((a, by_row), (by_row, b)):
        with pytest.raises(
            ValueError, match=r"a is float._e.*, block \(1, .*\), b is float.*; needed are scales of 16 or"
        ):
            mm(left, right)
    tiled = cufp8.QuantizedTensor(
        np.zeros((6, 64), np.uint8), np.full((1, 1), 127, np.uint8), dtype="float8_e4m3fn",
        scale_dtype="float8_e8m0fnu", shape=(6, 64), block=(128, 128),
    )  # fmt: skip
    with pytest.raises(
        ValueError, match=r"b is float8_e4m3fn with float8_e8m0fnu scales, block \(128, 128\); needed are"
    ):
        mm(a, tiled)
    with pytest.raises(ValueError, match=r"a has float8_e8m0fnu scales of shape \[1, 1\]; needed is float32"):
        mm(tiled, tiled)
    with pytest.raises(ValueError, match=r"a is \[4, 64\] and b \[6, 65\]; both need the same K"):
        mm(a, side(rng, "mxfp4", 6, 65).tensor())
    with pytest.raises(ValueError, match="out_dtype is 'float64'; allowed are bfloat16"):
        mm(a, b, out_dtype="float64")
    with pytest.raises(ValueError, match=r"bias has shape \[4\]; needed is \[6\]"):
        mm(a, b, bias=np.zeros(4, np.float32))
    memory = np.ones(64, np.float32)
    shared = cufp8.QuantizedTensor(
        a.codes, a.scale, dtype=a.dtype, scale_dtype=a.scale_dtype, shape=a.shape, block=a.block,
        global_scale=memory[20:21],
    )  # fmt: skip
    with pytest.raises(ValueError, match="out overlaps"):
        mm(shared, b, out_dtype="float32", out=memory[:24].reshape(4, 6))
    form = {"dtype": b.dtype, "scale_dtype": b.scale_dtype, "shape": (4, 64), "block": (1, 32)}
    with pytest.raises(
        ValueError, match=r"scale has shape \[4, 4\]; needed is \[4, 2\], a scale per 32 values of a row"
    ):
        cufp8.QuantizedTensor(b.codes[:4], np.zeros((4, 4), np.uint8), **form)
    with pytest.raises(ValueError, match=r"codes have shape \[4, 64\]; needed is \[4, 32\]"):
        cufp8.QuantizedTensor(np.zeros((4, 64), np.uint8), b.scale[:4], **form)


# --- the tables -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHS)
def test_every_problem_has_a_launch_within_the_limits(arch: str) -> None:
    seen = set()
    for target, m, n, k in itertools.product(
        targets(arch), (1, 16, 33, 4096, 5_000_000), (1, 64, 65, 20_000_000), (1, 4096)
    ):
        p = BlockProblem("nvfp4", "mxfp8_e4m3fn", "float16", m, n, k)
        row = pick(target, p)
        launch = row.plan(target, p)
        tokens, (x, y, z) = int(launch.entry.rsplit("_", 1)[1]), launch.grid
        assert row.name == "scaled_blocks" and launch.entry in row.entries(ARCHS[arch])
        assert x * 64 >= n > (x - 1) * 64 and y * z * tokens >= m > y * (z - 1) * tokens
        assert x <= GRID_X and y <= GRID_YZ and z <= GRID_YZ and launch.block == 128
        seen.add(launch.entry)
    assert seen == set(kernels.ROWS["scaled_blocks"].entries(ARCHS[arch]))


# --- on the GPU -----------------------------------------------------------------------------------------------


def acc_here() -> float:
    return kernels.arch_of(runtime.target().arch).acc["tensor"]


def placed(values: np.ndarray, pitch: int = 0, offset: int = 0) -> Any:
    """The array on the GPU as a view of a larger one, full of 0x7F: rows `pitch` bytes further apart."""
    import cupy

    rows, width = values.shape
    memory = cupy.full(offset + rows * (width + pitch), 0x7F, cupy.uint8)
    view = memory[offset:].reshape(rows, width + pitch)[:, :width]
    view[...] = cupy.asarray(values)
    return view


def put(pitch: int = 0, offset: int = 0) -> Callable[[np.ndarray], Any]:
    import cupy

    return lambda a: placed(a, pitch, offset) if a.dtype == np.uint8 else cupy.asarray(a)


def multiply(
    a: Side, b: Side, poison: Any, out_dtype: str = "bfloat16", bias: Any = None, pitch: int = 0, offset: int = 0
) -> Any:
    """y in a poisoned array with guards."""
    import cupy

    out = poison((len(a.codes), len(b.codes)), out_dtype, "cupy")
    bias = None if bias is None else cupy.asarray(bias)
    sides = a.tensor(put(pitch, offset)), b.tensor(put(pitch, offset))
    assert cufp8.scaled_mm(*sides, bias=bias, out_dtype=out_dtype, out=out) is out
    return out


@pytest.mark.gpu
@pytest.mark.parametrize("out_dtype", FLOATS)
@pairs
def test_on_the_gpu_against_float64(
    rng: np.random.Generator, poison: Any, forms: tuple[str, str], out_dtype: str
) -> None:
    with Cases() as cases:
        for i, (m, n, k) in enumerate((*SIZES, (300, 200, 1000))):
            a, b = (side(rng, f, rows, k, rows if i % 2 else 1) for f, rows in zip(forms, (m, n), strict=True))
            bias = floats(rng, n) if i % 3 else None
            for pitch, offset in ((0, 0), (3, 5), (16, 16)):
                with cases(m, n, k, pitch, offset):
                    y = multiply(a, b, poison, out_dtype, bias, pitch, offset)
                    reference.assert_scaled_close(y, exact(a, b, bias), out_dtype, acc_here())


@pytest.mark.gpu
@pytest.mark.parametrize("m", range(1, 18))
def test_every_number_of_few_tokens(rng: np.random.Generator, poison: Any, m: int) -> None:
    for i, (n, k) in enumerate(((8, 16), (72, 48), (96, 144), (1856, 160), (40, 2688))):
        forms = PAIRS[(m * 5 + i) % len(PAIRS)]
        a, b = side(rng, forms[0], m, k, m), side(rng, forms[1], n, k, n)
        reference.assert_scaled_close(multiply(a, b, poison), exact(a, b), "bfloat16", acc_here())


@pytest.mark.gpu
@pytest.mark.sanitize
def test_small_products_on_the_gpu(rng: np.random.Generator, poison: Any) -> None:
    for i, (forms, (m, n, k)) in enumerate(itertools.product(PAIRS[::3], ((1, 1, 1), (5, 40, 80), (70, 37, 67)))):
        a, b = side(rng, forms[0], m, k), side(rng, forms[1], n, k)
        y = multiply(a, b, poison, tuple(FLOATS)[i % 3], pitch=i % 2)
        reference.assert_scaled_close(y, exact(a, b), tuple(FLOATS)[i % 3], acc_here())


@pytest.mark.gpu
def test_scales_at_the_ends_on_the_gpu() -> None:
    import cupy

    check_ends(cupy.asarray, lambda y: y.get())
    check_factors(cupy.asarray, lambda y: y.get())


@pytest.mark.gpu
def test_every_code_with_every_scale_on_the_gpu() -> None:
    """Rows of a with one 1 pick single values of b: they come exactly, Inf where float32 ends."""
    import cupy

    for form in FORMATS:
        scales = np.arange(0x7F if form == "nvfp4" else 255, dtype=np.uint8)
        codes = np.flatnonzero(np.isfinite(element_values(form))).astype(np.uint8)
        size, factor = size_of(form), np.ones(1, np.float32) if form == "nvfp4" else None
        k = size * len(scales)
        b = Side(form, np.repeat(codes[:, None], k, axis=1), np.tile(scales, (len(codes), 1)), factor)
        at = np.arange(7, k, size)
        ones = np.zeros((len(at), k), np.uint8)
        ones[np.arange(len(at)), at] = 0x38  # 1 in e4m3fn
        with np.errstate(over="ignore", under="ignore"):
            want = b.values.astype(np.float32)[:, at].T
        for some in (slice(0, 9), slice(0, None)):
            a = Side("mxfp8_e4m3fn", ones[some], np.full((len(at[some]), -(-k // 32)), 127, np.uint8), None)
            y = cufp8.scaled_mm(a.tensor(cupy.asarray), b.tensor(cupy.asarray), out_dtype="float32")
            np.testing.assert_array_equal(y.get(), want[some], form)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "forms", [("nvfp4", "mxfp4"), ("mxfp8_e4m3fn", "nvfp4"), ("mxfp8_e5m2", "mxfp8_e5m2")], ids="-".join
)
def test_what_is_not_finite_stays_in_its_row_on_the_gpu(
    rng: np.random.Generator, poison: Any, forms: tuple[str, str]
) -> None:
    a, b = spoilt(rng, forms)
    check_spoilt(a, b, multiply(a, b, poison), acc_here())


@pytest.mark.gpu
def test_views_in_any_order(rng: np.random.Generator) -> None:
    import cupy

    a, b = side(rng, "nvfp4", 40, 64, 40), side(rng, "mxfp4", 48, 64)
    there, ref = a.tensor(cupy.asarray), exact(a, b)
    for name, view in {
        "transposed": lambda v: cupy.ascontiguousarray(v.T).T,
        "backwards": lambda v: cupy.ascontiguousarray(v[::-1])[::-1],
        "every other row": lambda v: cupy.repeat(v, 2, axis=0)[::2],
    }.items():
        factor = cupy.repeat(there.global_scale, 3)[::3] if name == "every other row" else there.global_scale
        q = cufp8.QuantizedTensor(
            view(there.codes), view(there.scale), dtype=there.dtype, scale_dtype=there.scale_dtype, shape=there.shape,
            block=there.block, global_scale=factor, activations=True,
        )  # fmt: skip
        out = cupy.full((40, 60), 77, np.float32)
        cufp8.scaled_mm(q, b.tensor(cupy.asarray), out_dtype="float32", out=out[:, 5:53])
        reference.assert_scaled_close(out[:, 5:53], ref, "float32", acc_here())
        assert bool((out[:, :5] == 77).all()) and bool((out[:, 53:] == 77).all()), name


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 40, 300])
def test_the_same_bits_again_in_a_graph_and_behind_what_is_late(rng: np.random.Generator, m: int) -> None:
    import cupy

    a, b = side(rng, "mxfp8_e4m3fn", m, 1024), side(rng, "nvfp4", 264, 1024)
    left, right = a.tensor(cupy.asarray), b.tensor(cupy.asarray)
    first = cufp8.scaled_mm(left, right)
    reference.assert_scaled_close(first, exact(a, b), "bfloat16", acc_here())
    stream, out = cupy.cuda.Stream(non_blocking=True), cupy.empty_like(first)
    synchronize()

    def calls() -> None:
        for _ in range(10):  # each may start before the one before is done
            cufp8.scaled_mm(left, right, out=out)

    graph, _ = capture(stream, calls)
    for _ in range(3):
        out.view("uint8").fill(0xFF)
        synchronize()
        graph.launch(stream)
        stream.synchronize()
        assert_same_bits(out, first)
    with cupy.cuda.Stream(non_blocking=True) as behind:
        late = late_copy(left.codes)
        q = cufp8.QuantizedTensor(
            late, left.scale, dtype=left.dtype, scale_dtype=left.scale_dtype, shape=left.shape, block=left.block,
            activations=True, _trusted=True,
        )  # fmt: skip
        y = cufp8.scaled_mm(q, right)
        late.fill(0x7F)
    behind.synchronize()
    assert_same_bits(y, first)


@pytest.mark.gpu
@libraries
def test_arrays_of_torch_and_jax(rng: np.random.Generator, library: str) -> None:
    import cupy

    into = gpu_maker(library)
    a, b = side(rng, "nvfp4", 20, 80, 20), side(rng, "mxfp8_e5m2", 33, 80)
    y = cufp8.scaled_mm(a.tensor(into), b.tensor(into), out_dtype="float32")
    assert isinstance(y, cupy.ndarray)
    reference.assert_scaled_close(y, exact(a, b), "float32", acc_here())
    assert cufp8.scaled_mm(side(rng, "nvfp4", 0, 80).tensor(cupy.asarray), b.tensor(cupy.asarray)).shape == (0, 33)
    with pytest.raises(ValueError, match="a is on cuda:0 and b on cpu"):
        cufp8.scaled_mm(a.tensor(cupy.asarray), b.tensor())


@pytest.mark.gpu
def test_a_layer_and_its_two_steps_are_alike(rng: np.random.Generator) -> None:
    """The product of the very codes, by the other kernel."""
    import cupy

    for scheme in ("NVFP4", "MXFP4", "MXFP8"):
        layer, x = (
            cufp8.Linear(floats(rng, (129, 320)), scheme=scheme, device="cuda"),
            cupy.asarray(floats(rng, (40, 320))),
        )
        row = cufp8.formats.SCHEMES[scheme]
        q = cufp8.quantize_activations(x, block=row.x_block, dtype=row.dtype, scale_dtype=row.scale_dtype)
        values = q.to("cpu").dequantize("float64"), layer.weight.to("cpu").dequantize("float64")
        ref = values[0] @ values[1].T, np.abs(values[0]) @ np.abs(values[1]).T
        for y in (layer(x), cufp8.scaled_mm(q, layer.weight, out_dtype="float32")):
            reference.assert_scaled_close(y, ref, "float32", acc_here())
