"""Float activations -> FP8 or FP4 codes and scales, alone or with what stands before a layer.

Host and GPU give the same bits: each step is defined in float32 operations that both repeat.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from cufp8 import interop, kernels, runtime
from cufp8.block_scaled import E8M0_RULES, encode_activations, factors_of, store, tiles
from cufp8.formats import ACTIVATIONS, FLOATS, FORMATS, Scheme
from cufp8.quantize import (
    FACTOR_BY_ROW,
    FACTOR_GIVEN,
    NO_FACTOR,
    BlockRows,
    QuantizedTensor,
    _row_chunks,
    codes_of,
    queue_blocks,
    scales_of,
)

_TILE = 1 << 20  # values handled at once: 4 MiB as float32; a multiple of every group
_COMPUTED_TILE = 1 << 17  # the same where they are computed before, with float64 on the way
_NAN = 0x7F  # a NaN in both formats, and what CUDA's __nv_cvt_float_to_fp8 makes of any NaN
_ONE = np.float32(1)
FACTOR_MOST = 2.0**125  # of a given global scale: 6 times it is finite


def quantize_activations(
    x: Any,
    *,
    block: tuple[int, int] = (1, -1),
    dtype: str = "float8_e4m3fn",
    scale_dtype: str = "float32",
    scale: Any = None,
    global_scale: Any = None,
    e8m0: str = "RCEIL",
    out: QuantizedTensor | None = None,
) -> QuantizedTensor:
    """Quantise activations to FP8 or FP4, with a scale per tensor, per token or per group of 128, 32 or 16.

    float32 scales: `scale = max(amax / max, 2^-126)`, 1 where amax is 0, with amax the largest finite magnitude of the
    block and max the format's: 448 (e4m3fn) or 57344 (e5m2). `code = round(x / scale)`, to nearest, ties to even,
    saturated to +-max; zeros keep their sign. All in float32. NaN and Inf become the code 0x7F, a NaN of either format,
    whatever their sign; no other value's code and no scale depends on them. On the host and on a GPU the same bits.

    MXFP8 and MXFP4 (float8_e8m0fnu scales) and NVFP4 (float8_e4m3fn): scales and codes of a block are those that
    `quantize` gives a weight (`block_scaled.encode_blocks`), but NVFP4's global scale is each token's own,
    `g = max(amax / 2688, 2^-126)`, 1 where amax is 0. amax is of finite values again. MXFP8: NaN and Inf as above;
    e2m1 has no NaN: a block that holds one has a NaN for its scale, 0xFF (e8m0) or 0x7F (e4m3fn), and codes 0.

    Parameters
    ----------
    x
        bfloat16, float16 or float32, shape [..., K], K at least 1, any strides; NumPy, CuPy, torch or JAX. The leading
        dimensions are folded into M rows, or tokens; [K] is one. M may be 0.
    block
        Which values share a scale: (1, -1) a token, (-1, -1) all of x, (1, 128) a group of 128 neighbours in a token,
        where the last group of a token has what is left: ceil(K / 128) groups. (1, 32) for MXFP8 and MXFP4,
        (1, 16) for NVFP4, the last again of what is left.
    dtype
        "float8_e4m3fn" or "float8_e5m2"; "float4_e2m1fn" with the block scales of MXFP4 and NVFP4.
    scale_dtype
        "float32"; "float8_e8m0fnu" for MXFP8 and MXFP4; "float8_e4m3fn" for NVFP4.
    scale
        None: found from x (dynamic). Or the scale itself (static), with block (-1, -1) alone: a number, rounded to
        float32, or a float32 array of one element, on the host or on x's GPU; finite and above 0. On a GPU that cannot
        be looked at without a wait: there a scale that is not makes every code NaN, and stands in the result as it is.
    global_scale
        NVFP4 alone. None: each token's own, found in the same read. Or one for all (static), given as `scale` is; above
        0 and at most 2^125. On a GPU one that is not makes every scale NaN.
    e8m0
        How MXFP8 and MXFP4 choose a power of two: "RCEIL", "FLOOR" or "EVEN", as for `quantize`.
    out
        A QuantizedTensor where x is, with this dtype, scale_dtype, block and shape (M, K), which is overwritten and
        returned; its codes and scales may lie in wider arrays, each row without gaps.

    Returns
    -------
    QuantizedTensor
        Codes uint8 [M, K], or [M, ceil(K / 2)] of two e2m1 each; scales float32 [M, 1] per token, [1, 1] per tensor,
        [M, ceil(K / 128)] per group, or uint8 [M, ceil(K / 32)] or [M, ceil(K / 16)]; NVFP4's global_scale float32 [M],
        or [1] where it was given. Where x is. On the host it takes at most 64 MiB beside x and the result. On a GPU the
        work is queued on the stream of x's library, and nothing but JAX waits; memory is what that library allocates
        for the result, and a copy of x only where x has three or more dimensions that do not fold into rows at one
        distance.

    Raises
    ------
    TypeError
        If x is no array or no such float, scale no number and no float32 array, or out no QuantizedTensor.
    ValueError
        If x is a scalar, or K is 0; if dtype, scale_dtype, block or e8m0 is not one of those above, or they do not go
        together; if scale comes with another block than (-1, -1), or global_scale with other scales than NVFP4's, has
        more than one element, lies on another GPU than x, or (on the host) is not finite and above 0; if out does not
        fit, is read-only or shares memory with what is read. Nothing has been written then.
    RuntimeError
        If x is a torch tensor that requires grad while grad mode is on.

    Notes
    -----
    The first call on a GPU compiles and loads its kernels: make it outside of a capture. A token of up to 65,536 bytes
    is read once; a longer one, or one whose 16-byte pieces are not whole and aligned, value by value and once more for
    each pass, and so are e5m2 codes of float32 with a float32 scale (below compute capability 8.9 of any x), and blocks
    of 16 or 32 that K does not fill. The scale of a whole tensor takes a pass of its own.

    Source: OCP 8-bit Floating Point Specification (OFP8) 1.0, section 5: the formats, their NaN codes (the sign of
    which it gives no meaning) and the saturating conversion; NaN instead of the largest value for Inf is cufp8's own.
    OCP Microscaling Formats (MX) Specification 1.0, section 6.3: FLOOR; section 5: what a NaN scale means.
    """
    call = _Call("quantize_activations", x, "x", block, dtype, scale, scale_dtype, global_scale, e8m0)
    if interop.on_host(call.x):
        return call.on_host(out, _as_they_are)
    return call.on_gpu("activations", "quantize", out)


def rms_norm_quantize(
    x: Any,
    weight: Any,
    eps: float,
    residual: Any = None,
    *,
    block: tuple[int, int] = (1, -1),
    dtype: str = "float8_e4m3fn",
    scale: Any = None,
    out: QuantizedTensor | None = None,
    pdl: bool = True,
) -> QuantizedTensor | tuple[QuantizedTensor, Any]:
    """RMS normalisation, with the sum before it, and `quantize_activations` of what comes of it, in one kernel.

    `h = x`, or `x + residual` rounded to x's dtype. `rstd = 1 / sqrt(fma(sum of h^2 over K, 1 / K, eps))`;
    `v = (h * rstd) * weight`; codes and scales are those of v in float32, which is rounded to no narrower dtype. The
    host and a GPU give the same bits, of v too: every operation is one of IEEE's in float32, and the sum's order
    depends on K and x's dtype alone (kernels_cu/rms_norm.cu tells it). A NaN in h makes all of its row NaN; an Inf,
    or an h^2 beyond float32, makes rstd 0.

    Parameters
    ----------
    x, block, dtype, scale, out
        As for `quantize_activations`; the block (-1, -1) needs a scale.
    weight
        Shape [K], x's dtype, where x is.
    eps
        Added to the mean square: 0 or more, rounded to float32.
    residual
        None, or what is added to x: its shape and dtype, where it is, any strides.
    pdl
        Programmatic dependent launch (sm_90 and newer): the kernel reads `weight` before its predecessor in the stream
        is done. False: it starts after, for callers who write weights in place.

    Returns
    -------
    QuantizedTensor, or (QuantizedTensor, array)
        As `quantize_activations`; with a residual also h, the new residual, x's shape, dtype and library.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As `quantize_activations`; TypeError if weight or residual has another dtype than x, ValueError if one has
        another shape or lies elsewhere, eps is negative or not finite, or block is (-1, -1) without a scale.

    Source: B. Zhang and R. Sennrich, Root Mean Square Layer Normalization, 2019, section 3, with eps under the root.
    """
    call = _Call("rms_norm_quantize", x, "x", block, dtype, scale, computed=True)
    w = call.beside(weight, "weight", call.x.shape[-1:])
    r = None if residual is None else call.beside(residual, "residual", call.x.shape)
    if not (math.isfinite(eps) and eps >= 0):
        raise ValueError(f"rms_norm_quantize: eps is {eps}; needed is finite and 0 or more.")
    if interop.on_host(call.x):
        h = None if r is None else np.empty(call.x.shape, call.x.dtype)
        flat = None if h is None else h.reshape(call.shape)
        q = call.on_host(out, lambda rows: _rms_norm(call.x, w, np.float32(eps), r, flat, rows))
        found = interop.adapter(x)
        return q if h is None else (q, found.from_host(x, h) if hasattr(found, "from_host") else h)
    return call.on_gpu("rms_norm", "rms_norm", out, second=w, residual=r, eps=eps, pdl=pdl)


def silu_mul_quantize(
    gate_up: Any,
    *,
    block: tuple[int, int] = (1, -1),
    dtype: str = "float8_e4m3fn",
    scale: Any = None,
    out: QuantizedTensor | None = None,
) -> QuantizedTensor:
    """The gated activation of a feed-forward layer and `quantize_activations` of it, in one kernel.

    `v = (g * sigmoid(g)) * u` with g the first half of a row and u the second; codes and scales are those of v in
    float32, which is rounded to no narrower dtype. sigmoid is a sequence of float32 operations (kernels_cu/silu_mul.cu)
    within 2^-19 of `1 / (1 + exp(-clip(g, -87, 87)))`, relatively, and so silu; the host and a GPU give the same bits,
    of v too. What is NaN or Inf, or becomes so in float32, is NaN in the codes.

    Parameters
    ----------
    gate_up
        [..., 2K], as x of `quantize_activations`: a row is K gates beside K factors.
    block, dtype, scale, out
        As for `quantize_activations`; the block (-1, -1) needs a scale. `out` has shape (M, K).

    Returns
    -------
    QuantizedTensor
        Of [M, K], as `quantize_activations`.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As `quantize_activations`; ValueError if gate_up's last dimension is odd, or block is (-1, -1) without a scale.

    Source: N. Shazeer, GLU Variants Improve Transformer, 2020, section 2: SwiGLU.
    """
    call = _Call("silu_mul_quantize", gate_up, "gate_up", block, dtype, scale, computed=True, halves=True)
    if interop.on_host(call.x):
        return call.on_host(out, lambda rows: _silu_mul(call.x, rows))
    return call.on_gpu("silu_mul", "silu_mul", out)


def _as_they_are(rows: slice) -> None:
    """Values that are not computed: `_Call.on_host` takes them from x."""


class _Call:
    """What the three have in common: their arguments, looked at, and the two ways to serve them.

    `what` names the function in errors, `name` the array x in them; `shape` is that of the codes.
    """

    def __init__(
        self,
        what: str,
        x: Any,
        name: str,
        block: Any,
        dtype: str,
        scale: Any,
        scale_dtype: str = "float32",
        global_scale: Any = None,
        rule: str = E8M0_RULES[0],
        computed: bool = False,
        halves: bool = False,
    ) -> None:
        self.what, self.name, self.halves, self.rule = what, name, halves, rule
        self.row = self._row(dtype, scale_dtype, tuple(block) if isinstance(block, list) else block)
        if rule not in E8M0_RULES:
            raise self.wrong(f"e8m0 is {rule!r}; allowed are {', '.join(E8M0_RULES)}.")
        self.x = self._floats(x, name)
        self.inputs = {name: (x, self.x)}  # as given and as an array; a result may not share memory with them
        if halves and self.x.shape[-1] % 2:
            raise self.wrong(f"{name} has shape {list(self.x.shape)}; needed is [..., 2K]: K gates and K factors.")
        if computed and scale is None and self.row.block == (-1, -1):
            raise self.wrong("block (-1, -1) needs a scale here; pass one, or a block of (1, -1) or (1, 128).")
        self.scale = None if scale is None else self._given_scale(scale)
        self.factor = None if global_scale is None else self._given_factor(global_scale)
        self.shape = math.prod(self.x.shape[:-1]), self.x.shape[-1] // (1 + halves)

    def wrong(self, text: str) -> ValueError:
        return ValueError(f"{self.what}: {text}")

    def _row(self, dtype: str, scale_dtype: str, block: tuple[int, int]) -> Scheme:
        for row in ACTIVATIONS:
            if (row.dtype, row.scale_dtype, row.block) == (dtype, scale_dtype, block):
                return row
        rows = [row for row in ACTIVATIONS if row.scale_dtype == scale_dtype]
        if not rows:
            allowed = ", ".join(dict.fromkeys(row.scale_dtype for row in ACTIVATIONS))
            raise self.wrong(f"scale_dtype is {scale_dtype!r}; allowed are {allowed}.")
        scales = "" if scale_dtype == "float32" else f" with {scale_dtype} scales"
        dtypes = dict.fromkeys(row.dtype for row in rows)
        if dtype not in dtypes:
            raise self.wrong(f"dtype is {dtype!r}; allowed are {', '.join(dtypes)}{scales}.")
        blocks = ", ".join(dict.fromkeys(str(row.block) for row in rows))
        each = scales or ": per tensor, per token, per group"
        raise self.wrong(f"block is {block!r}; allowed are {blocks}{each}.")

    def _array(self, x: Any, name: str) -> Any:
        if getattr(x, "requires_grad", False) and interop.adapter(x).grad_enabled():
            raise RuntimeError(
                f"{self.what}: the torch tensor requires grad and grad mode is on, but no gradient flows through "
                "cufp8 yet; call under torch.no_grad() or pass x.detach()."
            )
        return interop.array(x, f"{self.what}: {name}")

    def _floats(self, x: Any, name: str) -> Any:
        a = self._array(x, name)
        if a.dtype.name not in FLOATS:
            raise TypeError(f"{self.what}: {name} is {a.dtype}; allowed are {', '.join(FLOATS)}.")
        if a.ndim == 0 or a.shape[-1] == 0:
            raise self.wrong(f"{name} has shape {list(a.shape)}; needed is [..., K] with K at least 1.")
        return a

    def _near(self, a: Any, name: str) -> Any:
        """a, which must lie where x does."""
        place, mine = (_place(one) for one in (a, self.x))
        if place != mine:
            raise self.wrong(f"{name} is on {place}, what is quantised on {mine}; move one of them.")
        return a

    def beside(self, given: Any, name: str, shape: tuple[int, ...]) -> Any:
        """Another array of x's dtype, with this shape."""
        a = self._near(self._array(given, name), name)
        if a.dtype != self.x.dtype:
            raise TypeError(f"{self.what}: {name} is {a.dtype}, x {self.x.dtype}; convert it once.")
        if a.shape != shape:
            raise self.wrong(f"{name} has shape {list(a.shape)}; needed is {list(shape)}.")
        self.inputs[name] = given, a
        return a

    def _given_scale(self, scale: Any) -> Any:
        if self.row.block != (-1, -1):
            raise self.wrong(
                f"a scale was given with block {self.row.block}; a given scale is for the whole of x: pass "
                "block=(-1, -1), or leave the scale out."
            )
        return self._given(scale, "scale", float(np.finfo(np.float32).max), "finite and above 0")

    def _given_factor(self, factor: Any) -> Any:
        if not self.row.global_scale:
            raise self.wrong(
                f"a global_scale was given with {self.row.scale_dtype} scales, which have none; leave it out, or pass "
                'scale_dtype="float8_e4m3fn".'
            )
        return self._given(factor, "global_scale", FACTOR_MOST, "above 0 and at most 2^125")

    def _given(self, scale: Any, name: str, most: float, needed: str) -> Any:
        """A scale as a float32 number, or an array on x's GPU."""
        if isinstance(scale, (int, float, np.floating)):
            with np.errstate(over="ignore", under="ignore"):
                value = np.float32(scale)
        else:
            a = self._array(scale, name)
            if a.dtype != np.float32:
                raise TypeError(f"{self.what}: {name} is {a.dtype}; needed is a number or a float32 array.")
            if a.size != 1:
                raise self.wrong(f"{name} has shape {list(a.shape)}; needed is one element.")
            if not interop.on_host(a):
                return self._near(a, name)
            value = a.reshape(())[()]
        if not 0 < value <= most:
            raise self.wrong(f"{name} is {value} as float32; needed is {needed}.")
        return value

    # --- the result ---------------------------------------------------------------------------------------

    def _scales_shape(self) -> tuple[int, int]:
        (m, k), (rows, columns) = self.shape, self.row.block
        return 1 if rows == -1 else m, 1 if columns == -1 else -(-k // columns)

    def _codes_shape(self) -> tuple[int, int]:
        return self.shape[0], -(-self.shape[1] * FORMATS[self.row.dtype].bits // 8)

    def _factors(self) -> int | None:
        """How many global scales there are; None: none."""
        return None if not self.row.global_scale else self.shape[0] if self.factor is None else 1

    def _new(self, make: Callable[[tuple[int, ...], str], Any]) -> QuantizedTensor:
        """A result whose arrays `make` makes, of a shape and a dtype."""
        row, factors = self.row, self._factors()
        return QuantizedTensor(
            make(self._codes_shape(), "uint8"),
            make(self._scales_shape(), "float32" if row.scale_dtype == "float32" else "uint8"),
            dtype=row.dtype,
            scale_dtype=row.scale_dtype,
            shape=self.shape,
            block=row.block,
            global_scale=None if factors is None else make((factors,), "float32"),
            activations=True,
            _trusted=True,
        )

    def _fitting(self, out: Any) -> QuantizedTensor:
        """`out`, which must fit and share no memory with what is read."""
        if not isinstance(out, QuantizedTensor):
            raise TypeError(f"{self.what}: out is a {type(out).__name__}; allowed are a QuantizedTensor and None.")
        row = self.row
        block = (1, self.shape[1]) if row.block == (1, -1) else row.block
        came = (out.dtype, out.scale_dtype, out.block, out.shape, out.device)
        wanted = (row.dtype, row.scale_dtype, block, self.shape, _place(self.x))
        if came != wanted:
            text = "{} with {} scales, block {}, shape {} on {}"
            raise self.wrong(
                f"out is {text.format(*came)}; needed is {text.format(*wanted)}: leave out= away, or make one that "
                "fits by a first call without it."
            )
        arrays = {"codes": out.codes, "scale": out.scale}
        if row.global_scale:
            arrays["global_scale"] = out.global_scale
            if out.global_scale.size != self._factors():
                raise self.wrong(
                    f"out.global_scale has shape {list(out.global_scale.shape)}; needed is [{self._factors()}]."
                )
        for name, array in arrays.items():
            if interop.on_host(array):
                if not array.flags.writeable:
                    raise self.wrong(f"out.{name} is read-only; pass one that owns its memory.")
            elif array.shape[-1] > 1 and array.strides[-1] != array.dtype.itemsize:
                raise self.wrong(f"out.{name} has strides {list(array.strides)} bytes; needed are rows without gaps.")
            for other, (_, read) in self.inputs.items():
                if _share(array, read):
                    raise self.wrong(f"out.{name} shares memory with {other}; pass an out of its own.")
        return out

    # --- on the host --------------------------------------------------------------------------------------

    def on_host(self, out: Any, values: Callable[[slice], np.ndarray | None]) -> QuantizedTensor:
        """`values(rows)` computes those of some rows, float32 [rows, K]; None: x itself, as it is."""
        q = self._new(np.empty) if out is None else self._fitting(out)
        m, k = self.shape
        with np.errstate(all="ignore"):
            if self.row.scale_dtype != "float32":
                size = self.row.block[1]
                for rows in _row_chunks((m, -(-k // size) * size), _TILE):
                    parts = partial(_parts, self.x, k, rows)
                    _quantize_blocks(q, self.row, self.rule, rows, self.factor, parts)
                return q
            if values is _as_they_are:
                every = [slice(0, m)] if self.row.block[0] == -1 else _row_chunks(self.shape, _TILE)
                for rows in every:
                    _quantize(q, rows, self.scale, lambda rows=rows: _parts(self.x, k, rows))
                return q
            if self.scale is not None:
                q.scale[...] = self.scale
            for rows in _row_chunks(self.shape, _COMPUTED_TILE):
                part = rows, slice(0, k), values(rows)
                _quantize(q, rows, self.scale, lambda part=part: [part])
        return q

    # --- on a GPU -----------------------------------------------------------------------------------------

    def on_gpu(
        self,
        kernel: str,
        name: str,
        out: Any,
        second: Any = None,
        residual: Any = None,
        eps: float = 0.0,
        pdl: bool = True,
    ) -> Any:
        """Queue the kernels; the result, and the sum of x and the residual where there is one."""
        import cupy

        q = None if out is None else self._fitting(out)
        given = self.inputs[self.name][0]
        found = interop.adapter(given)
        ours = interop.adapter_for("cupy")
        device, (m, k) = self.x.device.id, self.shape
        if m >= 2**31 or k > 2**30:
            raise self.wrong(f"x has {m} rows of {k} values; a GPU takes less than 2^31 rows of at most 2^30.")
        with cupy.cuda.Device(device):
            stream = found.stream(given)
            make = found if hasattr(found, "maker") else ours
            x, r = _matrix(given, self.x), _NONE if residual is None else _matrix(*self.inputs["residual"])
            if q is None:
                q = self._new(lambda *what: interop.array(make.maker(*what, device)(stream)[0], self.what))
            total, total_ptr = None, 0
            if residual is not None:
                total, total_ptr = make.maker(tuple(self.x.shape), self.x.dtype.name, device)(stream)
            if self.row.scale_dtype == "float32":
                self._launch(kernel, name, device, stream, q, x, second, r, total_ptr, eps, pdl)
            else:
                self._launch_blocks(device, stream, q, x)
            if found.kind == "JAX":  # frees what it was given without asking who still reads it
                cupy.cuda.runtime.streamSynchronize(stream)
        return q if residual is None else (q, make.finish(given, total, stream))

    def _launch_blocks(self, device: int, stream: int, q: QuantizedTensor, x: _Matrix) -> None:
        codes, scale = q.codes, q.scale
        places = codes.data.ptr, codes.strides[0], scale.data.ptr, scale.strides[0]
        rows = BlockRows(self.x.dtype.name, self.shape, x.ptr, x.stride, x.step, *places)
        options: dict[str, Any] = {"mode": NO_FACTOR}
        if q.global_scale is not None:
            options = {
                "mode": FACTOR_BY_ROW if self.factor is None else FACTOR_GIVEN,
                "factor": q.global_scale.data.ptr,
            }
        if self.factor is not None:
            static = isinstance(self.factor, np.floating)
            options |= {"value": float(self.factor)} if static else {"given": self.factor.data.ptr}
        queue_blocks("quantize", self.row, self.rule, rows, device, stream, pdl=True, **options)

    def _launch(
        self,
        kernel: str,
        name: str,
        device: int,
        stream: int,
        q: QuantizedTensor,
        x: _Matrix,
        second: Any,
        r: _Matrix,
        total: int,
        eps: float,
        pdl: bool,
    ) -> None:
        (m, k), size = self.shape, self.x.dtype.itemsize
        mode, code = kernels.SCALINGS[self.row.block], self.row.dtype.removeprefix("float8_")
        second_ptr, second_step = x.ptr + k * x.step * size, 1
        if second is not None:
            second_ptr, second_step = second.data.ptr, second.strides[0] // size
        codes, scale, codes_stride = q.codes.data.ptr, q.scale.data.ptr, q.codes.strides[0]
        static = isinstance(self.scale, np.floating)
        dynamic = mode == "tensor" and self.scale is None
        given = scale if dynamic else 0 if self.scale is None or static else self.scale.data.ptr

        def fields(found: bool) -> tuple[Any, ...]:
            return (
                *(x.ptr, second_ptr, r.ptr, total, codes, scale, given),
                *(x.stride, x.step, second_step, r.stride, r.step, codes_stride, q.scale.strides[0] // 4),
                *(m, k, float(self.scale) if static else 0.0, eps, _ONE / np.float32(k)),
                *(found, _MODES.index(mode), code == "e5m2"),
            )

        # Kernels for whole pieces of 16 bytes read what is aligned so, and write the codes of a piece at once.
        read = x.ptr | x.stride * size | r.ptr | r.stride * size | second_ptr | k * size
        whole = not (read & 15 or (codes | codes_stride) & 16 // size - 1) and x.step == r.step == second_step == 1
        if dynamic:
            import cupy

            cupy.cuda.runtime.memsetAsync(scale, 0, 4, stream)
            kept = whole and k <= kernels.row_most(size)
            entry = f"amax_{self.x.dtype.name}{'' if kept else '_any'}"
            _launcher(kernel, entry, m, k, True, device, False)(stream, *fields(False))
        entry, row = _entry(kernel, name, self.x.dtype.name, mode, code, k, whole, device)
        _launcher(kernel, entry, m, k, row, device, pdl)(stream, *fields(dynamic))


class _Matrix(NamedTuple):
    """An array [..., K] on a GPU as rows: address, values from one to the next, values within one, and its owner."""

    ptr: int
    stride: int
    step: int
    owner: Any


_NONE = _Matrix(0, 0, 1, None)


def _matrix(given: Any, a: Any) -> _Matrix:
    """`a`, the CuPy array of `given`, as rows; a copy where they have no common distance."""
    ours = interop.adapter_for("cupy")
    v = ours.view(a)
    if math.prod(v.shape[:-1]) < 2:
        return _Matrix(v.ptr, 0, v.strides[-1] if v.shape[-1] > 1 else 1, a)
    flat = interop.rows(v._replace(strides=(*v.strides[:-1], 1)))
    if flat is not None:
        return _Matrix(v.ptr, flat[1], v.strides[-1] if v.shape[-1] > 1 else 1, a)
    found = interop.adapter(given)
    a = interop.array(found.contiguous(given), "x") if hasattr(found, "contiguous") else ours.contiguous(a)
    return _Matrix(a.data.ptr, a.shape[-1], 1, a)


_MODES = list(kernels.SCALINGS.values())  # in the order of `Mode` in kernels_cu/activations.cuh


def queue_of(
    x_dtype: str,
    m: int,
    k: int,
    block: tuple[int, int],
    scale: float | None,
    *,
    pitch: int,
    aligned: bool,
    device: int,
    pdl: bool,
) -> Callable[[int, int, int, int, int], None]:
    """`quantize_activations` of m rows to e4m3fn in prepared memory on a GPU, for many calls.

    Called with (stream, address of x, values from one row of it to the next, address of codes, address of scales). Rows
    of codes lie `pitch` bytes apart, scales side by side. `aligned`: each row of x starts on 16 bytes and fills such
    pieces. A scale goes with the block (-1, -1), and only with that.
    """
    mode = kernels.SCALINGS[block]
    entry, row = _entry("activations", "quantize", x_dtype, mode, "e4m3fn", k, aligned, device)
    launcher = _launcher("activations", entry, m, k, row, device, pdl)
    last = m, k, 0.0 if scale is None else scale, 0.0, _ONE / np.float32(k), False, _MODES.index(mode), False

    def queue(stream: int, x: int, x_stride: int, codes: int, scales: int) -> None:
        launcher(stream, x, 0, 0, 0, codes, scales, 0, x_stride, 1, 1, 0, 1, pitch, 1, *last)

    return queue


def _entry(
    kernel: str, name: str, x_dtype: str, mode: str, code: str, k: int, whole: bool, device: int
) -> tuple[str, bool]:
    """The entry that serves rows of k values, and whether a block of it has to know all of a row."""
    row, entry = kernel == "rms_norm" or mode == "token", f"{name}_{x_dtype}_{mode}_{code}"
    kept = k <= kernels.row_most(FLOATS[x_dtype].itemsize)
    if whole and (kept or not row) and entry in _entries(kernel, device):
        return entry, row
    return f"{name}_{x_dtype}_any", True


@lru_cache
def _entries(kernel: str, device: int) -> frozenset[str]:
    return frozenset(kernels.ROWS[kernel].entries(kernels.arch_of(runtime.target(device).arch)))


@lru_cache(4096)
def _launcher(kernel: str, entry: str, m: int, k: int, row: bool, device: int, pdl: bool) -> Callable[..., None]:
    pdl = pdl and kernels.arch_of(runtime.target(device).arch).pdl
    return runtime.Launcher(runtime.row(kernel), kernels.row_launch(entry, m, k, row), device, pdl)


def _share(a: Any, b: Any) -> bool:
    """Whether two arrays of one place may share memory."""
    if interop.on_host(a):
        return np.may_share_memory(a, b)
    view = interop.adapter_for("cupy").view
    (low, high), (start, end) = (interop.extent(view(one), one.dtype.itemsize) for one in (a, b))
    return low < end and start < high


def _place(a: Any) -> str:
    return "cpu" if interop.on_host(a) else f"cuda:{a.device.id}"


# --- on the host -----------------------------------------------------------------------------------------


def _quantize(
    q: QuantizedTensor, rows: slice, given: np.float32 | None, parts: Callable[[], Iterable[tuple[slice, slice, Any]]]
) -> None:
    """Quantise some rows, all of them where they share a scale; `parts` gives them part by part as float32."""
    k = q.shape[1]
    fmt, whole = FORMATS[q.dtype], q.block[0] == -1
    size = k if whole else q.block[1]
    at = slice(0, 1) if whole else rows
    if given is None:
        amax = np.zeros(q.scale[at].shape, np.float32)
        for _, c, values in parts():
            magnitude = np.where(np.isfinite(values), np.abs(values), np.float32(0))
            found = np.maximum.reduceat(magnitude, np.arange(0, magnitude.shape[1], size), axis=1)
            if whole:
                found = found.max(axis=0, keepdims=True)
            first = c.start // size
            part = amax[:, first : first + found.shape[1]]
            np.maximum(part, found, out=part)
        q.scale[at] = scales_of(amax, fmt)
    else:
        q.scale[at] = given
    for r, c, values in parts():
        some = q.scale[at, c.start // size : -(-c.stop // size)]
        each = np.repeat(some, min(size, values.shape[1]), axis=1)[:, : values.shape[1]]
        codes = codes_of(values, each, fmt)
        codes[~np.isfinite(values)] = _NAN
        q.codes[r, c] = codes


def _quantize_blocks(
    q: QuantizedTensor,
    row: Scheme,
    rule: str,
    rows: slice,
    given: np.float32 | None,
    parts: Callable[[], Iterable[tuple[slice, slice, Any]]],
) -> None:
    """The same with block scales; `given`: the global scale of all."""
    if given is not None:
        q.global_scale[...] = given
    elif row.global_scale:
        amax = np.zeros(rows.stop - rows.start, np.float32)
        for r, _, values in parts():
            some = amax[r.start - rows.start : r.stop - rows.start]
            np.maximum(some, np.abs(values).max(axis=1, initial=0, where=np.isfinite(values)), out=some)
        q.global_scale[rows] = factors_of(amax)
    for r, c, values in parts():
        g = given if given is not None or q.global_scale is None else q.global_scale[r, None]
        size = row.block[1]
        codes, q.scale[r, c.start // size : -(-c.stop // size)] = encode_activations(values, row, rule, g)
        store(codes, q.codes, FORMATS[row.dtype], r, c)


def _between(a: np.ndarray, first: int, last: int) -> np.ndarray:
    """The values from one index to another of an array of any strides, seen flat; no view is copied whole."""
    return (a.reshape(-1) if a.flags.c_contiguous else a.flat)[first:last]


def _parts(a: np.ndarray, k: int, rows: slice) -> Iterator[tuple[slice, slice, np.ndarray]]:
    """Some rows of [..., k], seen as [M, k], part by part as float32; no group is cut."""
    for r, c in tiles((rows.stop - rows.start, k)):
        r = slice(rows.start + r.start, rows.start + r.stop)
        # A tile is of whole rows, or lies in one: its values follow one another.
        values = _between(a, r.start * k + c.start, (r.stop - 1) * k + c.stop)
        yield r, c, values.reshape(r.stop - r.start, -1).astype(np.float32)


def _rows(a: np.ndarray, rows: slice) -> np.ndarray:
    k = a.shape[-1]
    return _between(a, rows.start * k, rows.stop * k).reshape(-1, k).astype(np.float32)


def _fma(a: Any, b: Any, c: Any) -> np.ndarray:
    """a * b + c of float32 numbers, rounded once, as a GPU's fma.

    The product is exact in float64; where the sum is not, it is rounded to the neighbour with an odd last bit, so that
    the rounding to float32 finds no tie that is none. Source: S. Boldo and G. Melquiond, Emulation of FMA and Correctly
    Rounded Sums: Proved Algorithms Using Rounding to Odd, 2008.
    """
    product, addend = np.multiply(a, b, dtype=np.float64), np.asarray(c, np.float64)
    total = product + addend
    part = total - product
    lost = (product - (total - part)) + (addend - part)
    bits = total.view(np.int64)
    away = np.where((lost > 0) == (total > 0), 1, -1)
    inexact = (lost > 0) | (lost < 0)  # not where it is NaN, of sums that are not finite
    odd = bits + np.where(inexact & (bits & 1 == 0), away, 0)
    return odd.view(np.float64).astype(np.float32)


def _rms_norm(
    x: np.ndarray,
    weight: np.ndarray,
    eps: np.float32,
    residual: np.ndarray | None,
    total: np.ndarray | None,
    rows: slice,
) -> np.ndarray:
    """Some rows of (h * rstd) * weight; h also goes to `total` [M, K]."""
    h = _rows(x, rows)
    if residual is not None:
        total[rows] = (h + _rows(residual, rows)).astype(x.dtype)
        h = total[rows].astype(np.float32)
    mean = _fma(_sum_of_squares(h, 16 // x.dtype.itemsize), _ONE / np.float32(h.shape[1]), eps)
    return h * (_ONE / np.sqrt(mean)) * weight.astype(np.float32)


def _sum_of_squares(h: np.ndarray, piece: int) -> np.ndarray:
    """float32 [rows, 1] of float32 [rows, k], of which `piece` values are 16 bytes, in rms_norm.cu's order."""
    m, k = h.shape
    threads = kernels.row_threads(k)
    turns = -(-k // (16 * threads))
    wide = np.zeros((m, turns * threads * 16), np.float32)
    wide[:, :k] = h
    # [row, group, piece, lane, value] -> [row, turn, thread, value / 4, chain]
    units = wide.reshape(m, -1, 16 // piece, 8, piece).swapaxes(2, 3).reshape(m, turns, threads, 4, 4)
    chains = np.zeros((m, threads, 4), np.float32)
    for turn in range(turns):
        for i in range(4):
            some = units[:, turn, :, i]
            chains = _fma(some, some, chains)
    sums = (chains[..., 0] + chains[..., 1]) + (chains[..., 2] + chains[..., 3])
    warps = np.zeros((m, 32), np.float32)
    warps[:, : threads // 32] = _over_lanes(sums.reshape(m, -1, 32))
    return _over_lanes(warps)[:, None]


def _over_lanes(v: np.ndarray) -> np.ndarray:
    """Sums over the last axis, of 32, by those 16, 8, 4, 2, 1 apart."""
    for d in (16, 8, 4, 2, 1):
        v = v[..., :d] + v[..., d : 2 * d]
    return v[..., 0]


_LOG2E, _ROUND = np.float32(math.log2(math.e)), np.float32(1.5 * 2**23 + 127)
_POWERS = [np.float32(float.fromhex(p)) for p in ("0x1.5bb994p-10", "0x1.3cea84p-7", "0x1.c6b754p-5", "0x1.ebf9bcp-3")]
_POWERS += [np.float32(float.fromhex("0x1.62e42ap-1")), _ONE]


def _sigmoid(v: np.ndarray) -> np.ndarray:
    """silu_mul.cu's, operation by operation."""
    x = np.fmax(np.fmin(v, np.float32(87)), np.float32(-87))
    total = _fma(x, -_LOG2E, _ROUND)
    f = _fma(x, -_LOG2E, -(total - _ROUND))
    p = _POWERS[0]
    for power in _POWERS[1:]:
        p = _fma(p, f, power)
    d = _fma(p, (total.view(np.uint32) << 23).view(np.float32), _ONE)
    r = (np.uint32(0x7EF311C7) - d.view(np.uint32)).view(np.float32)
    e = _fma(-d, r, _ONE)
    r = _fma(r, _fma(e, e, e), r)
    return _fma(r, _fma(-d, r, _ONE), r)


def _silu_mul(x: np.ndarray, rows: slice) -> np.ndarray:
    """Some rows of (g * sigmoid(g)) * u."""
    g, u = np.split(_rows(x, rows), 2, axis=1)
    return g * _sigmoid(g) * u
