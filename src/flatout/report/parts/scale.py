"""Layouts in the order of their steps' seconds, as text: where each step's time goes, and what its fullest device holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from flatout.core import units
from flatout.core.records.failure import Goodput
from flatout.core.records.scale import Layout, ModelShape, ParetoLayout, Ranked, StageMemory, StepFootprint
from flatout.report.document import Block, Column, Table, numbers
from flatout.scale.sizes import num_parameters

STEP_PARTS = (
    ("compute_s", "compute"),
    ("host_s", "host"),
    ("tensor_s", "tensor"),
    ("context_s", "context"),
    ("expert_s", "expert"),
    ("bubble_s", "bubble"),
    ("data_s", "data"),
    ("offload_s", "copies"),
    ("optimizer_s", "update"),
    ("straggler_s", "stragglers"),
    ("step_s", "the loop"),
)
"""Parts of a step's seconds, and what they are called."""
_SHARDS = {0: "", 1: " (zero-1)", 2: " (zero-2)", 3: " (fsdp)"}


def ranking_blocks(ranked: Sequence[Ranked], *, tokens: int, num_devices: int) -> Iterator[Block]:
    """A row a layout, and what the words mean; `tokens` of a step."""
    rows = []
    for place, one in enumerate(ranked, start=1):
        step = one.step
        shares = [(getattr(step, name) / step.total_s, word) for name, word in STEP_PARTS]
        rows.append(
            [
                f"{place}",
                layout_text(one.layout),
                f"{step.total_s:.3f} s",
                f"{one.low_s:.2f} - {one.high_s:.2f} s",
                f"{one.mfu:.0%}",
                prefixed(tokens / step.total_s),
                _gib(one.memory.total_bytes),
                ", ".join(f"{word} {share:.0%}" for share, word in shares if share >= 0.005),
            ]
        )
    figures = numbers("step", "interval", "MFU", "tokens/s", "memory")
    yield Table([*numbers(""), Column("layout"), *figures, Column("where the step goes")], rows, inset=0)
    if ranked:
        best = ranked[0].layout
        yield (
            f"{best.micro_batch} x {best.num_micro_batches}: micro-batches of {units.counted(best.micro_batch, 'sample')}, "
            f"{best.num_micro_batches} of them a step on each data rank; memory of the fullest device; MFU without what is "
            "computed again"
        )
        hours, days = _hours(ranked[0].step.total_s, tokens, num_devices, 1e12)
        yield f"a trillion tokens by the first: {prefixed(hours)} GPU-hours, {days:.1f} days"


def pareto_blocks(
    rows: Sequence[ParetoLayout], *, tokens: int, run_tokens: float, price: float | None, most: int, name: str
) -> Iterator[Block]:
    """A row a layout, the most devices first, `most` of each number; `tokens` of a step, `run_tokens` of the run."""
    steps = run_tokens / tokens
    shown: Counter[int] = Counter()
    table = []
    for row in rows:
        shown[row.num_devices] += 1
        if shown[row.num_devices] > most:
            continue
        step_s = row.ranked.step.total_s
        hours = row.device_s * steps / 3600
        table.append(
            [
                f"{row.num_devices}" if shown[row.num_devices] == 1 else "",
                layout_text(row.ranked.layout),
                f"{step_s:.3f} s",
                f"{row.ranked.mfu:.0%}",
                _gib(row.ranked.memory.total_bytes),
                _long(step_s * steps),
                prefixed(hours),
                "-" if row.energy_j is None else f"{row.energy_j * steps / 3.6e9:,.1f}",
                *([prefixed(hours * price)] if price is not None else []),
            ]
        )
    figures = numbers("step", "MFU", "memory", "the run", "GPU-hours", "MWh", *(["cost"] if price is not None else []))
    yield f"{name}, {prefixed(run_tokens)} tokens, {tokens:,} of them a step"
    yield Table([*numbers("devices"), Column("layout"), *figures], table, inset=0)
    yield (
        "no layout here is beaten by another in seconds, memory of the fullest device and number of devices; MWh at the limit of "
        "power, without hosts, network and cooling"
    )
    if left := sum(max(0, number - most) for number in shown.values()):
        yield f"{units.counted(left, 'more layout')} with less memory: --top, or --json"


def run_lines(
    step_s: float,
    *,
    tokens: int,
    num_devices: int,
    run_tokens: float,
    expected: Goodput | None = None,
    price: float | None = None,
) -> Iterator[str]:
    """What a run of `run_tokens` takes by steps of so many seconds and tokens: without failures, with what they leave of its
    time, and in money at `price` a GPU-hour."""
    hours, days = _hours(step_s, tokens, num_devices, run_tokens)
    yield f"{prefixed(run_tokens)} tokens without failures: {prefixed(hours)} GPU-hours, {days:.1f} days{_cost(hours, price)}"
    if expected is None:
        return
    yield (
        f"interrupted every {_long(expected.mtbf_s)} in the mean, checkpoint every {_long(expected.interval_s)}: "
        f"{expected.goodput:.1%} of the time is kept; saving {expected.saving:.1%}, work done twice {expected.lost:.1%}, "
        f"restarts {expected.down:.1%}"
    )
    hours, days = hours / expected.goodput, days / expected.goodput
    yield f"{prefixed(run_tokens)} tokens with failures: {prefixed(hours)} GPU-hours, {days:.1f} days{_cost(hours, price)}"


