"""One rank, or each rank of one node, needs longer for its own work than the others, step after step, and they wait for it.

Costs        The difference between that rank's own work, or that of the node's ranks, and the next slowest rank's.
Evidence     Own work (the step less exposed communication) rank by rank, less what the sizes of the batches explain; the names of
             their nodes.
Levers       communication.even-ranks
False alarm  A rank that is last now and then; a rank with larger batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from flatout.core.parts import rule
from flatout.core.records.distributed import Distributed, RankSummary
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.machine.cost.waiting import Balance, balance_of

_FEWEST_STEPS = 8
_PERSISTENT = 0.8
"""Share of the steps in which the same rank must be the slowest."""
_MOST_NAMED = 8


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding when one rank, or the ranks of one node, are slowest nearly always."""
    distributed = evidence.distributed
    balance = balance_of(distributed)
    if distributed is None or balance is None or len(balance.steps) < _FEWEST_STEPS:
        return
    hosts = {r.rank: r.host for r in distributed.ranks}
    node = balance.slowest_group(hosts)
    if node is not None and node.share >= _PERSISTENT:
        extra_s = min(node.extra_s, evidence.steps.step_s)
        yield Finding(
            where=None,
            cost_s=extra_s,
            saved_s=(0.5 * extra_s, extra_s),
            because=f"each rank of node {node.name} works longer than every other rank, {extra_s * 1e3:.2f} ms more than the "
            f"next slowest in a step ({_works(balance, hosts)})",
            edit=f"compare node {node.name} with the others: other jobs on it, clocks, cooling, memory, the files it reads; "
            "leave it out until then",
        )
        return
    slowest, share = balance.slowest
    if share < _PERSISTENT:
        return
    extra_s = min(balance.extra_s(slowest), evidence.steps.step_s)
    if extra_s <= 0:
        return
    summary = distributed.summary_of(slowest)
    assert summary is not None
    source, phase, line_s = _difference(distributed, summary)
    place = f", {line_s * 1e3:.2f} ms of it on this line ({phase})" if source >= 0 else ""
    yield Finding(
        where=evidence.source_of(source),
        cost_s=extra_s,
        saved_s=(0.5 * extra_s, extra_s),
        because=f"rank {slowest}{_on_node(slowest, hosts)} works {extra_s * 1e3:.2f} ms longer than the next slowest in a step, "
        f"in {share:.0%} of the steps ({_works(balance, hosts)}){place}",
        edit=f"make rank {slowest} do what the others do: move logging, checkpoints and evaluation out of its step or spread "
        "them over ranks; if its code is the same, look at its processor, memory and cooling",
    )


def _works(balance: Balance, hosts: Mapping[int, str]) -> str:
    """Own work of each rank, of the slowest where there are many."""
    every = sorted(zip(balance.ranks, balance.mean_work_s, strict=True), key=lambda one: -one[1])
    shown = sorted(every[:_MOST_NAMED])
    rest = f", {len(every) - len(shown)} more below" if len(every) > len(shown) else ""
    return ", ".join(f"rank {r}{_on_node(r, hosts)} {w * 1e3:.2f} ms" for r, w in shown) + rest


def _on_node(rank: int, hosts: Mapping[int, str]) -> str:
    """Where a rank is, if not all are there."""
    return f" on {hosts[rank]}" if len(set(hosts.values())) > 1 else ""


def _difference(distributed: Distributed, slow: RankSummary) -> tuple[int, str, float]:
    """The (line, phase, seconds) where the slow rank spends most more than the others' mean; -1 where none stands out."""
    others = [r for r in distributed.ranks if r.rank != slow.rank]
    collective_lines = {c.source for c in distributed.collectives}
    best = (-1, "", 0.0)
    for line in slow.lines:
        if line.source in collective_lines:
            continue
        theirs = sum(x.seconds for r in others for x in r.lines if (x.source, x.phase) == (line.source, line.phase))
        more_s = line.seconds - theirs / max(1, len(others))
        if more_s > best[2]:
            best = (line.source, line.phase, more_s)
    return best


RULE = rule(__name__, check, title="One rank is slower than the others")
