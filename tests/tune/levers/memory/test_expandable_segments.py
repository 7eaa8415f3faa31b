from __future__ import annotations

import msgspec
import pytest
from tests.evidence_builder import EvidenceBuilder
from tests.lever_tools import found, pulled

from flatout.core.records.lever import Candidate, Refusal
from flatout.core.records.memory import Memory
from flatout.tune.levers.memory.expandable_segments import LEVER, environment


def test_it_is_offered_for_what_was_found_and_for_retries() -> None:
    run = EvidenceBuilder(device_s=0.05).build()
    retried = msgspec.structs.replace(
        run, memory=(Memory(device="cuda:0", peak_bytes=1, peak_phase="forward", num_retries=3),)
    )
    [refusal] = LEVER.propose(run, ())
    [of_finding] = LEVER.propose(run, [found(0.01)])
    [of_retries] = LEVER.propose(retried, ())
    assert isinstance(refusal, Refusal)
    assert isinstance(of_finding, Candidate)
    assert isinstance(of_retries, Candidate)
    assert "3 times" in of_retries.because


def test_the_environment_is_what_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    [(name, value)] = environment({}).items()
    monkeypatch.delenv(name, raising=False)
    with pulled(LEVER) as hooks:
        assert not hooks.done
    monkeypatch.setenv(name, value)
    with pulled(LEVER) as hooks:
        assert hooks.done == [LEVER.id]


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128", "max_split_size_mb:128,expandable_segments:True"),
        ("PYTORCH_ALLOC_CONF", "expandable_segments:False,backend:native", "backend:native,expandable_segments:True"),
        (
            "PYTORCH_CUDA_ALLOC_CONF",
            "roundup_power2_divisions:[256:1,512:2],expandable_segments:True",
            "roundup_power2_divisions:[256:1,512:2],expandable_segments:True",
        ),
    ],
)
def test_the_users_own_settings_of_the_allocator_stay(
    monkeypatch: pytest.MonkeyPatch, name: str, before: str, after: str
) -> None:
    for other in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, before)
    assert environment({}) == {name: after}
    monkeypatch.setenv(name, after)
    assert environment({}) == {name: after}, "a process that was begun once more begins no third time"
