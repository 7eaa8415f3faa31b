"""Checkpoints: bit-equal resumes, whole or not there, errors on every rank, other numbers of ranks."""

from __future__ import annotations

import json
import random
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.blocks.parallel.forked import lines_of
from torch import Tensor, nn

from flatout.blocks.training.checkpoint_files import SplitTensors, join_tensors, split_tensors
from flatout.blocks.training.checkpoints import Checkpoints
from flatout.blocks.training.staging import Staging
from flatout.core.errors import CheckpointError, UsageError


class _Tied(nn.Module):
    """Dropout, running statistics, tied weights, a mask with infinities."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(width, width), nn.Linear(width, width)
        self.two.weight = self.one.weight
        self.norm, self.drop = nn.BatchNorm1d(width), nn.Dropout(0.2)
        self.register_buffer("mask", torch.full((2, 2), float("-inf")).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.drop(self.norm(self.one(x)).tanh()))  # type: ignore[no-any-return]


class _Training:
    """Everything that a resume has to bring back."""

    def __init__(self, device: str = "cpu") -> None:
        torch.manual_seed(0)
        random.seed(0)
        self.net = _Tied().to(device)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 20)
        self.average = torch.optim.swa_utils.AveragedModel(
            self.net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )
        self.device = device

    @property
    def parts(self) -> dict[str, Any]:
        return {"net": self.net, "optimizer": self.optimizer, "schedule": self.schedule, "average": self.average}

    def steps(self, num: int) -> None:
        for _ in range(num):
            x = torch.randn(8, 16).to(self.device, non_blocking=True) * (1 + random.random())
            loss = self.net(x).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.schedule.step()
            self.average.update_parameters(self.net)

    def state(self) -> list[Tensor]:
        return [t.detach().cpu().clone() for m in (self.net, self.average) for t in m.state_dict().values()]


def _same(one: list[Tensor], two: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=[pytest.mark.device, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
    ),
]


@pytest.mark.parametrize("device", DEVICES)
def test_a_resumed_training_ends_bit_for_bit_as_one_that_was_not_stopped(tmp_path: Path, device: str) -> None:
    whole = _Training(device)
    with Checkpoints(tmp_path) as saves:
        for step in (3, 5, 8):
            whole.steps(step - (0, 3, 5)[(3, 5, 8).index(step)])
            saves.save(step, **whole.parts)
        whole.steps(4)  # while the last one is written
    assert saves.steps == [5, 8]
    assert [s.step for s in saves.saved] == [3, 5, 8]
    again = _Training(device)
    again.steps(1)
    with Checkpoints(tmp_path) as saves:
        assert saves.load(**again.parts) == 8
    again.steps(4)
    assert _same(again.state(), whole.state())
    assert again.schedule.get_last_lr() == whole.schedule.get_last_lr()


def test_nothing_to_load_is_none_and_saving_draws_and_changes_nothing(tmp_path: Path) -> None:
    plain, watched = _Training(), _Training()
    plain.steps(5)
    torch.manual_seed(0)
    random.seed(0)
    watched = _Training()
    with Checkpoints(tmp_path / "deep" / "folder") as saves:
        assert saves.load(**watched.parts) is None
        for step in range(5):
            watched.steps(1)
            saves.save(step, **watched.parts)
    assert _same(watched.state(), plain.state())


LEAVES = st.one_of(st.none(), st.booleans(), st.integers(-(2**60), 2**60), st.floats(), st.text(max_size=6))
KEYS = st.one_of(st.text(max_size=4), st.integers(0, 9), st.sampled_from(["__tensor__", "__tuple__", "__pairs__"]))
TREES = st.recursive(
    st.one_of(LEAVES, st.integers(1, 4).map(torch.zeros)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=3), st.tuples(inner, inner)
    ),
    max_leaves=12,
)


def _equal(one: Any, two: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(two, Tensor) and torch.equal(one, two)
    if isinstance(one, dict):
        return isinstance(two, dict) and list(one) == list(two) and all(_equal(v, two[k]) for k, v in one.items())
    if isinstance(one, (list, tuple)):
        return type(one) is type(two) and len(one) == len(two) and all(map(_equal, one, two))
    return type(one) is type(two) and (one == two or (one != one and two != two))


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(TREES)
def test_any_tree_comes_back_from_json_and_tensors(tree: Any) -> None:
    tensors = SplitTensors()
    plain = json.loads(json.dumps(split_tensors(tree, "part", tensors)))
    assert _equal(join_tensors(plain, tensors.__getitem__), tree)


def test_what_would_have_to_be_unpickled_is_refused_by_its_path(tmp_path: Path) -> None:
    class Odd:
        def state_dict(self) -> dict[str, Any]:
            return {"numbers": [1, 2.0], "inner": {"thing": object()}}

    with Checkpoints(tmp_path) as saves:
        with pytest.raises(UsageError, match="'odd/inner/thing' is a object"):
            saves.save(1, odd=Odd())
        with pytest.raises(UsageError, match="give something with a state_dict"):
            saves.save(1, odd=3)
        with pytest.raises(UsageError, match=r"'net/weight' is a tensor of the kind torch.sparse_coo"):
            saves.save(1, net={"weight": torch.eye(2).to_sparse()})
        with pytest.raises(UsageError, match="give the number of steps done"):
            saves.save(1)
        assert saves.steps == []


@pytest.mark.parametrize("damage", ["truncated", "changed", "no index", "half an index"])
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(tmp_path: Path, damage: str) -> None:
    training = _Training()
    training.steps(1)
    expected = training.state()
    with Checkpoints(tmp_path) as saves:
        saves.save(1, **training.parts)
        training.steps(1)
        saves.save(2, **training.parts)
    [weights] = (tmp_path / "step-2").glob("*.safetensors")
    index = tmp_path / "step-2" / "checkpoint.json"
    if damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif damage == "changed":
        data = bytearray(weights.read_bytes())
        data[-5] ^= 1
        weights.write_bytes(data)
    elif damage == "no index":
        index.unlink()
    else:
        index.write_bytes(index.read_bytes()[:200])
    again = _Training()
    with Checkpoints(tmp_path) as saves:
        if damage == "no index":
            assert saves.steps == [1]
            assert saves.load(**again.parts) == 1
        else:
            with pytest.warns(UserWarning, match="step 2 is passed over"):
                assert saves.load(**again.parts) == 1
            with pytest.raises(CheckpointError, match="damaged"):
                saves.load(2, **again.parts)
        with pytest.raises(CheckpointError, match="has no checkpoint of step 7; it has"):
            saves.load(7, **again.parts)
    assert _same(again.state(), expected)


def test_another_model_is_refused_and_nothing_is_changed(tmp_path: Path) -> None:
    training = _Training()
    with Checkpoints(tmp_path) as saves:
        saves.save(1, **training.parts)
        training.steps(2)
        before = training.state()
        for other, says in (
            (nn.Linear(16, 16), "lacks bias, weight"),
            (_Tied(8), r"is \[8, 8\] float32, and \[16, 16\]"),
        ):
            with pytest.raises(UsageError, match=says):
                saves.load(optimizer=training.optimizer, net=other)
        with pytest.raises(UsageError, match="has no parts"):
            saves.load(network=training.net)
    assert _same(training.state(), before)


def test_weights_that_are_not_finite_never_take_the_place_of_good_ones(tmp_path: Path) -> None:
    training = _Training()
    with Checkpoints(tmp_path, keep=1) as saves:
        saves.save(1, **training.parts)
        with torch.no_grad():
            training.net.one.bias[3] = float("nan")
        saves.save(2, **training.parts)
        with pytest.raises(CheckpointError, match=r"net/one\.bias' is not finite; the last good one is of step 1"):
            saves.wait()
        assert saves.steps == [1]
    assert [p.name for p in tmp_path.iterdir()] == ["step-1"]


@pytest.fixture
def full_disk() -> Iterator[Callable[[], None]]:
    """From its call on no file grows past 50 kB, until the test ends."""
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_is_told_by_the_next_call_and_leaves_the_last_good_one(
    tmp_path: Path, full_disk: Callable[[], None]
) -> None:
    net = nn.Linear(256, 256)
    with Checkpoints(tmp_path) as saves:
        saves.save(1, net=net)
        saves.wait()
        full_disk()
        saves.save(2, net=net)
        with pytest.raises(
            CheckpointError,
            match=r"^the checkpoint of step 2 was not written; rank 0: .*; the last good one is of step 1$",
        ):
            saves.save(3, net=net)
        assert saves.steps == [1]
    assert [p.name for p in tmp_path.iterdir()] == ["step-1"]


def test_what_killed_writers_left_is_removed_and_what_they_were_replacing_put_back(tmp_path: Path) -> None:
    training = _Training()
    with Checkpoints(tmp_path) as saves:
        saves.save(4, **training.parts)
    (tmp_path / "step-4").rename(tmp_path / ".step-4.replaced")
    (tmp_path / ".step-5.writing").mkdir()
    (tmp_path / ".step-3.removed").mkdir()
    with Checkpoints(tmp_path) as saves:
        assert saves.load(**training.parts) == 4
    assert [p.name for p in tmp_path.iterdir()] == ["step-4"]


def test_a_step_that_is_saved_again_replaces_the_one_before(tmp_path: Path) -> None:
    training = _Training()
    with Checkpoints(tmp_path) as saves:
        saves.save(4, **training.parts)
        training.steps(1)
        saves.save(4, **training.parts)
        expected = training.state()
        training.steps(1)
        assert saves.load(**training.parts) == 4
    assert _same(training.state(), expected)
    assert [p.name for p in tmp_path.iterdir()] == ["step-4"]


def test_a_run_that_goes_on_from_an_older_one_is_the_newest(tmp_path: Path) -> None:
    training = _Training()
    with Checkpoints(tmp_path, keep=3) as saves:
        for step in (10, 20, 30):
            saves.save(step, **training.parts)
    with Checkpoints(tmp_path, keep=3) as saves:
        assert saves.load(10, **training.parts) == 10
        training.steps(1)
        saves.save(15, **training.parts)
        expected = training.state()
        saves.wait()
        assert saves.steps == [20, 30, 15]
        training.steps(1)
        assert saves.load(**training.parts) == 15
    assert _same(training.state(), expected)


def test_a_failure_without_words_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def speechless(*_: Any) -> None:
        raise MemoryError

    training = _Training()
    with Checkpoints(tmp_path) as saves:
        monkeypatch.setattr("flatout.blocks.training.checkpoint_files.publish", speechless)
        saves.save(1, **training.parts)
        with pytest.raises(
            CheckpointError, match="step 1 was not written; rank 0: MemoryError; there is none before it"
        ):
            saves.wait()
    assert list(tmp_path.iterdir()) == []


def test_what_was_given_to_save_only_is_not_loaded_into(tmp_path: Path) -> None:
    with Checkpoints(tmp_path) as saves:
        saves.save(1, net=nn.Linear(2, 2), notes={"best": 0.5})
        with pytest.raises(UsageError, match=r"the parts \['notes'\] have no load_state_dict"):
            saves.load(net=nn.Linear(2, 2), notes={})
        assert saves.load(net=nn.Linear(2, 2)) == 1


def test_what_cannot_be_read_does_not_count_among_those_that_are_kept(tmp_path: Path) -> None:
    training = _Training()
    with Checkpoints(tmp_path, keep=1) as saves:
        saves.save(1, **training.parts)
        saves.wait()
        (tmp_path / "step-1").rename(tmp_path / "step-9")
        (tmp_path / "step-9" / "checkpoint.json").write_text("{")
        for step in (2, 3):
            saves.save(step, **training.parts)
            saves.wait()
        assert saves.steps == [3, 9]
        with torch.no_grad():
            training.net.one.bias.fill_(float("nan"))
        saves.save(4, **training.parts)
        with pytest.raises(CheckpointError, match="the last good one is of step 3"):
            saves.wait()
        with pytest.warns(UserWarning, match="step 9 is passed over"):
            assert saves.load(**training.parts) == 3


def test_torchs_own_reader_reads_it(tmp_path: Path) -> None:
    net = nn.Linear(5, 3)
    with Checkpoints(tmp_path) as saves:
        saves.save(1, net=net)
    found = {"net/weight": torch.zeros(3, 5)}
    reader = dcp.HuggingFaceStorageReader(str(tmp_path / "step-1"))
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.load(found, storage_reader=reader, no_dist=True)
    assert torch.equal(found["net/weight"], net.weight)


RANKS = """
    import json
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.tensor import distribute_tensor, Shard, Replicate
    import flatout
    from flatout.core.errors import CheckpointError

    folder = sys.argv[1]

    def ranks(is_loading):
        with flatout.World("cpu") as world:
            mesh = world.mesh()
            torch.manual_seed(0)
            net = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 2))
            for n, p in list(net[0].named_parameters()):  # uneven shards of one layer, the other the same everywhere
                setattr(net[0], n, nn.Parameter(distribute_tensor(p.data, mesh, [Shard(0)])))
            optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, foreach=False)
            for p in net.parameters():
                p.grad = torch.ones_like(p)
            optimizer.step()
            torch.manual_seed(world.rank)

            def load(saves):
                for p in net.parameters():
                    p.data.zero_()
                optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, foreach=False)
                assert saves.load(net=net, optimizer=optimizer) == 2
                assert optimizer.state[net[0].weight]["exp_avg"].placements == net[0].weight.placements
                tell(f"loaded by {world.num_ranks}", optimizer)

            def tell(what, optimizer):
                full = [*net.parameters(), *(t for s in optimizer.state.values() for t in s.values())]
                full = [t.full_tensor() if hasattr(t, "full_tensor") else t for t in full]
                if world.is_first:
                    report(what + " " + json.dumps([t.detach().flatten().tolist() for t in full]))

            with flatout.Checkpoints(folder) as saves:
                if is_loading:
                    load(saves)
                    return
                tell("saved", optimizer)
                saves.save(1, net=net, optimizer=optimizer)
                saves.save(2, net=net, optimizer=optimizer)
                report(f"drawn {world.rank} {torch.rand(()).item()}")
                load(saves)
                report(f"drawn again {world.rank} {torch.rand(()).item()}")
                if world.rank == 1:
                    with torch.no_grad():
                        net[0].bias.to_local()[0] = float("inf")
                saves.save(3, net=net)
                try:
                    saves.wait()
                except CheckpointError as e:
                    report(f"{world.rank}: {e}")

    as_ranks(2, lambda: ranks(is_loading=False))
    as_ranks(1, lambda: ranks(is_loading=True))
    as_ranks(3, lambda: ranks(is_loading=True))