def _hours(step_s: float, tokens: int, num_devices: int, run_tokens: float) -> tuple[float, float]:
    """(GPU-hours, days) of a run."""
    run_s = step_s * run_tokens / tokens
    return run_s * num_devices / 3600, run_s / 86400


def _long(seconds: float) -> str:
    """
    >>> _long(864000), _long(177632), _long(1500)
    ('10.0 days', '49.3 hours', '25.0 minutes')
    """
    if seconds >= 3 * 86400:
        return f"{seconds / 86400:.1f} days"
    return f"{seconds / 3600:.1f} hours" if seconds >= 7200 else f"{seconds / 60:.1f} minutes"


def _cost(hours: float, price: float | None) -> str:
    return "" if price is None else f", {prefixed(hours * price)} at {price:g} a GPU-hour"


def layout_text(layout: Layout) -> str:
    """Name the degrees of a layout that are more than one, then what is sharded, recomputed and offloaded.

    >>> layout_text(Layout(tensor=4, pipeline=2, data=8, micro_batch=1, global_batch=64, shard=1, recompute="full"))
    'tensor 4, pipeline 2, data 8 (zero-1), 1 x 8, recompute full'
    >>> layout_text(Layout(context=4, pipeline=2, data=2, global_batch=64, schedule="zbv", offload="state", shard=1))
    'context 4, pipeline 2 zbv, data 2 (zero-1), 1 x 32, state on the host'
    """
    words = [f"tensor {layout.tensor}"] if layout.tensor > 1 else []
    words += [f"context {layout.context}"] if layout.context > 1 else []
    if layout.pipeline > 1:
        chunks = f"x{layout.chunks}" if layout.chunks > 1 else ""
        schedule = f" {layout.schedule}" if layout.schedule != "1f1b" else ""
        words.append(f"pipeline {layout.pipeline}{chunks}{schedule}")
    shard = _SHARDS[layout.shard]
    if layout.shard_ranks:
        shard = f"{shard[:-1]} in {layout.shard_ranks}s)"
    words.append(f"data {layout.data}{shard}")
    words += [f"expert {layout.expert}"] if layout.expert > 1 else []
    words.append(f"{layout.micro_batch} x {layout.num_micro_batches}")
    again = " and ".join(layout.recomputed) if layout.recomputed else layout.recompute
    words += [f"recompute {again}"] if layout.recompute != "none" else []
    words += [f"{layout.offload} on the {layout.offload_to}"] if layout.offload != "none" else []
    words += [f"{layout.compression} gradients (changes results)"] if layout.compression != "none" else []
    return ", ".join(words)


def memory_lines(memory: StageMemory) -> Iterator[str]:
    """A bar a part of the device's memory, and what lies elsewhere."""
    parts = [(name.removesuffix("_bytes"), getattr(memory, name)) for name in memory.__struct_fields__]
    for name, size in parts:
        if size and name != "host":
            yield f"   {name:11} {_gib(size):>9}  {'#' * max(1, round(40 * size / memory.total_bytes))}"
    if memory.host_bytes:
        yield f"   and {_gib(memory.host_bytes)} a device in the host's memory or on its disk"


BOUND = (
    "An upper bound for what is counted: every tensor that a layer keeps, as many micro-batches as the schedule ever holds, "
    "1.5 GiB for the driver and libraries, and 6 % of what comes and goes for the allocator. Not in it: what your own code "
    "keeps besides (metrics, a second model, an average of the weights)."
)
"""What memory that is counted is good for."""


def accounting_lines(model: ModelShape) -> Iterator[str]:
    """What all devices together hold of weights, gradients and the optimizer's state, counted in the two ways that people do."""
    of_layers, of_embedding = num_parameters(model)
    parameters = of_layers + of_embedding * (1 if model.is_tied else 2)
    yield (
        f"{parameters / 1e9:.1f} G parameters. Mixed precision with Adam, 16 bytes each (weights 2, gradients 2, float32 "
        f"weights 4, two moments 4 each): {_tb(16 * parameters)}, and activations besides."
    )
    yield (
        f"Counted as four parts of 4 bytes each (weights, gradients, activations, optimizer): {_tb(4 * parameters)} each "
        f"({4 * parameters / 2**30:.0f} GiB), {_tb(16 * parameters)} ({16 * parameters / 2**30:.0f} GiB): the same total by "
        "chance, with one moment too few, and activations that no batch has a say in."
    )


def footprint_lines(found: StepFootprint, with_slack: int) -> Iterator[str]:
    """What a step holds, and when."""
    others = max(0, found.persistent_bytes - found.weight_bytes - found.gradient_bytes)
    yield f"weights {_gib(found.weight_bytes)}, gradients {_gib(found.gradient_bytes)}, kept between steps besides {_gib(others)}"
    yield f"at most {_gib(found.peak_bytes)} in tensors, {_gib(with_slack)} with libraries and fragments"


def _tb(num_bytes: float) -> str:
    return f"{num_bytes / 1e12:.2f} TB" if num_bytes >= 1e11 else f"{num_bytes / 1e9:.1f} GB"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


def prefixed(number: float) -> str:
    """Three digits of a number and k, M, G or T.

    >>> prefixed(470562.0), prefixed(31.0)
    ('471k', '31')
    """
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"
