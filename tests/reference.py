"""A float64 oracle of the numeric contract, written from the specifications alone.

Nothing here comes from cufp8 (nor from ml_dtypes): the e4m3fn and e5m2 tables follow the definitions in the
"OCP 8-bit Floating Point Specification (OFP8)", revision 1.0, section 5, in integer arithmetic; the
quantiser searches that table in exact arithmetic; the product is taken in float64 on the very codes
and scales that a kernel read, and judged element by element.

The bound, for each element of ``y = round(fmaf(scale[n], sum_k x[m, k] q[n, k], bias[n]))``::

    abs(y - ref) <= u * abs(ref) + eta + acc * (abs(x) @ abs(w).T + abs(bias))

u is half a unit in the last place of the output's dtype, eta half of its smallest subnormal, acc
the relative error that a kernel's fp32 sums may have. Where the exact result rounds beyond the
largest finite value, y is an infinity of the same sign; where it is NaN, y is NaN.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

# --- e4m3fn -------------------------------------------------------------------------------------
# Sign 1, exponent 4 (bias 7), mantissa 3. All values are whole multiples of 2^-9, the smallest
# subnormal, so the table is one of integers. There is no infinity; S.1111.111 is NaN.
UNIT = 2.0**-9
NAN_CODE = 0x7F


def _units(code: int, mantissa_bits: int = 3) -> int:
    """Magnitude of a finite non-negative code in units of the smallest subnormal."""
    one = 1 << mantissa_bits
    exponent, mantissa = code >> mantissa_bits, code & (one - 1)
    return mantissa if exponent == 0 else (one + mantissa) << (exponent - 1)


MAGNITUDES = tuple(_units(code) for code in range(NAN_CODE))  # 127 of them, strictly increasing
MAX = MAGNITUDES[-1] * UNIT
_HALF = [magnitude * UNIT for magnitude in MAGNITUDES] + [math.nan]
VALUES = np.array(_HALF + [-value for value in _HALF])  # of all 256 codes; -0.0 at 0x80
# Half-way points between neighbours: whole multiples of 2^-10, exact in float64.
TIES = np.array([(a + b) * UNIT / 2 for a, b in zip(MAGNITUDES, MAGNITUDES[1:], strict=False)])

# --- e5m2 ---------------------------------------------------------------------------------------
# Sign 1, exponent 5 (bias 15), mantissa 2: whole multiples of 2^-16. S.11111.00 is Inf, the three above are NaN.
UNIT_E5M2 = 2.0**-16
INF_CODE_E5M2 = 0x7C
MAGNITUDES_E5M2 = tuple(_units(code, 2) for code in range(INF_CODE_E5M2))
_HALF_E5M2 = [magnitude * UNIT_E5M2 for magnitude in MAGNITUDES_E5M2] + [math.inf] + [math.nan] * 3


@dataclass(frozen=True)
class Element:
    """An FP8 format: magnitudes of its finite codes in units of its smallest subnormal, values of all 256 codes, and
    half-way points between neighbours."""

    unit: float
    magnitudes: tuple[int, ...]
    values: np.ndarray

    @property
    def ties(self) -> np.ndarray:
        m = self.magnitudes
        return np.array([(a + b) * self.unit / 2 for a, b in zip(m, m[1:], strict=False)])

    @property
    def max(self) -> float:
        return self.magnitudes[-1] * self.unit


ELEMENTS = {
    "float8_e4m3fn": Element(UNIT, MAGNITUDES, VALUES),
    "float8_e5m2": Element(UNIT_E5M2, MAGNITUDES_E5M2, np.array(_HALF_E5M2 + [-value for value in _HALF_E5M2])),
}


def nearest_code(value: Fraction | float, negative: bool = False, dtype: str = "float8_e4m3fn") -> int:
    """The code nearest to one number, by looking at every code: ties to even, saturating.

    Parameters
    ----------
    value : Fraction or float
        Finite number; its sign counts unless it is zero.
    negative : bool
        Sign of a zero.
    """
    exact = Fraction(value) if isinstance(value, Fraction) else Fraction(float(value))
    element = ELEMENTS[dtype]
    target = abs(exact) / Fraction(element.unit)
    codes = range(len(element.magnitudes))
    best = min(codes, key=lambda code: (abs(element.magnitudes[code] - target), code & 1))
    return best | (0x80 if exact < 0 or (exact == 0 and negative) else 0)


def encode(values: np.ndarray, dtype: str = "float8_e4m3fn") -> np.ndarray:
    """Codes nearest to float64 (or narrower) numbers, not NaN: ties to even, saturating to the largest finite value."""
    values, ties = np.asarray(values, np.float64), ELEMENTS[dtype].ties
    magnitude = np.abs(values)
    index = np.searchsorted(ties, magnitude, side="left")
    tie = ties[np.minimum(index, len(ties) - 1)] == magnitude
    index = index + (tie & (index % 2 == 1))  # at a tie, index is the lower neighbour
    return (index | np.where(np.signbit(values), 0x80, 0)).astype(np.uint8)


def decode(codes: Any) -> np.ndarray:
    """Values of uint8 codes, float64."""
    return VALUES[host(codes)]


# --- the quantiser ------------------------------------------------------------------------------
def quantize(w: Any) -> tuple[np.ndarray, np.ndarray]:
    """Codes [N, K] (uint8) and scales [N, 1] (float32) of a finite weight [N, K], contract FP8A16.

    A zero keeps its sign, in a row of zeros too.

    fp32 divisions are taken in float64 and rounded once more: a quotient of two 24-bit numbers that
    is rounded to 53 bits first rounds to the same fp32 number (Figueroa 1995), except among
    subnormals, where a scale is 2^-126 and a code is zero whichever way they round.
    """
    w = to_float64(w)
    codes = np.empty(w.shape, np.uint8)
    scale = np.empty((w.shape[0], 1), np.float32)
    step = max(1, (1 << 20) // max(1, w.shape[1]))
    for i in range(0, w.shape[0], step):
        rows = w[i : i + step].astype(np.float32).astype(np.float64)
        amax = np.abs(rows).max(axis=1, keepdims=True)
        s = np.maximum((amax / 448.0).astype(np.float32), np.float32(2.0**-126))
        s[amax == 0] = 1
        scale[i : i + step] = s
        with np.errstate(under="ignore"):
            quotient = (rows / s.astype(np.float64)).astype(np.float32)
        codes[i : i + step] = encode(quotient)
    return codes, scale


def quantize_activations(
    x: Any, block: tuple[int, int], dtype: str = "float8_e4m3fn", scale: float | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Codes [M, K] (uint8) and scales [rows of blocks, blocks in a row] (float32) of x [..., K], block by block.

    amax over finite values, scale max(fp32(amax / max), 2^-126) or 1 where there is none; codes of fp32(x / scale),
    saturated; 0x7F where x is NaN or Inf. Divisions as `quantize` takes them.
    """
    x = to_float64(x)
    x = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    (m, k), element = x.shape, ELEMENTS[dtype]
    high, wide = (max(m, 1) if block[0] == -1 else block[0]), (k if block[1] == -1 else block[1])
    codes = np.empty((m, k), np.uint8)
    scales = np.ones((1 if block[0] == -1 else m, -(-k // wide)), np.float32)
    for i, j in np.ndindex(scales.shape):
        at = slice(i * high, i * high + high), slice(j * wide, j * wide + wide)
        part = x[at]
        finite = np.isfinite(part)
        amax = np.abs(part[finite]).max(initial=0)
        if scale is not None:
            scales[i, j] = scale
        elif amax:
            scales[i, j] = max(np.float32(amax / element.max), np.float32(2.0**-126))
        with np.errstate(all="ignore"):
            quotient = (np.where(finite, part, 0) / np.float64(scales[i, j])).astype(np.float32)
        quotient = np.copysign(quotient, part)  # the sign of a zero
        codes[at] = np.where(finite, encode(quotient, dtype), 0x7F)
    return codes, scales


# --- what stands before the quantiser -----------------------------------------------------------
def to_float32(exact: Fraction) -> float:
    """The float32 number nearest to an exact one, ties to even; infinite beyond the largest. For single numbers."""
    if exact == 0:
        return 0.0
    exponent = abs(exact).numerator.bit_length() - abs(exact).denominator.bit_length()
    if abs(exact) < Fraction(2) ** exponent:
        exponent -= 1
    unit = Fraction(2) ** (max(exponent, -126) - 23)
    found = round(exact / unit) * unit  # Python rounds a Fraction's ties to even
    return math.copysign(math.inf, exact) if abs(found) >= 2**128 else float(found)


def fma(a: float, b: float, c: float) -> float:
    """a * b + c of finite float32 numbers with one rounding. A zero has no sign here."""
    return to_float32(Fraction(a) * Fraction(b) + Fraction(c))


def sum_of_squares(h: list[float], threads: int, piece: int) -> float:
    """As rms_norm.cu says that it adds a row up: `threads` of a block, and `piece` values in 16 bytes.

    A thread's unit is of 16 values, in pieces that are 8 pieces apart; eight threads share 128 neighbours.
    """
    sums = []
    for thread in range(threads):
        chains = [0.0] * 4
        for unit in range(thread, -(-len(h) // 128) * 8, threads):
            first = unit // 8 * 128 + unit % 8 * piece
            for i in range(16):
                at = first + i // piece * 8 * piece + i % piece
                if at < len(h):
                    chains[i % 4] = fma(h[at], h[at], chains[i % 4])
        sums.append(_add(_add(chains[0], chains[1]), _add(chains[2], chains[3])))
    warps = [_over_lanes(sums[i : i + 32]) for i in range(0, threads, 32)]
    return _over_lanes(warps + [0.0] * (32 - len(warps)))


def _add(a: float, b: float) -> float:
    return fma(a, 1.0, b)


def _over_lanes(lanes: list[float]) -> float:
    for distance in (16, 8, 4, 2, 1):
        lanes = [_add(v, lanes[i ^ distance]) for i, v in enumerate(lanes)]
    assert len(set(lanes)) == 1
    return lanes[0]


def rms_norm(x: Any, weight: Any, eps: float, residual: Any = None, dtype: str = "float32") -> tuple[Any, Any]:
    """float64 [M, K] of x * weight / sqrt(mean of x^2 + eps), and h; h is x + residual, rounded to `dtype` before."""
    h = to_float64(x)
    if residual is not None:
        # Sums of 16-bit numbers in float32 first, as cufp8's contract has it; of float32 numbers rounded once.
        h = to_float64((h + to_float64(residual)).astype(np.float32))
        h = round_to(h, dtype)
    flat = h.reshape(-1, h.shape[-1])
    scale = 1 / np.sqrt((flat**2).mean(axis=1, keepdims=True) + float(np.float32(eps)))
    return flat * scale * to_float64(weight), h


def round_to(values: np.ndarray, dtype: str) -> np.ndarray:
    """float32 numbers, given in float64, rounded to a float dtype, ties to even; float64 again."""
    single = values.astype(np.float32)
    if dtype == "float32":
        return single.astype(np.float64)
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return single.astype(np.float16).astype(np.float64)
    bits = single.view(np.uint32)
    rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32)
    return np.where(np.isfinite(single), rounded.view(np.float32), single).astype(np.float64)


def silu_mul(x: Any) -> np.ndarray:
    """float64 [M, K] of silu(gate) * up, x = [gate, up] of [..., 2K]; the exponential's argument within +-87."""
    x = to_float64(x)
    gate, up = np.split(x.reshape(-1, x.shape[-1]), 2, axis=1)
    with np.errstate(all="ignore"):
        return gate / (1 + np.exp(-np.clip(gate, -87, 87))) * up


def assert_quantised(codes: Any, scale: Any, exact: np.ndarray, size: int, dtype: str, error: float) -> None:
    """Codes and scales are those of values within a relative `error` of the exact ones.

    Parameters
    ----------
    codes : array [M, K], uint8
    scale : array [M or 1, blocks in a row], float32
    exact : array [M, K], float64, finite
    size : int
        Columns of a block.
    """
    codes, scale, element = host(codes), host(scale), ELEMENTS[dtype]
    each = np.repeat(scale.astype(np.float64), size, axis=1)[:, : codes.shape[1]]
    with np.errstate(under="ignore"):
        low, high = (np.abs(exact) * (1 + e) / each for e in (-error, error))
    magnitude = codes & 0x7F
    wrong = (magnitude < encode(low, dtype)) | (magnitude > encode(high, dtype))
    wrong |= (codes >> 7 != np.signbit(exact)) & (exact != 0)
    assert not wrong.any(), f"{int(wrong.sum())} codes, the first at {np.argwhere(wrong)[0].tolist()}"
    if scale.shape[0] == codes.shape[0]:
        for j in range(scale.shape[1]):
            amax = np.abs(exact[:, j * size : j * size + size]).max(axis=1)
            wanted = np.where(amax == 0, 1, np.maximum(amax / element.max, 2.0**-126))
            np.testing.assert_allclose(scale[:, j], wanted, rtol=error + 2.0**-23)


def dequantize(codes: Any, scale: Any) -> np.ndarray:
    """Exact values code * scale, float64 [N, K]."""
    return decode(codes) * to_float64(scale).reshape(-1, 1)


def error_report(w: Any, codes: Any, scale: Any, x: Any = None) -> dict[str, float]:
    """The error report's figures in float64; rows of zero norm do not count as channels."""
    w, back = to_float64(w), dequantize(codes, scale)
    norm = np.linalg.norm(w, axis=1)
    live = norm > 0
    error = np.linalg.norm(w - back, axis=1)
    nonzero = w != 0
    report = {
        "rel_l2": float(np.linalg.norm(w - back) / np.linalg.norm(w)),
        "worst_channel_rel_l2": float((error[live] / norm[live]).max()),
        "underflow": float((nonzero & (back == 0)).sum() / nonzero.sum()),
        "crest": float((np.abs(w).max(axis=1)[live] / (norm[live] / math.sqrt(w.shape[1]))).max()),
    }
    if x is not None:
        x = to_float64(x).reshape(-1, w.shape[1])
        want, got = x @ w.T, x @ back.T
        report["output_rel_l2"] = float(np.linalg.norm(got - want) / np.linalg.norm(want))
        report["output_cosine"] = float((got * want).sum() / (np.linalg.norm(got) * np.linalg.norm(want)))
    return report


# --- arrays of others ---------------------------------------------------------------------------
def host(a: Any) -> np.ndarray:
    """A NumPy array of a NumPy, CuPy, torch (bf16: as float32) or JAX array."""
    if hasattr(a, "detach"):
        a = a.detach().cpu()
        return (a.float() if dtype_name(a) == "bfloat16" else a).numpy()
    return a.get() if hasattr(a, "get") else np.asarray(a)


def to_float64(a: Any) -> np.ndarray:
    """The same numbers in float64, on the host."""
    with np.errstate(invalid="ignore"):  # a NaN may be a signalling one
        return host(a).astype(np.float64)


def dtype_name(a: Any) -> str:
    """Name of an array's dtype: "bfloat16", not "torch.bfloat16"."""
    name = getattr(a.dtype, "name", None) or str(a.dtype)
    return name.removeprefix("torch.")


# --- the product and its bound ------------------------------------------------------------------
@dataclass(frozen=True)
class Output:
    """An output dtype: u, eta, largest finite value, and the least magnitude that rounds to Inf."""

    u: float
    eta: float
    max: float

    @property
    def overflow(self) -> float:
        # Half a unit in the last place beyond the largest finite value; the tie goes to even, that
        # is to infinity. frexp: max = f * 2^e with f in [0.5, 1), so its unit is 2^e * u.
        return self.max + math.ldexp(self.u, math.frexp(self.max)[1]) / 2


OUTPUTS = {
    "bfloat16": Output(2.0**-8, 2.0**-134, (2 - 2.0**-7) * 2.0**127),
    "float16": Output(2.0**-11, 2.0**-25, 65504.0),
    "float32": Output(2.0**-24, 2.0**-150, (2 - 2.0**-23) * 2.0**127),
}


def product(x: Any, codes: Any, scale: Any, bias: Any = None) -> tuple[np.ndarray, np.ndarray]:
    """The exact result and the sum of magnitudes that the bound takes, each float64 [M, N].

    Parameters
    ----------
    x : array [..., K]
        Activations of any of the float dtypes; NaN and Inf count as IEEE has it, in their own row.
    codes : array [N, K], uint8
    scale : array [N, 1] or [N], float32
    bias : array [N], optional

    Raises
    ------
    ValueError
        If shapes do not fit, or if sums of finite x may leave fp32's range before the scale is
        applied: the contract's fp32 sums then overflow where the exact result does not, and
        nothing could be said of such an element.
    """
    codes, scale = host(codes), to_float64(scale).reshape(-1)
    n, k = codes.shape
    x = to_float64(x)
    if x.shape[-1] != k or scale.shape != (n,):
        raise ValueError(f"oracle: x {x.shape}, codes {codes.shape}, scale {scale.shape}")
    x = x.reshape(-1, k)
    offset = np.zeros(n) if bias is None else to_float64(bias)
    if offset.shape != (n,):
        raise ValueError(f"oracle: bias {offset.shape} for codes {codes.shape}")
    finite = np.isfinite(x).all(axis=1)
    ref = np.empty((x.shape[0], n))
    mag = np.empty((x.shape[0], n))
    clean = np.where(finite[:, None], x, 0.0)
    step = max(1, (1 << 24) // k)
    with np.errstate(all="ignore"):
        for i in range(0, n, step):
            part = slice(i, i + step)
            q = VALUES[codes[part]]
            ref[:, part] = clean @ q.T
            mag[:, part] = np.abs(clean) @ np.abs(q).T
            for m in np.flatnonzero(~finite):
                ref[m, part] = _nonfinite_dot(x[m], q)
        if mag.size and mag.max() >= OUTPUTS["float32"].max:
            raise ValueError("oracle: these inputs may overflow fp32 sums; choose smaller ones")
        return ref * scale + offset, mag * scale + np.abs(offset)


def _nonfinite_dot(x: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Dot products of one row that holds NaN or Inf, by their kinds alone: +-Inf or NaN, [N]."""
    if np.isnan(x).any():
        return np.full(q.shape[0], math.nan)
    at = np.isinf(x)
    products = np.sign(x[at]) * np.sign(q[:, at])
    up, down = (products > 0).any(axis=1), (products < 0).any(axis=1)
    nan = (products == 0).any(axis=1) | np.isnan(products).any(axis=1) | (up & down)
    return np.where(nan, math.nan, np.where(up, math.inf, -math.inf))


def _needed_acc(y: np.ndarray, ref: np.ndarray, mag: np.ndarray, out: Output) -> np.ndarray:
    """For each element the least acc that accepts it; inf where none does."""
    with np.errstate(all="ignore"):
        error = np.abs(y - ref) - out.u * np.abs(ref) - out.eta
        # Infinite y: right only if the exact result, moved by the allowance, rounds to infinity.
        error = np.where(np.isinf(y), out.overflow - np.abs(ref), error)
        # Finite y although the exact result rounds to infinity: the allowance must bring it back.
        beyond = np.isfinite(y) & (np.abs(ref) >= out.overflow)
        error = np.where(beyond, np.maximum(error, np.abs(ref) - out.overflow), error)
        need = np.where(error <= 0, 0.0, error / mag)  # error / 0 is inf: nothing to be wrong with
    wrong_sign = np.isinf(y) & (np.sign(y) != np.sign(ref))
    need = np.where(np.isnan(y) | wrong_sign, math.inf, need)
    same_kind = (np.isnan(y) & np.isnan(ref)) | (np.isinf(ref) & (y == ref))
    return np.where(np.isfinite(ref), need, np.where(same_kind, 0.0, math.inf))


def _judge(
    y: Any, x: Any, codes: Any, scale: Any, bias: Any, out_dtype: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    if dtype_name(y) != out_dtype:
        raise AssertionError(f"y is {dtype_name(y)}, not {out_dtype}")
    shape = tuple(x.shape[:-1]) + (host(codes).shape[0],)
    if tuple(y.shape) != shape:
        raise AssertionError(f"y has shape {list(y.shape)}, not {list(shape)}")
    ref, mag = product(x, codes, scale, bias)
    y = to_float64(y).reshape(ref.shape)
    return y, ref, mag, _needed_acc(y, ref, mag, OUTPUTS[out_dtype])


def measured_acc(y: Any, x: Any, codes: Any, scale: Any, bias: Any, out_dtype: str) -> float:
    """The smallest acc with which `assert_close` passes; inf if none does."""
    need = _judge(y, x, codes, scale, bias, out_dtype)[3]
    return float(need.max(initial=0.0))


def assert_close(y: Any, x: Any, codes: Any, scale: Any, bias: Any, out_dtype: str, acc: float) -> float:
    """Check every element of y against the contract's bound.

    Parameters
    ----------
    y : array [..., N]
        What a kernel wrote (NumPy, CuPy, torch or JAX), of dtype `out_dtype`.
    x, codes, scale, bias
        What it read: see `product`.
    out_dtype : str
        "bfloat16", "float16" or "float32".
    acc : float
        Relative error allowed to the fp32 sums.

    Returns
    -------
    float
        The greatest abs(error) / bound over finite elements.

    Raises
    ------
    AssertionError
        If y has another dtype or shape, or an element lies outside its bound; the text has the
        worst element's index, value, reference and ratio, and how many there are.
    """
    value, ref, mag, need = _judge(y, x, codes, scale, bias, out_dtype)
    if not value.size:
        return 0.0
    out = OUTPUTS[out_dtype]
    with np.errstate(all="ignore"):
        ratio = np.abs(value - ref) / (out.u * np.abs(ref) + out.eta + acc * mag)
    ratio = np.where(np.isfinite(ratio), ratio, 0.0)
    bad = ~(need <= acc)  # so that a NaN anywhere in the judgement fails
    if bad.any():
        worst = int(np.argmax(np.where(bad, np.where(need == math.inf, math.inf, ratio), -1.0)))
        m, n = divmod(worst, ref.shape[1])
        raise AssertionError(
            f"{int(bad.sum())} of {bad.size} elements are out of bounds; the worst is "
            f"y[{m}, {n}] = {value[m, n]!r}, reference {ref[m, n]!r}, "
            f"abs(error) / bound = {_ratio_text(value[m, n], ref[m, n], ratio[m, n])}, "
            f"needs acc = {need[m, n]:.3g}, allowed {acc:.3g} "
            f"({out_dtype}, y {list(ref.shape)}, K = {host(codes).shape[1]})"
        )
    return float(ratio.max())


def _ratio_text(value: float, ref: float, ratio: float) -> str:
    return f"{ratio:.4g}" if math.isfinite(value) and math.isfinite(ref) else "inf"


# --- both operands in FP8 -----------------------------------------------------------------------
def scaled_product(
    a: tuple[Any, str], b: tuple[Any, str], scale_a: Any, scale_b: Any, bias: Any = None
) -> tuple[np.ndarray, np.ndarray]:
    """The exact `scale_a * (a @ b.T) * scale_b + bias` and the sum of magnitudes, each float64 [M, N].

    a and b: codes (uint8 [M, K], [N, K]) and their dtype; scales: [rows, 1] or [1, 1].
    """
    x, w = (ELEMENTS[dtype].values[host(codes)] for codes, dtype in (a, b))
    factor = to_float64(scale_a) * to_float64(scale_b).reshape(1, -1)
    offset = np.zeros(len(w)) if bias is None else to_float64(bias)
    with np.errstate(all="ignore"):
        return x @ w.T * factor + offset, np.abs(x) @ np.abs(w).T * factor + np.abs(offset)


def assert_scaled_close(y: Any, exact: tuple[np.ndarray, np.ndarray], out_dtype: str, acc: float) -> None:
    """Check every element of y against `scaled_product` by the bound of `assert_close`."""
    (ref, mag), value = exact, to_float64(y)
    assert dtype_name(y) == out_dtype and value.shape == ref.shape, f"y is {dtype_name(y)} {list(value.shape)}"
    need = _needed_acc(value, ref, mag, OUTPUTS[out_dtype])
    bad = ~(need <= acc)  # so that a NaN anywhere in the judgement fails
    if bad.any():
        m, n = np.unravel_index(np.argmax(np.where(bad, need, -1.0)), ref.shape)
        raise AssertionError(
            f"{int(bad.sum())} of {bad.size} elements are out of bounds; the worst is y[{m}, {n}] = {value[m, n]!r}, "
            f"reference {ref[m, n]!r}, needs acc = {need[m, n]:.3g}, allowed {acc:.3g}; rows "
            f"{np.flatnonzero(bad.any(1))[:8]}, columns {np.flatnonzero(bad.any(0))[:8]}"
        )
