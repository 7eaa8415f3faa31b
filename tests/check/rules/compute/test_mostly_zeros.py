from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.evidence_builder import EvidenceBuilder, only_finding

from flatout.check.rules.compute.mostly_zeros import RULE
from flatout.core.records.evidence import Evidence
from flatout.core.records.trial import TrialResult
from flatout.core.records.usage import ModuleFact

WORDS = (2708, 1433)


def words(*, kind: str, draws: bool = True) -> Evidence:
    """Dropout of a graph's word features and their product with a weight, on lines 5 and 6."""
    run = EvidenceBuilder()
    drop, layer = run.line("gcn.py", 5, "x = F.dropout(x)"), run.line("gcn.py", 6, "x = torch.mm(x, self.weight)")
    if draws:
        run.operator("aten.bernoulli_", drop, inputs=[WORDS], output=WORDS, op_s=0.03)
    run.operator("aten.mul", drop, inputs=[WORDS, WORDS], output=WORDS, op_s=0.01)
    run.operator("aten.mm", layer, inputs=[WORDS, (1433, 16)], output=(2708, 16), op_s=0.02)
    run.operator("aten.mm", layer, inputs=[WORDS[::-1], (2708, 16)], output=(1433, 16), op_s=0.02, phase="backward")
    source = drop if kind == "aten.mul" else layer
    run.facts.append(
        ModuleFact(name="mostly-zeros", module="GCN", kind=kind, value=0.98, text="2708x1433", source=source)
    )
    assert RULE.propose is not None
    run.trials.extend(TrialResult(trial=t, now_s=0.04, cured_s=0.004) for t in RULE.propose(run.build()))
    return run.build()


@pytest.mark.parametrize(("kind", "line", "edit"), [("aten.mul", 5, "F.dropout"), ("aten.mm", 6, "torch.sparse.mm")])
def test_work_on_zeros_is_found_with_its_forward_and_backward(kind: str, line: int, edit: str) -> None:
    finding = only_finding(RULE, words(kind=kind))
    assert finding.where is not None
    assert finding.where.line == line
    assert finding.cost_s == pytest.approx(0.04)
    assert finding.saved_s[1] == pytest.approx(0.04 * 0.9)
    assert edit in finding.edit


def test_a_multiplication_that_draws_nothing_is_no_dropout() -> None:
    assert not list(RULE.check(words(kind="aten.mul", draws=False)))


@pytest.mark.parametrize(("draws", "edit"), [(True, "drop among them alone"), (False, "x.to_sparse() once")])
def test_a_matrix_that_goes_through_dropout_is_another_in_each_step(draws: bool, edit: str) -> None:
    assert edit in only_finding(RULE, words(kind="aten.mm", draws=draws)).edit


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_dropping_among_the_numbers_that_are_there_runs_as_it_is_printed() -> None:
    edit = only_finding(RULE, words(kind="aten.mm")).edit
    names = {"x": torch.eye(6) * 3, "weight": torch.randn(6, 4), "p": 0.5, "training": False, "torch": torch, "F": F}
    once = edit[edit.index("(places") + 1 : edit.index("); in a step")]
    for statement in once.split(", values", 1)[0], "values" + once.split(", values", 1)[1]:
        exec(statement, names)
    out = eval(edit[edit.index("torch.sparse.mm") :], names)
    torch.testing.assert_close(out, names["x"] @ names["weight"])
