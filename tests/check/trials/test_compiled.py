"""A module compiled beside itself, in a fork that leaves no trace: what is measured, refused, and left as it was."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from flatout.check.observe.calls import RootModule
from flatout.check.trials import compiled
from flatout.check.trials.context import Refused, Scene
from flatout.check.trials.runner import run_trials
from flatout.check.trials.subprocess_copy import latest_in_copy
from flatout.core.records.trial import TimeCompiled, TimeModel, Trial, TrialResult


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)  # type: ignore[no-any-return]


def scene(module: nn.Module) -> Scene:
    root = RootModule(module, (0,), "Net")
    root.strong_ref = module
    root.capture((torch.randn(16, 8),), {})
    return Scene([], [], [], [root], [], [], (), "cpu", 0.2)


def outcome(trial: Trial, module: nn.Module, *, budget_s: float = 60.0) -> TrialResult:
    [result] = run_trials([trial], scene(module), budget_s=budget_s)
    return result


@pytest.fixture
def net(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """A network, with a backend that compiles in no time."""
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    torch.manual_seed(0)
    return Net()


@pytest.mark.slow
@pytest.mark.parametrize(("regions", "variant"), [((), "whole"), (("blocks",), "regions")])
def test_both_sides_are_timed_and_nothing_of_it_stays(net: nn.Module, regions: tuple[str, ...], variant: str) -> None:
    state = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    trial, beside = TimeCompiled(model=0, backward=True, autocast="bfloat16", regions=regions), scene(net)
    random = torch.get_rng_state()

    [result] = run_trials([trial], beside, budget_s=60.0)

    assert not result.refused
    assert result.now_s and result.cured_s
    assert result.variant == variant
    assert result.parts["compile"] > 0
    assert result.parts["autocast"] > 0
    assert all(torch.equal(tensor, state[name]) for name, tensor in net.state_dict().items())
    assert all(p.grad is None for p in net.parameters())
    assert torch.equal(torch.get_rng_state(), random)
    assert not any(module._compiled_call_impl for module in net.modules())


@pytest.mark.slow
def test_torchs_own_layers_are_compiled_as_a_whole(net: nn.Module) -> None:
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)))
    result = outcome(TimeCompiled(model=0, backward=True, regions=("",)), layers)
    assert (result.refused, result.variant) == ("", "whole")


@pytest.mark.parametrize(("num_operators", "budget_s"), [(0, 1.0), (5000, 60.0)])
def test_too_little_time_is_refused_before_anything_is_loaded(
    net: nn.Module, num_operators: int, budget_s: float
) -> None:
    trial = TimeCompiled(model=0, backward=True, num_operators=num_operators)
    assert "left for trials" in outcome(trial, net, budget_s=budget_s).refused


def test_it_is_refused_in_a_script_that_compiles(net: nn.Module) -> None:
    beside = scene(net)._replace(compiled={net: {}})
    [result] = run_trials([TimeCompiled(model=0, backward=True)], beside, budget_s=60.0)
    assert "compiles by itself" in result.refused


def test_what_has_to_compile_comes_after_the_others(net: nn.Module) -> None:
    late, early = TimeCompiled(model=0, backward=True), TimeModel(model=0, variant="bf16-autocast", backward=True)
    results = run_trials([late, early], scene(net), budget_s=0.5)
    assert [r.trial for r in results] == [early, late]


def test_a_module_is_timed_under_autocast_on_a_cpu(net: nn.Module) -> None:
    result = outcome(TimeModel(model=0, variant="bf16-autocast", backward=True), net)
    assert result.now_s and result.cured_s
    assert all(p.grad is None and p.dtype == torch.float32 for p in net.parameters())


def test_the_forward_alone_runs_under_autocast(net: nn.Module) -> None:
    forward: list[bool] = []
    backward: list[bool] = []

    class Noting(Net):
        def forward(self, x: Tensor) -> Tensor:
            forward.append(torch.is_autocast_enabled("cpu"))
            out = super().forward(x)
            out.register_hook(lambda _: backward.append(torch.is_autocast_enabled("cpu")))
            return out

    outcome(TimeModel(model=0, variant="bf16-autocast", backward=True), Noting())

    assert set(forward) == {False, True}
    assert set(backward) == {False}


# ---------------------------------------------------------------------------------------------------- a copy of the process


@pytest.mark.slow
def test_the_latest_result_counts_when_the_time_is_over() -> None:
    def measure() -> Iterator[dict[str, float]]:
        yield {"first": 1.0}
        yield {"second": float(os.getpid())}
        time.sleep(60)

    began = time.perf_counter()
    found = latest_in_copy(measure, limit_s=1.5, num_threads=1)
    assert found["second"] != os.getpid()
    assert time.perf_counter() - began < 20


@pytest.mark.parametrize("num_threads", [1, 2])
def test_products_run_with_the_threads_asked_for(num_threads: int) -> None:
    def measure() -> Iterator[dict[str, float]]:
        torch.randn(600, 600) @ torch.randn(600, 600)
        yield {"threads": float(torch.get_num_threads())}

    torch.randn(600, 600) @ torch.randn(600, 600)  # the parent's own threads are there before
    assert latest_in_copy(measure, limit_s=30.0, num_threads=num_threads) == {"threads": num_threads}


@pytest.mark.parametrize(("error", "words"), [(ValueError("odd"), "ValueError: odd"), (Refused("no way"), "no way")])
def test_a_copy_that_fails_says_why(error: Exception, words: str) -> None:
    def measure() -> Iterator[dict[str, float]]:
        raise error
        yield {}

    with pytest.raises(Refused, match=words):
        latest_in_copy(measure, limit_s=30.0, num_threads=1)


def test_what_a_copy_has_started_ends_with_it(tmp_path: os.PathLike[str]) -> None:
    def measure() -> Iterator[dict[str, float]]:
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        yield {"child": float(child)}

    found = latest_in_copy(measure, limit_s=30.0, num_threads=1)
    deadline = time.perf_counter() + 10
    while time.perf_counter() < deadline and _is_running(int(found["child"])):
        time.sleep(0.05)
    assert not _is_running(int(found["child"]))


def _is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def free_timer() -> Iterator[None]:
    """The process's timer without the time limit of the test runner."""
    left_s, _ = signal.setitimer(signal.ITIMER_REAL, 0.0)
    handler = signal.signal(signal.SIGALRM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, left_s)


@pytest.mark.slow
@pytest.mark.usefixtures("free_timer")
def test_a_timer_interrupts_and_is_put_back() -> None:
    def measure() -> Iterator[dict[str, float]]:
        yield {"first": 1.0}
        while True:
            time.sleep(0.01)

    assert compiled._in_time(measure, 0.3) == {"first": 1.0}
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0.0


def test_a_timer_of_the_script_is_left_alone() -> None:
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    try:
        with pytest.raises(Refused, match="uses the timer"):
            compiled._in_time(lambda: iter([{"first": 1.0}]), 1.0)
    finally:
        signal.signal(signal.SIGALRM, before)
