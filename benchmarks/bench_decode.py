"""One step of a decoder: the linear layers of Llama-3-8B, all of them, one after the other in one graph.

Every layer has a weight of its own: 7.5 GB in FP8, 15 GB in bfloat16. Each reads what the one before it wrote: the
attention's output is stood for by the first columns of q, k and v, the MLP's activation by the first half of gate and
up. What lies between the layers in a model (attention, norms, SiLU, sums) is left out, so that a step takes longer than
this: M over its time bounds the tokens a second.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest

from cufp8.bench import linear
from cufp8.bench.measure import Contender, measure, normal, relative_l2, without_arrays
from cufp8.bench.results import TORCH

DEPTH = 32
BLOCK = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
HEAD = (128256, 4096)
ROWS = [1, 8, 32]
DTYPE = "bfloat16"
NAMES = ["cufp8", "cufp8-nopdl", *[TORCH[DTYPE]] * (importlib.util.find_spec("torch") is not None)]
LARGEST_ERROR = 0.1  # 129 roundings to bfloat16 in a row come to 0.02; a layer that reads stale x, to about 1


def make_weights(bench: Any) -> list[linear.Weights]:
    """The weights of all layers in their order."""
    bench.forget()
    shapes = [*list(BLOCK.values()) * DEPTH, HEAD]
    return [linear.Weights(n, k, bench.memory.l2_bytes, seed, copies=1) for seed, (n, k) in enumerate(shapes)]


def ours(bench: Any, weights: list[linear.Weights], x: list[Any], name: str) -> Contender:
    """cufp8 in a chain; every kind of layer writes into a buffer of its own, again and again."""
    layers = [one.layers(name != "cufp8-nopdl")[0] for one in weights]
    m = len(x[0])
    y = [bench.queue.empty((m, n), DTYPE) for n, _ in BLOCK.values()]
    logits = [bench.queue.empty((m, HEAD[0]), DTYPE) for _ in range(2)]
    # What a layer reads: the columns that it needs of the y before. The first block's first layer reads x instead.
    read = [before[:, :k] for before, (_, k) in zip(y[-1:] + y[:-1], BLOCK.values(), strict=True)]

    def call(i: int) -> None:
        for at, layer in enumerate(layers[:-1]):
            layer(x[i % 2] if at == 0 else read[at % len(y)], out=y[at % len(y)])
        layers[-1](y[-1], out=logits[i % 2])

    kernels = {f"{n}x{k}": linear.kernel(n, k, m, DTYPE, True) for n, k in [*BLOCK.values(), HEAD]}
    most = kernels["{}x{}".format(*BLOCK["gate_up"])]  # of the bytes
    return Contender(name, call, logits, kernel=most, note={"kernels": kernels})


def torch_linear(weights: list[linear.Weights], x: list[Any]) -> Contender:
    """The same by F.linear."""
    import torch

    copies = [one.torch_copies(DTYPE)[0] for one in weights]
    product = torch.nn.functional.linear

    def call(i: int) -> Any:
        h = x[i % 2]
        for w in copies:
            h = product(h[:, : w.shape[1]], w)
        return h

    return Contender(TORCH[DTYPE], call)


def group(bench: Any, weights: list[linear.Weights], m: int) -> dict[str, Any]:
    """Measure all contenders for m rows."""
    import cupy

    both = bench.queue.array(normal((2 * m, BLOCK["qkv"][1]), m), DTYPE)
    x = [both[:m], both[m:]]
    exact = linear.on_cupy(both)
    for one in weights:
        exact = one.product(exact[:, : one.k], one.checked if one is weights[-1] else slice(None))

    contenders, failed = [], {}
    for name in NAMES:
        try:
            contenders.append(torch_linear(weights, x) if name in TORCH.values() else ours(bench, weights, x, name))
        except Exception as wrong:  # a rival that cannot be made must not take the group with it
            failed[name] = without_arrays(wrong)

    def error(contender: Contender, outputs: list[Any]) -> float:
        parts = [linear.on_cupy(y)[:, weights[-1].checked].astype(np.float64) for y in outputs]
        return linear.acceptable(contender, relative_l2(cupy.concatenate(parts), exact), LARGEST_ERROR)

    done = measure(bench.queue, contenders, error, bench.memory.hold)
    rows = bench.rows(done, m, None, None)
    for row in rows:
        row["note"] |= {"model": "Llama-3-8B", "weight_bytes": sum(one.nbytes for one in weights)}
    bench.write("decode_step", rows)
    return {**failed, **done}


@pytest.fixture(scope="module")
def weights(bench: Any) -> Any:
    made = make_weights(bench)
    yield made
    made.clear()
    bench.forget()


@pytest.mark.parametrize("m", [pytest.param(m, marks=[pytest.mark.quick] * (m == 1), id=f"m{m}") for m in ROWS])
@pytest.mark.parametrize("contender", NAMES)
def test_decode_step(bench: Any, replay: Any, weights: Any, m: int, contender: str) -> None:
    measured = bench.once(("decode_step", m), lambda: group(bench, weights, m))
    replay(f"decode step, M = {m}", measured[contender])
