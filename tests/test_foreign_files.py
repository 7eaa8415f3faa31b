"""Files that somebody else may have written: reading them runs no code, opens nothing elsewhere, takes no more than they justify.

What each of these did before is in SECURITY.md; `bench/fuzz_files.py` does the first test ten thousand times a kind.
"""

from __future__ import annotations

import gzip
import json
import os
import pickle
import shutil
import socket
import subprocess
import sys
import zipfile
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests import command_line, foreign_files
from tests.foreign_files import KINDS

from flatout.blocks.elastic.messages import NodeLink
from flatout.blocks.recording.replay import _rebuilt
from flatout.check.traces.kineto import read_trace
from flatout.core.errors import (
    CaptureError,
    CheckpointError,
    FlatoutError,
    NativeError,
    PlanError,
    RecordError,
    UsageError,
)
from flatout.core.files import path_inside, read_regular_file
from flatout.core.records.hardware import Machine
from flatout.core.records.plan import from_toml
from flatout.core.records.record import from_json
from flatout.core.tensors.saved import load_saved_tensors
from flatout.report.json_report import read_evidence
from flatout.tune.script_hooks import ScriptHooks

QUICK = [
    "plan",
    "search-log",
    "memory-copy",
    "teacher-cache",
    "messages",
    "pruning",
    "recorded-steps",
    "machine",
    "quantised",
    "adapter",
]
REPORTS = ["report", "drawn-report"]
SLOWER = [kind for kind in KINDS if kind not in (*QUICK, *REPORTS)]
TOOL = Path(foreign_files.__file__)


def changed_and_read(kinds: list[str], num: int) -> list[dict[str, Any]]:
    command = [sys.executable, str(TOOL), ",".join(kinds), str(num), "1"]
    environment = {**os.environ, **command_line.QUICK}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    return [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]


def assert_sound(found: list[dict[str, Any]], num: int) -> None:
    for one in found:
        assert not one["failures"], f"{one['kind']}: {one['examples']}"
        assert one["num_read"] + one["num_refused"] == num
        assert one["num_refused"] or one["kind"] == "messages"
        assert one["most_more_bytes"] < 512 << 20


@pytest.mark.slow
@pytest.mark.long
def test_a_changed_file_is_read_or_refused_and_nothing_else() -> None:
    assert_sound(changed_and_read(QUICK, 80), 80)


@pytest.mark.slow
@pytest.mark.parametrize(("kinds", "num"), [(REPORTS, 60), (SLOWER, 80)], ids=str)
@pytest.mark.long
def test_changed_files_of_kinds_that_take_longer_are_read_or_refused(kinds: list[str], num: int) -> None:
    assert_sound(changed_and_read(kinds, num), num)


@pytest.fixture
def with_outside(tmp_path: Path) -> Callable[[str], Path]:
    """A folder with a real file of a kind, beside a folder `outside`."""

    def make(kind: str) -> Path:
        folder = tmp_path / "made"
        folder.mkdir()
        (tmp_path / "outside").mkdir()
        (tmp_path / "outside" / "secret").write_text("{}")
        KINDS[kind].write(folder)
        return folder

    return make


def edited(path: Path, change: Callable[[Any], None]) -> None:
    tree = json.loads(path.read_bytes())
    change(tree)
    path.write_text(json.dumps(tree))


# -- paths ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["../outside/secret", "/etc/passwd", "a/../../b", "", ".", "..", "a\0b", "link"])
def test_a_name_that_leads_out_of_its_folder_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "link").symlink_to("/etc/passwd")
    with pytest.raises(OSError, match=r"leads out|no name"):
        path_inside(tmp_path / "folder", name)


def test_a_name_in_the_folder_or_below_is_taken(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "linked").symlink_to(tmp_path / "real")
    assert path_inside(tmp_path / "linked", "a/b.py") == tmp_path / "linked" / "a" / "b.py"


def test_a_pipe_or_a_device_is_no_file_to_wait_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        with pytest.raises(OSError, match=r"no regular file|directory"):
            read_regular_file(path)


def test_an_index_of_a_checkpoint_names_no_file_elsewhere(with_outside: Callable[[str], Path]) -> None:
    folder = with_outside("checkpoint")
    index = next(folder.glob("checkpoints/*/checkpoint.json"))

    def change(tree: Any) -> None:
        tree["files"]["../../../outside/secret"] = {"num_bytes": 2, "crc32": 2745614147}

    edited(index, change)
    with pytest.warns(UserWarning, match="passed over"), pytest.raises(CheckpointError, match="leads out"):
        KINDS["checkpoint"].read(folder)


