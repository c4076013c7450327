"""What a GPU that is required means for tests that are skipped."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from conftest import OTHER_ARCH, fail_if_skipped


@pytest.mark.parametrize(
    ("why", "outcome"),
    [
        ("Skipped: this torch has no CUDA", "failed"),
        ("Skipped: could not import 'jax'", "failed"),
        (f"Skipped: {OTHER_ARCH}such kernel", "skipped"),
    ],
)
def test_only_other_architectures_may_be_skipped(why: str, outcome: str) -> None:
    report = SimpleNamespace(skipped=True, outcome="skipped", longrepr=("test_x.py", 1, why))
    fail_if_skipped(report)
    assert report.outcome == outcome and (outcome == "skipped" or why in report.longrepr)


def test_what_ran_stays_as_it_is() -> None:
    report = SimpleNamespace(skipped=False, outcome="failed", longrepr="an assertion")
    fail_if_skipped(report)
    assert (report.outcome, report.longrepr) == ("failed", "an assertion")