"""


def _after(lines: list[str], what: str) -> str:
    [found] = [line.removeprefix(f"{what} ") for line in lines if line.startswith(f"{what} ")]
    return found


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.long
def test_ranks_write_their_shards_and_other_numbers_of_ranks_read_them(tmp_path: Path) -> None:
    told = lines_of(RANKS, tmp_path)
    saved = _after(told, "saved")
    for rank in (0, 1):
        assert _after(told, f"drawn {rank}") == _after(told, f"drawn again {rank}")
        said = _after(told, f"{rank}:")
        assert said.startswith("the checkpoint of step 3 was not written; rank 1: 'net/0.bias' is not finite")
        assert said.endswith("the last good one is of step 2")
    for num in (1, 2, 3):
        assert _after(told, f"loaded by {num}") == saved


def test_copies_are_of_the_moment_and_their_memory_is_kept() -> None:
    staging = Staging()
    tensors = {"a": torch.randn(3, 4).t(), "b": torch.tensor(2.5), "c": torch.arange(5), "d": torch.empty(0, 3)}
    first = staging.copy(tensors)
    assert all(torch.equal(first.tensors[n], t) for n, t in tensors.items())
    places = [t.data_ptr() for t in first.tensors.values()]
    tensors["a"].zero_()
    assert not torch.equal(first.tensors["a"], tensors["a"])
    second = staging.copy(tensors)
    assert [t.data_ptr() for t in second.tensors.values()] == places
    assert torch.equal(second.tensors["a"], tensors["a"])
    third = staging.copy({"a": torch.ones(2)})
    assert torch.equal(third.tensors["a"], torch.ones(2))


@pytest.mark.device
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_device_nobody_waits_and_copies_are_of_the_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flatout.blocks.training.staging._PIECE_BYTES", 1 << 16)
    monkeypatch.setattr("flatout.blocks.training.staging._SHARE_OF_FREE", 1e-6)  # some pieces wait for others
    tensors = {f"{n}": torch.randn(100 * (n + 1), 40, device="cuda") for n in range(12)} | {
        "step": torch.tensor(3.0),
        "bool": torch.rand(7, device="cuda") > 0.5,
        "turned": torch.randn(30, 50, device="cuda").t(),
    }
    staging = Staging()
    staging.copy(tensors).wait()
    expected = {n: t.to("cpu", copy=True) for n, t in tensors.items()}
    torch.cuda.set_sync_debug_mode("error")
    try:
        staged = staging.copy(tensors)
        for tensor in tensors.values():
            tensor.zero_()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert staged.wait() > 0
    assert all(torch.equal(staged.tensors[n], t) for n, t in expected.items())
