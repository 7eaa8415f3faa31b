"""Captured updates, with a stand-in for the device: a "graph" whose capture updates nothing, and whose replay runs the call."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from flatout.blocks.training import captured_updates, update_graph
from flatout.blocks.training.captured_updates import CapturedUpdate, captured_update
from flatout.core.errors import UsageError
from flatout.core.runtime.replayed_backwards import listen_to_replays
from flatout.core.tensors.nests import tree_leaves

T = TypeVar("T")
needs_device = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class StandIn:
    """Captures calls that update these modules and optimizers, and counts captures and replays."""

    def __init__(self, nets: list[nn.Module], optimizers: list[Optimizer]) -> None:
        self._nets, self._optimizers = nets, optimizers
        self.num_captures = self.num_replays = 0

    def __call__(self, call: Callable[[], T], device: torch.device) -> tuple[T, Callable[[], None]]:
        weights = [{k: v.clone() for k, v in net.state_dict().items()} for net in self._nets]
        states = [
            {p: {k: v.clone() for k, v in state.items()} for p, state in optimizer.state.items()}
            for optimizer in self._optimizers
        ]
        drawn, groups = torch.get_rng_state(), [dict(g) for o in self._optimizers for g in o.param_groups]
        results = call()
        gradients = [(p, p.grad) for net in self._nets for p in net.parameters()]
        torch.set_rng_state(drawn)
        with torch.no_grad():
            for net, before in zip(self._nets, weights, strict=True):
                net.load_state_dict(before)
            for optimizer, saved in zip(self._optimizers, states, strict=True):
                for parameter, state in saved.items():
                    for name, value in state.items():
                        optimizer.state[parameter][name].copy_(value)
        self.num_captures += 1

        def replay() -> None:
            self.num_replays += 1
            now = [g for o in self._optimizers for g in o.param_groups]
            rates = [g["lr"] for g in now]
            for group, captured in zip(now, groups, strict=True):
                group["lr"] = captured["lr"]
            with update_graph.noted([], self._optimizers), torch.enable_grad():
                new = call()
            for group, rate in zip(now, rates, strict=True):
                group["lr"] = rate
            with torch.no_grad():
                for parameter, gradient in gradients:
                    if gradient is not None and parameter.grad is not None:
                        gradient.copy_(parameter.grad)
                for old, value in zip(tree_leaves(results), tree_leaves(new), strict=True):
                    if isinstance(old, Tensor):
                        old.detach().copy_(value)

        return results, replay


class Training:
    """A small network, its optimizer, and one update of it as a function."""

    def __init__(self, kind: str = "Adam", *, device: str = "cpu") -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Linear(5, 8, bias=False), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 3)
        ).to(device)
        options = {"momentum": 0.9} if kind == "SGD" else {}
        self.optimizer: Optimizer = getattr(torch.optim, kind)(self.net.parameters(), lr=1e-2, **options)
        self.table = torch.randn(50, 5, device=device)
        self.labels = torch.randint(0, 3, (50,), device=device)

    def update(self, rows: Any, table: Tensor, labels: Tensor) -> dict[str, Tensor]:
        self.optimizer.zero_grad()
        output = self.net(table[rows])
        loss = F.cross_entropy(output, labels[rows])
        loss.backward()
        nn.utils.clip_grad_norm_(self.net.parameters(), 0.5)
        self.optimizer.step()
        return {"loss": loss, "output": output}

    def learn(self, update: Callable[..., dict[str, Tensor]], *, is_annealed: bool = True) -> list[Tensor]:
        seen: list[Tensor] = []
        order = np.random.default_rng(0)
        for epoch in range(4):
            if is_annealed:
                self.optimizer.param_groups[0]["lr"] = 1e-2 / (1 + epoch)
            table, rows = self.table + epoch, order.permutation(50)
            for start in range(0, 40, 10):
                found = update(rows[start : start + 10], table, self.labels)
                seen += [v.detach().clone() for v in found.values()]
        return [*seen, *(v.detach() for v in self.net.state_dict().values())]


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "SGD", "RMSprop"])
def test_replayed_updates_learn_what_the_updates_learn(kind: str) -> None:
    plain = Training(kind)
    expected = plain.learn(plain.update)
    training = Training(kind)
    stand_in = StandIn([training.net], [training.optimizer])
    captured = CapturedUpdate(training.update, [training.optimizer], stand_in)
    found = training.learn(lambda *args: captured.run(args, {}))
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    has_rates = kind in ("Adam", "AdamW")
    assert stand_in.num_captures == (1 if has_rates else 4), "a rate that lies on the device is no other kind"
    assert stand_in.num_replays == (13 if has_rates else 4)


@pytest.fixture
def quickly_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile without kernels of its own: graphs, backwards and optimizers are traced as ever."""
    original = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda function, **options: original(function, backend="aot_eager", **options)
    )


