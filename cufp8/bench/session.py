"""One GPU for the length of one run: its queue, its ceilings, the versions, and the rows that come of it."""

from __future__ import annotations

import datetime
import gc
from typing import Any

from cufp8 import runtime
from cufp8.bench.ceilings import Memory
from cufp8.bench.linear import Weights
from cufp8.bench.measure import CupyQueue, Measured, TorchQueue
from cufp8.bench.results import Row


def torch_missing() -> str | None:
    """Why torch cannot be a rival here, or None; imports it."""
    try:
        import torch
    except (ImportError, OSError) as wrong:
        absent = getattr(wrong, "name", None) == "torch"
        return "torch is not installed" if absent else f"torch does not import ({wrong})"
    return None if torch.cuda.is_available() else "torch sees no GPU"


class Session:
    """The current GPU, measured as it is now.

    Parameters
    ----------
    torch : bool
        Let torch capture and allocate, if it can use the GPU; False: it is not imported.

    Raises
    ------
    runtime.DeviceError
        If there is no GPU to be used.
    """

    def __init__(self, torch: bool = True) -> None:
        runtime.require()
        info = runtime.info()
        self.without_torch = torch_missing() if torch else "as asked"
        self.queue: Any = CupyQueue() if self.without_torch else TorchQueue()
        self.memory = Memory(self.queue)
        self.gpu: str = info["gpu"]
        self.digests = runtime.digests()
        now = datetime.datetime.now(datetime.timezone.utc)
        self.run_id = now.strftime("%Y%m%dT%H%M%SZ")
        self.memory.warm_up()
        read, copy = self.memory.ceilings()
        self.run = {
            "date": now.isoformat(timespec="seconds"),
            "driver": str(info["driver"] or "unknown"),
            "cuda": str(info["cuda"]),
            "cupy": str(info["cupy"]),
            "read_ceiling_tb_s": round(read, 3),
            "copy_tb_s": round(copy, 3),
        }
        self._weights: Weights | None = None

    def weights(self, n: int, k: int) -> Weights:
        """The weight of one shape; that of the shape before goes, with all its copies."""
        if self._weights is None or (self._weights.n, self._weights.k) != (n, k):
            self.forget()
            self._weights = Weights(n, k, self.memory.l2_bytes)
        return self._weights

    def forget(self) -> None:
        """Let the weight go, and give back the memory that nothing uses."""
        self._weights = None
        gc.collect()  # layers and their launch plans refer to each other
        self.queue.release()

    def row(
        self,
        contender: str,
        measured: Measured,
        *,
        scheme: str | None = None,
        m: int | None = None,
        n: int | None = None,
        k: int | None = None,
    ) -> Row:
        """One row of the results: the median of the rounds, and in the note the least and the most."""
        kernel, error, seconds = measured.kernel, measured.error, measured.seconds
        return {
            "run": self.run_id,
            "scheme": scheme,
            "m": m,
            "n": n,
            "k": k,
            "contender": contender,
            "kernel": kernel,
            "sources_sha256": None if kernel is None else self.digests[kernel],
            "time_us": _digits(measured.time_us),
            "error": None if error is None else _digits(error),
            "note": {
                **measured.note,
                "low_us": _digits(min(seconds) * 1e6),
                "high_us": _digits(max(seconds) * 1e6),
                "rounds": len(seconds),
            },
        }

    def rows(self, done: dict[str, Measured | Exception], m: int, n: int | None, k: int | None) -> list[Row]:
        """The rows of a group's contenders that ran."""
        ran = {name: result for name, result in done.items() if isinstance(result, Measured)}
        return [self.row(name, result, scheme="FP8A16", m=m, n=n, k=k) for name, result in ran.items()]


def _digits(value: float) -> float:
    return float(f"{value:.5g}")
