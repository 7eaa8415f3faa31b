"""The state block: with a supervisor and without, over other numbers of ranks, with a disk that fails."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.blocks.elastic.supervised import messages_of
from torch import nn

from flatout.blocks.elastic import messages
from flatout.blocks.elastic import survivor as survivors
from flatout.blocks.elastic.messages import HeartbeatPage, RankContext
from flatout.blocks.elastic.survivor import Survivor
from flatout.blocks.training import checkpoint_files
from flatout.core.errors import CheckpointError, UsageError

pytestmark = pytest.mark.long


@pytest.fixture
def supervised(tmp_path: Path) -> Iterator[RankContext]:
    """This process, supervised."""
    memory = tmp_path / "memory"
    memory.mkdir()
    heartbeats = HeartbeatPage(memory / "heartbeats", 1)
    rank_context = RankContext(
        job="j" * 32, restart=0, node=0, row=0, memory=memory, heartbeats=heartbeats, restart_s=2.0
    )
    messages.set_rank_context(rank_context)
    yield rank_context
    messages._current.clear()


def _parts(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    net = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    net(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    return {"net": net, "optimizer": optimizer}


def test_without_a_supervisor_it_is_the_disk(tmp_path: Path) -> None:
    parts = _parts()
    with Survivor(tmp_path / "disk", disk_every=2) as state:
        assert state.resume(**parts) == 0
        for step in range(1, 6):
            state.keep(step, **parts)
        state.alive()
    again = _parts(1)
    with Survivor(tmp_path / "disk", disk_every=2) as state:
        assert state.resume(**again) == 4
    assert torch.equal(again["net"].weight, parts["net"].weight)


def test_with_one_memory_comes_before_an_older_disk(tmp_path: Path, supervised: RankContext) -> None:
    parts = _parts()
    with Survivor(tmp_path / "disk", disk_every=4) as state:
        for step in range(1, 7):
            parts["net"].weight.data.add_(1)
            state.keep(step, **parts)
    again = _parts(1)
    with Survivor(tmp_path / "disk") as state:
        assert state.resume(**again) == 6
    assert torch.equal(again["net"].weight, parts["net"].weight)


def test_copies_of_another_job_are_not_taken(tmp_path: Path, supervised: RankContext) -> None:
    with Survivor(None) as state:
        state.keep(3, **_parts())
    supervised.job = "k" * 32
    with Survivor(None) as state:
        assert state.resume(**_parts()) == 0


def test_a_disk_that_is_newer_comes_before_memory(tmp_path: Path, supervised: RankContext) -> None:
    parts = _parts()
    with Survivor(tmp_path / "disk", every=4, disk_every=3) as state:
        for step in range(1, 7):
            state.keep(step, **parts)
    with Survivor(tmp_path / "disk") as state:
        assert state.resume(**_parts(1)) == 6


def test_what_comes_back_changed_is_named(
    tmp_path: Path, supervised: RankContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Survivor(None) as state:
        state.keep(3, **_parts())
    load = torch.optim.AdamW.load_state_dict

    def forgets(self: torch.optim.AdamW, state: Any) -> None:
        load(self, state)
        next(iter(self.state.values()))["exp_avg"].zero_()

    monkeypatch.setattr(torch.optim.AdamW, "load_state_dict", forgets)
    with Survivor(None) as state, pytest.raises(CheckpointError, match=r"optimizer/state/0/exp_avg differs: float32"):
        state.resume(**_parts())


def test_what_comes_back_from_the_disk_changed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Survivor(tmp_path, disk_every=1) as state:
        state.keep(3, **_parts())
    monkeypatch.setattr(survivors, "split_state", _with_a_changed_weight(survivors.split_state))
    with Survivor(tmp_path) as state, pytest.raises(CheckpointError, match=r"net/weight differs"):
        state.resume(**_parts())


def _with_a_changed_weight(split_state: Any) -> Any:
    def changed(parts: Any, rank: int) -> Any:
        parts["net"].weight.data.view(torch.int32)[0, 0].bitwise_xor_(1)
        return split_state(parts, rank)

    return changed


def test_random_numbers_of_numpy_come_back(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    with Survivor(tmp_path, disk_every=1) as state:
        numpy.random.seed(3)
        state.keep(1, **_parts())
        wanted = numpy.random.rand()
    with Survivor(tmp_path) as state:
        assert state.resume(**_parts()) == 1
    assert numpy.random.rand() == wanted


def test_failing_saves_are_told_and_so_many_in_a_row_end_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with Survivor(tmp_path, disk_every=1, disk_failures=2) as state:
        state.keep(1, **_parts())
        assert state._disk is not None
        state._disk.wait()
        monkeypatch.setattr(checkpoint_files, "sync_to_disk", full)
        state.keep(2, **_parts())
        with pytest.warns(UserWarning, match=r"step 2 was not written.*No space left.*last good one is of step 1"):
            state.keep(3, **_parts())
        assert len(state.failed_saves) == 1
        with pytest.raises(CheckpointError, match=r"2 saves in a row failed; the last: .*step 3 .*No space left"):
            state.keep(4, **_parts())
    monkeypatch.undo()
    with Survivor(tmp_path) as state:
        assert state.resume(**_parts()) == 1


@pytest.mark.slow
def test_a_measured_interval_is_settled_after_eight_steps(supervised: RankContext) -> None:
    with Survivor(None, every="measured", mtbf_s=3600.0) as state:
        for step in range(1, 10):
            state.keep(step, **_parts())
        assert state._every.steps is not None and state._every.steps > 1


@pytest.mark.parametrize("wrong", [{"disk_every": 3}, {"disk_failures": 0}, {"every": 0}, {"every": "measured"}])
def test_options_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Survivor(None, **wrong)


@pytest.mark.parametrize("call", [{"step": -1}, {"step": 2.0}, {"step": 1, "random": {}}, {"step": 1, "none": True}])
def test_calls_that_make_no_sense_are_refused(call: dict[str, Any]) -> None:
    step = call.pop("step")
    parts = {} if call.pop("none", False) else {"net": nn.Linear(1, 1), **call}
    with Survivor(None) as state, pytest.raises(UsageError, match="give the number of steps done"):
        state.keep(step, **parts)


SHARDED = """
    import errno, warnings
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import fully_shard
    import flatout
    from flatout.core.errors import CheckpointError
    from flatout.blocks.elastic.messages import HeartbeatPage, RankContext, set_rank_context
    from flatout.blocks.elastic.survivor import Survivor
    from flatout.blocks.training import checkpoint_files

    STEPS = 6
    where = Path(MEMORY)
    heartbeats = HeartbeatPage(where / "heartbeats", 4)

    def trained(world, folder, *, till, is_saved, job):
        # Losses of an FSDP2 model, on the same data over any number of ranks.
        if job:
            memory = where / job
            memory.mkdir(exist_ok=True)
            row = int(os.environ["RANK"])
            own = {"row": row, "memory": memory, "heartbeats": heartbeats}
            set_rank_context(RankContext(job="j" * 32, restart=0, node=0, restart_s=None, **own))
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 10), nn.Tanh(), nn.Linear(10, 1))
        data = torch.randn(12, 8)
        fully_shard(net, mesh=world.mesh())
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        losses = {}
        with Survivor(folder, disk_every=1 if folder and is_saved else None) as state:
            done = state.resume(net=net, optimizer=optimizer)
            while done < till:
                own = data.chunk(world.num_ranks)[world.rank]
                loss = net(own).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                done += 1
                losses[done] = (world.total(loss) / world.num_ranks).item()
                if is_saved:
                    state.keep(done, net=net, optimizer=optimizer)
        return losses

    def run(name, num, folder, **options):
        def work():
            with flatout.World("cpu") as world:
                losses = trained(world, folder, **options)
                if world.is_first:
                    report(json.dumps([name, losses]))
        as_ranks(num, work)

    run("whole 4", 4, None, till=STEPS, is_saved=False, job="")
    def both(num):
        # Kept by `num` ranks in memory and on the disk, and gone on with from either.
        disk, job = str(where / f"disk-{num}"), f"{num}"
        run(f"{num} before", num, disk, till=3, is_saved=True, job=job)
        run(f"{num} memory {6 - num}", 6 - num, None, till=STEPS, is_saved=False, job=job)
        run(f"{num} disk {6 - num}", 6 - num, disk, till=STEPS, is_saved=False, job="")
        return job

    run("4 memory 4", 4, None, till=STEPS, is_saved=False, job=both(4))
    both(2)

    def full(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def failing():
        with flatout.World("cpu") as world:
            net = nn.Linear(2, 2)
            messages = []
            with Survivor(str(where / "fails"), disk_every=1, disk_failures=2) as state:
                if world.rank == 1:
                    checkpoint_files.sync_to_disk = full
                try:
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")
                        for step in range(1, 5):
                            state.keep(step, net=net)
                except CheckpointError as e:
                    messages.append(str(e))
            try:
                if world.is_first:
                    Path(where / "file").write_text("")
                dist.barrier()
                Survivor(str(where / "file" / "folder"), disk_every=1)
            except CheckpointError as e:
                messages.append(str(e))
            report(json.dumps(["failing", messages]))
    as_ranks(2, failing)
"""


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return messages_of(SHARDED, tmp_path_factory.mktemp("sharded"))


@pytest.mark.slow
@pytest.mark.multi
def test_sharded_state_goes_on_over_as_many_more_or_fewer_ranks(sharded: list[Any]) -> None:
    losses = {name: one for name, one in sharded if name != "failing"}
    whole = losses["whole 4"]
    rest = {step: whole[step] for step in "456"}
    assert losses["4 before"] == {step: whole[step] for step in "123"}
    assert losses["4 memory 4"] == rest, "bit for bit on as many ranks"
    for name in ("4 memory 2", "4 disk 2", "2 memory 4", "2 disk 4"):
        assert losses[name] == pytest.approx(rest, rel=1e-6), name


@pytest.mark.slow
@pytest.mark.multi
def test_a_disk_that_fails_for_one_rank_is_told_to_all(sharded: list[Any]) -> None:
    reports = [messages for name, messages in sharded if name == "failing"]
    assert len(reports) == 2
    for first, second in reports:
        assert first.startswith("2 saves in a row failed; the last: the checkpoint of step 2 was not written; rank 1:")
        assert "Input/output error" in first
        assert "cannot be made" in second
