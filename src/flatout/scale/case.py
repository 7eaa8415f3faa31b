"""What a predicted step follows from: a model, its layout, the cluster, the software, and constants."""

from __future__ import annotations

from typing import NamedTuple

from flatout.core.records.scale import Cluster, Constants, Layout, ModelShape, Software
from flatout.scale.sizes import number_bytes


class StepCase(NamedTuple):
    """All that the seconds of one step depend on."""

    model: ModelShape
    layout: Layout
    cluster: Cluster
    software: Software
    constants: Constants

    @property
    def width(self) -> int:
        """Bytes of a weight or an activation."""
        return number_bytes(self.software)

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on one context rank."""
        return self.layout.micro_batch * self.model.seq // self.layout.context

    @property
    def product_dtype(self) -> str:
        """The type in which products of the head, and of attention, are made: 8 bits are for weights of layers alone."""
        return "bfloat16" if self.software.dtype in ("float8", "mxfp8", "nvfp4") else self.software.dtype


def rate_dtype(dtype: str) -> str:
    """The type of the data sheet's rate by which products of a type are made."""
    return {"mxfp8": "float8", "nvfp4": "float4"}.get(dtype, dtype)
