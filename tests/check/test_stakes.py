"""Trials come in the order of what is at stake."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from tests.evidence_builder import EvidenceBuilder

from flatout.check.diagnosis import diagnose
from flatout.check.stakes import proposals, proposed_trials
from flatout.core.records.evidence import Evidence, OptimizerUse
from flatout.core.records.finding import Finding, Rule
from flatout.core.records.trial import TimeOptimizer, TimeWorkers, Trial, TrialResult
from flatout.core.registry import rules
from flatout.machine.cost.accounting import remaining_fraction, result_of


def suspecting(id: str, trial: Trial, cost_s: float) -> Rule:
    """A rule that prices a cause of so many seconds by this trial."""

    def propose(evidence: Evidence) -> Iterator[Trial]:
        yield trial

    def check(evidence: Evidence) -> Iterator[Finding]:
        result = result_of(evidence, trial)
        if result is not None:
            saved_s = cost_s * (1 - remaining_fraction(result))
            yield Finding(rule=id, where=None, cost_s=cost_s, saved_s=(saved_s, saved_s), because="", edit="")

    return Rule(id=id, title=id, module=id, propose=propose, check=check)


SMALL, LARGE = TimeOptimizer(optimizer=0), TimeOptimizer(optimizer=1)


def test_the_trial_with_most_at_stake_comes_first() -> None:
    evidence = EvidenceBuilder(step_s=0.1).build()

    found = proposals(evidence, [suspecting("a.small", SMALL, 0.005), suspecting("b.large", LARGE, 0.04)])

    assert [p.trial for p in found] == [LARGE, SMALL]
    assert 0.039 < found[0].stake_s <= 0.04


def test_of_two_with_the_same_at_stake_the_shorter_comes_first() -> None:
    evidence = EvidenceBuilder(step_s=0.1).build()
    long = TimeWorkers(loader=0, counts=(1, 2, 4))

    order = proposed_trials(evidence, [suspecting("a.long", long, 0.02), suspecting("b.short", SMALL, 0.02)])

    assert order == (SMALL, long)


def test_a_result_that_is_there_already_does_not_change_what_was_at_stake() -> None:
    evidence = EvidenceBuilder(step_s=0.1).build()
    rule = suspecting("a.a", SMALL, 0.02)
    tried = msgspec.structs.replace(evidence, trials=(TrialResult(trial=SMALL, now_s=1.0, cured_s=1.0),))

    assert proposals(tried, [rule]) == proposals(evidence, [rule])


def test_what_was_not_tried_is_listed_with_what_was_at_stake() -> None:
    evidence = EvidenceBuilder(step_s=0.1).build()
    rule = suspecting("a.a", SMALL, 0.022)
    refused = msgspec.structs.replace(evidence, trials=(TrialResult(trial=SMALL, refused="the 15 s were spent"),))

    assert diagnose(refused, [rule]).refused == (
        "optimizer: the 15 s were spent (at stake: 22.0 ms of each step at most)",
    )


def test_an_optimizer_of_a_fifth_of_the_step_is_worth_its_trial_under_the_real_rules() -> None:
    use = OptimizerUse(
        name="Adam",
        variant="for-loop",
        source=0,
        constructed=0,
        num_tensors=100,
        num_elements=10_000,
        step_s=0.022,
        fused_supported=True,
    )
    evidence = EvidenceBuilder(step_s=0.1).build()
    steps = msgspec.structs.replace(evidence.steps, phases=evidence.steps.phases | {"optimizer": 0.022})
    evidence = msgspec.structs.replace(evidence, optimizers=(use,), steps=steps)

    [proposal] = [p for p in proposals(evidence, rules()) if isinstance(p.trial, TimeOptimizer)]

    assert 0.15 * 0.1 < proposal.stake_s < 0.3 * 0.1
