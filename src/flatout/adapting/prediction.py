"""What a training step would take with a method, before anything is changed.

The plain model's step is timed on a copy: forward with and without a graph for backward, the whole, and its optimizer. A copy
without data tells which operators the plain and the adapted step run (flatout.adapting.ledger); each different one is timed
alone, all in the same rounds as the plain step. The sums of these times say how much longer each part gets:

    forward     without a graph, as the sums over forward's operators, beginning with those that run when nothing is trained;
                what the graph adds to it, as the number of backward's operators
    backward    as the sums over backward's operators
    optimizer   timed on parameters of the trained shapes

What is outside of operators (Python, autograd's own work, memory that is fresh) is so taken to grow with them.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from flatout.adapting.adapted import adapt
from flatout.adapting.ledger import Call, Ledger, Like, Loss, recorded, squares, without_graph
from flatout.errors import UsageError
from flatout.measure.stats import median, median_estimate
from flatout.measure.timer import Clock, clock_for, compare
from flatout.records.adapting import Method, Prediction, StepCost

Optimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: Final[dict[str, Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
}
_FORWARD, _BARE, _STEP = "forward", "forward without a graph", "step"


def predicted(
    model: nn.Module,
    inputs: Sequence[Any],
    *methods: Method,
    loss: Loss = squares,
    optimizer: str | Optimizer = "adamw",
    max_time_s: float = 10.0,
    clock: Clock | None = None,
) -> tuple[Prediction, ...]:
    """What each method would cost, beside the plain model's step, in the mode (train or eval) that the model is in.

    `loss` is called with the outputs; without one it is the mean of their squares. `optimizer` is a name (adamw, adam, sgd,
    momentum) or makes one from parameters. Takes memory for about two more steps and a copy of the model; the model, its
    gradients and the random state stay as they are.

    Raises UsageError for a model that looks at the values of its tensors.
    """
    make = _maker(optimizer)
    given = tuple(inputs)
    plain = recorded(model, given, loss)
    ledgers = [recorded(model, given, loss, lambda bare, m=method: adapt(bare, m)) for method in methods]  # type: ignore[misc]
    bare = without_graph(model, given, loss)
    steps = [_stand_in(make, ledger.trained) for ledger in (plain, *ledgers)]
    every = [set(ledger.forward) | set(ledger.backward) for ledger in (plain, *ledgers)]
    counted = [part for ledger in (plain, *ledgers) for part in (ledger.forward, ledger.backward)]
    calls = list(dict.fromkeys(call for part in (*counted, bare) for call in part))
    device = next(model.parameters()).device
    devices = [device] if device.type != "cpu" else []
    with torch.random.fork_rng(devices=devices):
        fns = _plain_step(model, given, loss, make)
        fns |= {f"optimizer {number}": step.run for number, step in enumerate(steps)}
        fns |= {f"call {number}": _runner(call) for number, call in enumerate(calls)}
        timings = compare(
            fns,
            device=device,
            min_time_s=min(2.0, max_time_s),
            max_time_s=max_time_s,
            clock=Settled(clock_for(device) if clock is None else clock),
        )
    rounds = _Rounds({name: timing.samples_s for name, timing in timings.items()}, calls)
    costs = [
        _cost(rounds, ledger, plain, bare, step, number)
        for number, (ledger, step) in enumerate(zip((plain, *ledgers), steps, strict=True))
    ]
    return tuple(
        _prediction(rounds, method, costs, number, len(every[0] | every[number]))
        for number, method in enumerate(methods, start=1)
    )


class Settled:
    """Times what follows an untimed call of the same: memory and caches are then as they are in a loop of it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def elapsed_s(self, fn: Callable[[], object], num_calls: int) -> float:
        fn()
        return self._clock.elapsed_s(fn, num_calls)


class _StandIn(NamedTuple):
    """An optimizer over parameters of the trained shapes, with gradients."""

    run: Callable[[], object]
    gradient_bytes: int
    state_bytes: int
    num_parameters: int


class _Rounds:
    """Samples of all calls, round by round."""

    def __init__(self, samples_s: dict[str, tuple[float, ...]], calls: Sequence[Call]) -> None:
        self.samples_s = samples_s
        self.number = {call: number for number, call in enumerate(calls)}
        self.count = len(samples_s[_STEP])

    def sums_s(self, counted: Counter[Call]) -> list[float]:
        """Seconds of these operators in each round."""
        rows = [(self.samples_s[f"call {self.number[call]}"], times) for call, times in counted.items()]
        return [sum(samples[i] * times for samples, times in rows) for i in range(self.count)]


