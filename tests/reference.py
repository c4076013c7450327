"""A float64 oracle of the numeric contract, written from the specifications alone.

Nothing here comes from cufp8 (nor from ml_dtypes): the e4m3fn table follows the definition in the
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


def _units(code: int) -> int:
    """Magnitude of a finite code in units of 2^-9."""
    exponent, mantissa = (code >> 3) & 15, code & 7
    return mantissa if exponent == 0 else (8 + mantissa) << (exponent - 1)


MAGNITUDES = tuple(_units(code) for code in range(NAN_CODE))  # 127 of them, strictly increasing
MAX = MAGNITUDES[-1] * UNIT
_HALF = [magnitude * UNIT for magnitude in MAGNITUDES] + [math.nan]
VALUES = np.array(_HALF + [-value for value in _HALF])  # of all 256 codes; -0.0 at 0x80
# Half-way points between neighbours: whole multiples of 2^-10, exact in float64.
TIES = np.array([(a + b) * UNIT / 2 for a, b in zip(MAGNITUDES, MAGNITUDES[1:], strict=False)])


def nearest_code(value: Fraction | float, negative: bool = False) -> int:
    """The code nearest to one number, by looking at every code: ties to even, saturating.

    Parameters
    ----------
    value : Fraction or float
        Finite number; its sign counts unless it is zero.
    negative : bool
        Sign of a zero.
    """
    exact = Fraction(value) if isinstance(value, Fraction) else Fraction(float(value))
    target = abs(exact) / Fraction(UNIT)
    best = min(range(NAN_CODE), key=lambda code: (abs(MAGNITUDES[code] - target), code & 1))
    return best | (0x80 if exact < 0 or (exact == 0 and negative) else 0)


def encode(values: np.ndarray) -> np.ndarray:
    """Codes nearest to finite float64 (or narrower) numbers: ties to even, saturating to +-448."""
    values = np.asarray(values, np.float64)
    magnitude = np.abs(values)
    index = np.searchsorted(TIES, magnitude, side="left")
    tie = TIES[np.minimum(index, len(TIES) - 1)] == magnitude
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
