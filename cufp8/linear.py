"""Linear: y = x @ w.T + bias with a weight in few bits. The front door."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np

from cufp8 import interop, kernels, runtime
from cufp8.formats import FLOATS, FORMATS, SCHEMES, Scheme
from cufp8.formats import scheme as scheme_of
from cufp8.kernels import Problem, pick
from cufp8.quantize import QuantizedTensor, _column_chunks, _row_chunks, quantize_to

_OUT = {name: i for i, name in enumerate(FLOATS)}  # Out in kernels_cu/linear.cuh
_HOST_SLICE = kernels.SLICE_BYTES // 16  # values widened at once on the host: 4 bytes each, and 8 for their index


class Linear:
    """A linear layer whose weight stays in its codes.

    FP8A16: y = round(fmaf(scale[n], sum_k x[m, k] * code[n, k], bias[n])): products and sums in float32, one rounding,
    to x's dtype. With scales of blocks the sum is of x * code * scale, and NVFP4A16's global scale is scale[n]; no
    scale is rounded into a code. FP8_DYNAMIC and FP8: x becomes e4m3fn in each call, by `quantize_activations`, and is
    multiplied so, by `scaled_mm`, which rounds once, to x's dtype. NVFP4, MXFP4 and MXFP8: the same with x in the
    formats of the weight; global scales of x and of the weight meet the sum as `scaled_mm` says. A GPU computes that by
    the kernels for 16-bit x, from the values that x's codes and scales stand for, which 16 bits have exactly. A NaN or
    Inf in x makes its row NaN where x is quantised.

    Parameters
    ----------
    weights
        Float weight, shape [N, K] (outputs, inputs), as `quantize` takes it.
    bias
        None, or floats of shape [N]; kept in float32.
    scheme
        "FP8A16": e4m3fn weights with a float32 scale per output channel, activations as they are.
        "FP8_DYNAMIC": the same weights; activations in e4m3fn too, with a scale per token, found in each call.
        "FP8": e4m3fn weights with one scale, activations in e4m3fn with one scale, `input_scale`.
        "NVFP4A16", "MXFP4A16", "MXFP8A16": weights with a scale for 16 or 32 neighbours of a row (`quantize`),
        activations as they are. By `from_quantized` also FP8A16 with a scale for each block of 128 x 128.
        "NVFP4", "MXFP4", "MXFP8": the same weights; activations so too, their scales found in each call.
    device
        "cpu", "cuda", "cuda:i". None: where the weights are if that is a GPU, else the current GPU, else "cpu".
    out_dtype
        "bfloat16", "float16", "float32", or None for x's.
    pdl
        Programmatic dependent launch (sm_90 and newer): the kernel starts, and reads codes, scales and bias, before
        its predecessor in the stream is done. False: it starts after, for callers who write weights in place.
    batch_invariant
        The bits of a row of y depend on its row of x alone, not on how many rows come with it. False: each number of
        rows gets the kernel that is fastest for it, and rows may differ in their last bit. Only where x stays as it is.
    input_scale
        Of FP8: what the codes of x are multiplied with, so that x up to 448 times it fits and what is larger is cut to
        that. A number, rounded to float32, or a float32 array of one element, on any device; finite and above 0. None:
        `calibrate` finds it before the layer is called. Later also by `layer.input_scale = ...`, while no thread calls
        the layer; graphs captured before keep the scale of then.
        Of NVFP4: the global scale of x, amax / 2688, for all tokens, given likewise and at most 2^125. None: each
        token's own, found in each call.
    fast_accum
        Of FP8_DYNAMIC and FP8: as for `scaled_mm`.

    Raises
    ------
    TypeError, ValueError
        As `quantize`; or if bias, out_dtype, device or input_scale are not as above, the scheme has no input_scale,
        fast_accum or batch_invariant and one is given, or no kernel serves it on that GPU.
    runtime.DeviceError
        If a GPU is named that cannot be used.

    Source: compressed-tensors for the names of schemes and what they quantise; OCP 8-bit Floating Point Specification
    1.0, section 5, for e4m3fn; OCP MX 1.0, sections 5.2 to 5.4, for MX formats; `block_scaled.factors_of` for NVFP4.
    """

    input_scale: float | None = None
    fast_accum = False

    def __new__(cls, *args: Any, scheme: str = "FP8A16", **options: Any) -> Linear:
        row = SCHEMES.get(scheme)
        if cls is Linear and row is not None and row.x_block is not None:
            from cufp8 import scaled_linear

            cls = scaled_linear.BlockScaledLinear if row.x_in_blocks else scaled_linear.ScaledLinear
        return object.__new__(cls)

    @staticmethod
    def _computes(row: Scheme) -> bool:
        return row.x_block is None

    def __init__(
        self,
        weights: Any,
        bias: Any = None,
        *,
        scheme: str = "FP8A16",
        device: str | None = None,
        out_dtype: str | None = None,
        pdl: bool = True,
        batch_invariant: bool = False,
        input_scale: Any = None,
        fast_accum: bool = False,
    ) -> None:
        place = _place(device, interop.array(weights, "Linear: weights"))
        self._set(scheme, out_dtype, pdl, batch_invariant, input_scale, fast_accum)
        self._take(quantize_to(weights, place, scheme), bias)

    @classmethod
    def from_quantized(
        cls,
        q: QuantizedTensor,
        bias: Any = None,
        *,
        scheme: str | None = None,
        device: str | None = None,
        out_dtype: str | None = None,
        pdl: bool = True,
        batch_invariant: bool = False,
        input_scale: Any = None,
        fast_accum: bool = False,
        _ordered: bool = False,
    ) -> Linear:
        """A layer from codes and scales that exist already; parameters as for `Linear`.

        scheme: None is that of q. FP8_DYNAMIC and FP8 take any e4m3fn weights of one float32 scale a row, or one for
        all; the others those that `quantize` makes for them.

        Raises
        ------
        ValueError
            If q holds activations, which may have NaN codes or no rows, is of no scheme of weights, or has other
            dtypes or scales than the scheme needs.
        """
        if q.activations or q.scheme not in SCHEMES or q.dtype != SCHEMES[q.scheme].dtype:
            what = "holds activations" if q.activations else "is of no scheme of weights"
            raise ValueError(
                f"Linear: the QuantizedTensor {what} ({q.scheme}: {q.dtype}, block {q.block}, {q.scale_dtype} scales); "
                f"allowed are weights of {', '.join(SCHEMES)}: make one by quantize(w), or of codes and scales by "
                "QuantizedTensor(...) without activations=True, which looks for NaN."
            )
        scheme = q.scheme if scheme is None else scheme_of(scheme).name
        row, made = SCHEMES[scheme], SCHEMES[q.scheme]
        same = (row.dtype, row.scale_dtype, row.block) == (made.dtype, made.scale_dtype, made.block)
        alike = row is made or (same and q.block[0] < 2)
        by_row = (row.dtype, row.scale_dtype) == (q.dtype, q.scale_dtype) and q._scaled_by_row
        if not (alike or (row.x_block and by_row)):
            raise ValueError(
                f"Linear: the QuantizedTensor has {q.dtype} codes with {q.scale_dtype} scales of shape "
                f"{list(q.scale.shape)}; {scheme} needs {cls._needed(row, q.shape)}."
            )
        layer = cls.__new__(cls, scheme=scheme)
        layer._set(scheme, out_dtype, pdl, batch_invariant, input_scale, fast_accum)
        layer._take(q.to(_place(device, q.codes)), bias, _ordered)
        return layer

    @staticmethod
    def _needed(row: Scheme, shape: tuple[int, int]) -> str:
        """The weights that a scheme takes."""
        n, k = shape
        wanted = [n, 1 if row.block[1] == -1 else -(-k // row.block[1])]
        each = f"{wanted} or [1, 1]" if row.x_block and not row.x_in_blocks else f"{wanted}"
        return f"{row.dtype} codes with {row.scale_dtype} scales of shape {each}"

    def _set(
        self,
        scheme: str,
        out_dtype: str | None,
        pdl: bool,
        batch_invariant: bool,
        input_scale: Any,
        fast_accum: bool,
    ) -> None:
        """All that is not the weight or the bias."""
        if out_dtype is not None and out_dtype not in FLOATS:
            raise ValueError(f"Linear: out_dtype is {out_dtype!r}; allowed are {', '.join(FLOATS)} and None.")
        self.out_dtype, self.pdl, self.batch_invariant = out_dtype, pdl, batch_invariant
        self.scheme = scheme_of(scheme).name
        if not self._computes(SCHEMES[scheme]):
            raise TypeError(f"Linear: {type(self).__name__} does not compute {scheme}; make the layer by Linear.")
        self._plans: dict[Any, Any] = {}  # what `_plan` and `_examine` remember
        self._set_x(input_scale, fast_accum)

    def _set_x(self, input_scale: Any, fast_accum: bool) -> None:
        """How x is quantised."""
        if input_scale is not None:
            raise ValueError(f"Linear: an input_scale was given, and {self.scheme} has none; FP8 and NVFP4 have.")
        if fast_accum:
            raise ValueError(f"Linear: fast_accum was set, and {self.scheme} has none; FP8_DYNAMIC and FP8 have.")

    def _take(self, q: QuantizedTensor, bias: Any, ordered: bool = False) -> None:
        """The weight, where it is to stay, and the bias; on a GPU all kernels are loaded.

        ordered: q was just made on CuPy's current stream, by `QuantizedTensor.to`, so that no other need be waited for.
        """
        self.shape, self._nbytes = q.shape, q.nbytes
        self._n, self._k = q.shape
        bias = self._bias(bias)
        if q.device == "cpu":
            self._weight, self.bias, self._index = q, bias, None
            return
        import cupy

        self._index = q.codes.device.id
        self._current = cupy.cuda.runtime.getDevice
        self._target = runtime.target(self._index)
        runtime.load(self._rows(q), self._index)
        with cupy.cuda.Device(self._index):
            if not ordered:  # any library's stream may still write the codes, or read what lay where they go
                cupy.cuda.runtime.deviceSynchronize()
            self._keep(q)
            self.bias = None if bias is None else cupy.asarray(bias)
            cupy.cuda.get_current_stream().synchronize()  # from here on no stream needs to wait for the weights

    def _rows(self, q: QuantizedTensor) -> list[kernels.Kernel]:
        """Rows of KERNELS that may serve the layer."""
        return [row for row in kernels.KERNELS if row.linear and row.weight == _kind(q).name]

    def _keep(self, q: QuantizedTensor) -> None:
        """Codes and scales on the current GPU, as the kernels read them."""
        import cupy

        # The codes may come from any library's stream, and y follows on any: the layer is made between two waits.
        cupy.cuda.runtime.deviceSynchronize()
        self._kind, self._wide = _kind(q), _scales_are_wide(q)
        self._panels = kernels.panels_split(*self.shape, self._target.sms)[0]
        self._form = {"dtype": q.dtype, "scale_dtype": q.scale_dtype, "block": q.block, "_scheme": q.scheme}
        if q.global_scale is not None:
            self._form["global_scale"] = cupy.array(q.global_scale)
            self._scale = cupy.array(cupy.broadcast_to(self._form["global_scale"], self.shape[:1]))
        elif self._kind.block:
            self._scale = None
        else:
            self._form["scale"] = cupy.ascontiguousarray(q.scale)
            self._scale = self._form["scale"]
            if q.scale_dtype != "float32":
                self._scale = cupy.asarray(FORMATS[q.scale_dtype].table)[self._scale]
        self._codes = _pack(q, self._panels, self._index)

    def _bias(self, bias: Any) -> np.ndarray | None:
        if bias is None:
            return None
        b = interop.to_host(interop.array(bias, "Linear: bias"))
        if b.shape != (self._n,) or b.dtype.name not in (*FLOATS, "float64"):
            raise ValueError(
                f"Linear: bias is {b.dtype} of shape {list(b.shape)}; the weight {list(self.shape)} needs floats "
                f"of shape [{self._n}]."
            )
        with np.errstate(over="ignore"):
            b = b.astype(np.float32)
        if not np.isfinite(b).all():
            raise ValueError(f"Linear: bias[{np.flatnonzero(~np.isfinite(b))[0]}] is not finite as float32.")
        return b

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_plans": {}}  # a plan holds this layer's addresses: a copy makes its own

    @property
    def weight(self) -> QuantizedTensor:
        """The codes and scales in the standard layout; on a GPU a copy, unpacked from the kernels' layout."""
        if self._index is None:
            return self._weight
        return _unpack(self._codes, self._kind, self.shape, self._panels, self._index, self._form)

    @property
    def device(self) -> str:
        """ "cpu" or "cuda:i"."""
        return "cpu" if self._index is None else f"cuda:{self._index}"

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and bias, without padding."""
        return self._nbytes + (0 if self.bias is None else 4 * self._n)

    def to(self, device: str) -> Linear:
        """The same layer on another device; itself if it is there already."""
        if _place(device, None) == self.device:
            return self
        q = self.weight.to(device)
        bias = None if self.bias is None else interop.to_host(self.bias)
        return Linear.from_quantized(
            q,
            bias,
            scheme=self.scheme,
            device=q.device,
            out_dtype=self.out_dtype,
            pdl=self.pdl,
            batch_invariant=self.batch_invariant,
            input_scale=self.input_scale,
            fast_accum=self.fast_accum,
        )

    def kernels(self, m: int, x_dtype: str = "bfloat16") -> str:
        """The name of the KERNELS row that serves m rows of x, laid out as a new array is; "numpy" on the CPU."""
        if self._index is None:
            return "numpy"
        aligned16 = self._k * _SIZES[x_dtype] % 16 == 0
        return pick(self._target, self._problem(m, x_dtype, aligned16)).name

    def __repr__(self) -> str:
        serving = ", ".join(f"M={m} {self.kernels(m)}" for m in (1, 16, 256))
        return (
            f"Linear({list(self.shape)}, {self.scheme}, device={self.device!r}, {self.nbytes:,} bytes, "
            f"bias={self.bias is not None}, kernels: {serving})"
        )

    def __call__(self, x: Any, out: Any = None) -> Any:
        """x @ w.T + bias.

        Parameters
        ----------
        x
            bfloat16, float16 or float32, shape [..., K] or [K], any strides; on the layer's device. NumPy arrays
            go to a GPU layer and come back. Work is queued on the stream of x's library; only NumPy waits.
        out
            Where the result goes: x's library and device, shape [..., N], the result's dtype, rows contiguous; it
            may not overlap x.

        Returns
        -------
        array
            [..., N], of x's library and device, in x's dtype or the layer's out_dtype.

        Raises
        ------
        TypeError
            If x is no array, or its dtype is not one of the three.
        ValueError
            If x has another number of features, is on another device, or `out` does not fit; or if the scheme is FP8
            and there is no input_scale yet.
        RuntimeError
            If a torch tensor requires grad while grad mode is on.
        """
        a = interop.adapter(x)
        if a is None:
            raise TypeError(f"Linear: x is a {type(x).__name__}; allowed is {interop.KNOWN}.")
        if self._index is None or a.kind in ("NumPy", "DLPack"):
            return self._through_host(a, x, out)
        if self._current() != self._index:
            import cupy

            with cupy.cuda.Device(self._index):
                return self(x, out)

        # Of an x, and an out, whose form was served before, only addresses and the stream are looked at.
        x_ptr, form = a.seen(x)
        if out is not None:
            y_ptr, y_form = a.seen(out) if interop.adapter(out) is a else interop.UNSEEN
            form = form and y_form and (form, y_form)
        known = None if x_ptr & 15 else self._plans.get(form)
        if known is None:
            return self._examine(a, x, out, form)
        plan, x_stride, y_stride, result = known
        stream = a.stream(x)
        if out is None:
            out, y_ptr = result(stream)
        else:
            x_bytes, y_bytes = result
            self._check_apart((x_ptr, x_ptr + x_bytes), (y_ptr, y_ptr + y_bytes))
        plan(stream, x_ptr, x_stride, y_ptr, y_stride)
        return out

    def _examine(self, a: Any, x: Any, out: Any, form: Any) -> Any:
        """A call that looks at all of x and out. What holds for all of their form, x on 16 bytes, is remembered."""
        v = a.view(x)
        if v.device != self._index:
            raise self._elsewhere(v)
        shape = v.shape
        if not shape or shape[-1] != self._k:
            raise self._features(shape)
        flat = interop.rows(v)
        if flat is None or (flat[0] > 1 and not self._k <= flat[1] < 2**31):
            x, form = a.contiguous(x), None
            v = a.view(x)
            flat = interop.rows(v) or (math.prod(shape[:-1]), self._k)
        m, x_stride = flat if flat[0] > 1 else (flat[0], self._k)
        ptr, dtype = v.ptr, v.dtype
        try:
            size = _SIZES[dtype]
        except KeyError:
            raise self._dtype(dtype) from None
        if ptr % size:
            raise ValueError(f"Linear: x starts at address {ptr:#x}, which no {dtype} can; copy x first.")
        stream = a.stream(x)
        aligned = not (ptr | self._k * size | x_stride * size) & 15
        y_shape, out_dtype = (*shape[:-1], self._n), self.out_dtype or dtype
        if out is None:
            result = a.maker(y_shape, out_dtype, self._index)
            (y, y_ptr), y_stride = result(stream), self._n
        else:
            y, (y_ptr, y_stride) = out, self._check_out(a, v, out, y_shape, out_dtype, size)
            result = size * ((m - 1) * x_stride + self._k), _SIZES[out_dtype] * ((m - 1) * y_stride + self._n)
        if m:
            plan = self._plans.get((m, dtype, aligned)) or self._plan(m, dtype, aligned, a)
            plan(stream, ptr, x_stride, y_ptr, y_stride)
            if form is not None and not ptr & 15:
                self._remember(form, (plan, x_stride, y_stride, result))
        return y if out is not None else a.finish(x, y, stream)

    # --- one problem's launch ----------------------------------------------------------------------------

    def _problem(self, m: int, x_dtype: str, aligned16: bool = True, captured: bool = False) -> Problem:
        return Problem(
            self.scheme, self._form["block"], x_dtype, self.out_dtype or x_dtype, m, self._n, self._k,
            aligned16=aligned16, batch_invariant=self.batch_invariant, captured=captured,
            weight=self._kind.name, wide=self._wide,
        )  # fmt: skip

    def _plan(self, m: int, x_dtype: str, aligned: bool, library: Any) -> Callable[..., None]:
        """How m rows are served, as a call of (stream, x, x's stride, y, y's stride); remembered."""
        problem = self._problem(m, x_dtype, aligned)
        row = pick(self._target, problem)
        if row.plan is None:
            plan = partial(self._library, problem, self._launch_plan(self._problem(m, x_dtype, aligned, True)))
        else:
            plan = self._launch_plan(problem)
        self._remember((m, x_dtype, aligned), plan)
        return plan

    def _remember(self, key: Any, value: Any) -> None:
        if len(self._plans) >= 4096:
            self._plans.clear()
        self._plans[key] = value

    def _launch_plan(self, p: Problem, factors: int = 0) -> Callable[..., None]:
        """factors: how many bytes behind x a factor for each token lies; 0: there is none."""
        row = pick(self._target, p)
        launch = row.plan(self._target, p)
        pdl = self.pdl and kernels.arch_of(self._target.arch).pdl
        codes, scale = self._codes.data.ptr, 0 if self._scale is None else self._scale.data.ptr
        bias = 0 if self.bias is None else self.bias.data.ptr
        units, steps = kernels.units_steps(p.n, p.k)
        tail = p.m, p.n, p.k, steps, _OUT[p.out_dtype], *divmod(units, self._panels), launch.split, launch.stages
        tail += factors, *launch.fields
        return runtime.Product(row, launch, self._index, pdl, (codes, scale, bias), tail).queue

    def _library(
        self, p: Problem, captured: Callable[..., None], stream: int, x: int, x_stride: int, y: int, y_stride: int
    ) -> None:
        """The cuBLAS row; during a capture, which it refuses, the row that serves then."""
        from cufp8 import cublas

        if runtime.capturing(stream):
            return captured(stream, x, x_stride, y, y_stride)
        return cublas.product(
            stream, x, x_stride, y, y_stride,
            codes=self._codes.data.ptr, scale=self._scale.data.ptr,
            bias=0 if self.bias is None else self.bias.data.ptr,
            m=p.m, n=p.n, k=p.k, panels=self._panels, x_dtype=p.x_dtype, out=_OUT[p.out_dtype], device=self._index,
        )  # fmt: skip

    # --- on the host -------------------------------------------------------------------------------------

    def _through_host(self, a: Any, x: Any, out: Any) -> Any:
        """Host arrays, and arrays that only DLPack knows: NumPy computes, or a GPU layer with copies both ways."""
        if a.kind != "DLPack":
            a.view(x)  # refuses what wants a gradient or is being traced
        h = a.array(x)
        if not interop.on_host(h):
            if self._index is None:
                raise self._elsewhere(interop.adapter(h).view(h))
            return self(h, out)
        if h.dtype.name not in FLOATS:
            raise self._dtype(h.dtype.name)
        if not h.ndim or h.shape[-1] != self._k:
            raise self._features(h.shape)
        shape = (*h.shape[:-1], self._n)
        dtype = self.out_dtype or h.dtype.name
        if out is not None:
            target = self._check_host_out(a, h, out, shape, dtype)
        if self._index is None:
            y = self._multiply_host(h.reshape(-1, self._k), dtype).reshape(shape)
        else:
            import cupy

            with cupy.cuda.Device(self._index):
                y = cupy.asnumpy(self(cupy.asarray(np.ascontiguousarray(h))))
        if out is None:
            return a.from_host(x, y) if hasattr(a, "from_host") else y
        target[...] = y
        return out

    def _multiply_host(self, x: np.ndarray, dtype: str) -> np.ndarray:
        q, x = self._weight, x.astype(np.float32, copy=False)
        y = np.empty((x.shape[0], self._n), FLOATS[dtype])
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            for r in _row_chunks(self.shape, _HOST_SLICE):
                sums = np.zeros((x.shape[0], r.stop - r.start), np.float32)
                for c in _column_chunks(self.shape):
                    sums = sums + self._host_product(x[:, c], q.widened(r, c))
                # In float64 the product is exact and the sum's rounding is far below float32's: as one fmaf.
                v = sums.astype(np.float64) * q.row_scale(r)
                if self.bias is not None:
                    v += self.bias[r]
                y[:, r] = v.astype(np.float32).astype(y.dtype)
        return y

    def _host_product(self, x: np.ndarray, w: np.ndarray) -> np.ndarray:
        # A library's product of matrices may add up in another order for another number of rows.
        return np.concatenate([row @ w.T for row in x[:, None]] or [x @ w.T]) if self.batch_invariant else x @ w.T

    # --- errors ------------------------------------------------------------------------------------------

    def _features(self, shape: Any) -> ValueError:
        shape = list(shape)
        count = f"{shape[-1]} features (shape {shape})" if shape else "no dimension"
        return ValueError(f"Linear: x has {count}; the weight {list(self.shape)} needs {self._k}.")

    def _dtype(self, name: str) -> TypeError:
        return TypeError(f"Linear: x is {name}; allowed are {', '.join(FLOATS)}. Convert x first.")

    def _elsewhere(self, v: interop.View) -> ValueError:
        where = "the CPU" if v.device is None else f"cuda:{v.device}"
        wish = "cpu" if v.device is None else f"cuda:{v.device}"
        return ValueError(
            f"Linear: x is on {where}, the layer on {self.device}; move x, or the layer by layer.to({wish!r})."
        )

    def _check_out(
        self, a: Any, v: interop.View, out: Any, shape: tuple[int, ...], dtype: str, x_size: int
    ) -> tuple[int, int]:
        """Pointer and row stride of `out`, which must fit; a view of a wider array may."""
        b = interop.adapter(out)
        if b is None or b.kind != a.kind or not b.writeable(out):
            kind = type(out).__name__ if b is None else b.kind
            raise TypeError(f"Linear: out is a {kind} array, x a {a.kind} one; out must be x's kind and writeable.")
        w = b.view(out)
        if w.dtype != dtype or tuple(w.shape) != shape or w.device != v.device:
            raise ValueError(
                f"Linear: out is {w.dtype} {list(w.shape)} on device {w.device}; needed is {dtype} {list(shape)} "
                f"on device {v.device}."
            )
        flat = interop.rows(w)
        if 0 in shape:
            return w.ptr, self._n
        if flat is None or (flat[0] > 1 and flat[1] < self._n):
            raise ValueError(f"Linear: out has strides {list(w.strides)}; needed are contiguous rows, one pitch.")
        self._check_apart(interop.extent(v, x_size), interop.extent(w, FLOATS[dtype].itemsize))
        return w.ptr, flat[1]

    def _check_apart(self, x: tuple[int, int], out: tuple[int, int]) -> None:
        codes = self._codes.data.ptr
        for what, (low, high) in (("x", x), ("the weight", (codes, codes + self._codes.nbytes))):
            if out[0] < high and low < out[1]:
                raise ValueError(f"Linear: out overlaps {what} in memory; give it memory of its own.")

    def _check_host_out(self, a: Any, x: np.ndarray, out: Any, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        b = interop.adapter(out)
        if b is None or b.kind != a.kind or not b.writeable(out):
            kind = type(out).__name__ if b is None else b.kind
            raise TypeError(f"Linear: out is a {kind} array, x a {a.kind} one; out must be x's kind and writeable.")
        target = out if isinstance(out, np.ndarray) else b.array(out)
        if (
            not interop.on_host(target)
            or target.dtype != FLOATS[dtype]
            or not target.dtype.isnative
            or target.shape != shape
        ):
            raise ValueError(
                f"Linear: out is {target.dtype} {list(target.shape)}; needed is {dtype} {list(shape)} on the host."
            )
        if _overlap(x, target):
            raise ValueError("Linear: out overlaps x in memory; give it memory of its own.")
        return target


_SIZES = {name: dtype.itemsize for name, dtype in FLOATS.items()}


def _overlap(a: np.ndarray, b: np.ndarray) -> bool:
    try:
        return np.shares_memory(a, b, max_work=100_000)
    except np.exceptions.TooHardError:
        return True


def fuse(layers: Iterable[Linear]) -> Linear:
    """One layer with the outputs of several that take the same x, side by side: q, k and v, or gate and up.

    Codes and scales stay as they are, a scale for all of a weight as one for each of its rows: what the fused layer
    computes is what the layers compute, but for the order in which a kernel adds.

    Parameters
    ----------
    layers
        `Linear` [N_i, K], one at least, alike in all but the weight, its scales, N_i and the bias; where some have a
        bias it is 0 for the others. With blocks of several rows, N_i is a multiple of those for all but the last.

    Returns
    -------
    Linear
        [sum of N_i, K], with codes and scales of its own.

    Raises
    ------
    TypeError
        If something among `layers` is no Linear.
    ValueError
        If there is none; if two differ in K, scheme, blocks, device, out_dtype, pdl, batch_invariant, fast_accum or
        input_scale; or if the rows of a weight do not fill its blocks.
    """
    parts = list(layers)
    for i, layer in enumerate(parts):
        if not isinstance(layer, Linear):
            raise TypeError(f"fuse: layer {i} is a {type(layer).__name__}; needed are Linears.")
    if not parts:
        raise ValueError("fuse: there is no layer; needed is one at least.")
    weights = [layer.weight for layer in parts]
    first, q = parts[0], weights[0]
    for i, (layer, w) in enumerate(zip(parts, weights, strict=True)):
        for name in ("scheme", "device", "out_dtype", "pdl", "batch_invariant", "fast_accum", "input_scale"):
            if getattr(layer, name) != getattr(first, name):
                raise ValueError(
                    f"fuse: layer {i} has {name} {getattr(layer, name)!r} and the first {getattr(first, name)!r}; "
                    "needed is the same."
                )
        if layer.shape[1] != first.shape[1] or (w.block[0] > 1) != (q.block[0] > 1):
            raise ValueError(
                f"fuse: layer {i} is {list(layer.shape)} with blocks {w.block}, the first {list(first.shape)} with "
                f"{q.block}; needed are the same K and blocks."
            )
        if w.block[0] > 1 and layer is not parts[-1] and layer.shape[0] % w.block[0]:
            raise ValueError(
                f"fuse: layer {i} has {layer.shape[0]} rows; all but the last need a multiple of {w.block[0]}, for so "
                "many rows share a scale."
            )
    if q.device == "cpu":
        xp: Any = np
    else:
        import cupy as xp

        xp.cuda.runtime.deviceSynchronize()

    def by_row(a: Any, w: QuantizedTensor) -> Any:
        return xp.broadcast_to(a, (w.shape[0], *a.shape[1:])) if len(a) == 1 != w.shape[0] else a

    scales = [w.scale if w.block[0] > 1 else by_row(w.scale, w) for w in weights]
    biases = [None if layer.bias is None else interop.to_host(layer.bias) for layer in parts]
    bias = None
    if any(b is not None for b in biases):
        zeros = [np.zeros(layer.shape[0], np.float32) for layer in parts]
        bias = np.concatenate([z if b is None else b for b, z in zip(biases, zeros, strict=True)])
    joined = QuantizedTensor(
        xp.concatenate([w.codes for w in weights]),
        xp.concatenate(scales),
        dtype=q.dtype,
        scale_dtype=q.scale_dtype,
        shape=(sum(layer.shape[0] for layer in parts), first.shape[1]),
        block=(1, -1) if q.block[0] == -1 else q.block,
        global_scale=None if q.global_scale is None else xp.concatenate([by_row(w.global_scale, w) for w in weights]),
        _trusted=True,
    )
    return Linear.from_quantized(
        joined, bias, scheme=first.scheme, device=first.device, out_dtype=first.out_dtype, pdl=first.pdl,
        batch_invariant=first.batch_invariant, input_scale=first.input_scale, fast_accum=first.fast_accum,
    )  # fmt: skip


def _place(device: str | None, weights: Any) -> str:
    """The device a layer goes to: "cpu" or "cuda:i"."""
    if device is None and not interop.on_host(weights):
        device = f"cuda:{weights.device.id}"
    elif device is None:
        device = f"cuda:{runtime.current_device()}" if runtime.available() else "cpu"
    elif device == "cuda":
        runtime.require()
        device = f"cuda:{runtime.current_device()}"
    return device


def _kind(q: QuantizedTensor) -> kernels.Weight:
    return kernels.weight_of(q.dtype, q.scale_dtype, q.block)


def _scales_are_wide(q: QuantizedTensor) -> bool:
    """Whether a block that is not all zeros has an e8m0 scale that kernels cannot fold into codes."""
    kind = _kind(q)
    if kind.folds is None:
        return False
    first, last = kind.folds
    wide = (q.scale < first) | (q.scale > last)
    rows = wide.any(axis=1).nonzero()[0]
    if not len(rows):
        return False
    if interop.on_host(q.codes):
        xp: Any = np
    else:
        import cupy as xp
    block_bytes, blocks = kind.block * kind.bits // 8, q.scale.shape[1]
    codes = xp.zeros((len(rows), blocks * block_bytes), np.uint8)
    codes[:, : q.codes.shape[1]] = q.codes[rows] & (0x77 if kind.bits == 4 else 0x7F)
    return bool((wide[rows] & codes.reshape(-1, blocks, block_bytes).any(axis=2)).any())


def _pack(q: QuantizedTensor, panels: int, device: int) -> Any:
    """The codes of q, and scales that stand with them, on the current GPU, in the kernels' layout."""
    import cupy

    kind, (units, steps) = _kind(q), kernels.units_steps(*q.shape)
    packed = cupy.empty(units * steps * kind.tile_bytes, np.uint8)
    for entry, a in (("pack", q.codes), ("pack_scales", q.scale))[: 2 if kind.block else 1]:
        rows = a if a.strides[1] == 1 or a.shape[1] == 1 else cupy.ascontiguousarray(a)
        _relayout(kind, entry, q.shape, panels, device, rows.data.ptr, 0, packed.data.ptr, rows.strides[0], 0)
    return packed


