"""Observing loops whose model is compiled: what the record says, and that the compiled code is that of the unobserved run."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from flatout.check.capture import Capture
from flatout.check.observe.steps.schedule import Schedule
from flatout.core.records.compilation import Compilation
from flatout.core.records.evidence import Evidence
from flatout.core.runtime.patches import Patches, all_suspended
from flatout.machine.cost.families import COMPILED_GRAPH

pytestmark = pytest.mark.slow

FAST = Schedule(trials_budget_s=0.0)


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def observe(loop: Callable[[], object], schedule: Schedule = FAST) -> Evidence:
    capture = Capture(command=("test",), cwd=".", schedule=schedule, machine=None, propose=lambda _: ())
    capture.start()
    try:
        loop()
    finally:
        evidence = capture.finish(exit="finished", exit_code=0)
    return evidence


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)  # type: ignore[no-any-return]


class Broken(Whole):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 1e9:  # breaks
            x = x + 1
        return self.inner(x)  # type: ignore[no-any-return]


class Counting(Whole):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1  # another value every time
        return self.inner(x * self.calls) / self.calls  # type: ignore[no-any-return]


def train(net: nn.Module, *, steps: int = 20, sizes: tuple[int, ...] = (4,), backend: str = "eager") -> Tensor:
    model = torch.compile(net, backend=backend, dynamic=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        loss = model(torch.randn(sizes[step % len(sizes)], 8, generator=generator)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.detach()


def compilation(evidence: Evidence) -> Compilation:
    assert evidence.compilation is not None
    return evidence.compilation


def test_a_compiled_model_is_one_frame_at_its_forward() -> None:
    evidence = observe(lambda: train(Whole()))

    record = compilation(evidence)
    [frame] = record.events
    assert (frame.kind, evidence.sources[frame.source].text) == ("frame", "def forward(self, x: Tensor) -> Tensor:")
    assert (record.num_frames, record.num_graphs) == (1, 1)
    assert record.compile_s > 0
    assert [evidence.sources[s].text for s in record.compiled_at] == [
        "model = torch.compile(net, backend=backend, dynamic=False)"
    ]


def test_a_graph_break_has_the_line_and_the_reason() -> None:
    evidence = observe(lambda: train(Broken()))

    breaks = [e for e in compilation(evidence).events if e.kind == "graph-break"]
    assert [evidence.sources[e.source].text for e in breaks] == ["if x.sum() > 1e9:  # breaks"]
    assert "depends on a tensor's value" in breaks[0].reason


def test_recompiles_up_to_the_limit_have_the_line_whose_check_failed() -> None:
    evidence = observe(lambda: train(Counting()))

    events = {e.kind: e for e in compilation(evidence).events if e.kind in ("recompile", "limit")}
    assert evidence.sources[events["limit"].source].text == "self.calls += 1  # another value every time"
    assert "calls == " in events["recompile"].reason
    assert events["recompile"].count == torch._dynamo.config.recompile_limit - 1
    assert compilation(evidence).before_limit_s is not None


@pytest.mark.long
def test_new_sizes_are_recompiles_in_timed_steps_and_a_phase_of_their_own() -> None:
    sizes = tuple(range(2, 22))
    with torch._dynamo.config.patch(recompile_limit=64):
        evidence = observe(lambda: train(Whole(), steps=20, sizes=sizes))

    [event] = [e for e in compilation(evidence).events if e.kind == "recompile"]
    assert event.count >= 18
    assert event.in_steps >= 5
    assert event.last_step >= 18
    assert evidence.steps.phases["compile"] > 0
    assert evidence.steps.whole_s == pytest.approx(evidence.steps.step_s + evidence.steps.phases["compile"], rel=0.2)


@pytest.mark.parametrize("kind", [Whole, Broken, Counting])
def test_as_many_graphs_and_the_same_numbers_as_without_observing(kind: type[Whole]) -> None:
    def counted(run: Callable[[], object]) -> tuple[int, int]:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        run()
        counters = torch._dynamo.utils.counters
        return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())

    losses: list[Tensor] = []
    plain = counted(lambda: losses.append(train(kind())))
    observed = counted(lambda: observe(lambda: losses.append(train(kind()))))

    assert plain == observed
    assert torch.equal(*losses)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # Inductor's own, when it is imported
def test_a_compiled_graph_is_one_operator_and_stays_compiled() -> None:
    evidence = observe(lambda: train(Whole(), backend="inductor"))

    graphs = {o.phase: o for o in evidence.operators if o.op == COMPILED_GRAPH}
    assert set(graphs) == {"forward", "backward"}
    assert all(evidence.sources[o.source].text.startswith("def forward") for o in graphs.values())
    assert graphs["forward"].num_calls == 1
    assert not any(o.op == "aten.relu" for o in evidence.operators)
    assert any(o.op == "aten.mean" for o in evidence.operators)


def test_without_compile_there_is_no_record_and_no_callback_is_left() -> None:
    def loop() -> None:
        net = Whole()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        for _ in range(20):
            net(torch.randn(4, 8)).mean().backward()
            optimizer.step()

    handlers = torch._dynamo.callback.callback_handler
    before = (list(handlers.start_callbacks), list(handlers.end_callbacks), torch.compile)

    assert observe(loop).compilation is None
    assert (handlers.start_callbacks, handlers.end_callbacks, torch.compile) == before


def test_suspended_patches_are_as_before_and_come_back() -> None:
    class Thing:
        value = 1

    first, second = Patches(), Patches()
    first.set(Thing, "value", 2)
    second.set(Thing, "value", 3)
    try:
        with all_suspended():
            assert Thing.value == 1
        assert Thing.value == 3
    finally:
        second.undo()
        first.undo()
    assert Thing.value == 1


@pytest.mark.slow
def test_a_script_that_resets_dynamo_is_observed_to_its_end() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    compiled = torch.compile(net, backend="eager")

    def loop() -> None:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(30):
            optimizer.zero_grad()
            compiled(torch.randn(4, 8)).sum().backward()
            optimizer.step()
            if step == 15:
                torch._dynamo.reset()

    evidence = observe(loop)

    assert evidence.steps.num_observed >= 25
    assert not [note for note in evidence.notes if "stopped early" in note]