@pytest.mark.usefixtures("quickly_compiled")
@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("kind", ["Adam", "SGD"])
def test_compiled_updates_learn_what_the_updates_learn(kind: str) -> None:
    plain = Training(kind)
    expected = plain.learn(plain.update, is_annealed=kind == "Adam")
    training = Training(kind)
    stand_in = StandIn([training.net], [training.optimizer])
    captured = CapturedUpdate(training.update, [training.optimizer], stand_in, compiled=True)
    found = training.learn(lambda *args: captured.run(args, {}), is_annealed=kind == "Adam")
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert (stand_in.num_captures, stand_in.num_replays) == (1, 11), "three plain calls, two compiled ones"


@pytest.mark.usefixtures("quickly_compiled")
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_compiled_updates_step_each_optimizer_once() -> None:
    training = Training()

    def twice(rows: Tensor, table: Tensor, labels: Tensor) -> dict[str, Tensor]:
        training.update(rows, table, labels)
        return training.update(rows, table, labels)

    captured = CapturedUpdate(twice, [training.optimizer], StandIn([training.net], [training.optimizer]), compiled=True)
    with pytest.warns(UserWarning, match="step each of their optimizers once"):
        for _ in range(5):
            captured.run((torch.arange(10), training.table, training.labels), {})


def in_rounds(training: Training, each: Callable[[list[tuple[Any, ...]]], Any], num_epochs: int) -> list[Tensor]:
    """Epochs of four updates each, at falling rates; what the last of each returned, and what was learnt."""
    seen: list[Tensor] = []
    order = np.random.default_rng(0)
    for epoch in range(num_epochs):
        training.optimizer.param_groups[0]["lr"] = 1e-2 / (1 + epoch)
        table, rows = training.table + epoch, torch.from_numpy(order.permutation(40))
        found = each([(rows[start : start + 10], table, training.labels) for start in range(0, 40, 10)])
        seen += [v.detach().clone() for v in found.values()]
    return [*seen, *(v.detach() for v in training.net.state_dict().values())]


def one_by_one(training: Training) -> Callable[[list[tuple[Any, ...]]], Any]:
    return lambda calls: [training.update(*args) for args in calls][-1]


@pytest.mark.usefixtures("quickly_compiled")
@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("compiled", [False, True])
def test_updates_in_a_row_are_one_graph(compiled: bool) -> None:
    plain = Training()
    expected = in_rounds(plain, one_by_one(plain), 8)
    training, steps, backwards = Training(), list[str](), list[int]()
    training.optimizer.register_step_post_hook(lambda *_: steps.append("step"))
    stop = listen_to_replays(lambda losses: backwards.append(len(losses)))
    stand_in = StandIn([training.net], [training.optimizer])
    captured = CapturedUpdate(training.update, [training.optimizer], stand_in, compiled=compiled)
    found = in_rounds(training, captured.each, 8)
    stop()
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert stand_in.num_captures == 2, "one update, and four of them"
    assert len(backwards) == 8 * 4 - (5 if compiled else 3), "all but the first updates are replayed"
    assert stand_in.num_replays < 0.65 * len(backwards), "a replay for four updates"
    assert len(steps) == 8 * 4


