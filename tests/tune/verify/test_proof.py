"""Whole proofs, of real scripts in real processes."""

from __future__ import annotations

import os
import signal
import textwrap
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from flatout.core.errors import VerificationError
from flatout.core.records.verdict import Verdict
from flatout.tune.verify.base_runs import BaseRuns, _num_that_fit
from flatout.tune.verify.equality import compare_exact
from flatout.tune.verify.fork_server import fork_servers
from flatout.tune.verify.proof import ScriptProver, prove_script
from flatout.tune.verify.proof_terms import ProofTerms
from flatout.tune.verify.side import SideAnswer
from flatout.tune.verify.side_process import Request, SideProcess

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked")]

TRAINING = """
    import os, signal, subprocess, sys, time
    import torch
    from torch import nn

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 1))
    {setup}
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    x, y = torch.randn(64, 16), torch.randn(64, 1)
    for step in range({steps}):
        loss = (net(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        {change}
        optimizer.step()
"""

INFERENCE = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).eval()
    x = torch.randn(64, 16)
    for step in range(200):
        with torch.{mode}():
            net({given})
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def script(folder: Path, name: str, *, setup: str = "", change: str = "pass", steps: int = 400) -> Request:
    path = folder / name
    path.write_text(textwrap.dedent(TRAINING).format(setup=setup, change=change, steps=steps))
    return Request(target=str(path))


def verdict(before: Request, after: Request, **terms: object) -> Verdict:
    usual = {"num_steps": 4, "budget_s": 1.0, "timeout_s": 60.0, "is_timed": False}
    return prove_script(before, after, ProofTerms(**(usual | terms)))  # type: ignore[arg-type]


def test_a_script_is_equal_to_itself_bit_for_bit(folder: Path) -> None:
    one, two = script(folder, "a.py"), script(folder, "b.py")
    found = verdict(one, two, guarantee="exact")
    assert (found.outcome, found.equality.holds, found.equality.num_steps) == ("proved", True, 4)
    assert found.equality.num_tensors == 4 * (1 + 4 + 4)


def test_other_rounding_is_not_exact_but_bounded(folder: Path) -> None:
    one = script(folder, "a.py")
    two = script(folder, "b.py", change="[p.grad.mul_(3).div_(3) for p in net.parameters()]")
    assert verdict(one, two, guarantee="exact").outcome == "different"
    found = verdict(one, two)
    assert (found.outcome, found.equality.guarantee, found.equality.reference) == ("proved", "bounded", "float64")
    assert found.equality.worst < 1
    assert 0 < found.judging_s < found.seconds and found.racing_s == 0


@pytest.mark.long
def test_a_slower_script_is_told_as_slower(folder: Path) -> None:
    """Twenty milliseconds more a step leave no doubt on any machine."""
    one, two = script(folder, "a.py", steps=5000), script(folder, "b.py", change="time.sleep(0.02)", steps=5000)
    found = verdict(one, two, is_timed=True, budget_s=2.0)
    assert (found.outcome, found.exit_code) == ("slower", 1)
    assert 0 < found.racing_s < found.seconds and found.judging_s == 0, (
        "the same numbers bit for bit need no other runs"
    )
    back = verdict(two, one, is_timed=True, num_processes=1)
    assert (back.outcome, back.exit_code) == ("proved", 0)
    assert back.speed is not None and back.speed.is_faster
    assert back.footprints[0].before_bytes > 0


