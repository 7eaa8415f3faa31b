"""Drawn models against eager: a few carried events, every way to step, with rubbish in the work memory."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from tests.blocks.inference.native.bare import Array, Bare
from tests.blocks.inference.native.random_models import Garden, Model, drawn, fresh, in_double
from torch import Tensor, nn

from flatout.blocks.inference.native.program import Program
from flatout.core.errors import NativeError

_EVENTS = 4
_STREAMS = (1, 8, 11)
_ERROR = 1e-5
"""Of an output's largest number. Where eager itself is farther from float64, four times its own error."""


_BUGS = (AssertionError, AttributeError, IndexError, KeyError, TypeError, ValueError, RuntimeError)
"""Of the generation, on the way to C."""


class Verdict(NamedTuple):
    """What became of a model: "equal", "refused" or "wrong", and why."""

    model: Model
    kind: str
    why: str = ""


def judged(seeds: Sequence[int], folder: Path) -> list[Verdict]:
    """All of these models, in one file of C."""
    return verdicts([drawn(seed) for seed in seeds], folder)


def verdicts(models: list[Model], folder: Path) -> list[Verdict]:
    """As many at once as are not refused."""
    try:
        bare = built(models, folder)
    except (NativeError, *_BUGS) as e:
        if len(models) == 1:
            told = str(e) if isinstance(e, (NativeError, AssertionError)) and str(e) else f"{type(e).__name__}: {e}"
            return [Verdict(models[0], "refused" if isinstance(e, NativeError) else "wrong", told)]
        half = len(models) // 2
        return [*verdicts(models[:half], folder), *verdicts(models[half:], folder)]
    why: dict[int, str] = {}
    for number, text in differences(models, bare):
        why.setdefault(number, text)
    return [Verdict(m, "wrong" if i in why else "equal", why.get(i, "")) for i, m in enumerate(models)]


def built(models: list[Model], folder: Path) -> Bare:
    """A garden of them, compiled."""
    garden = Garden(models).eval()
    inputs, states = tuple(t for m in models for t in m.inputs), tuple(t for m in models for t in m.states)
    kept = {n: t.clone() for n, t in garden.named_buffers()}
    name = f"m{models[0].seed}_{len(models)}"
    generated = Program.of(garden, (inputs, states), "s" if states else (), name).generated()
    assert all(torch.equal(t, kept[n]) for n, t in garden.named_buffers()), "exporting changed a buffer"
    return Bare(generated, folder, extra=("-O0",))  # gardens are large, and are called a few times


def rolled_out(models: list[Model], events: list[list[Tensor]], is_double: bool) -> list[list[Tensor]]:
    """What eager gives."""
    garden: nn.Module = Garden(models).eval()
    garden = in_double(garden) if is_double else copy.deepcopy(garden)
    wide = torch.float64 if is_double else torch.float32
    states = [t.to(wide) for m in models for t in m.states]
    was, count, found = torch.get_default_dtype(), sum(m.num_outputs for m in models), []
    torch.set_default_dtype(wide)
    try:
        with torch.no_grad():
            for inputs in events:
                made = garden(tuple(t.to(wide) if t.is_floating_point() else t for t in inputs), tuple(states))
                found.append([t.clone() for t in made[:count]])
                states = [t.clone() for t in made[count:]]
    finally:
        torch.set_default_dtype(was)
    return found


def differences(models: list[Model], bare: Bare) -> Iterator[tuple[int, str]]:
    """(number of the model, what is wrong with it)."""
    owner = [i for i, m in enumerate(models) for _ in range(m.num_outputs)]
    events = [[t for m in models for t in fresh(m, 1000 * e + m.seed)] for e in range(_EVENTS)]
    eager, exact = rolled_out(models, events, False), rolled_out(models, events, True)
    states, arrays = bare.states(), [[t.numpy() for t in inputs] for inputs in events]
    stepped = [bare.step(states, inputs) for inputs in arrays]
    for event, (ours, theirs, true) in enumerate(zip(stepped, eager, exact, strict=True)):
        for at, (a, b, c) in enumerate(zip(ours, theirs, true, strict=True)):
            error, allowed = _errors(a, b, c)
            if not error <= allowed:
                yield owner[at], f"event {event}, output {at}: error {error:.2e} of {allowed:.2e}"
    yield from _ways(bare, arrays, stepped, owner)


def _errors(ours: Array, eager: Tensor, exact: Tensor) -> tuple[float, float]:
    a, b, c = torch.from_numpy(ours.copy()).double(), eager.double(), exact.double()
    scale = max(float(b.abs().max()), 1e-2)  # a sum of numbers around 1 may be nearly 0
    return float((a - b).abs().max()), _ERROR * scale + 4 * float((b - c).abs().max())


def _ways(
    bare: Bare, events: list[list[Array]], stepped: list[list[Array]], owner: list[int]
) -> Iterator[tuple[int, str]]:
    states = bare.states()
    many = bare.step_many(states, [np.stack(each) for each in zip(*events, strict=True)], len(events))
    yield from _unequal("step_many", [[m[e] for m in many] for e in range(len(events))], stepped, owner)
    middle = bare.states()
    bare.step(middle, events[0])
    again = bare.states()
    bare.restore(again, bare.snapshot(middle))
    yield from _unequal("restore", [bare.step(again, inputs) for inputs in events[1:]], stepped[1:], owner)
    for n in _STREAMS:
        states = bare.states(n)
        for event in range(2):
            inputs = [
                np.stack([events[(event + i) % len(events)][at] for i in range(n)]) for at in range(len(events[0]))
            ]
            outs = bare.step_streams(states, inputs, n)
        for i in {0, n // 2, n - 1}:
            alone = bare.states()
            bare.step(alone, events[i % len(events)])
            one = bare.step(alone, events[(i + 1) % len(events)])
            yield from _unequal(f"stream {i} of {n}", [[o[i] for o in outs]], [one], owner)


def _unequal(
    what: str, ours: list[list[Array]], theirs: list[list[Array]], owner: list[int]
) -> Iterator[tuple[int, str]]:
    for event, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        for at, (x, y) in enumerate(zip(a, b, strict=True)):
            if x.tobytes() != y.tobytes():
                yield owner[at], f"{what}, event {event}, output {at}: other bits than step"
