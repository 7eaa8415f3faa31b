"""The device's profile, with a profiler that makes up what a device would have done; nothing here needs one."""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from threading import get_native_id
from time import perf_counter, perf_counter_ns, time_ns
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flatout.check.capture import Capture
from flatout.check.observe import observation
from flatout.check.observe.device import kernels
from flatout.check.observe.device.clocks import Clocks
from flatout.check.observe.device.kernels import KernelTimes
from flatout.check.observe.device.launches import LaunchLog
from flatout.check.observe.steps.schedule import Schedule
from flatout.check.observe.steps.timeline import PhaseStart
from flatout.core.runtime.source_sites import Sites

KERNEL_NS = 2_000
BASE_NS = 1_711_964_646_000_000_000
SKEW_NS = 7_000_000
"""The made-up profiler's clock is off by this: only the anchors can tell."""


class FakeDevice(TorchDispatchMode):
    """Takes every operator for a launch of one kernel of its name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launches: list[tuple[int, int, str]] = []
        self.anchors: list[int] = []
        self.names_threads = True
        self.has_operators = False
        """Whether the profile has operators, too; tanh is then what a compiled kernel did, and a kernel of its own comes last."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        self.launches.append((perf_counter_ns(), get_native_id(), func._schema.name))
        return func(*args, **(kwargs or {}))

    def record_anchors(self) -> list[int]:
        self.anchors = [perf_counter_ns() + i for i in range(3)]
        return list(self.anchors)

    def text(self) -> str:
        wall = time_ns() - perf_counter_ns() - BASE_NS + SKEW_NS
        events = [
            {"ph": "X", "cat": "cuda_runtime", "name": "cudaEventRecord", "tid": 1, "ts": (a + wall) / 1000, "dur": 0}
            for a in self.anchors
        ]
        free = 0
        for number, (at, thread, name) in enumerate(self.launches, start=1):
            start = max(free, at + wall + 500)
            free = start + KERNEL_NS
            tid = thread if self.names_threads else 12345678
            call = {"name": "cudaLaunchKernel", "tid": tid, "ts": (at + wall) / 1000, "dur": 0.1}
            work = {"name": f"kernel_of_{name}", "tid": 7, "ts": start / 1000, "dur": KERNEL_NS / 1000}
            events.append({"ph": "X", "cat": "cuda_runtime", "args": {"correlation": number}, **call})
            events.append({"ph": "X", "cat": "kernel", "args": {"correlation": number, "stream": 7}, **work})
            if self.has_operators and name != "aten::ones_like":
                names = {"aten::tanh": "triton_poi_fused_tanh_0"}
                args = {"Input Dims": [[4]], "Input type": ["float"]}
                times = {"ts": (at + wall) / 1000 - 1, "dur": 3}
                events.append(
                    {"ph": "X", "cat": "cpu_op", "name": names.get(name, name), "tid": tid, "args": args, **times}
                )
        return json.dumps({"baseTimeNanoseconds": BASE_NS, "traceEvents": events})


class FakeProfile:
    device: FakeDevice

    def __init__(self, activities: Sequence[object], *, record_shapes: bool, acc_events: bool) -> None:
        self.device.has_operators = record_shapes and torch.profiler.ProfilerActivity.CPU in activities

    def start(self) -> None:
        self.device.launches.clear()

    def stop(self) -> None:
        pass

    def export_chrome_trace(self, path: str) -> None:
        with open(path, "w") as file:
            file.write(self.device.text())


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    fake = FakeDevice()
    monkeypatch.setattr(FakeProfile, "device", fake, raising=False)
    monkeypatch.setattr(kernels, "profile", FakeProfile)
    monkeypatch.setattr(kernels, "record_anchors", fake.record_anchors)
    monkeypatch.setattr(kernels, "read_clocks", lambda _: Clocks(0.9, ("power limit",)))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return fake


def step(x: torch.Tensor) -> list[int]:
    """Two operators on two lines, which are returned."""
    frame = inspect.currentframe()
    assert frame is not None
    lines = [frame.f_lineno + 1, frame.f_lineno + 2]
    y = torch.exp(x)
    torch.tanh(y)
    return lines


def watched(
    device: FakeDevice, sites: Sites, *, steps: int = 4, has_log: bool = True, is_compiled: bool = False
) -> KernelTimes:
    def log() -> LaunchLog | None:
        created = LaunchLog(sites, phase=lambda: "forward", module=lambda: "")
        return created if has_log else None

    times = KernelTimes(log, is_compiled=lambda: is_compiled)
    x = torch.ones(4)
    with device:
        for _ in range(steps):
            times.begin()
            phase_starts = [PhaseStart("forward", perf_counter(), None)]
            step(x)
            if is_compiled:
                torch.ones_like(x)  # launched by no operator, as the made-up profile has it
            times.end(phase_starts)
    return times


@pytest.mark.parametrize("names_threads", [True, False])
def test_kernels_have_the_lines_and_phases_of_their_launches(device: FakeDevice, names_threads: bool) -> None:
    device.names_threads = names_threads
    sites = Sites(user_root=str(__file__).rpartition("/")[0])
    found = watched(device, sites).device_step
    assert found is not None
    table = sites.table()
    lines = step(torch.ones(1))
    by_name = {k.name: (table[k.source].line, k.phase, k.num_launches, k.op) for k in found.kernels}
    assert by_name["kernel_of_aten::exp"] == (lines[0], "forward", 1, "aten.exp")
    assert by_name["kernel_of_aten::tanh"] == (lines[1], "forward", 1, "aten.tanh")


