from __future__ import annotations

import pytest
from tests.evidence_builder import EvidenceBuilder
from tests.lever_tools import pulled

from flatout.core.errors import PlanError
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


def test_no_text_is_changed_for_what_is_a_setting() -> None:
    assert LEVER.edit is None and LEVER.environment is not None
