"""Small models drawn by a number: a pool of tensors that grows by one operator after the other, outputs, carried states."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from math import prod
from random import Random
from typing import NamedTuple

import torch
from tests.blocks.inference.native.random_operators import BINARY, COMMON, RARE, SIZES, Step, fitted
from torch import Tensor, nn

_MOST = 1500
"""Numbers of a tensor."""


class Drawn(nn.Module):
    """A model: forward(inputs, states) gives outputs and new states."""

    def __init__(
        self, steps: list[tuple[Step, list[int]]], ends: list[int], news: list[tuple[Step, list[int]]], has_count: bool
    ) -> None:
        super().__init__()
        self.has_count = has_count
        self.steps, self.news = nn.ModuleList(s for s, _ in steps), nn.ModuleList(s for s, _ in news)
        self.args, self.new_args, self.ends = [a for _, a in steps], [a for _, a in news], ends
        self.register_buffer("count", torch.tensor([1.0, 2.0]))

    def pool(self, inputs: Sequence[Tensor], states: Sequence[Tensor]) -> list[Tensor]:
        found = [*inputs, *states]
        for step, args in zip(self.steps, self.args, strict=True):
            found.append(step(*(found[i] for i in args)))
        return found

    def forward(self, inputs: Sequence[Tensor], states: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        found = self.pool(inputs, states)
        news = [step(*(found[i] for i in args)) for step, args in zip(self.news, self.new_args, strict=True)]
        outs = [found[i] for i in self.ends]
        if self.has_count:
            self.count.mul_(0.5).add_(1.0)  # type: ignore[operator]
            outs.append(self.count * 2)  # type: ignore[operator]
        return outs, news


class Model(NamedTuple):
    """A drawn model, what it takes, and how it is told."""

    seed: int
    module: Drawn
    inputs: list[Tensor]
    states: list[Tensor]
    num_outputs: int

    def __str__(self) -> str:
        steps = [f"{s.label}{a}" for s, a in zip(self.module.steps, self.module.args, strict=True)]  # type: ignore[union-attr]
        news = [f"{s.label}{a}" for s, a in zip(self.module.news, self.module.new_args, strict=True)]  # type: ignore[union-attr]
        given = [tuple(t.shape) for t in (*self.inputs, *self.states)]
        return f"seed {self.seed}: {given} -> {', '.join(steps)}; out {self.module.ends}; carried {news}"


class Garden(nn.Module):
    """Several models beside each other, as one."""

    def __init__(self, models: Sequence[Model]) -> None:
        super().__init__()
        self.models = nn.ModuleList(m.module for m in models)
        self.counts = [(len(m.inputs), len(m.states)) for m in models]

    def forward(self, x: tuple[Tensor, ...], s: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        outs, news, i, j = [], [], 0, 0
        for module, (a, b) in zip(self.models, self.counts, strict=True):
            made, new = module(x[i : i + a], s[j : j + b])
            outs += made
            news += new
            i, j = i + a, j + b
        return (*outs, *news)


# --------------------------------------------------------------------------------------------------------------- models


def _added(draw: Random, pool: list[Tensor], is_odd: bool) -> tuple[Step, list[int], Tensor] | None:
    """One more step, or None where the draw does not fit."""
    last = range(max(0, len(pool) - 3), len(pool))
    at = draw.choice(last) if draw.random() < 0.7 else draw.randrange(len(pool))
    if pool[at].dtype != torch.float32:
        step, args = Step("to float", lambda x: x.to(torch.get_default_dtype()) * 0.1), [at]
    elif draw.random() < 0.2:
        other = draw.choice([i for i, t in enumerate(pool) if t.dtype == torch.float32])
        name = draw.choice(list(BINARY))
        fits = _joins(pool[at].shape, pool[other].shape)
        call, shape = BINARY[name], tuple(pool[at].shape)
        step = Step(name, call) if fits else Step(f"{name} fitted", lambda a, b: call(a, fitted(b, shape)))
        args = [at, other]
    else:
        x = pool[at] if pool[at].dim() else pool[at].reshape(1)
        inner = draw.choice(RARE if is_odd else COMMON)(draw, x)
        step, args = Step(inner.label, lambda m, x: m(x if x.dim() else x.reshape(1)), inner), [at]
    try:
        made = step.eval()(*(pool[i] for i in args))
    except (RuntimeError, ValueError):  # torch itself does not take it
        return None
    if made.numel() == 0 or made.numel() > _MOST or not bool(torch.isfinite(made).all()):
        return None
    if made.dtype == torch.float32 and made.abs().max() > 8:
        step = Step(f"{step.label}, tanh", lambda m, *xs: torch.tanh(m(*xs) * 0.1), step)
        made = step(*(pool[i] for i in args))
    return step, args, made


def _joins(a: Sequence[int], b: Sequence[int]) -> bool:
    try:
        return prod(torch.broadcast_shapes(tuple(a), tuple(b))) <= _MOST
    except RuntimeError:
        return False


def _carried(draw: Random, states: list[Tensor], first: int, pool: list[Tensor]) -> list[tuple[Step, list[int]]]:
    """How each state goes on."""
    news: list[tuple[Step, list[int]]] = []
    floats = [i for i, t in enumerate(pool) if t.dtype == torch.float32]
    for number, state in enumerate(states):
        me, other, shape = first + number, draw.choice(floats), tuple(state.shape)
        twins = [first + i for i, s in enumerate(states) if s.shape == state.shape]
        dim = draw.randrange(len(shape))
        row = (*shape[:dim], 1, *shape[dim + 1 :])
        kinds: dict[str, tuple[Callable[..., Tensor], list[int]]] = {
            "mixed": (lambda s, x, shape=shape: 0.7 * s + 0.3 * torch.tanh(fitted(x, shape)), [me, other]),
            "new": (lambda x, shape=shape: torch.tanh(fitted(x, shape)), [other]),
            f"shifted {dim}": (
                lambda s, x, d=dim, r=row: torch.cat((s.narrow(d, 1, s.shape[d] - 1), torch.tanh(fitted(x, r))), d),
                [me, other],
            ),
            "joined": (
                lambda s, x, d=dim, r=row: torch.cat((s, torch.tanh(fitted(x, r))), d).narrow(d, 1, s.shape[d]),
                [me, other],
            ),
            "counted": (lambda s: torch.fmod(s + 1, 7), [me]),
            "kept": (lambda s: s, [me]),
            "swapped": (lambda s: s, [draw.choice(twins)]),
            "rolled": (lambda s, d=dim: torch.roll(s, 1, d), [me]),
            "turned": (lambda s, shape=shape: s.permute(*reversed(range(len(shape)))).reshape(shape), [me]),
            "back": (lambda s, d=dim: torch.cat(s.split(1, d)[::-1], d) * 0.9, [me]),
        }
        name = draw.choice(list(kinds))
        call, args = kinds[name]
        news.append((Step(name, call), args))
    return news


def drawn(seed: int) -> Model:
    """The model of a number. One in eight tries operators that may be refused."""
    draw = Random(seed)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        most = draw.choice((1, 2, 3, 4))
        inputs = [
            torch.randn(
                [draw.choice(SIZES[:6]) if i else draw.choice((1, 1, 2, 3)) for i in range(draw.randint(1, most))]
            )
            for _ in range(draw.choice((1, 1, 2)))
        ]
        if draw.random() < 0.15:
            inputs.append(torch.randint(0, 4, (draw.choice((1, 3)),)))
        shapes = [
            [draw.choice((1, 2, 3, 5, 17)) for _ in range(draw.randint(1, 3))] for _ in range(draw.choice((0, 1, 1, 2)))
        ]
        if shapes and draw.random() < 0.3:
            shapes.append(shapes[0])
        states = [torch.randn(shape) * draw.choice((0.0, 1.0)) for shape in shapes]
        pool, steps = [*inputs, *states], []
        wanted, is_odd = draw.randint(2, 7), draw.random() < 0.125
        for attempt in range(40):
            if len(steps) >= wanted:
                break
            found = _added(draw, pool, is_odd and attempt == 1)
            if found:
                steps.append(found[:2])
                pool.append(found[2])
        ends = [len(pool) - 1, *draw.sample(range(len(pool)), draw.choice((0, 0, 1, 2)) if len(pool) > 2 else 0)]
        if draw.random() < 0.1:
            ends.append(ends[0])
        news, has_count = _carried(draw, states, len(inputs), pool), draw.random() < 0.1
    return Model(seed, Drawn(steps, ends, news, has_count).eval(), inputs, states, len(ends) + has_count)


def fresh(model: Model, seed: int) -> list[Tensor]:
    """Other inputs of one event."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(t.shape, generator=generator)
        if t.is_floating_point()
        else torch.randint(0, 4, t.shape, generator=generator)
        for t in model.inputs
    ]


def in_double(module: nn.Module) -> nn.Module:
    """A copy that computes in float64."""
    return copy.deepcopy(module).double()