@pytest.mark.slow
def test_an_engine_names_no_library_elsewhere(with_outside: Callable[[str], Path]) -> None:
    folder = with_outside("engine")
    edited(folder / "engine" / "engine.json", lambda tree: tree["sums"].update({"../../outside/secret": "0" * 64}))
    with pytest.raises(CheckpointError, match="leads out"):
        KINDS["engine"].read(folder)
    edited(folder / "engine" / "engine.json", lambda tree: tree.update(name="x/../../../outside/evil"))
    with pytest.raises(CheckpointError, match="missing or damaged"):
        KINDS["engine"].read(folder)


@pytest.mark.slow
def test_a_replay_writes_nothing_outside_of_its_scratch_folder(
    with_outside: Callable[[str], Path], tmp_path: Path
) -> None:
    from flatout.blocks.recording.run import read_run

    folder = with_outside("run")

    def change(tree: Any) -> None:
        tree["code"].update(revision="", untracked=["../../outside/planted.py"])

    edited(folder / "run.json", change)
    with ExitStack() as stack, pytest.raises(CaptureError, match="leads out"):
        _rebuilt(folder, read_run(folder), tmp_path / "scratch", stack)
    assert not (tmp_path / "outside" / "planted.py").exists()


def test_a_plan_changes_no_text_outside_of_the_scripts_project(tmp_path: Path) -> None:
    (tmp_path / "project" / "site-packages").mkdir(parents=True)
    hooks = ScriptHooks(str(tmp_path / "project"))
    for file in ("../elsewhere.py", os.__file__, "site-packages/torch.py"):
        with pytest.raises(PlanError, match="not in the project"):
            hooks.at_source(file, lambda text: text)
    hooks.at_source("train.py", lambda text: text)


# -- code ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lever", "parameters"),
    [
        ("workload.tf32", {"level": 'high")\nimport os; os.system("touch planted")\n("'}),
        ("workload.freeze", {"modules": ["Net.x); __import__('os').system('touch planted'); print(1"]}),
        ("communication.prefetch-to-device", {"device": "__import__('os').system('touch planted')"}),
    ],
)
def test_a_setting_of_a_plan_that_holds_code_is_refused(lever: str, parameters: dict[str, Any]) -> None:
    """These texts were written into the script as they stood."""
    lines = [f'[[lever]]\nid = "{lever}"\nguarantee = "bounded"\n[lever.parameters]']
    lines += [f"{name} = {json.dumps(value)}" for name, value in parameters.items()]
    with pytest.raises(PlanError, match="and no code"):
        from_toml("\n".join(lines).encode())


