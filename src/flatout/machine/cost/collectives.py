"""How long collectives take over tiers of links: latencies of their steps, and the bytes that each rank sends.

Rings (Thakur, Rabenseifner and Gropp, Optimization of collective communication operations in MPICH, 2005): an all-reduce of S
bytes over n ranks takes 2 (n - 1) steps of S / n bytes, an all-gather or reduce-scatter n - 1 of them. Over more than one tier it
is done tier by tier: reduce-scatter within, all-reduce of the share between, all-gather within.
"""

from __future__ import annotations

from collections.abc import Sequence

from flatout.core.records.scale import Tier


def all_reduce_s(num_bytes: float, ranks: int, tiers: Sequence[Tier], *, stride: int = 1, share: float = 1.0) -> float:
    """Seconds of an all-reduce of `num_bytes` over `ranks` devices that lie `stride` apart.

    `share` of the links' bandwidth is reached. 0 for one rank.

    >>> nvlink = Tier(name="nvlink", reach=8, bytes_per_s=1e11, latency_s=0.0)
    >>> all_reduce_s(8e8, 4, [nvlink])
    0.012
    """
    if ranks == 1:
        return 0.0
    near = tiers[0]
    inside = max(1, min(ranks, near.reach // stride))
    if inside == ranks or len(tiers) == 1:
        return _ring_s(num_bytes, ranks, near, share)
    outside = -(-ranks // inside)
    within_s = _ring_s(num_bytes, inside, near, share) if inside > 1 else 0.0
    further = max(1, stride // near.reach)
    return within_s + all_reduce_s(num_bytes / inside, outside, _beyond(tiers), stride=further, share=share)


def gather_s(num_bytes: float, ranks: int, tiers: Sequence[Tier], *, stride: int = 1, share: float = 1.0) -> float:
    """Seconds of an all-gather to `num_bytes`, or of a reduce-scatter of them: half an all-reduce, and more messages.

    Libraries gather in one ring through all ranks, which takes as many messages as there are ranks, most of them to neighbours
    (NCCL before its PAT algorithm of 2.23, which takes part only with one device a node).
    """
    half_s = all_reduce_s(num_bytes, ranks, tiers, stride=stride, share=share) / 2
    inside = max(1, min(ranks, tiers[0].reach // stride))
    if inside == ranks or len(tiers) == 1:
        return half_s
    further = ranks - 1 - (inside - 1) - (-(-ranks // inside) - 1)
    return half_s + max(0, further) * tiers[0].latency_s


def all_to_all_s(
    num_bytes: float,
    ranks: int,
    tiers: Sequence[Tier],
    *,
    stride: int = 1,
    share: float = 1.0,
    near: float = 1.0,
    crossing: float = 1.0,
) -> float:
    """Seconds until each of `ranks` devices has sent an equal part of its `num_bytes` to each other one.

    What stays within the nearest tier and what goes beyond it are sent side by side: the longer counts. Of what
    stays a share `near` is sent, of what goes beyond a share `crossing`, which is spread there.

    >>> nvlink = Tier(name="nvlink", reach=8, bytes_per_s=1e11, latency_s=0.0)
    >>> all_to_all_s(8e8, 4, [nvlink])
    0.006
    """
    if ranks == 1:
        return 0.0
    slowest, done, num = 0.0, 1, num_bytes / ranks
    for tier in tiers:
        reached = ranks if tier is tiers[-1] else max(done, min(ranks, tier.reach // stride))
        if reached > done:
            sent = (reached - done) * num * (crossing if tier is not tiers[0] else near)
            slowest = max(slowest, tier.latency_s + sent / (tier.bytes_per_s * share))
        done = reached
    return slowest


def send_s(num_bytes: float, tiers: Sequence[Tier], *, stride: int = 1, share: float = 1.0) -> float:
    """Seconds of one message to the device `stride` further."""
    tier = next((t for t in tiers if stride < t.reach), tiers[-1])
    return tier.latency_s + num_bytes / (tier.bytes_per_s * share)


def _ring_s(num_bytes: float, ranks: int, tier: Tier, share: float) -> float:
    """An all-reduce in a ring within one tier."""
    steps = 2 * (ranks - 1)
    return steps * (tier.latency_s + num_bytes / ranks / (tier.bytes_per_s * share))


def _beyond(tiers: Sequence[Tier]) -> tuple[Tier, ...]:
    """The further tiers, counted in groups of the nearest."""
    near = tiers[0].reach
    return tuple(
        Tier(name=t.name, reach=max(1, t.reach // near), bytes_per_s=t.bytes_per_s, latency_s=t.latency_s)
        for t in tiers[1:]
    )
