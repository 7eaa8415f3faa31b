"""Layouts in the order of their steps' seconds, as text: where each step's time goes, and what its fullest device holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flatout.records.scale import Layout, ModelShape, Ranked, StageMemory, StepFootprint
from flatout.simulate.step import num_parameters

_PARTS = (
    ("compute_s", "compute"),
    ("host_s", "host"),
    ("tensor_s", "tensor"),
    ("bubble_s", "bubble"),
    ("data_s", "data"),
    ("optimizer_s", "update"),
)


def ranking_lines(ranked: Sequence[Ranked], *, tokens: int, num_devices: int) -> Iterator[str]:
    """A heading and a line a layout."""
    yield f"{'':3}{'layout':44} {'step':>9} {'interval':>15} {'MFU':>5} {'tokens/s':>9}  {'memory':>8}  where the step goes"
    for place, one in enumerate(ranked, 1):
        step = one.step
        shares = [(getattr(step, name) / step.total_s, word) for name, word in _PARTS]
        where = ", ".join(f"{word} {share:.0%}" for share, word in shares if share >= 0.005)
        yield (
            f"{place:2} {layout_text(one.layout):44} {step.total_s:7.3f} s {one.low_s:6.2f} - {one.high_s:.2f} s "
            f"{one.mfu:5.0%} {_short(tokens / step.total_s):>9}  {_gib(one.memory.total_bytes):>8}  {where}"
        )
    if ranked:
        best = ranked[0].step.total_s
        hours = best * num_devices / 3600 * 1e12 / tokens
        yield f"a trillion tokens by the first: {_short(hours)} GPU-hours, {best * 1e12 / tokens / 86400:.1f} days"


def layout_text(layout: Layout) -> str:
    """
    >>> layout_text(Layout(tensor=4, pipeline=2, data=8, micro_batch=1, global_batch=64, shard=1, recompute="full"))
    'tensor 4, pipeline 2, data 8 (zero-1), 1 x 8, recompute full'
    """
    shard = {0: "", 1: " (zero-1)", 2: " (zero-2)", 3: " (fsdp)"}[layout.shard]
    words = [f"tensor {layout.tensor}"] if layout.tensor > 1 else []
    if layout.pipeline > 1:
        words.append(f"pipeline {layout.pipeline}" + (f"x{layout.chunks}" if layout.chunks > 1 else ""))
    words += [f"data {layout.data}{shard}", f"{layout.micro_batch} x {layout.num_micro_batches}"]
    return ", ".join([*words, *([f"recompute {layout.recompute}"] if layout.recompute != "none" else [])])


def memory_lines(memory: StageMemory) -> Iterator[str]:
    """A bar a part."""
    parts = [(name.removesuffix("_bytes"), getattr(memory, name)) for name in memory.__struct_fields__]
    for name, size in parts:
        if size:
            yield f"   {name:11} {_gib(size):>9}  {'#' * max(1, round(40 * size / memory.total_bytes))}"


def accounting_lines(model: ModelShape) -> Iterator[str]:
    """What all devices together hold of weights, gradients and the optimizer's state, counted in the two ways that people do."""
    of_layer, of_embedding = num_parameters(model)
    parameters = of_layer * model.layers + of_embedding * (1 if model.is_tied else 2)
    yield (
        f"{parameters / 1e9:.1f} G parameters. Mixed precision with Adam, 16 bytes each (weights 2, gradients 2, float32 "
        f"weights 4, two moments 4 each): {_tb(16 * parameters)}, and activations besides."
    )
    yield (
        f"Counted as four parts of 4 bytes each (weights, gradients, activations, optimizer): {_tb(4 * parameters)} each, "
        f"{_tb(16 * parameters)}: the same total by chance, with one moment too few, and activations that no batch has a say in."
    )


def footprint_lines(found: StepFootprint, with_slack: int) -> Iterator[str]:
    """What a step holds, and when."""
    others = max(0, found.kept_bytes - found.weight_bytes - found.gradient_bytes)
    yield f"weights {_gib(found.weight_bytes)}, gradients {_gib(found.gradient_bytes)}, kept between steps besides {_gib(others)}"
    yield f"at most {_gib(found.peak_bytes)} in tensors, {_gib(with_slack)} with libraries and fragments"


def _tb(num_bytes: float) -> str:
    return f"{num_bytes / 1e12:.2f} TB" if num_bytes >= 1e11 else f"{num_bytes / 1e9:.1f} GB"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


def _short(number: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"
