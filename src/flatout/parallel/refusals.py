"""Layouts that can be planned and not run: what stands in the way, and what to do."""

from __future__ import annotations

from torch import nn

from flatout.errors import PlanError
from flatout.parallel.experts import Experts
from flatout.records.scale import SPLIT, Layout


def refuse(model: nn.Module, layout: Layout) -> None:
    """Raises PlanError with the first reason why this model cannot be laid out so."""
    has_experts = any(isinstance(module, Experts) for module in model.modules())
    is_one_piece = layout.tensor == layout.pipeline == 1
    for is_so, why in (
        (
            layout.pipeline > 1 and layout.schedule in SPLIT and layout.shard == 3,
            f"schedule '{layout.schedule}' with shard 3: torch loses gradients of weights that are gathered once more for a "
            "backward in two halves; use shard 1 or 2, or another schedule",
        ),
        (
            layout.expert > 1 and not has_experts,
            f"expert {layout.expert}, and the model has no flatout.Experts to divide; use expert 1",
        ),
        (
            has_experts and layout.tensor > 1,
            f"tensor {layout.tensor} with flatout.Experts, whose rows have no fixed place; use tensor 1 and divide the experts",
        ),
        (
            layout.expert > 1 and layout.pipeline > 1,
            f"expert {layout.expert} with pipeline {layout.pipeline}: stages would exchange rows out of step; use one of them",
        ),
        (
            layout.compression != "none" and not is_one_piece,
            f"compression '{layout.compression}' is of replicated models; use tensor 1 and pipeline 1",
        ),
        (
            layout.offload != "none" and layout.offload_to == "disk",
            "offloading to the disk can be planned and is not built; use offload_to 'host'",
        ),
        (
            layout.offload == "weights" and not is_one_piece and not layout.shard,
            "weights in the host's memory of tensor and pipeline ranks need them sharded; use shard 3",
        ),
    ):
        if is_so:
            raise PlanError(why)