class Planted:
    """Runs code where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("kind", ["quantised", "recorded-steps"])
def test_a_file_of_tensors_is_not_unpickled(with_outside: Callable[[str], Path], tmp_path: Path, kind: str) -> None:
    folder = with_outside(kind)
    file = next(folder.glob("*.pt"))
    torch.save({"format": 1, "schemes": {}, "state": Planted(tmp_path / "ran")}, file)
    with pytest.raises(CheckpointError):
        KINDS[kind].read(folder)
    file.write_bytes(pickle.dumps(Planted(tmp_path / "ran")))
    with pytest.raises(CheckpointError):
        KINDS[kind].read(folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
@pytest.mark.parametrize("opened", ["engine", "engine/libaverage.so"])
def test_an_engine_that_others_may_write_to_is_not_loaded(with_outside: Callable[[str], Path], opened: str) -> None:
    folder = with_outside("engine")
    (folder / opened).chmod(0o777)
    with pytest.raises(NativeError, match="can be written by other users"):
        KINDS["engine"].read(folder)


@pytest.mark.slow
def test_an_engine_is_its_owners_alone_whatever_the_umask(with_outside: Callable[[str], Path]) -> None:
    before = os.umask(0)
    try:
        folder = with_outside("engine")
    finally:
        os.umask(before)
    KINDS["engine"].read(folder)


def test_ranks_do_not_meet_in_a_folder_that_is_open_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from flatout.app.cli.ranks import Rank, shared_folder

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    rank, environment = Rank(0, 2, 2), {"MASTER_PORT": "1"}
    folder = shared_folder(environment, rank)
    folder.chmod(0o777)
    with pytest.raises(UsageError, match="yours alone"):
        shared_folder(environment, rank)
    folder.rmdir()
    (tmp_path / "theirs").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "theirs")
    with pytest.raises(UsageError, match="yours alone"):
        shared_folder(environment, rank)


# -- sizes ---------------------------------------------------------------------------------------------------------------------


DEEP = b"[" * 100_000


@pytest.mark.parametrize(
    "read",
    [
        lambda: from_json(b'{"id":' + DEEP, Machine),
        lambda: from_json(b'{"unknown_field":' + DEEP + b"]" * len(DEEP) + b"}", Machine),
        lambda: read_evidence(b'{"schema_version": 2, "workload":' + DEEP),
        lambda: from_toml(b"a = " + DEEP),
        lambda: from_toml(b"version = " + b"9" * 5000),
    ],
)
def test_deep_nesting_and_endless_numbers_are_errors_of_the_file(read: Callable[[], object]) -> None:
    with pytest.raises(FlatoutError):
        read()


def test_a_number_beyond_64_bits_is_refused() -> None:
    with pytest.raises(RecordError, match="64 bits"):
        from_json(b'{"version": ' + b"9" * 400 + b"}", Machine)


@pytest.mark.slow
def test_a_small_gzip_of_gigabytes_is_given_up(tmp_path: Path) -> None:
    bomb = tmp_path / "trace.json.gz"
    bomb.write_bytes(gzip.compress(b'{"traceEvents":[' + b" " * (300 << 20)))
    with pytest.raises(RecordError, match="times that unpacked"):
        read_trace(bomb)


def test_a_checkpoint_gets_no_memory_for_a_mere_claim(with_outside: Callable[[str], Path]) -> None:
    folder = with_outside("checkpoint")
    index = next(folder.glob("checkpoints/*/checkpoint.json"))

    def change(tree: Any) -> None:
        entry = tree["tensors"]["optimizer/state/0/exp_avg"]
        entry["shape"] = entry["chunks"][0]["shape"] = [10_000_000_000_000]
        entry["chunks"][0]["offset"] = [0]

    edited(index, change)
    with pytest.warns(UserWarning, match="passed over"), pytest.raises(CheckpointError, match="more bytes than"):
        KINDS["checkpoint"].read(folder)


def test_a_packed_file_of_tensors_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(1 << 20)}, tmp_path / "plain.pt")
    with zipfile.ZipFile(tmp_path / "plain.pt") as plain, zipfile.ZipFile(tmp_path / "bomb.pt", "w") as bomb:
        for member in plain.namelist():
            bomb.writestr(member, plain.read(member), compress_type=zipfile.ZIP_DEFLATED)
    assert torch.equal(load_saved_tensors(tmp_path / "plain.pt", name="plain")["w"], torch.zeros(1 << 20))
    with pytest.raises(CheckpointError, match="packed"):
        load_saved_tensors(tmp_path / "bomb.pt", name="bomb")


def test_a_tensor_that_repeats_its_memory_a_million_times_is_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(1).expand(1 << 40)}, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match="larger"):
        load_saved_tensors(tmp_path / "w.pt", name="w")


def test_an_adapter_of_a_huge_rank_is_refused_before_it_is_made(with_outside: Callable[[str], Path]) -> None:
    from safetensors import safe_open

    folder = with_outside("adapter")
    path = folder / "lora.safetensors"
    with safe_open(path, framework="pt") as file:
        tensors, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    described = json.loads(metadata["flatout_adapter"])
    described["rank"] = described["method"]["rank"] = 10**9
    save_file(tensors, path, {"flatout_adapter": json.dumps(described)})
    with pytest.raises(CheckpointError, match="no tensor of that size"):
        KINDS["adapter"].read(folder)


def test_a_pattern_that_would_be_looked_for_without_end_is_refused(with_outside: Callable[[str], Path]) -> None:
    folder = with_outside("adapter")
    edited(folder / "peft" / "adapter_config.json", lambda tree: tree.update(alpha_pattern={"(a+)+": 2}))
    with pytest.raises(UsageError, match="alpha_pattern"):
        KINDS["adapter"].read(folder)


@pytest.mark.parametrize(
    "sent", [b"nonsense\n", b'{"type": "start"}\n', b"x" * (9 << 20)], ids=["nonsense", "unknown", "endless"]
)
def test_a_stranger_who_sends_no_messages_is_hung_up_on(sent: bytes) -> None:
    here, there = socket.socketpair()
    with here, there:
        link, left = NodeLink(here), memoryview(sent)
        there.setblocking(False)
        while link.is_open:
            with suppress(BlockingIOError, BrokenPipeError):
                left = left[there.send(left) :] if left else left
            assert link.received() == []
            assert left or not link.is_open or sent == b""


def test_evidence_names_no_line_or_operator_that_is_not_there(with_outside: Callable[[str], Path]) -> None:
    from tests.evidence_builder import EvidenceBuilder

    from flatout.core.records.record import to_json

    data = json.loads(to_json(EvidenceBuilder().build()))
    read_evidence(json.dumps(data).encode())
    data["trace"]["operator"] = [5]
    with pytest.raises(RecordError, match="operator 5"):
        read_evidence(json.dumps(data).encode())


def test_shrunk_models_are_unpickled_on_an_explicit_word_alone(
    with_outside: Callable[[str], Path], tmp_path: Path
) -> None:
    from flatout.shrink.compose.saved_model import load_shrunk

    folder = with_outside("shrunk") / "shrunk"
    torch.save(Planted(tmp_path / "ran"), folder / "model.pt")
    edited(folder / "how.json", lambda tree: tree.update(is_pickled=True))
    with pytest.raises(CheckpointError, match="allow_pickle"):
        load_shrunk(folder)
    assert not (tmp_path / "ran").exists()
    shutil.rmtree(folder)
