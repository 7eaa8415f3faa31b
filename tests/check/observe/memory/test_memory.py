"""One step's memory, and what outlives it, in real loops in this process."""

from __future__ import annotations

import gc
from collections import defaultdict, deque
from collections.abc import Callable
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flatout.check.capture import Capture
from flatout.check.observe.steps.schedule import Schedule
from flatout.core.records.evidence import Evidence
from flatout.core.records.memory import Growth, Memory

STEPS = 14


def observe(loop: Callable[[], object]) -> Evidence:
    capture = Capture(
        command=("test",), cwd=".", schedule=Schedule(trials_budget_s=0.0), machine=None, propose=lambda _: ()
    )
    capture.start()
    try:
        loop()
    finally:
        evidence = capture.finish(exit="finished", exit_code=0)
    assert not [n for n in evidence.notes if "memory was not watched" in n]
    return evidence


def host(evidence: Evidence) -> Memory:
    return next(m for m in evidence.memory if m.device == "cpu")


def sums(memory: Memory) -> dict[str, int]:
    by_kind: dict[str, int] = defaultdict(int)
    for part in memory.at_peak:
        by_kind[part.kind] += part.bytes
    return by_kind


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))


def text_of(evidence: Evidence, index: int) -> str:
    source = evidence.source_of(index)
    return source.text if source is not None else ""


def only_growth(evidence: Evidence) -> Growth:
    [growth] = host(evidence).growth
    return growth


# ------------------------------------------------------------------------------------------------------------- the peak


def adam_loop() -> None:
    net = model()
    optimizer = torch.optim.Adam(net.parameters())
    for _ in range(STEPS):
        x = torch.randn(2048, 64)
        hidden = torch.relu(net[0](x))  # saved for the backward
        loss = net[2](hidden).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@cache
def observed_adam() -> Evidence:
    return observe(adam_loop)


@pytest.mark.slow
def test_parameters_and_optimizer_state_are_counted_exactly() -> None:
    parts = sums(host(observed_adam()))
    parameters = sum(p.numel() * 4 for p in model().parameters())

    assert parts["parameters"] == parameters
    assert 2 * parameters <= parts["optimizer state"] < 2 * parameters + 100


def test_what_is_saved_for_the_backward_is_an_activation_of_its_line() -> None:
    evidence = observed_adam()
    activations = [p for p in host(evidence).at_peak if p.kind == "activations"]

    largest = max(activations, key=lambda p: p.bytes)
    assert text_of(evidence, largest.source).endswith("# saved for the backward")
    assert largest.bytes == 2048 * 256 * 4
    assert largest.example == "float32[2048, 256]"


def test_the_batch_is_distinguished_with_its_line() -> None:
    evidence = observed_adam()
    batches = [p for p in host(evidence).at_peak if p.kind == "batch"]

    assert [(text_of(evidence, p.source), p.bytes) for p in batches] == [("x = torch.randn(2048, 64)", 2048 * 64 * 4)]


def test_the_curve_rises_to_the_tensors_part_of_the_peak() -> None:
    memory = host(observed_adam())
    parts = sums(memory)
    tensors = sum(b for kind, b in parts.items() if kind not in ("process", "cached"))

    assert memory.peak_bytes == sum(parts.values())
    assert max(p.bytes for p in memory.curve) <= 1.05 * tensors
    assert all(0 <= p.at <= 1 for p in memory.curve)


def test_the_process_measures_itself() -> None:
    memory = host(observed_adam())

    assert memory.measured_peak_bytes is not None
    assert memory.total_bytes is not None
    assert memory.peak_bytes == pytest.approx(memory.measured_peak_bytes, rel=0.15)


def test_sparse_gradients_do_no_harm() -> None:
    def loop() -> None:
        net = nn.EmbeddingBag(100, 16, sparse=True)
        optimizer = torch.optim.SparseAdam(net.parameters())
        for _ in range(STEPS):
            loss = net(torch.randint(100, (8, 4))).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    assert host(observe(loop)).peak_bytes > 0


def test_the_step_computes_what_it_computes_unwatched() -> None:
    def run() -> list[Tensor]:
        net = model()
        torch.manual_seed(1)
        optimizer = torch.optim.Adam(net.parameters())
        for _ in range(STEPS):
            x = F.dropout(torch.randn(16, 64), 0.3)
            loss = checkpoint(net, x, use_reentrant=False).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return [p.detach().clone() for p in net.parameters()]

    plain = run()
    watched: list[Tensor] = []
    observe(lambda: watched.extend(run()))

    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))


