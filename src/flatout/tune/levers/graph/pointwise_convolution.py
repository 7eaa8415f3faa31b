"""Convolutions of single pixels as matrix products, forward and backward.

What        `nn.Conv2d` layers of 1 x 1 with stride 1 compute by `F.linear`, or by `torch.matmul` where channels are outermost
            (`flatout.pointwise_convolutions_as_products`), from a model's first call on; state dict and parameters stay.
Guarantee   BOUNDED: the same sums in another order.
Refuses     Processors, whose convolutions of single pixels were as fast or faster than products; models without such, or where
            they take little.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from flatout.core.parts import lever
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.core.records.lever import Candidate, Hooks, Parameters
from flatout.tune.levers.convolutions import call_behind_models, change_layers, propose_on_gpus

_MOST: Final = 0.8
"""The share of these convolutions' time that is promised at most. In a U-Net's step gradients of 1 x 1 convolutions took
up to 14 times as long as their bytes (bench/results/2026-11-30-h200, account_unet_plan)."""


def propose(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Candidate]:
    """Propose it where convolutions of single pixels are part of a step on a GPU."""
    yield from propose_on_gpus(
        evidence,
        lambda shapes: shapes.weight[2:] == (1, 1) and shapes.image[2:] == shapes.result[2:],
        what="convolutions of 1 x 1, which are products of matrices,",
        least=0.02,
        most=_MOST,
        on_cpu="on processors convolutions of single pixels are as fast as products",
    )


def apply(hooks: Hooks, parameters: Parameters) -> None:
    """Change the layers of each model at its first call."""
    from flatout.blocks.training.pointwise_convolutions import PointwiseConvolution, pointwise_convolutions_as_products

    change_layers(hooks, LEVER.id, pointwise_convolutions_as_products, PointwiseConvolution)


def edit(text: str, parameters: Parameters) -> str:
    """Write the call after the statement that constructs a model."""
    return call_behind_models(text, "pointwise_convolutions_as_products")


LEVER = lever(__name__, propose, apply=apply, edit=edit, title="Convolutions of single pixels as products")
