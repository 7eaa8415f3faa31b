"""Constants of a device and of the software on it where nothing was measured: what the data sheet says that programs reach."""

from __future__ import annotations

from typing import NamedTuple

from msgspec import structs

from flatout.core.records.hardware import HardwareSpec, Reached, ReachedBy
from flatout.core.records.scale import Cluster, Constants, ModelShape, Software
from flatout.machine.specs.catalog import load_spec


class Usual(NamedTuple):
    """Constants, and in words what each follows from."""

    constants: Constants
    assumptions: tuple[str, ...]


def usual_constants(
    model: ModelShape, cluster: Cluster, software: Software, constants: Constants | None = None
) -> Usual:
    """Constants for the cluster's device as far as its data sheet has measured shares; the others are as given, or an A100's.

    Raises HardwareError when there is no such data sheet.
    """
    spec, before = load_spec(cluster.device), constants or Constants()
    found: dict[str, float] = {}
    assumptions: list[str] = []
    wanted: tuple[tuple[str, ReachedBy, str, str, int], ...] = (
        ("product_share", "products", software.dtype, "", 0),
        ("memory_share", "memory", "bfloat16", "", 0),
        ("attention_share", "attention", "bfloat16", software.kernels, model.head_width),
        ("attention_backward_share", "attention-backward", "bfloat16", software.kernels, model.head_width),
    )
    for name, what, dtype, kernels, head_width in wanted:
        if software.attention != "fused" and name.startswith("attention"):
            continue
        best = reached_share(spec, what, dtype=dtype, kernels=kernels, head_width=head_width)
        words = _WORDS[what]
        if best is None:
            assumptions.append(
                f"{words} reach {getattr(before, name):.0%} of the data sheet's rate: assumed, nothing is known of {spec.id}"
            )
            continue
        found[name] = best.share.value
        if kernels and best.kernels != kernels:
            words += f" (of other kernels: the data sheet does not know '{kernels}')"
        assumptions.append(
            f"{words} reach {best.share.value:.0%} of the data sheet's rate ({best.share.condition}; {best.share.source})"
        )
    return Usual(structs.replace(before, **found), tuple(assumptions))


_WORDS: dict[ReachedBy, str] = {
    "products": "products",
    "memory": "operators that only read and write",
    "attention": "attention's forward products",
    "attention-backward": "attention's backward products",
}


def reached_share(
    spec: HardwareSpec, what: ReachedBy, *, dtype: str = "bfloat16", kernels: str = "", head_width: int = 0
) -> Reached | None:
    """The data sheet's entry that fits best: of this dtype, of these kernels or of any, of the nearest width of heads.

    None where there is none of that dtype.
    """
    dtype = {"float16": "bfloat16"}.get(dtype, dtype)
    rows = [row for row in spec.reached if row.what == what and row.dtype == dtype and row.kernels in (kernels, "")]
    if kernels and any(row.kernels for row in rows):
        rows = [row for row in rows if row.kernels]
    return min(rows, key=lambda row: abs((row.head_width or head_width) - head_width), default=None)
