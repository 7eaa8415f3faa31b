from __future__ import annotations

import msgspec
import pytest
from tests.evidence_builder import EvidenceBuilder

from flatout.check.diagnosis import diagnose
from flatout.check.rules.communication.distributed_settings import RULE
from flatout.core.records.distributed import Distributed, RankSummary
from flatout.core.records.evidence import Evidence


def evidence(*, backend: str = "nccl", hosts: tuple[str, ...] = ("n0", "n0"), **variables: str) -> Evidence:
    run = EvidenceBuilder()
    for name, value in variables.items():
        run.setting(name, value)
    ranks = tuple(RankSummary(rank=i, host=host, step_s=0.1, work_s=0.1) for i, host in enumerate(hosts))
    distributed = Distributed(backend=backend, rank=0, world_size=len(hosts), ranks=ranks)
    return msgspec.structs.replace(run.build(), distributed=distributed)


def notes(found: Evidence) -> list[str]:
    diagnosis = diagnose(found, [RULE])
    assert diagnosis.findings == ()
    return [note.text for note in diagnosis.notes]


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("NCCL_P2P_DISABLE", "1", "not over NVLink"),
        ("NCCL_P2P_LEVEL", "LOC", "not over NVLink"),
        ("NCCL_ALGO", "Tree", "one algorithm is forced"),
        ("NCCL_MAX_NCHANNELS", "2", "so few channels"),
        ("NCCL_DEBUG", "TRACE", "every call is logged"),
        ("TORCH_NCCL_BLOCKING_WAIT", "1", "the host waits"),
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", "ranks compare each collective"),
    ],
)
def test_a_variable_that_turns_a_fast_path_off_is_named_with_what_it_does(name: str, value: str, says: str) -> None:
    (text,) = notes(evidence(**{name: value}))

    assert text.startswith(f"{name}={value}: ")
    assert says in text


@pytest.mark.parametrize(
    "variables",
    [
        {"NCCL_P2P_DISABLE": "0"},
        {"NCCL_DEBUG": "WARN"},
        {"NCCL_MAX_NCHANNELS": "32"},
        {"TORCH_DISTRIBUTED_DEBUG": "OFF"},
        {},
    ],
)
def test_harmless_values_are_left_alone(variables: dict[str, str]) -> None:
    assert notes(evidence(**variables)) == []


def test_what_concerns_the_network_is_named_on_several_hosts_alone() -> None:
    assert notes(evidence(NCCL_IB_DISABLE="1")) == []
    (text,) = notes(evidence(NCCL_IB_DISABLE="1", hosts=("n0", "n1")))
    assert "over TCP" in text


def test_settings_of_nccl_do_not_matter_to_gloo() -> None:
    assert notes(evidence(backend="gloo", NCCL_P2P_DISABLE="1")) == []
    assert len(notes(evidence(backend="gloo", TORCH_DISTRIBUTED_DEBUG="DETAIL"))) == 1


def test_one_process_alone_has_no_such_settings() -> None:
    run = EvidenceBuilder()
    run.setting("TORCH_DISTRIBUTED_DEBUG", "DETAIL")

    assert notes(run.build()) == []