def test_other_updates_in_a_row_are_what_they_are() -> None:
    def learnt(training: Training, each: Callable[[list[tuple[Any, ...]]], Any]) -> list[Tensor]:
        found = []
        for number in range(12):
            sizes = (10, 10, 6) if number % 2 else (10, 10)
            calls = [(torch.arange(size), training.table, training.labels) for size in sizes]
            found.append(each(calls)["loss"].detach())
        return found

    plain = Training()
    assert captured_update(plain.optimizer)(plain.update).each([]) is None
    expected, training = learnt(plain, one_by_one(plain)), Training()
    captured = CapturedUpdate(training.update, [training.optimizer], StandIn([training.net], [training.optimizer]))
    assert captured.each([]) is None
    found = learnt(training, captured.each)
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert [len(rows) for rows in captured._rounds] == [2]
    assert not [one for one in captured._rounds if len(one) == 3], "calls of two kinds are no graph together"


@pytest.mark.parametrize("kind", ["Adam", "SGD"])
def test_groups_that_are_added_and_states_that_are_loaded_count_from_the_next_update(kind: str) -> None:
    def learnt(training: Training, run: Callable[..., dict[str, Tensor]]) -> list[Tensor]:
        optimizer, rows, seen = training.optimizer, torch.arange(10), list[Tensor]()
        late = next(reversed(list(training.net.parameters()))).requires_grad_(False)
        optimizer.param_groups[0]["params"] = [p for p in training.net.parameters() if p is not late]
        for number in range(32):
            if number == 8:
                optimizer.add_param_group({"params": [late.requires_grad_()], "lr": 0.1})
            if number == 16:
                before = copy.deepcopy(optimizer.state_dict())
            if number == 20:
                optimizer.load_state_dict(before)
            if number == 22:
                optimizer.param_groups[0]["lr"] = 0.05
            seen.append(run(rows, training.table, training.labels)["loss"].detach())
        return [*seen, *(p.detach() for p in training.net.parameters())]

    plain = Training(kind)
    expected, training = learnt(plain, plain.update), Training(kind)
    stand_in = StandIn([training.net], [training.optimizer])
    captured = CapturedUpdate(training.update, [training.optimizer], stand_in)
    found = learnt(training, lambda *args: captured.run(args, {}))
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert stand_in.num_captures >= 3, "another group, and another state, need graphs of their own"


def test_a_function_is_compiled_where_that_is_asked_for_later() -> None:
    training = Training()
    first = captured_update(training.optimizer)(training.update)
    again = captured_update(training.optimizer)(training.update)
    compiled = captured_update(training.optimizer, compiled=True)(training.update)
    assert again.each.__self__ is first.each.__self__  # type: ignore[attr-defined]
    assert compiled.each.__self__ is not first.each.__self__  # type: ignore[attr-defined]


def test_those_who_watch_see_each_update_once() -> None:
    def watched(run: Callable[[Training], None]) -> list[str]:
        training, seen = Training(), list[str]()
        handles = [
            training.optimizer.register_step_pre_hook(lambda *_: seen.append("before")),
            training.optimizer.register_step_post_hook(lambda *_: seen.append("after")),
        ]
        stop = listen_to_replays(lambda losses: seen.append(f"replayed {len(losses)}"))
        try:
            run(training)
        finally:
            stop()
            for handle in handles:
                handle.remove()
        return seen

    def replayed(training: Training) -> None:
        stand_in = StandIn([training.net], [training.optimizer])
        captured = CapturedUpdate(training.update, [training.optimizer], stand_in)
        training.learn(lambda *args: captured.run(args, {}))
        assert stand_in.num_replays == 13

    plain = watched(lambda training: training.learn(training.update) and None)
    assert plain == ["before", "after"] * 16
    assert watched(replayed) == ["before", "after"] * 3 + ["replayed 1", "before", "after"] * 13