def _unpack(
    packed: Any, kind: kernels.Weight, shape: tuple[int, int], panels: int, device: int, form: dict[str, Any]
) -> QuantizedTensor:
    """The inverse: the codes, the scales among them, and what `form` has beside."""
    import cupy

    n, k = shape
    with cupy.cuda.Device(device):
        found = {"codes": cupy.empty((n, -(-k * kind.bits // 8)), np.uint8)}
        if kind.block:
            found["scale"] = cupy.empty((n, -(-k // kind.block)), np.uint8)
        for entry, a in zip(("unpack", "unpack_scales"), found.values(), strict=False):
            _relayout(kind, entry, shape, panels, device, 0, packed.data.ptr, a.data.ptr, 0, a.shape[1])
    return QuantizedTensor(**found, **form, shape=shape, _trusted=True)


def _relayout(
    kind: kernels.Weight,
    entry: str,
    shape: tuple[int, int],
    panels: int,
    device: int,
    x: int,
    codes: int,
    y: int,
    x_stride: int,
    y_stride: int,
) -> None:
    import cupy

    units, steps = kernels.units_steps(*shape)
    launch = kernels.Launch(entry, (steps, min(units, 65535), 1), 64)
    launcher = runtime.launcher(kind.layout, launch, device)
    stream = cupy.cuda.get_current_stream().ptr
    launcher(stream, x, codes, 0, 0, y, x_stride, y_stride, 0, *shape, steps, 0, *divmod(units, panels), 1, 0, 0)