def loading(folder: Path, name: str, *, change: str) -> Request:
    """A script that waits for its loader: two workers take 60 ms for each batch."""
    path = folder / name
    path.write_text(
        textwrap.dedent(
            f"""
            import time, torch
            from torch.utils.data import DataLoader, Dataset
            class Slow(Dataset):
                def __len__(self):
                    return 4000
                def __getitem__(self, i):
                    end = time.thread_time() + 0.06
                    while time.thread_time() < end:
                        pass
                    return torch.full((8,), i / 4000)
            torch.manual_seed(0)
            net = torch.nn.Linear(8, 8)
            opt = torch.optim.SGD(net.parameters(), lr=0.01)
            workers = dict(num_workers=2, prefetch_factor=8, multiprocessing_context="fork")
            for x in DataLoader(Slow(), batch_size=1, **workers):
                {change}
                opt.zero_grad()
                net(x).square().mean().backward()
                opt.step()
            """
        )
    )
    return Request(target=str(path))


@pytest.mark.long
def test_a_side_that_stands_gets_no_batches_ahead(folder: Path) -> None:
    """20 ms less in the loop gain nothing where each batch is waited for: so it is in a whole run, and in the race."""
    one, two = loading(folder, "a.py", change="time.sleep(0.02)"), loading(folder, "b.py", change="pass")
    found = verdict(one, two, is_timed=True, budget_s=3.0, num_processes=1)
    assert found.speed is not None and found.equality.holds
    assert found.speed.before_s > 0.025 and found.speed.after_s > 0.025
    assert found.speed.ratio < 1.3