def refused(update: Callable[..., Any], training: Training, *args: Any) -> str:
    """Why the updates are not captured."""
    captured = CapturedUpdate(update, [training.optimizer], StandIn([training.net], [training.optimizer]))
    with pytest.warns(UserWarning, match="are not captured") as found:
        for _ in range(6):
            captured.run(args, {})
    assert len(found) == 1, "it is said once"
    return str(found[0].message)


def test_what_no_graph_would_do_is_left_alone() -> None:
    training = Training()
    rows, table, labels = torch.arange(10), training.table, training.labels

    def with_random_scale(*args: Any) -> Any:
        training.net[1].momentum = random.random()
        return training.update(*args)

    def with_argument_changed(rows: Tensor, table: Tensor, labels: Tensor) -> Any:
        table.add_(0.01)
        return training.update(rows, table, labels)

    def with_number(*args: Any) -> float:
        return training.update(*args)["loss"].item()

    source: dict[str, Tensor] = {}

    def with_another_tensor(rows: Tensor, labels: Tensor) -> Any:
        return training.update(rows, source.pop("table"), labels)

    assert "random numbers in Python" in refused(with_random_scale, training, rows, table, labels)
    assert "arguments in place" in refused(with_argument_changed, training, rows, table.clone(), labels)
    assert "other than tensors" in refused(with_number, training, rows, table, labels)

    captured = CapturedUpdate(with_another_tensor, [training.optimizer], StandIn([training.net], [training.optimizer]))
    with pytest.warns(UserWarning, match="must be arguments"):
        for _ in range(5):
            source["table"] = table + 1
            captured.run((rows, labels), {})


def test_a_tensor_from_elsewhere_that_is_replaced_is_not_read_where_it_was() -> None:
    training = Training()
    stand_in = StandIn([training.net], [training.optimizer])
    around = {"table": training.table.clone()}

    def update(rows: Tensor, labels: Tensor) -> Any:
        return training.update(rows, around["table"], labels)

    captured = CapturedUpdate(update, [training.optimizer], stand_in)
    rows = torch.arange(10)
    for _ in range(6):
        captured.run((rows, training.labels), {})
    assert stand_in.num_captures == 1
    around["table"] = around["table"] + 1
    before = stand_in.num_replays
    captured.run((rows, training.labels), {})
    assert stand_in.num_captures == 2 and stand_in.num_replays == before + 1


def test_kinds_in_turn_have_a_graph_each_and_gradients_are_those_of_the_last_update() -> None:
    def learnt(training: Training, update: Callable[..., dict[str, Tensor]]) -> list[Tensor]:
        seen: list[Tensor] = []
        for number in range(12):
            rows = torch.arange(10 if number % 3 else 6)
            seen.append(update(rows, training.table, training.labels)["loss"].detach())
            seen += [p.grad.clone() for p in training.net.parameters() if p.grad is not None]
        return seen

    plain = Training()
    expected, training = learnt(plain, plain.update), Training()
    stand_in = StandIn([training.net], [training.optimizer])
    captured = CapturedUpdate(training.update, [training.optimizer], stand_in)
    found = learnt(training, lambda *args: captured.run(args, {}))
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    assert stand_in.num_captures == 2, "one for each size"
    assert stand_in.num_replays == 5 + 1


