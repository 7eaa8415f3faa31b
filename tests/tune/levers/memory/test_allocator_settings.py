from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
from tests.evidence_builder import EvidenceBuilder
from tests.lever_tools import edited, pulled

from flatout.core.errors import EditError, PlanError
from flatout.core.records.lever import Refusal
from flatout.tune.levers.memory.allocator_settings import LEVER, environment


def test_without_page_faults_it_says_so() -> None:
    [refusal] = LEVER.propose(EvidenceBuilder().build(), ())
    assert isinstance(refusal, Refusal)


def test_the_environment_is_what_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = environment({"kept_bytes": 1 << 30})
    with pulled(LEVER, kept_bytes=1 << 30) as hooks:
        assert not hooks.done
    for name, value in wanted.items():
        monkeypatch.setenv(name, value)
    with pulled(LEVER, kept_bytes=1 << 30) as hooks:
        assert hooks.done == [LEVER.id]


def test_a_size_that_is_none_is_refused() -> None:
    with pytest.raises(PlanError, match="kept_bytes"):
        environment({"kept_bytes": "1 GiB"})


EXAMPLES = Path(__file__).parents[4] / "examples"


def test_edited_malloc_is_told_as_in_the_fast_twin() -> None:
    slow, fast = ((EXAMPLES / kind / "sea_surface.py").read_text() for kind in ("slow", "fast"))
    [told] = [line for line in fast.splitlines() if "Have glibc" in line]
    after = edited(LEVER, slow, kept_bytes=1 << 30)
    assert after.replace('    """Have glibc keep freed memory for the next step."""', told) == fast


def test_edited_glibc_takes_the_thresholds(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, int]] = []

    class Libc:
        def mallopt(self, option: int, value: int) -> None:
            told.append((option, value))

    monkeypatch.setattr(ctypes, "CDLL", lambda _: Libc())
    exec(edited(LEVER, "print(1)\n", kept_bytes=1000), {})
    assert told == [(-3, 1000), (-1, 1000)]
    with pytest.raises(EditError, match="already"):
        edited(LEVER, "libc.mallopt(-3, 1)\n", kept_bytes=1000)