def test_only_the_undisturbed_step_counts(device: FakeDevice) -> None:
    times = watched(device, Sites())
    assert times.busy_s == pytest.approx(2 * KERNEL_NS * 1e-9)
    assert times.device_step is not None
    assert sum(k.num_launches for k in times.device_step.kernels) == 2
    assert (times.device_step.clock_fraction, times.device_step.throttle_reasons) == (0.9, ("power limit",))
    assert {s.track for s in times.spans} == {"device"}
    assert all(s.start_s >= 0 for s in times.spans)


def test_without_a_log_kernels_have_phases_and_no_lines(device: FakeDevice) -> None:
    found = watched(device, Sites(), has_log=False).device_step
    assert found is not None
    assert {(k.source, k.phase) for k in found.kernels} == {(-1, "forward")}


@pytest.mark.parametrize("has_log", [True, False])
def test_of_compiled_code_the_fourth_step_has_operators_and_compiled_kernels(device: FakeDevice, has_log: bool) -> None:
    assert watched(device, Sites(), has_log=has_log, is_compiled=True, steps=3).operators == ()
    times = watched(device, Sites(), has_log=has_log, is_compiled=True)
    rows = {o.op: (o.phase, o.num_calls, o.bytes, o.python_s) for o in times.operators}
    assert rows == {
        "aten.exp": ("forward", 1, 16, 0.0),
        "inductor.triton_poi_fused_tanh_0": ("forward", 1, 16, 0.0),
        "kernel.kernel_of_aten::ones_like": ("forward", 1, 0, 0.0),
    }
    assert [o.op_s for o in times.operators] == pytest.approx([KERNEL_NS * 1e-9] * 3)
    assert times.busy_s == pytest.approx(3 * KERNEL_NS * 1e-9)


def test_no_log_is_kept_while_operators_of_compiled_code_are_profiled(device: FakeDevice) -> None:
    """Under a log, which is a mode of dispatch, torch runs compiled code as it was before."""
    logged: list[bool] = []

    class Log(LaunchLog):
        def __torch_dispatch__(self, *args: Any, **kwargs: Any) -> Any:
            logged.append(device.has_operators)
            return super().__torch_dispatch__(*args, **kwargs)

    times = KernelTimes(lambda: Log(Sites(), phase=lambda: "forward", module=lambda: ""), is_compiled=lambda: True)
    with device:
        for _ in range(4):
            times.begin()
            phase_starts = [PhaseStart("forward", perf_counter(), None)]
            step(torch.ones(4))
            times.end(phase_starts)
    assert times.operators
    assert set(logged) == {False}


def test_without_compiled_code_no_operators_are_profiled(device: FakeDevice) -> None:
    assert watched(device, Sites()).operators == ()


def test_a_script_that_ends_after_the_undisturbed_step_has_it_all_the_same(device: FakeDevice) -> None:
    times = watched(device, Sites(), steps=2)
    times.begin()
    times.abort()
    assert times.device_step is not None


def test_a_profiler_that_does_not_start_leaves_all_unknown(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: FakeProfile) -> None:
        raise RuntimeError("CUPTI_ERROR_INSUFFICIENT_PRIVILEGES")

    monkeypatch.setattr(FakeProfile, "start", refuse)
    times = watched(device, Sites())
    assert (times.device_step, times.busy_s) == (None, None)
    assert "INSUFFICIENT_PRIVILEGES" in times.failure


def test_a_profile_that_cannot_be_read_is_reported(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeDevice, "text", lambda self: "{}")
    times = watched(device, Sites())
    assert times.device_step is None
    assert "could not be read" in times.failure


def test_nothing_stays_patched_after_a_log(device: FakeDevice) -> None:
    owners = (torch.cuda, torch.cuda.Stream, torch.cuda.Event)
    before = [vars(owner).get("synchronize") for owner in owners]
    watched(device, Sites())
    assert [vars(owner).get("synchronize") for owner in owners] == before


class FakeEvent:
    """An event of a device that is always done at once."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.at = 0.0

    def record(self, stream: object = None) -> None:
        self.at = perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: FakeEvent) -> float:
        return (other.at - self.at) * 1e3


def test_an_observed_loop_has_its_device_step_with_lines(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole observation on a device that is made up: order of the modes, marks, restarts, what reaches the Evidence."""
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    monkeypatch.setattr(observation, "is_on_accelerator", lambda tensors: True)
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    schedule = Schedule(num_light_on_device=4, trials_budget_s=0.0)
    capture = Capture(command=("test",), cwd=".", schedule=schedule, machine=None, propose=lambda _: ())
    with device:
        capture.start()
        try:
            for _ in range(24):
                loss = net(torch.ones(4, 8)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        finally:
            evidence = capture.finish(exit="finished", exit_code=0)
    assert evidence.notes == ()
    assert len(evidence.operators) > 0
    step = evidence.device_step
    assert step is not None
    assert step.slowdown is not None
    assert evidence.steps.device_s == step.busy_s
    phases = {k.phase for k in step.kernels}
    assert {"forward", "backward", "optimizer"} <= phases
    known = [k for k in step.kernels if k.source >= 0]
    assert len(known) > 0.9 * len(step.kernels)
    texts = {evidence.sources[k.source].text for k in known if "addmm" in k.name}
    assert texts == {"loss = net(torch.ones(4, 8)).square().mean()"}
    backward = {evidence.sources[k.source].text for k in known if k.phase == "backward" and "mm" in k.name}
    assert backward == texts