def test_a_function_that_is_defined_anew_goes_on_with_its_graph_and_another_does_not() -> None:
    training, other = Training(), Training()

    def defined(training: Training) -> Callable[[Tensor], Tensor]:
        @captured_update(training.optimizer)
        def update(rows: Tensor) -> Tensor:
            return training.update(rows, training.table, training.labels)["loss"]

        return update

    for _ in range(2):
        defined(training)(torch.arange(10))
    defined(other)
    [update] = vars(training.optimizer)[captured_updates._UPDATES].values()
    assert update.is_of(defined(training).__wrapped__, [training.optimizer])  # type: ignore[attr-defined]
    assert not update.is_of(defined(other).__wrapped__, [training.optimizer])  # type: ignore[attr-defined]
    assert captured_updates._UPDATES not in training.optimizer.state_dict()


def test_it_wants_the_optimizers() -> None:
    with pytest.raises(UsageError, match=r"@captured_update\(optimizer\)"):
        captured_update()
    with pytest.raises(UsageError, match=r"@captured_update\(optimizer\)"):
        captured_update(nn.Linear(2, 2))  # type: ignore[arg-type]


def test_on_a_processor_updates_are_what_they_are() -> None:
    plain = Training()
    expected = plain.learn(plain.update)
    training = Training()
    found = training.learn(captured_update(training.optimizer)(training.update))
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
    assert not training.optimizer.param_groups[0].get("capturable")


@needs_device
@pytest.mark.parametrize("kind", ["Adam", "AdamW", "SGD", "RMSprop", "Fused"])
def test_on_a_device_graphs_learn_what_the_updates_learn(kind: str) -> None:
    def training() -> Training:
        made = Training("Adam" if kind == "Fused" else kind, device="cuda")
        if kind == "Fused":
            made.optimizer = torch.optim.Adam(made.net.parameters(), lr=1e-2, fused=True)
        return made

    plain = training()
    if "capturable" in plain.optimizer.param_groups[0] and kind != "Fused":
        plain.optimizer.param_groups[0]["capturable"] = True
    expected = plain.learn(lambda rows, *rest: plain.update(torch.from_numpy(rows).cuda(), *rest))
    twin = training()
    replayed: list[int] = []
    stop = listen_to_replays(lambda losses: replayed.append(len(losses)))
    found = twin.learn(captured_update(twin.optimizer)(twin.update))
    stop()
    assert len(replayed) >= 3
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def without_dropout(*, is_fused: bool = False) -> Training:
    """A training on the device that draws nothing, since compiled code draws other numbers."""
    training = Training(device="cuda")
    training.optimizer = torch.optim.Adam(training.net.parameters(), lr=1e-2, capturable=True, fused=is_fused)
    dropout = training.net[2]
    assert isinstance(dropout, nn.Dropout)
    dropout.p = 0.0
    return training


@needs_device
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("is_fused", [False, True])
def test_on_a_device_compiled_graphs_learn_what_the_updates_learn(is_fused: bool) -> None:
    plain, twin = without_dropout(is_fused=is_fused), without_dropout(is_fused=is_fused)
    expected = plain.learn(lambda rows, *rest: plain.update(torch.from_numpy(rows).cuda(), *rest))
    replayed: list[int] = []
    stop = listen_to_replays(lambda losses: replayed.append(len(losses)))
    found = twin.learn(captured_update(twin.optimizer, compiled=True)(twin.update))
    stop()
    assert len(replayed) == 11, "three plain calls, two compiled ones"
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


@needs_device
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("compiled", [False, True])
def test_on_a_device_updates_in_a_row_are_one_graph(compiled: bool) -> None:
    def learnt(training: Training, each: Callable[[list[tuple[Any, ...]]], Any]) -> list[Tensor]:
        def on_device(calls: list[tuple[Any, ...]]) -> Any:
            return each([(rows.cuda(), table, labels) for rows, table, labels in calls])

        return in_rounds(training, on_device, 8)

    plain, twin = without_dropout(), without_dropout()
    expected = learnt(plain, one_by_one(plain))
    captured = CapturedUpdate(twin.update, [twin.optimizer], compiled=compiled)
    found = learnt(twin, captured.each)
    assert len(captured._rounds) == 1
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
