"""A variable of the environment turns a fast path between ranks off, or has every collective checked or logged.

Costs        The transfer over the slower path that is left, or the check of each call; how much that is, a comparison shows.
Evidence     Variables of NCCL and of torch.distributed, the exposed transfer of a step, whether ranks are on several hosts.
Levers       none
False alarm  A setting for hardware that is broken or has no such path; one that is set to find a bug, for as long as that takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Note
from flatout.machine.cost.accounting import setting_of

_TRUE: Final = ("1", "true", "yes", "on")


class _Variable(NamedTuple):
    """A variable, the values that matter ('*' any), and what they do; for one backend ('' any), or several hosts alone."""

    name: str
    values: tuple[str, ...]
    effect: str
    needs: str = "nccl"
    across: bool = False


_VARIABLES: Final = (
    _Variable("NCCL_P2P_DISABLE", _TRUE, "GPUs of a node exchange through the host's memory, not over NVLink or PCIe"),
    _Variable(
        "NCCL_P2P_LEVEL", ("loc", "0"), "GPUs of a node exchange through the host's memory, not over NVLink or PCIe"
    ),
    _Variable("NCCL_SHM_DISABLE", _TRUE, "ranks of a node without a direct path go through the network"),
    _Variable("NCCL_IB_DISABLE", _TRUE, "nodes talk over TCP, not InfiniBand or RoCE", across=True),
    _Variable("NCCL_NET", ("socket",), "nodes talk over TCP, not InfiniBand or RoCE", across=True),
    _Variable("NCCL_NET_GDR_LEVEL", ("loc", "0"), "the network reaches GPUs through the host's memory", across=True),
    _Variable("NCCL_ALGO", ("*",), "one algorithm is forced for all sizes; NCCL chooses by size otherwise"),
    _Variable("NCCL_PROTO", ("*",), "one protocol is forced for all sizes; NCCL chooses by size otherwise"),
    _Variable("NCCL_MAX_NCHANNELS", ("1", "2", "3", "4"), "so few channels do not fill the links"),
    _Variable("NCCL_MAX_CTAS", ("1", "2", "3", "4"), "so few blocks do not fill the links"),
    _Variable("NCCL_DEBUG", ("trace",), "every call is logged"),
    _Variable("TORCH_NCCL_BLOCKING_WAIT", _TRUE, "the host waits for each collective"),
    _Variable("TORCH_DISTRIBUTED_DEBUG", ("detail",), "ranks compare each collective with one another first", needs=""),
)
"""NVIDIA Collective Communication Library, Environment Variables (2.27); torch.distributed, Debugging (2.11)."""


def note(evidence: Evidence) -> Iterator[Note]:
    """Yield a note for each variable that is set so."""
    distributed = evidence.distributed
    if distributed is None:
        return
    is_across = len({rank.host for rank in distributed.ranks}) > 1
    transfer_s = sum(collective.transfer_s for collective in distributed.collectives)
    share = f"{transfer_s * 1e3:.2f} ms of each step are exposed transfer" if transfer_s > 0 else ""
    for variable in _VARIABLES:
        value = setting_of(evidence, variable.name)
        is_set = value.lower() in variable.values or (bool(value) and "*" in variable.values)
        if is_set and variable.needs in distributed.backend and (is_across or not variable.across):
            yield Note(
                where=None,
                text=f"{variable.name}={value}: {variable.effect}; {f'{share}, ' if share else ''}unset it and compare",
            )


RULE = rule(__name__, note=note)
