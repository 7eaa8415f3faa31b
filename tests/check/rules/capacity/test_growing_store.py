from __future__ import annotations

from tests.check.rules.capacity.memory_evidence import remembering
from tests.evidence_builder import EvidenceBuilder, only_finding

from flatout.check.rules.capacity.growing_store import RULE
from flatout.core.records.evidence import Evidence
from flatout.core.records.memory import Growth


def stored(num_bytes: int, *, has_graph: bool = False) -> Evidence:
    run = EvidenceBuilder()
    growth = Growth(
        source=run.line("model.py", 8, "features = self.body(x)"),
        holder=run.line("model.py", 9, "self.cache[index] = features"),
        container="dict 'cache' of Net",
        bytes_per_step=num_bytes,
        tensors_per_step=1.0,
        has_graph=has_graph,
    )
    return remembering(run, growth=(growth,))


def test_a_growing_cache_is_named_by_the_line_that_fills_it() -> None:
    finding = only_finding(RULE, stored(1 << 20))

    assert finding.where is not None
    assert finding.where.line == 9
    assert [s.line for s in finding.also] == [8]
    assert "'cache' of Net" in finding.because


def test_a_store_that_is_small_beside_the_peak_is_left_alone() -> None:
    assert not list(RULE.check(stored(4 << 10)))


def test_what_holds_graphs_is_left_to_another_rule() -> None:
    assert not list(RULE.check(stored(1 << 20, has_graph=True)))
