"""What one layout costs: the seconds of its step, the memory of its stages, and what both follow from."""

from __future__ import annotations

from flatout.core.records.scale import Cluster, Constants, Layout, ModelShape, Price, Software
from flatout.machine.cost.roofline import memory_bytes, peak_flop_per_s
from flatout.machine.specs.catalog import load_spec
from flatout.scale.case import rate_dtype
from flatout.scale.intervals import interval_of
from flatout.scale.layers import hides_experts
from flatout.scale.memory import memory_of
from flatout.scale.rules import require_possible
from flatout.scale.search import model_flop, recomputed_flop
from flatout.scale.step import step_time
from flatout.scale.usual import usual_constants


def price(
    model: ModelShape,
    layout: Layout,
    cluster: Cluster,
    software: Software | None = None,
    constants: Constants | None = None,
    *,
    preset: str = "",
) -> Price:
    """The price of a step: seconds and their parts, an interval, memory by stage and kind, shares of the device's rate.

    Without `constants`, those that the device's data sheet says programs reach. `preset` names the software for the interval,
    which is as wide as predictions of such software on such devices were off (bench/planner.py).

    Raises PlanError when the layout cannot run the model on the cluster, with the rule and the nearest layout that can;
    HardwareError when the device's data sheet lacks a figure.
    """
    software = software or Software()
    require_possible(model, layout, cluster.num_devices)
    assumptions: tuple[str, ...] = (f"constants as they were given, not the data sheet's: {constants}",)
    if constants is None:
        constants, assumptions = usual_constants(model, cluster, software)
    step = step_time(model, layout, cluster, software, constants)
    interval = interval_of(model, cluster, preset)
    spec = load_spec(cluster.device)
    rate = peak_flop_per_s(spec, rate_dtype(software.dtype)) * layout.num_devices * step.total_s
    tokens = layout.global_batch * model.seq
    flop = model_flop(model, layout.global_batch)
    return Price(
        model=model,
        layout=layout,
        cluster=cluster,
        software=software,
        constants=constants,
        step=step,
        low_s=step.total_s / (1 + interval.high),
        high_s=step.total_s / (1 - interval.low),
        tokens_per_s=tokens / step.total_s,
        mfu=flop / rate,
        mfu_whole=model_flop(model, layout.global_batch, is_causal=False) / rate,
        hfu=(flop + recomputed_flop(model, layout)) / rate,
        stages=memory_of(model, layout, software, imbalance=constants.routing_imbalance),
        room_bytes=memory_bytes(spec),
        assumptions=(*assumptions, *_of_software(software, layout), *_of_network(cluster), interval.text),
    )


def _of_software(software: Software, layout: Layout) -> tuple[str, ...]:
    hidden = [
        *(["gradients behind the backward"] if software.has_overlap else []),
        *(
            [f"{software.tensor_hidden:.0%} of tensor ranks' collectives behind products"]
            if software.tensor_hidden and layout.tensor > 1
            else []
        ),
        *(["experts' exchanges behind another micro-batch"] if hides_experts(software, layout) else []),
    ]
    attention = {
        "fused": "never writes scores",
        "written": "writes scores",
        "megatron": "writes scores, with a fused softmax",
    }
    return (
        f"attention {attention[software.attention]}; products in {software.dtype}; gradients are reduced in "
        f"{software.gradient_bytes} bytes; the optimizer keeps {software.state_bytes} bytes a parameter; "
        f"{'no ' if not software.has_dropout else ''}dropout",
        f"hidden: {', '.join(hidden) or 'nothing'}",
    )


def _of_network(cluster: Cluster) -> tuple[str, ...]:
    return tuple(
        f"{tier.name}: {tier.bytes_per_s / 1e9:.0f} GB/s out of a device, {tier.latency_s * 1e6:.0f} us a message, within "
        f"{tier.reach} devices"
        for tier in cluster.tiers
    )