@pytest.mark.long
def test_workers_that_stand_die_with_their_side(folder: Path) -> None:
    """Of a side that is killed while it stands, nothing is left behind."""
    request = msgspec.structs.replace(loading(folder, "a.py", change="pass"), num_recorded=2, folder=str(folder))
    process = SideProcess(request)
    with process:
        assert process.answer(timeout_s=60.0).num_workers == 2
        assert process._child is not None
        pid = process._child.pid
        workers = [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        deadline = time.monotonic() + 10
        while {_state(w) for w in workers} != {"T"} and time.monotonic() < deadline:
            time.sleep(0.02)
        assert [_state(w) for w in workers] == ["T", "T"]
        os.kill(pid, signal.SIGKILL)
        while any(_state(w) in ("T", "S", "R") for w in workers) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not any(_state(w) in ("T", "S", "R") for w in workers)


def _state(pid: int) -> str:
    """The state of a process as Linux has it: R, S, T (stopped), Z; '' when it has gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except OSError:
        return ""


@pytest.mark.long
def test_levers_that_met_nothing_to_change_are_named(folder: Path) -> None:
    before = script(folder, "a.py")
    plan = folder / "plan.toml"
    plan.write_text(
        '[[lever]]\nid = "parallelism.fused-optimizer"\nguarantee = "bounded"\n[lever.parameters]\n\n'
        '[[lever]]\nid = "communication.trim-padding"\nguarantee = "bounded"\n[lever.parameters]\npad = 0\n'
    )
    after = msgspec.structs.replace(before, plan=str(plan))
    found = verdict(before, after, is_timed=True)
    assert found.missed == ("communication.trim-padding",), found.because


def test_scripts_too_short_to_race_are_started_again(folder: Path) -> None:
    one, two = script(folder, "a.py", change="time.sleep(0.01)", steps=12), script(folder, "b.py", steps=12)
    found = verdict(one, two, is_timed=True)
    assert found.equality.holds is True
    assert found.speed is not None


@pytest.mark.long
def test_what_a_change_takes_to_start_is_told(folder: Path) -> None:
    before, after = script(folder, "a.py"), script(folder, "b.py", setup="import time; time.sleep(0.5)")
    found = verdict(before, after, is_timed=True, num_processes=1)
    assert found.speed is not None
    assert found.speed.num_first == 4
    assert found.speed.first_after_s > 0.5


@pytest.mark.long
@pytest.mark.parametrize("run_steps", [0, 1_000_000])
def test_what_only_the_first_process_compiles_is_no_price_of_every_run(folder: Path, run_steps: int) -> None:
    """A first start of four seconds, as for a compiler whose cache is empty, is not what later runs pay.

    For runs that are so long that this does not matter either, nothing is started to find that out.
    """
    cache = folder / "cache"
    compile = f"if not os.path.exists('{cache}'):\n    open('{cache}', 'w').close()\n    time.sleep(4)"
    before = script(folder, "a.py", change="time.sleep(0.02)", steps=5000)
    after = script(folder, "b.py", setup=compile, steps=5000)
    found = verdict(before, after, is_timed=True, decisive=1.3, run_steps=run_steps)
    assert cache.exists()
    assert found.speed is not None and found.speed.is_faster
    assert (found.speed.first_after_s < 3) == (run_steps == 0)


def test_one_wrong_gradient_is_named_with_its_step(folder: Path) -> None:
    one = script(folder, "a.py")
    two = script(folder, "b.py", change="net[3].bias.grad.mul_(1.001 if step == 0 else 1)")
    found = verdict(one, two)
    assert (found.outcome, found.exit_code) == ("different", 1)
    first = found.equality.first
    assert first is not None and (first.step, first.what) == (1, "gradient")
    assert first.tensor in ("Sequential.3.bias", "all together")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV) if step == 2 else None", "SIGSEGV"),
        ("sys.exit(3) if step == 2 else None", "SystemExit: 3"),
        ("1 / 0 if step == 2 else None", "ZeroDivisionError"),
    ],
)
def test_a_changed_script_that_fails_costs_itself_alone(folder: Path, change: str, why: str) -> None:
    one, two = script(folder, "a.py"), script(folder, "b.py", change=change)
    found = verdict(one, two)
    assert found.outcome == "different"
    assert why in found.because


def test_a_script_that_fails_before_the_change_is_an_error(folder: Path) -> None:
    one, two = script(folder, "a.py", change="1 / 0"), script(folder, "b.py")
    with pytest.raises(VerificationError, match="ZeroDivisionError"):
        verdict(one, two)


@pytest.mark.usefixtures("impatient")
@pytest.mark.long
def test_a_changed_script_that_hangs_costs_itself_alone_and_leaves_nothing_behind(folder: Path) -> None:
    """It has started a process that ignores polite signals."""
    ours = folder / "pid"
    child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(1000)"
    setup = (
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}]); open({str(ours)!r}, 'w').write(str(child.pid))"
    )
    hangs = script(folder, "b.py", setup=setup, change="time.sleep(1000) if step == 2 else None")
    found = verdict(script(folder, "a.py"), hangs, timeout_s=5.0)
    assert found.outcome == "unknown"  # it may compute the same
    assert "did not answer within 5 s" in found.because
    assert not _is_running(int(ours.read_text()))


def _is_running(pid: int) -> bool:
    """A zombie whose parent has gone, and that nobody has collected yet, does not run."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (OSError, IndexError):
        return False


SMALL_DEVICE = """
import glob
own = {folder!r} + "/held-" + str(os.getpid())

def hold(held):
    open(own, "w").write(str(held))
    pids = {{path: int(path.rpartition("-")[2]) for path in glob.glob({folder!r} + "/held-*")}}
    if sum(int(open(path).read() or 0) for path, pid in pids.items() if os.path.exists("/proc/%d" % pid)) > {total}:
        open({folder!r} + "/ran-out", "w")
        raise RuntimeError("CUDA out of memory. Tried to allocate 1 GiB")

for name, value in dict(
    is_available=True, is_initialized=True, is_current_stream_capturing=False, get_device_name="a device",
    synchronize=None, reset_peak_memory_stats=None, memory_snapshot=[], max_memory_allocated=100,
    mem_get_info=({shown}, {shown}),
).items():
    setattr(torch.cuda, name, lambda *_, value=value: value)
torch.cuda.empty_cache = lambda: hold(30)
"""
"""A device of which a step holds 100 and what stands 30, or 100 where it caches what its steps held."""


def on_small_device(folder: Path, name: str, *, total: int, shown: int) -> Request:
    setup = SMALL_DEVICE.format(folder=str(folder), total=total, shown=shown)
    return script(folder, name, setup=setup, change="hold(100)", steps=100000)


@pytest.mark.parametrize(("shown", "has_run_out"), [(150, False), (100000, True)])
def test_two_sides_that_do_not_fit_on_a_device_take_turns_there(folder: Path, shown: int, has_run_out: bool) -> None:
    """Whether the device's size shows that in time, or one of them runs out of memory."""
    sides = [on_small_device(folder, name, total=150, shown=shown) for name in ("a.py", "b.py")]
    found = verdict(*sides, is_timed=True, num_processes=1)
    assert found.equality.holds and found.speed is not None, found.because
    assert found.speed.num_pairs >= 7
    assert (folder / "ran-out").exists() == has_run_out


@pytest.mark.parametrize(("peak_bytes", "is_at_once"), [(42, True), (43, False)])
def test_sides_start_at_once_on_a_device_where_what_was_observed_leaves_room(
    folder: Path, peak_bytes: int, is_at_once: bool
) -> None:
    """The second begins before the first has made its steps, for which that waits a while, or after them."""
    log = folder / "log"
    waiting = f"""
log = open({str(log)!r}, "a")
print({{name!r}}, file=log, flush=True)
for _ in range({{looks}}):
    time.sleep(0.0 if "b.py" in open({str(log)!r}).read() else 0.05)
"""
    sides = [
        script(folder, name, setup=waiting.format(name=name, looks=looks))
        for name, looks in (("a.py", 200), ("b.py", 0))
    ]
    for side in sides:
        path = Path(side.target)
        path.write_text(
            path.read_text().replace("optimizer.step()", "optimizer.step()\n    print('step', file=log, flush=True)")
        )
    with ScriptProver(sides[0], ProofTerms(num_steps=4, timeout_s=60.0, is_timed=False)) as prover:
        prover.expect("a device", peak_bytes, 100)
        assert prover.prove(*sides).outcome == "proved"
    lines = log.read_text().splitlines()
    assert ("b.py" in lines[:2]) == is_at_once


def test_what_does_not_fit_on_a_device_even_alone_is_an_error(folder: Path) -> None:
    with pytest.raises(VerificationError, match="CUDA out of memory"):
        verdict(*(on_small_device(folder, name, total=90, shown=90) for name in ("a.py", "b.py")), is_timed=True)


def test_a_lean_order_takes_one_step_that_is_not_timed(folder: Path) -> None:
    wanted = msgspec.structs.replace(script(folder, "a.py"), num_recorded=2, seed=0)
    with SideProcess(wanted) as process:
        process.answer(timeout_s=60.0)
        numbers = []
        for is_lean in (True, False, True):
            process.order(3, is_lean=is_lean)
            numbers.append(process.answer(timeout_s=60.0).num_steps)
    assert numbers == [6, 9, 13]


def test_outputs_of_an_inference_loop_are_compared(folder: Path) -> None:
    paths = {}
    for name, mode, given in (("a", "no_grad", "x"), ("b", "inference_mode", "x"), ("c", "no_grad", "x * 1.0001")):
        paths[name] = Request(target=str(folder / f"{name}.py"))
        (folder / f"{name}.py").write_text(textwrap.dedent(INFERENCE).format(mode=mode, given=given))
    assert verdict(paths["a"], paths["b"], guarantee="exact").outcome == "proved"
    wrong = verdict(paths["a"], paths["c"])
    assert wrong.outcome == "different"
    assert wrong.equality.first is not None and wrong.equality.first.what == "output"


def test_a_change_that_keeps_memory_is_told_as_a_leak(folder: Path) -> None:
    one = script(folder, "a.py", steps=20000)
    two = script(folder, "b.py", setup="kept = []", change="kept.append(b'x' * (1 << 20))", steps=20000)
    for _ in range(3):  # where other work takes the processor, a side may have too few steps to show its growth
        found = verdict(one, two, is_timed=True, num_processes=1)
        if found.outcome == "different":
            break
    assert found.outcome == "different"
    assert "memory grows by 1" in found.because


@pytest.mark.usefixtures("impatient")
def test_a_change_that_takes_all_memory_is_ended(folder: Path) -> None:
    one, two = (
        script(folder, "a.py"),
        script(folder, "b.py", change="kept = bytearray(os.urandom(1 << 20) * 400); time.sleep(5)"),
    )
    found = verdict(one, msgspec.structs.replace(two, most_bytes=1 << 29))
    assert found.outcome == "different"
    assert "took more than 0.5 GiB" in found.because


def test_a_batch_in_parts_has_losses_that_add_up(folder: Path) -> None:
    one, two, wrong = (script(folder, f"{name}.py", setup="net[2].p = 0.0") for name in "abc")
    text = Path(one.target).read_text()
    parts = text.replace("loss = (net(x) - y).square().mean()", "pass").replace(
        "    loss.backward()\n",
        """    for a, b in zip(x.split(48), y.split(48)):
        ((net(a) - b).square().mean() * len(a) / 64).backward()
""",
    )
    assert parts.count("backward") == 1
    Path(two.target).write_text(parts)
    Path(wrong.target).write_text(parts.replace("* len(a) / 64", "/ 2"))
    found = verdict(one, two)
    assert (found.outcome, found.equality.holds) == ("proved", True)
    assert found.equality.worst < 1
    assert verdict(one, two, guarantee="exact").outcome == "different"
    lost = verdict(one, wrong)
    assert lost.outcome == "different"
    assert lost.equality.first is not None and lost.equality.first.what == "loss"


@pytest.mark.long
def test_memory_may_be_what_a_change_is_for(folder: Path) -> None:
    hoard = "kept = torch.ones(64 << 20)"
    one, two = script(folder, "a.py", setup=hoard, steps=5000), script(folder, "b.py", steps=5000)
    size = {"is_timed": True, "objective": "memory", "num_processes": 1, "budget_s": 0.1}
    found = verdict(one, two, **size)
    assert (found.outcome, found.because) == ("proved", "equal and smaller")
    assert found.footprints[0].fraction[1] < 0.8
    assert verdict(two, one, **size).outcome == "slower"
    assert verdict(two, two, **size).outcome == "unknown"


@pytest.mark.long
def test_float64_may_become_float32_where_that_is_what_counts(folder: Path) -> None:
    wide = script(folder, "a.py", setup="net = net.double(); torch.set_default_dtype(torch.float64)")
    narrow = script(folder, "b.py", setup="torch.set_default_dtype(torch.float64)")
    for path in (wide.target, narrow.target):
        text = Path(path).read_text().replace("nn.Dropout(0.1)", "nn.Tanh()")
        Path(path).write_text(text.replace("net(x)", "net(x.to(net[0].weight.dtype))"))
    assert verdict(wide, narrow).outcome == "different"
    found = verdict(wide, narrow, at="float32")
    assert (found.outcome, found.equality.at) == ("proved", "float32")


@pytest.mark.long
def test_the_peak_is_the_scripts_own_however_large_who_starts_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a server of the proof's own, which this large process starts."""
    monkeypatch.setattr("flatout.tune.verify.base_runs.fork_servers", fork_servers)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    ballast = bytearray(b"x") * (1 << 29)
    one = script(folder, "a.py", steps=2000)
    found = verdict(one, one, is_timed=True, num_processes=1, budget_s=0.1)
    assert len(ballast) == 1 << 29
    assert found.footprints[0].before_bytes < 1 << 29


FUNCTIONAL = """
    import torch

    torch.manual_seed(0)
    w1 = (torch.randn(16, 64) / 4).requires_grad_()
    w2 = (torch.randn(64, 1) / 8).requires_grad_()
    optimizer = torch.optim.SGD([w1, w2], lr=0.05)
    x, y = torch.randn(256, 16) + 1000, torch.randn(256, 1)
    for step in range(40):
        product = {product}
        hidden = torch.relu(product - product.mean(0))  # most digits cancel
        loss = (hidden @ w2 - y).square().mean() {more}
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


def functional(folder: Path, name: str, product: str, more: str = "") -> Request:
    path = folder / name
    path.write_text(textwrap.dedent(FUNCTIONAL).format(product=product, more=more))
    return Request(target=str(path))


def test_steps_without_modules_are_judged_by_rounding_noise(folder: Path) -> None:
    """Nothing can be converted to float64: the sums come in another order, which is rounding all the same."""
    one = functional(folder, "a.py", "x @ w1")
    two = functional(folder, "b.py", "x[:, :7] @ w1[:7] + x[:, 7:] @ w1[7:]")
    found = verdict(one, two, num_steps=8)
    assert (found.outcome, found.equality.reference) == ("proved", "noise"), found


def test_rounding_noise_lets_no_other_loss_pass(folder: Path) -> None:
    one, two = functional(folder, "a.py", "x @ w1"), functional(folder, "b.py", "x @ w1", "* 1.01")
    assert verdict(one, two, num_steps=8).outcome == "different"


DRAWING = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Dropout(0.3), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(8 * 8 * 8, 1)
    )
    {setup}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    x, y = torch.randn(8, 3, 12, 12), torch.randn(8, 1)
    for step in range(40):
        images = {images}
        noise = torch.randn_like(images)
        loss = (net(images + 0.1 * noise) - y).square().mean() {more}
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


def drawing(folder: Path, name: str, *, is_last: bool = False, more: str = "") -> Request:
    path = folder / name
    setup = "net = net.to(memory_format=torch.channels_last)" if is_last else ""
    images = "x.to(memory_format=torch.channels_last)" if is_last else "x"
    path.write_text(textwrap.dedent(DRAWING).format(setup=setup, images=images, more=more))
    return Request(target=str(path))


def test_other_draws_of_the_same_distribution_are_told_as_that(folder: Path) -> None:
    one, two = drawing(folder, "a.py"), drawing(folder, "b.py", is_last=True)
    refused = verdict(one, two)
    assert refused.outcome == "different"
    assert "other random numbers of the same distribution" in refused.because
    allowed = verdict(one, two, guarantee="distribution")
    assert (allowed.outcome, allowed.equality.guarantee) == ("proved", "distribution")


def test_other_draws_hide_no_other_loss(folder: Path) -> None:
    one, two = (
        drawing(folder, "a.py"),
        drawing(folder, "b.py", is_last=True, more="+ 0.01 * net[0].weight.square().sum()"),
    )
    found = verdict(one, two, guarantee="distribution")
    assert found.outcome == "different" and "distribution" not in found.because


def test_on_a_device_all_that_may_judge_a_change_is_recorded_at_once(folder: Path) -> None:
    """As if on a device: what it records is what it would have recorded one after the other."""
    request, terms = script(folder, "a.py"), ProofTerms(num_steps=4, timeout_s=60.0)
    keys = [("", 0), ("float64", 0), ("strict", 0), ("", 1), ("", 2), ("", 3)]
    with ExitStack() as stack:
        together, alone = (BaseRuns(request, terms, lambda _: None) for _ in range(2))
        stack.callback(together.end)
        stack.callback(alone.end)
        together.device = "a device"
        together.note_memory(SideAnswer(what="recorded", device_peak_bytes=1, device_free_bytes=8))
        together.record_together(keys)
        assert sorted(key[1:3] for key in together._recorded) == sorted(keys)
        for dtype, noise in keys:
            assert compare_exact(together.steps(dtype, noise), alone.steps(dtype, noise)).holds
        assert together._recorded.keys() == alone._recorded.keys()


@pytest.mark.parametrize(("total", "is_begun"), [(100, True), (3, False)])
def test_on_a_device_with_room_what_judges_coarser_numbers_is_begun_with_both_sides(
    folder: Path, total: int, is_begun: bool
) -> None:
    """The process that was begun is the one that answers, and none is left."""
    request, terms = script(folder, "a.py"), ProofTerms(num_steps=4, timeout_s=60.0)
    started: list[Request] = []

    class Counted(BaseRuns):
        def process(self, request: Request) -> SideProcess:
            started.append(request)
            return super().process(request)

    with ExitStack() as stack:
        early, alone = (Counted(request, terms, lambda _: None) for _ in range(2))
        stack.callback(early.end)
        stack.callback(alone.end)
        early.expect("a device", 1, total)
        early.begin("bfloat16")
        early.begin("float64")
        assert [one.dtype for one in started] == ["bfloat16", "float64"] * is_begun
        found = early.steps("bfloat16")
        early.record_together([("bfloat16", 0), ("float64", 0)])
        assert [one.dtype for one in started] == ["bfloat16", "float64"]
        assert not early._begun
        assert compare_exact(found, alone.steps("bfloat16")).holds
        assert compare_exact(early.steps("float64"), alone.steps("float64")).holds
        early.terms = msgspec.structs.replace(terms, seed=5)
        early.begin("bfloat16")
        early.end_begun()
        assert not early._begun and len(early.steps("bfloat16")) == 4


@pytest.mark.parametrize(("factor", "is_equal"), [(1.0001, True), (1.5, False)])
def test_a_change_is_judged_alike_where_what_judges_it_was_begun_early(
    folder: Path, factor: float, is_equal: bool
) -> None:
    change = f"[p.grad.mul_({factor}) for p in net.parameters()]"
    one, two = script(folder, "a.py"), script(folder, "b.py", change=change)
    terms = ProofTerms(num_steps=4, timeout_s=60.0, at="bfloat16", is_timed=False)
    with ScriptProver(one, terms) as early, ScriptProver(one, terms) as usual:
        early.expect("a device", 1, 100)
        found, wanted = early.prove(one, two), usual.prove(one, two)
    assert found.equality.holds is wanted.equality.holds is is_equal
    assert found.equality.worst == wanted.equality.worst


@pytest.mark.long
def test_nothing_that_was_begun_runs_beside_the_race(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits need no other run to be judged by, so nobody asks the one that was begun."""
    ended: list[bool] = []
    races = ScriptProver._race

    def race(prover: ScriptProver, *sides: Any) -> None:
        ended.append(not prover._runs._begun)
        races(prover, *sides)

    monkeypatch.setattr(ScriptProver, "_race", race)
    begun: list[int] = []
    ends = BaseRuns.end_begun

    def end_begun(runs: BaseRuns) -> None:
        begun.append(len(runs._begun))
        ends(runs)

    monkeypatch.setattr(BaseRuns, "end_begun", end_begun)
    one, two = script(folder, "a.py", steps=5000), script(folder, "b.py", steps=5000)
    terms = ProofTerms(num_steps=4, budget_s=1.0, timeout_s=60.0, at="bfloat16", num_processes=1)
    with ScriptProver(one, terms) as prover:
        prover.expect("a device", 1, 100)
        assert prover.prove(one, two).equality.holds
    assert begun[0] == 1, "one was begun, and not asked"
    assert ended == [True]


@pytest.mark.parametrize(
    ("free_gib", "num"),
    [(0, 0), (5, 1), (6, 2), (7, 2), (8, 3), (100, 3)],
)
def test_runs_at_once_fit_into_what_is_free(free_gib: int, num: int) -> None:
    """Of a script that holds 1 GiB, beside another: four fifths of the rest for 1.4, 2.2 and 1.4 GiB."""
    assert _num_that_fit(["", "float64", ""], 1 << 30, free_gib << 30) == num
