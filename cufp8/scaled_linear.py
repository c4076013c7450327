"""Linear layers whose x is quantised too, and the calibration of those whose x has a scale given once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from cufp8 import activations, interop, kernels, matmul, runtime
from cufp8.activations import quantize_activations
from cufp8.formats import FLOATS, SCHEMES, Scheme
from cufp8.kernels import SCALED_FORMATS, ScaledProblem, pick
from cufp8.linear import Linear
from cufp8.matmul import scaled_mm
from cufp8.quantize import QuantizedTensor, values_queue

_E4M3 = "float8_e4m3fn"


class QuantisingLinear(Linear):
    """What layers that quantise x have in common: a call is two kernels, one that does it and one that multiplies."""

    def _set_x(self, input_scale: Any, fast_accum: bool) -> None:
        row = SCHEMES[self.scheme]
        if self.batch_invariant:
            raise ValueError(f"Linear: batch_invariant was set, and {self.scheme} has none; FP8A16 has.")
        self._x_block, self._static, self.fast_accum = row.x_block, row.x_static, bool(fast_accum)
        self._input_scale = None
        if input_scale is not None:
            self.input_scale = input_scale

    @property
    def input_scale(self) -> float | None:
        """What the codes of x are multiplied with, a float32 number.

        Of FP8, None until it is known; of NVFP4, where it is the global scale, None if each token has its own.
        """
        return self._input_scale

    @input_scale.setter
    def input_scale(self, given: Any) -> None:
        row = SCHEMES[self.scheme]
        if not row.takes_input_scale:
            raise ValueError(
                f"Linear: an input_scale was given, and {self.scheme} finds it in each call; FP8 and NVFP4 have one."
            )
        if isinstance(given, (int, float, np.floating)):
            with np.errstate(over="ignore", under="ignore"):
                value = np.float32(given)
        else:
            a = interop.to_host(interop.array(given, "Linear: input_scale"))
            if a.dtype != np.float32 or a.size != 1:
                raise (ValueError if a.dtype == np.float32 else TypeError)(
                    f"Linear: input_scale is {a.dtype} of shape {list(a.shape)}; needed is a number, or a float32 "
                    "array of one element."
                )
            value = a.reshape(())[()]
        if not (np.isfinite(value) and value > 0):
            raise ValueError(f"Linear: input_scale is {value} as float32; needed is finite and above 0.")
        if row.global_scale and value > activations.FACTOR_MOST:
            raise ValueError(f"Linear: input_scale is {value} as float32; {self.scheme} needs at most 2^125.")
        self._input_scale = float(value)
        self._plans.clear()

    def _known_scale(self) -> float | None:
        """The scale that x is quantised with; None: its own."""
        if self._static and self._input_scale is None:
            raise ValueError(
                "Linear: the scheme FP8 has no input_scale yet; give it by input_scale=, or let "
                "cufp8.calibrate(layers, batches) find it."
            )
        return self._input_scale

    def _plan(self, m: int, x_dtype: str, aligned: bool, library: Any) -> Callable[..., None]:
        key = library.kind, m, x_dtype, aligned  # what lies between the kernels is memory of x's library
        plan = self._plans.get(key)
        if plan is None:
            plan = self._two_kernels(m, x_dtype, aligned, library)
            self._remember(key, plan)
        return plan


class ScaledLinear(QuantisingLinear):
    """What `Linear` makes for schemes whose x has one float32 scale, or one a token: a product of two FP8 matrices.

    The codes stay in the standard layout, on a GPU in rows that start on 16 bytes.
    """

    _observed: list[float] | None = None  # while `calibrate` runs: the scale of each call's x, 0 where x is all zeros

    @staticmethod
    def _computes(row: Scheme) -> bool:
        return row.x_block is not None and not row.x_in_blocks

    # --- the weight ---------------------------------------------------------------------------------------

    def _rows(self, q: QuantizedTensor) -> list[kernels.Kernel]:
        name = SCALED_FORMATS[_E4M3, _E4M3]
        products = [row for row in kernels.KERNELS if row.takes is ScaledProblem and row.name.endswith(name)]
        return [runtime.row("activations"), *products]

    def _keep(self, q: QuantizedTensor) -> None:
        import cupy

        n, k = q.shape
        self._codes = cupy.zeros((n, _pitch(k)), np.uint8)
        self._codes[:, :k] = q.codes
        self._scale = cupy.array(q.scale, order="C")
        self._weight = _like(q, self._codes[:, :k], self._scale)

    @property
    def weight(self) -> QuantizedTensor:
        """The codes and scales; on a GPU a copy."""
        if self._index is None:
            return self._weight
        import cupy

        with cupy.cuda.Device(self._index):
            return _like(self._weight, cupy.array(self._weight.codes, order="C"), self._scale.copy())

    # --- on a GPU -----------------------------------------------------------------------------------------

    def kernels(self, m: int, x_dtype: str = "bfloat16") -> str:
        """The name of the KERNELS row that multiplies m rows after `activations` quantised them; "numpy" on the CPU."""
        return "numpy" if self._index is None else pick(self._target, self._product(m, x_dtype)).name

    def _product(self, m: int, x_dtype: str) -> ScaledProblem:
        out_dtype = self.out_dtype or x_dtype
        return ScaledProblem(_E4M3, _E4M3, out_dtype, m, self._n, self._k, fast_accum=self.fast_accum)

    def _two_kernels(self, m: int, x_dtype: str, aligned: bool, library: Any) -> Callable[..., None]:
        if self._observed is not None:
            return self._observing(m, x_dtype)
        n, k, device, pitch, scale = self._n, self._k, self._index, _pitch(self._k), self._known_scale()
        by_token = self._x_block == (1, -1)
        quantize = activations.queue_of(
            x_dtype, m, k, self._x_block, scale, pitch=pitch, aligned=aligned, device=device, pdl=self.pdl
        )
        weight = self._codes.data.ptr, pitch, self._scale.data.ptr, int(len(self._scale) == n > 1)
        bias = 0 if self.bias is None else self.bias.data.ptr
        multiply = matmul.queue_of(
            self._product(m, x_dtype), weight, bias, int(by_token), a_stride=pitch, device=device, pdl=self.pdl
        )
        codes_bytes = m * pitch
        room = library.maker((codes_bytes + 4 * (m if by_token else 1),), "uint8", device)

        def plan(stream: int, x: int, x_stride: int, y: int, y_stride: int) -> None:
            # Given back when this returns, to whom works on this stream after the two kernels.
            held, codes = room(stream)
            quantize(stream, x, x_stride, codes, codes + codes_bytes)
            multiply(stream, codes, codes + codes_bytes, y, y_stride)

        return plan

    def _observing(self, m: int, x_dtype: str) -> Callable[..., None]:
        out_dtype = self.out_dtype or x_dtype

        def plan(stream: int, x: int, x_stride: int, y: int, y_stride: int) -> None:
            places = (x, self._k, x_stride, x_dtype), (y, self._n, y_stride, out_dtype)
            x_array, y_array = (
                interop._borrow(interop.View(ptr, (m, width), (max(stride, width), 1), dtype, self._index), None)
                for ptr, width, stride, dtype in places
            )
            with runtime.stream(stream):
                scaled_mm(
                    self._observe(x_array), self._weight, bias=self.bias, out_dtype=out_dtype,
                    fast_accum=self.fast_accum, out=y_array,
                )  # fmt: skip

        return plan

    def _observe(self, x: Any) -> QuantizedTensor:
        """x [m, k] with the scale of all its values, which is noted."""
        q = quantize_activations(x, block=(-1, -1))
        scale = float(interop.to_host(q.scale)[0, 0])
        if scale == 1 and not bool(((q.codes & 0x7F) == 0x7E).any()):  # not that of an amax of 448: there is none
            scale = 0.0
        self._observed.append(scale)
        return q

    # --- on the host --------------------------------------------------------------------------------------

    def _multiply_host(self, x: np.ndarray, dtype: str) -> np.ndarray:
        if not len(x):
            return np.empty((0, self._n), FLOATS[dtype])
        if self._observed is None:
            q = quantize_activations(x, block=self._x_block, scale=self._known_scale())
        else:
            q = self._observe(x)
        return scaled_mm(q, self._weight, bias=self.bias, out_dtype=dtype, fast_accum=self.fast_accum)


class BlockScaledLinear(QuantisingLinear):
    """What `Linear` makes for schemes whose x has block scales, as the weight has.

    On a GPU x becomes what its codes mean, which 16 bits have exactly but for a factor of each token, and the kernels
    for an x in 16 bits multiply; their sums meet the factor in float32.
    """

    @staticmethod
    def _computes(row: Scheme) -> bool:
        return row.x_in_blocks

    def _set_x(self, input_scale: Any, fast_accum: bool) -> None:
        Linear._set_x(self, None, fast_accum)
        super()._set_x(input_scale, False)

    # --- on a GPU -----------------------------------------------------------------------------------------

    def kernels(self, m: int, x_dtype: str = "bfloat16") -> str:
        """The name of the KERNELS row that multiplies m rows after `quantize_blocks`; "numpy" on the CPU."""
        return "numpy" if self._index is None else pick(self._target, self._product(m, x_dtype)).name

    def _rows(self, q: QuantizedTensor) -> list[kernels.Kernel]:
        return [runtime.row("quantize_blocks"), *super()._rows(q)]

    def _product(self, m: int, x_dtype: str) -> kernels.Problem:
        """Of the values of x: rows that start on 16 bytes, zeros up to the next 16."""
        values = kernels.values_dtype(kernels.arch_of(self._target.arch), self._kind.name)
        return replace(self._problem(m, x_dtype), x_dtype=values, aligned16=True)

    def _two_kernels(self, m: int, x_dtype: str, aligned: bool, library: Any) -> Callable[..., None]:
        p, pitch = self._product(m, x_dtype), -(-self._k // 8) * 8
        values_bytes = m * pitch * FLOATS[p.x_dtype].itemsize
        quantize = values_queue(
            SCHEMES[self.scheme], x_dtype, m, self._k, self.input_scale,
            pitch=pitch, aligned=aligned, device=self._index, pdl=self.pdl,
        )  # fmt: skip
        multiply = self._launch_plan(p, factors=values_bytes)
        room = library.maker((values_bytes + 4 * m,), "uint8", self._index)

        def plan(stream: int, x: int, x_stride: int, y: int, y_stride: int) -> None:
            # Given back when this returns, to whom works on this stream after the two kernels.
            held, values = room(stream)
            quantize(stream, x, x_stride, values, values + values_bytes)
            multiply(stream, values, pitch, y, y_stride)

        return plan

    # --- on the host --------------------------------------------------------------------------------------

    def _multiply_host(self, x: np.ndarray, dtype: str) -> np.ndarray:
        row = SCHEMES[self.scheme]
        q = quantize_activations(
            x, block=row.x_block, dtype=row.dtype, scale_dtype=row.scale_dtype, global_scale=self.input_scale
        )
        return matmul.on_host(q, self._weight, self.bias, dtype)


def _pitch(k: int) -> int:
    """Bytes from one row of codes to the next, on a GPU."""
    return -(-k // 16) * 16


def _like(q: QuantizedTensor, codes: Any, scale: Any) -> QuantizedTensor:
    """The same weight in other arrays."""
    return QuantizedTensor(
        codes, scale, dtype=q.dtype, scale_dtype=q.scale_dtype, shape=q.shape, block=q.block, _trusted=True,
        _scheme=q.scheme,
    )  # fmt: skip


# --- calibration -----------------------------------------------------------------------------------------


def calibrate(layers: Any, batches: Iterable[Any], run: Callable[[Any], Any] | None = None) -> dict[Any, float]:
    """Find the input_scale of FP8 layers from what goes through them.

    `input_scale = max(amax / 448, 2^-126)` in float32, with amax the largest finite magnitude in all x that a layer
    was called with; 1 where that is 0. Until the last batch is done a layer that is called computes with the scale of
    that call's own x. Then all scales are set at once, those of before replaced; if anything is raised, none is.

    Parameters
    ----------
    layers
        A `Linear` of the scheme FP8, a list of them, or a mapping of names to them.
    batches
        What is to go through them: with `run` anything that it takes. Without it each batch is an array, x of every
        layer, or a mapping of keys of `layers` to the x of each.
    run
        Called with each batch; calls the layers, as a model does. What it returns is dropped.

    Returns
    -------
    dict
        The scales as floats, by the keys of the mapping or by the numbers of the list, from 0.

    Raises
    ------
    TypeError
        If something among `layers` is no Linear.
    ValueError
        If a layer is of another scheme, has not been called with one row at least, or a batch names a layer that is
        not among them. As `Linear.__call__`, and whatever `run` raises.

    Notes
    -----
    A layer on a GPU waits for it in each call meanwhile: such calls can be neither captured nor timed, and no other
    thread may call the layers. Graphs captured before keep their scales.

    Source: OCP 8-bit Floating Point Specification 1.0, section 5: 448 is the largest e4m3fn, so that no x is cut.
    """
    named = dict(layers) if isinstance(layers, Mapping) else dict(enumerate(_several(layers)))
    for key, layer in named.items():
        if not isinstance(layer, Linear):
            raise TypeError(f"calibrate: layer {key!r} is a {type(layer).__name__}; needed is a Linear of scheme FP8.")
        if not SCHEMES[layer.scheme].x_static:
            raise ValueError(f"calibrate: layer {key!r} is of scheme {layer.scheme}; needed is FP8.")
    try:
        for layer in named.values():
            layer._observed = []
            layer._plans.clear()
        for batch in batches:
            if run is not None:
                run(batch)
                continue
            given = batch if isinstance(batch, Mapping) else dict.fromkeys(named, batch)
            for key, x in given.items():
                if key not in named:
                    raise ValueError(f"calibrate: a batch has x for {key!r}; the layers are {list(named)}.")
                named[key](x)
        silent = [key for key, layer in named.items() if not layer._observed]
        if silent:
            raise ValueError(
                f"calibrate: {len(silent)} of {len(named)} layers were called with no row of x: {silent[:8]}; let each "
                "batch go through all of them, by run= or as their x."
            )
        found = {key: max(layer._observed) or 1.0 for key, layer in named.items()}
    finally:
        for layer in named.values():
            layer._observed = None
            layer._plans.clear()
    for key, layer in named.items():
        layer.input_scale = found[key]
    return found


def _several(layers: Any) -> list[Any]:
    return [layers] if isinstance(layers, Linear) else list(layers)
