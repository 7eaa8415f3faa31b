"""What a predicted step follows from: a model, its layout, the cluster, the software, and constants."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from msgspec import structs

from flatout.core.records.scale import Cluster, Constants, Layout, ModelShape, Software, Tier
from flatout.scale.sizes import number_bytes


class StepCase(NamedTuple):
    """All that the seconds of one step depend on."""

    model: ModelShape
    layout: Layout
    cluster: Cluster
    software: Software
    constants: Constants

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """The cluster's tiers with the bandwidth that collectives reach of them."""
        return _reached(self.cluster.tiers, self.constants.link_share, self.constants.fabric_share)

    @property
    def width(self) -> int:
        """Bytes of a weight or an activation."""
        return number_bytes(self.software)

    @property
    def gathered_width(self) -> int:
        """Bytes of a weight as those that share it send it."""
        is_small = self.software.gathers_eight and self.software.dtype in ("float8", "mxfp8")
        return 1 if is_small else self.width

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on one context rank."""
        return self.layout.micro_batch * self.model.seq // self.layout.context

    @property
    def product_dtype(self) -> str:
        """The type in which products of the head, and of attention, are made: 8 bits are for weights of layers alone."""
        return "bfloat16" if self.software.dtype in ("float8", "mxfp8", "nvfp4") else self.software.dtype


@lru_cache(maxsize=1024)
def _reached(tiers: tuple[Tier, ...], near: float, far: float) -> tuple[Tier, ...]:
    return tuple(
        structs.replace(tier, bytes_per_s=tier.bytes_per_s * (far if number else near))
        for number, tier in enumerate(tiers)
    )


def rate_dtype(dtype: str) -> str:
    """The type of the data sheet's rate by which products of a type are made."""
    return {"mxfp8": "float8", "nvfp4": "float4"}.get(dtype, dtype)