def test_nothing_of_a_step_stays_alive_by_watching_it() -> None:
    def loop() -> None:
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(STEPS):
            net(torch.randn(777, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    observe(loop)
    gc.collect()

    assert not [
        t for t in gc.get_objects() if issubclass(type(t), Tensor) and t.shape[:1] == (777,) and t.numel() > 777 * 64
    ]


# --------------------------------------------------------------------------------------------------------------- growth


def trained(keep: Callable[[Tensor, Tensor], None]) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for _ in range(STEPS):
        out = net(torch.randn(256, 64))
        loss = out.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        keep(out, loss)


def test_a_list_of_losses_is_found_with_the_line_that_appends() -> None:
    def loop() -> None:
        losses = []

        def keep(_: Tensor, loss: Tensor) -> None:
            losses.append(loss)  # the leak

        trained(keep)

    growth = only_growth(observe(loop))

    assert growth.has_graph
    assert "losses" in growth.container


def test_a_running_sum_of_losses_is_found() -> None:
    def loop() -> None:
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        total: Tensor | float = 0.0
        for _ in range(STEPS):
            loss = net(torch.randn(256, 64)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total = total + loss  # the leak
        assert total > 0

    evidence = observe(loop)
    growth = only_growth(evidence)

    assert growth.has_graph
    assert text_of(evidence, growth.holder).endswith("# the leak")
    assert growth.container == "variable 'total' of loop()"


def test_validation_losses_keep_their_activations() -> None:
    def loop() -> None:
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        history: dict[str, list[Tensor]] = {"train": [], "validation": []}
        for _ in range(STEPS):
            loss = net(torch.randn(256, 64)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            history["train"].append(loss.detach())
            history["validation"].append(net(torch.randn(512, 64)).square().mean())  # the leak

    evidence = observe(loop)
    growth = max(host(evidence).growth, key=lambda g: g.bytes_per_step)

    assert growth.has_graph
    assert text_of(evidence, growth.holder).endswith("# the leak")
    assert growth.bytes_per_step >= 512 * 256 * 4


class Recorder:
    def __init__(self) -> None:
        self.outputs: list[Tensor] = []

    def keep(self, out: Tensor, _: Tensor) -> None:
        self.outputs.append(out.detach().clone())  # the store


def test_a_store_of_an_object_is_found_by_its_attribute() -> None:
    recorder = Recorder()
    evidence = observe(lambda: trained(recorder.keep))
    growth = only_growth(evidence)

    assert not growth.has_graph
    assert growth.container == "list 'outputs' of Recorder"
    assert text_of(evidence, growth.holder).endswith("# the store")
    assert growth.bytes_per_step == 256 * 64 * 4


def test_what_is_bounded_or_replaced_does_not_grow() -> None:
    def loop() -> None:
        recent: deque[Tensor] = deque(maxlen=3)
        best: list[Tensor] = []

        def keep(out: Tensor, loss: Tensor) -> None:
            recent.append(out.detach())
            if not best or loss < best[0]:
                best[:] = [loss]

        trained(keep)

    assert host(observe(loop)).growth == ()


# ---------------------------------------------------------------------------------------------------------- other causes


def retaining(*, second: bool) -> Evidence:
    def loop() -> None:
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        for _ in range(STEPS):
            out = net(torch.randn(256, 64))
            loss = out.square().mean()
            optimizer.zero_grad()
            loss.backward(retain_graph=True)
            if second:
                out.abs().mean().backward()
            optimizer.step()

    return observe(loop)


def test_a_graph_retained_for_nobody_is_found() -> None:
    evidence = retaining(second=False)
    [retained] = host(evidence).retained

    assert text_of(evidence, retained.source) == "loss.backward(retain_graph=True)"
    assert retained.bytes >= 256 * 256 * 4


def test_a_graph_that_a_second_backward_uses_is_left_alone() -> None:
    assert host(retaining(second=True)).retained == ()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_is_found_with_the_line_that_asks_for_it(use_reentrant: bool) -> None:
    def loop() -> None:
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        for _ in range(STEPS):
            x = torch.randn(64, 64, requires_grad=True)
            out = checkpoint(net, x, use_reentrant=use_reentrant)  # asks
            optimizer.zero_grad()
            out.square().mean().backward()
            optimizer.step()

    evidence = observe(loop)
    [fact] = [f for f in evidence.module_facts if f.name == "recompute"]

    assert text_of(evidence, fact.source).endswith("# asks")
    assert evidence.steps.phases["backward"] > 0


def test_state_of_frozen_parameters_is_found_and_that_of_trained_ones_is_not() -> None:
    def loop() -> None:
        net = model()
        optimizer = torch.optim.Adam(net.parameters())
        for step in range(STEPS):
            loss = net(torch.randn(32, 64)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step == 1:
                net[0].requires_grad_(False)

    [fact] = [f for f in observe(loop).module_facts if f.name == "dead-optimizer-state"]

    assert (fact.module, fact.kind) == ("Sequential.0", "Linear")
    assert fact.value == 2 * 4 * (64 * 256 + 256)


def test_collections_by_hand_are_counted_and_the_function_is_put_back() -> None:
    original = gc.collect

    def loop() -> None:
        def keep(_: Tensor, __: Tensor) -> None:
            gc.collect()

        trained(keep)

    evidence = observe(loop)
    [use] = [u for u in evidence.uses if u.name == "gc.collect"]

    assert text_of(evidence, use.source) == "gc.collect()"
    assert use.calls == pytest.approx(1, abs=0.2)
    assert use.seconds > 0
    assert gc.collect is original


def test_a_mistake_of_ours_ends_the_look_at_memory_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise ValueError("our own mistake")

    monkeypatch.setattr("flatout.check.observe.memory.memory_step.memories_of", broken)
    capture = Capture(
        command=("test",), cwd=".", schedule=Schedule(trials_budget_s=0.0), machine=None, propose=lambda _: ()
    )
    capture.start()
    adam_loop()
    evidence = capture.finish(exit="finished", exit_code=0)

    assert any("memory was not watched" in n and "our own mistake" in n for n in evidence.notes)
    assert evidence.operators
