"""What a rule, lever or reduction is called follows from where its file is."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from flatout.check.rules.overhead import host_read
from flatout.core import registry
from flatout.core.errors import UsageError
from flatout.core.parts import lever, reduction, rule
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding, Rule
from flatout.core.records.lever import Lever
from flatout.core.records.reduction import Reduction
from flatout.core.records.workload import Source

PARTS: list[Rule | Lever | Reduction] = [*registry.rules(), *registry.levers(), *registry.reductions()]


def module(monkeypatch: pytest.MonkeyPatch, docstring: str | None) -> str:
    """The name of an empty module that can be imported for the time of a test."""
    name = "theirs.overhead.bad_habit"
    monkeypatch.setitem(sys.modules, name, ModuleType(name, docstring))
    return name


def nothing(evidence: Evidence) -> Iterator[Finding]:
    """Yield nothing."""
    yield from ()


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.id)
def test_an_id_is_the_path(part: Rule | Lever | Reduction) -> None:
    assert part.id == ".".join(part.module.split(".")[-2:]).replace("_", "-")


def test_a_rule_takes_its_title_and_levers_from_the_docstring(monkeypatch: pytest.MonkeyPatch) -> None:
    name = module(monkeypatch, "A habit that\ncosts time.\n\nLevers       graph.compile,\n             memory.fusion\n")
    built = rule(name, nothing)
    assert (built.id, built.title) == ("overhead.bad-habit", "A habit that costs time")
    assert built.levers == ("graph.compile", "memory.fusion")


def test_a_title_may_differ_from_the_docstring(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rule(module(monkeypatch, "A habit that costs time."), nothing, title="Bad habit").title == "Bad habit"


def test_findings_get_the_id_and_the_levers_of_their_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    finding = Finding(regime="overhead", where=None, cost_s=1.0, saved_s=(0.1, 0.2), because="", edit="")
    built = rule(module(monkeypatch, "A habit.\n\nLevers       graph.compile\n"), lambda evidence: iter([finding]))
    (found,) = built.check(None)  # type: ignore[arg-type]
    assert (found.rule, found.levers) == ("overhead.bad-habit", ("graph.compile",))


def test_a_finding_without_a_regime_has_that_of_its_folder_and_never_its_own_line_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here, there = Source(file="train.py", line=1), Source(file="train.py", line=2)
    plain = Finding(where=here, because="", edit="", also=(here, there))
    other = Finding(regime="bandwidth", where=None, because="", edit="")
    built = rule(module(monkeypatch, "A habit."), lambda evidence: iter([plain, other]))
    first, second = built.check(None)  # type: ignore[arg-type]
    assert (first.regime, first.also, second.regime) == ("overhead", (there,), "bandwidth")


def test_a_guarantee_is_the_first_word_of_its_section(monkeypatch: pytest.MonkeyPatch) -> None:
    name = module(monkeypatch, "A cure.\n\nGuarantee   EXACT: every bit stays.\n")
    assert lever(name, lambda evidence, findings: iter(())).guarantee == "exact"


def test_a_reduction_without_a_guarantee_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    name = module(monkeypatch, "A cheaper model.\n\nGuarantee   It works.\n")
    with pytest.raises(UsageError, match="start it with EXACT, BOUNDED or QUALITY"):
        reduction(name, lambda candidate: iter(()), lambda candidate, parameters: candidate)


def test_a_module_without_a_docstring_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="has no docstring"):
        rule(module(monkeypatch, None), nothing)


def test_a_rule_knows_its_module() -> None:
    assert host_read.RULE.module == host_read.__name__