class _Cost(NamedTuple):
    """Seconds, round by round."""

    cost: StepCost
    steps_s: list[float]


def _cost(rounds: _Rounds, ledger: Ledger, plain: Ledger, bare: Counter[Call], step: _StandIn, number: int) -> _Cost:
    whole, forward, first = (rounds.samples_s[name] for name in (_STEP, _FORWARD, "optimizer 0"))
    update = rounds.samples_s[f"optimizer {number}"]
    ours, theirs, without = (rounds.sums_s(counted) for counted in (ledger.forward, plain.forward, bare))
    graph = sum(ledger.backward.values()) / sum(plain.backward.values())
    forwards = [
        b * a / n + max(f - b * p / n, 0.0) * graph
        for f, b, a, p, n in zip(forward, rounds.samples_s[_BARE], ours, theirs, without, strict=True)
    ]
    behind = [max(w - f - o, 0.0) for w, f, o in zip(whole, forward, first, strict=True)]
    pairs = zip(behind, rounds.sums_s(ledger.backward), rounds.sums_s(plain.backward), strict=True)
    backwards = [b * a / p for b, a, p in pairs]
    steps = [sum(parts) for parts in zip(forwards, backwards, update, strict=True)]
    cost = StepCost(
        trained_parameters=step.num_parameters,
        gradient_bytes=step.gradient_bytes,
        state_bytes=step.state_bytes,
        saved_bytes=ledger.saved_bytes,
        step_s=median(steps),
        forward_s=median(forwards),
        backward_s=median(backwards),
        optimizer_s=median(update),
    )
    return _Cost(cost, steps)


def _prediction(rounds: _Rounds, method: Method, costs: list[_Cost], number: int, num_operators: int) -> Prediction:
    pairs = zip(costs[number].steps_s, costs[0].steps_s, strict=True)
    ratio = median_estimate([a / p for a, p in pairs])
    return Prediction(
        method=method,
        plain=costs[0].cost,
        adapted=costs[number].cost,
        step_ratio=ratio.value,
        step_ratio_low=ratio.low,
        step_ratio_high=ratio.high,
        num_rounds=rounds.count,
        num_operators=num_operators,
    )


def _maker(optimizer: str | Optimizer) -> Optimizer:
    if not isinstance(optimizer, str):
        return optimizer
    if optimizer not in OPTIMIZERS:
        raise UsageError(
            f"optimizer '{optimizer}' is none of {', '.join(OPTIMIZERS)}; or give a function that makes it"
        )
    return OPTIMIZERS[optimizer]


def _plain_step(
    model: nn.Module, inputs: tuple[Any, ...], loss: Loss, make: Optimizer
) -> dict[str, Callable[[], object]]:
    """Forward, with and without a graph, and the whole step of a copy."""
    twin = copy.deepcopy(model)
    trained = [p for p in twin.parameters() if p.requires_grad]
    optimizer = make(trained)

    def forward() -> Tensor:
        return loss(twin(*inputs))

    def bare() -> None:
        # Frozen, and not under no_grad: in a frozen layer autograd still looks at each operator.
        for parameter in trained:
            parameter.requires_grad_(False)
        forward()
        for parameter in trained:
            parameter.requires_grad_(True)

    def step() -> None:
        optimizer.zero_grad()
        forward().backward()
        optimizer.step()

    return {_FORWARD: forward, _BARE: bare, _STEP: step}


def _stand_in(make: Optimizer, trained: Iterable[Like]) -> _StandIn:
    parameters = [nn.Parameter(torch.zeros(like.shape, dtype=like.dtype, device=like.device)) for like in trained]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer = make(parameters)
    optimizer.step()
    state = [t for held in optimizer.state.values() for t in held.values() if isinstance(t, Tensor)]
    return _StandIn(
        run=optimizer.step,
        gradient_bytes=sum(p.nbytes for p in parameters),
        state_bytes=sum(t.nbytes for t in state),
        num_parameters=sum(p.numel() for p in parameters),
    )


def _runner(call: Call) -> Callable[[], object]:
    args, kwargs = call.arguments()
    operator = call.operator

    def run() -> None:
        with torch.no_grad():
            operator(*args, **kwargs)

    return run
