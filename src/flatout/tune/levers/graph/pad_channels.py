"""Convolutions from or to few channels computed with eight, the number that a GPU's matrix units take.

What        `nn.Conv2d` layers with fewer than eight channels on a side get channels of zeros beside them
            (`flatout.pad_few_channels`), from a model's first call on; state dict and parameters stay.
Guarantee   BOUNDED: the same sums, and zeros, in another order.
Refuses     Processors, which have no such units; models without such layers, or where they take little.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from flatout.blocks.training.few_channels import UNIT
from flatout.core.parts import lever
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.core.records.lever import Candidate, Hooks, Parameters
from flatout.tune.levers.convolutions import call_behind_models, change_layers, propose_on_gpus

_MOST: Final = 0.8
"""The share of these convolutions' time that is promised at most, in our judgement."""


def propose(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Candidate]:
    """Propose it where convolutions of few channels are part of a step on a GPU."""
    yield from propose_on_gpus(
        evidence,
        lambda shapes: len(shapes.weight) == 4 and min(shapes.weight[:2]) < UNIT,
        what=f"convolutions of fewer than {UNIT} channels",
        least=0.005,
        most=_MOST,
        on_cpu="processors have no matrix units that take channels by the eight",
    )


def apply(hooks: Hooks, parameters: Parameters) -> None:
    """Change the layers of each model at its first call."""
    from flatout.blocks.training.few_channels import PaddedConvolution, pad_few_channels

    change_layers(hooks, LEVER.id, pad_few_channels, PaddedConvolution)


def edit(text: str, parameters: Parameters) -> str:
    """Write the call after the statement that constructs a model."""
    return call_behind_models(text, "pad_few_channels")


LEVER = lever(__name__, propose, apply=apply, edit=edit, title="Few channels padded to eight")
