from __future__ import annotations

import pytest
from tests.check.rules.capacity.memory_evidence import GIB, part, remembering
from tests.evidence_builder import EvidenceBuilder, only_finding

from flatout.check.rules.capacity.recompute import RULE
from flatout.core.records.evidence import Evidence
from flatout.core.records.usage import ModuleFact
from flatout.core.records.workload import LibraryFrame


def checkpointed(*, peak_bytes: int = GIB, forward_calls: float = 2, backward_calls: float = 2) -> Evidence:
    run = EvidenceBuilder()
    call = run.line("model.py", 40, "x = checkpoint(block, x)")
    inner = run.line("model.py", 12, "return self.out(F.gelu(self.up(x)))", callers=(call,))
    for phase, calls in (("forward", forward_calls), ("backward", backward_calls)):
        run.operator("aten.addmm", inner, inputs=[(64,), (8, 64), (64, 64)], calls=calls, op_s=0.01, phase=phase)
    run.operator("aten.mm", inner, inputs=[(64, 8), (8, 64)], op_s=0.02, phase="backward")
    fact = ModuleFact(name="recompute", module="Net.block", kind="torch.utils.checkpoint", source=call)
    return remembering(run, facts=(fact,), peak_bytes=peak_bytes)


def test_what_runs_twice_is_priced_where_there_is_room() -> None:
    finding = only_finding(RULE, checkpointed())

    assert finding.cost_s == pytest.approx(0.01)
    assert finding.where is not None
    assert finding.where.line == 40


def test_an_operator_is_repeated_no_oftener_than_the_forward_ran_it() -> None:
    assert only_finding(RULE, checkpointed(forward_calls=1, backward_calls=2)).cost_s == pytest.approx(0.005)


def test_a_library_that_recomputes_is_reached_from_one_line_in_several_ways() -> None:
    """As transformers does below `trainer.train()`: forward and backward are other ways there."""
    run = EvidenceBuilder()
    ways = [
        run.line(
            "train.py",
            9,
            "trainer.train()",
            via=(
                LibraryFrame(file=f"transformers/{way}.py", line=120, function="forward", text="checkpoint(self, x)"),
                LibraryFrame(file="transformers/model.py", line=40, function="Block.forward", text="self.up(x)"),
            ),
        )
        for way in ("trainer", "model")
    ]
    for way, phase in zip(ways, ("forward", "backward"), strict=True):
        run.operator("aten.addmm", way, inputs=[(64,), (8, 64), (64, 64)], calls=2, op_s=0.01, phase=phase)  # type: ignore[arg-type]
    fact = ModuleFact(
        name="recompute",
        module="Net.h.0",
        kind="torch.utils.checkpoint",
        source=run.line("train.py", 9, "trainer.train()"),
    )
    assert only_finding(RULE, remembering(run, facts=(fact,), peak_bytes=GIB)).cost_s == pytest.approx(0.01)


def test_near_the_end_of_the_memory_recomputing_is_left_alone() -> None:
    assert not list(RULE.check(checkpointed(peak_bytes=12 * GIB)))


def test_a_memory_full_of_activations_is_noted() -> None:
    assert RULE.note is not None
    full = remembering(EvidenceBuilder(), peak_bytes=15 * GIB, parts=(part("activations", 12 * GIB),))
    roomy = remembering(EvidenceBuilder(), peak_bytes=2 * GIB, parts=(part("activations", GIB),))

    assert len(list(RULE.note(full))) == 1
    assert not list(RULE.note(roomy))
