from __future__ import annotations

import pytest
from tests.evidence_builder import EvidenceBuilder, only_finding

from flatout.check.rules.communication.uneven_batches import RULE

SIZES = (
    (100, 400),
    (300, 100),
    (200, 500),
    (400, 100),
    (100, 300),
    (500, 200),
    (200, 300),
    (300, 400),
    (100, 200),
    (400, 300),
)


def two_ranks(sizes: tuple[tuple[int, int], ...] = SIZES, *, follows: bool = True) -> EvidenceBuilder:
    """Two ranks whose work takes 0.2 ms an element, or always 50 ms."""
    run = EvidenceBuilder()
    run.loader(run.line("train.py", 15, "for batch in loader:"))
    for rank in (0, 1):
        elements = [pair[rank] for pair in sizes]
        run.rank(
            work_s=[2e-4 * n if follows else 0.05 + 0.001 * (i % 3) for i, n in enumerate(elements)], elements=elements
        )
    return run


def test_the_longest_less_the_mean_is_saved() -> None:
    finding = only_finding(RULE, two_ranks().build())
    longest, mean = (sum(map(f, SIZES)) for f in (max, lambda pair: sum(pair) / 2))
    assert finding.where is not None
    assert finding.where.line == 15
    assert finding.saved_s[1] == pytest.approx(0.1 * (longest - mean) / longest)


def test_sizes_that_do_not_change_the_work_are_left_alone() -> None:
    assert list(RULE.check(two_ranks(follows=False).build())) == []


def test_even_batches_are_left_alone() -> None:
    assert list(RULE.check(two_ranks(((200, 201), (300, 299)) * 5).build())) == []


def test_too_few_steps_say_nothing() -> None:
    assert list(RULE.check(two_ranks(SIZES[:5]).build())) == []
