from __future__ import annotations

import gc

import pytest


@pytest.fixture(autouse=True)
def looks_at_memory_pass_over_what_was_there_before() -> None:
    """Each of them goes through every object of the process: of this one, all that torch and other tests have made."""
    gc.freeze()


@pytest.fixture(autouse=True)
def the_price_of_observing_is_measured_roughly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every observation does it once; no test looks at how well."""
    monkeypatch.setattr("flatout.check.observe.operators.overhead._CALLS", 30)
