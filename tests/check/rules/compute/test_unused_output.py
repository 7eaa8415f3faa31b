from __future__ import annotations

from tests.evidence_builder import EvidenceBuilder, only_finding

from flatout.check.rules.compute.unused_output import RULE


def with_side_branch(*, reader: str = "", escapes: tuple[int, ...] = (), backward: bool = True) -> EvidenceBuilder:
    """A product that the loss needs (line 9), and a product on the side (line 10) that only `reader` reads, if any."""
    run = EvidenceBuilder()
    main, side = run.line("model.py", 9, "h = self.body(x)"), run.line("model.py", 10, "extra = self.side(h)")
    needed = run.operator("aten.mm", main, inputs=[(64, 64), (64, 64)], op_s=0.02)
    dead = run.operator("aten.addmm", side, inputs=[(64, 64), (64, 64)], op_s=0.03)
    first = run.call(needed, -1, -1)
    second = run.call(dead, first, -1)
    if reader:
        run.call(run.operator(reader, run.line("train.py", 30)), second)
    if backward:
        run.call(run.operator("aten.mm_backward", main, phase="backward"), first)
    run.escapes = escapes
    return run


def test_what_nobody_uses_is_found_with_its_own_time() -> None:
    finding = only_finding(RULE, with_side_branch().build())
    assert finding.where is not None
    assert finding.where.line == 10
    assert finding.cost_s == 0.03
    assert finding.operators == (1,)


def test_a_chain_that_ends_nowhere_is_unused_as_a_whole() -> None:
    found = list(RULE.check(with_side_branch(reader="aten.relu").build()))
    assert {i for f in found for i in f.operators} == {1, 2}


def test_a_result_that_is_read_kept_or_handed_out_is_of_use() -> None:
    assert not list(RULE.check(with_side_branch(reader="aten._local_scalar_dense").build()))
    assert not list(RULE.check(with_side_branch(escapes=(1,)).build()))


def test_nothing_is_said_where_the_results_were_not_watched_or_the_aim_is_unknown() -> None:
    run = with_side_branch()
    run.escapes = None
    assert not list(RULE.check(run.build()))
    assert not list(RULE.check(with_side_branch(backward=False).build()))


def test_nothing_is_said_where_tensors_are_sharded_over_ranks() -> None:
    run = with_side_branch()
    run.operator("fsdp.all_gather_copy_in", run.line("model.py", 11), inputs=[(64, 64)])
    assert not list(RULE.check(run.build()))
