"""The report says first that the machine was busy."""

from __future__ import annotations

import json

import msgspec
import pytest
from tests.evidence_builder import EvidenceBuilder

from flatout.check.diagnosis import diagnose
from flatout.core.records.evidence import Evidence
from flatout.core.records.load import MachineLoad
from flatout.report.html import html_report
from flatout.report.json_report import json_report
from flatout.report.markdown import markdown_report
from flatout.report.parts.diagnosis import diagnosis_blocks, short_diagnosis_blocks
from flatout.report.parts.load import load_message
from flatout.report.text import plain_text

QUIET = MachineLoad(seconds=30.0, num_cores=2, own_cores=1.0, other_cores=0.1)
BUSY = MachineLoad(seconds=30.0, num_cores=2, own_cores=1.0, other_cores=1.0)
SENTENCE = "Other processes used 1.0 of 2 cores while the steps were timed"


def under(load: MachineLoad | None) -> Evidence:
    return msgspec.structs.replace(EvidenceBuilder().build(), load=load)


def test_a_busy_machine_is_said_in_the_first_lines_of_every_output() -> None:
    evidence = under(BUSY)
    diagnosis = diagnose(evidence, [])

    text = plain_text(diagnosis_blocks(evidence, diagnosis))
    assert SENTENCE in " ".join(" ".join(text.split()).split()[:60])
    markdown = markdown_report(short_diagnosis_blocks(evidence, diagnosis))
    assert SENTENCE in markdown.partition("\n\n")[2][:200]
    assert SENTENCE in html_report(evidence, diagnosis).decode()
    assert SENTENCE in json.loads(json_report(evidence, diagnosis))["load"]


@pytest.mark.parametrize("load", [QUIET, None], ids=["quiet", "not known"])
def test_of_a_quiet_machine_nothing_is_said(load: MachineLoad | None) -> None:
    evidence = under(load)

    assert load_message(evidence) == ""
    assert "processes used" not in plain_text(diagnosis_blocks(evidence, diagnose(evidence, [])))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"stolen_cores": 0.5}, "The host of this virtual machine kept back 0.5 of 2 cores"),
        ({"throttled_fraction": 0.25}, "A CPU quota (cgroup) stopped the process for 25 % of the time"),
        ({"gpu_other_fraction": 0.4}, "The GPU worked for other processes for 40 % of the time"),
    ],
    ids=["stolen", "throttled", "gpu"],
)
def test_each_disturbance_is_named_with_its_figure(change: dict[str, float], words: str) -> None:
    assert load_message(under(msgspec.structs.replace(QUIET, **change))).startswith(words)
