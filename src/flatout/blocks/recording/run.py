"""A run that records itself: what it was, how its first steps came out, how fast it went; in a folder that a person can read."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from argparse import Namespace
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any, ClassVar, Final, Literal

import msgspec
import torch
from torch import Tensor

from flatout.blocks.recording.code import CREDENTIAL, allowed, keep_code, read_sources, root_of, sums, surroundings_here
from flatout.blocks.recording.fingerprint import Fingerprint
from flatout.blocks.recording.sinks import Sink, Sinks, resolve_sinks
from flatout.core.errors import RecordError, UsageError
from flatout.core.files import read_regular_file, write_whole_file
from flatout.core.records.record import from_json, to_json
from flatout.core.records.run import FileLeftOut, RunRecord, RunSpeed, StepDigests
from flatout.core.runtime.optimizer_steps import OptimizerStepHooks
from flatout.core.runtime.script import end_script
from flatout.core.secrets import is_secret_text, redacted_text, without_secret_values, without_secrets
from flatout.machine.measure.stats import median_estimate

RECORD: Final = "run.json"
STEPS: Final = "steps.jsonl"
VALUES: Final = "values.jsonl"
COMPILED: Final = "compiled.bin"
"""What torch.compile made of the run's code, tuned choices of kernels included, in torch's own form (`torch.compiler`)."""
_MOST_COMPILED_BYTES: Final = 256 << 20
REPLAY: Final = "FLATOUT_REPLAY"
"""The variable by which a replay tells a script's Run where to write, and after how many steps to end."""
_WARM_UP: Final = 5
_MOST_DURATIONS: Final = 10_000
_FLUSHED, _FLUSHED_S = 256, 10.0
"""Values stay on their device for so many ticks or seconds, and are then sent at once."""
_SLOWER: Final = 1.1
"""A run is called slower than its history from here on; what two runs of one script differ by on a quiet machine is less."""


class Run:
    """Records what goes on inside: `with Run("runs", config=args) as run: ... run.tick(loss=loss)`.

    A folder of its own holds `run.json` (command, configuration, versions, hardware, threads, variables, what was left out and
    why), `code/` (the uncommitted changes and the untracked sources beside the revision), `steps.jsonl` (checksums of the first
    steps, by which `flatout replay` tells whether a run comes out the same), `values.jsonl` (what was ticked). What looks like a
    credential is left out. Only the first rank writes. One run inside another is the same run.

    `sinks` get the configuration and the values too: "tensorboard", "mlflow", "wandb", or objects of one's own. `config` is a
    mapping, a dataclass or an argparse Namespace. Steps are ticked by the script, or are those of optimizers where
    `ticks` is 'optimizer'. Raises UsageError when the folder cannot be created.
    """

    _active: ClassVar[Run | None] = None

    def __init__(
        self,
        folder: str | Path = "runs",
        *,
        config: object = None,
        name: str = "",
        fingerprint_steps: int = 8,
        ticks: Literal["own", "optimizer"] = "own",
        sinks: Sequence[str | Sink] = (),
    ) -> None:
        self._folder, self._config, self._name = Path(folder), config, name
        self._sinks = Sinks(resolve_sinks(sinks))
        self._fingerprint = Fingerprint(fingerprint_steps, self._write_digests)
        self._ticks = ticks
        self._tick_hook: OptimizerStepHooks | None = None
        self._outer: Run | None = None
        self._is_writing = False
        self._failure = ""
        self._path = Path()
        self._record: RunRecord | None = None
        self._num_ticks = 0
        self._began_s = self._ticked_s = self._flushed_s = 0.0
        self._durations: list[float] = []
        self._values: list[tuple[int, dict[str, Any]]] = []
        self._sent: deque[_Sent] = deque()

    @property
    def path(self) -> Path:
        """The folder that the run is written to."""
        return self._path if self._outer is None else self._outer.path

    def __enter__(self) -> Run:
        if Run._active is not None:
            self._outer = Run._active
            self._outer._tick_ourselves_no_more()
            return self
        self._began_s = self._flushed_s = perf_counter()
        self._is_writing = os.environ.get("RANK", "0") == "0"
        replay = json.loads(os.environ.get(REPLAY, "null"))
        if self._is_writing:
            self._begin(replay)
        elif replay:  # all ranks end after the same step
            self._fingerprint = Fingerprint(replay["steps"], lambda _: None, end_script)
            self._fingerprint.install()
        Run._active = self
        if self._ticks == "optimizer":
            self._tick_hook = OptimizerStepHooks(after=lambda *_: self.tick())
        return self

    def _begin(self, replay: dict[str, Any] | None) -> None:
        if replay:
            self._path = Path(replay["folder"])
            if replay.get("compiled"):
                torch.compiler.load_cache_artifacts(Path(replay["compiled"]).read_bytes())
            self._fingerprint = Fingerprint(replay["steps"], self._write_digests, end_script)
        else:
            self._path = _new_folder(self._folder, self._name or Path(sys.argv[0] or "python").stem)
        self._record = self._begun(is_replay=bool(replay))
        self._write()
        if replay:
            self._sinks = Sinks([])  # nobody else is told that a run is run again
        self._sinks.each("begin", self._record, self._path)
        self._fingerprint.install()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._outer is not None:
            return
        Run._active = None
        self._tick_ourselves_no_more()
        self._fingerprint.remove()
        if not self._is_writing or self._record is None:
            return
        self._flush(is_last=True)
        self._keep_compiled()
        if error is not None and not (isinstance(error, SystemExit) and error.code in (None, 0)):
            self.fail(redacted_text(f"{type(error).__name__}: {error}"))
        root = Path(self._record.code.root)
        self._record = msgspec.structs.replace(
            self._record,
            seconds=perf_counter() - self._began_s,
            outcome="failed" if self._failure else "finished",
            error=self._failure,
            num_steps=self._num_ticks,
            speed=self._speed(),
            code=msgspec.structs.replace(
                self._record.code, sources=sums(root, [*self._record.code.sources, *read_sources(root)])
            ),
            seeds={"torch": str(torch.initial_seed())},
        )
        self._write()
        self._sinks.each("end", self._record)
        slower = slower_than_before(self._path, self._record)
        if slower:
            sys.stderr.write(f"flatout: {slower}\n")

    def _keep_compiled(self) -> None:
        """So that a replay runs the kernels that were chosen here; a choice by timing comes out otherwise another time."""
        if "torch._inductor.codecache" not in sys.modules:
            return
        artifacts = torch.compiler.save_cache_artifacts()
        if artifacts is None or self._record is None:
            return
        if len(artifacts[0]) <= _MOST_COMPILED_BYTES:
            write_whole_file(self._path / COMPILED, artifacts[0])
            return
        because = f"it has {len(artifacts[0]) >> 20} MiB; a replay compiles anew, and may choose other kernels"
        left_out = (*self._record.left_out, FileLeftOut(name=COMPILED, because=because))
        self._record = msgspec.structs.replace(self._record, left_out=left_out)

    def tick(self, **values: float | Tensor) -> None:
        """One step is over; values are stored with its number. Tensors stay where they are for some seconds: nobody waits."""
        if self._outer is not None:
            self._outer.tick(**values)
            return
        now_s = perf_counter()
        if self._num_ticks > _WARM_UP and len(self._durations) < _MOST_DURATIONS:
            self._durations.append(now_s - self._ticked_s)
        self._ticked_s = now_s
        if self._is_writing and values:
            stored = {k: v.detach().clone() if isinstance(v, Tensor) else float(v) for k, v in values.items()}
            self._values.append((self._num_ticks, stored))
            if len(self._values) >= _FLUSHED or now_s - self._flushed_s > _FLUSHED_S:
                self._flush()
                self._flushed_s = now_s
        self._num_ticks += 1

    def fail(self, because: str) -> None:
        """The run failed, although no exception leaves the `with`."""
        self._failure = because

    def _tick_ourselves_no_more(self) -> None:
        """There is a script inside that ticks."""
        if self._tick_hook is not None:
            self._tick_hook.remove()
            self._tick_hook = None

    # -- inside ---------------------------------------------------------------------------------------------------------------

    def _begun(self, *, is_replay: bool) -> RunRecord:
        here = Path.cwd()
        code, left_out = keep_code(here, self._path)
        command, hidden = without_secrets(list(getattr(sys, "orig_argv", sys.argv))[1:])
        left_out += [FileLeftOut(name=name, because="its value looks like a credential") for name in hidden]
        left_out += allowed(os.environ)[1]
        config = _shown(self._config, left_out)
        if not is_replay:
            _keep_cells(self._path)
        return RunRecord(
            name=self._path.name,
            command=command,
            folder=os.path.relpath(here, root_of(here)[0]),
            began=datetime.now(UTC).isoformat(timespec="seconds"),
            config=config,
            code=code,
            surroundings=surroundings_here(),
            left_out=tuple(left_out),
        )

    def _write(self) -> None:
        assert self._record is not None
        write_whole_file(self._path / RECORD, to_json(self._record))

    def _write_digests(self, digests: StepDigests) -> None:
        with (self._path / STEPS).open("ab") as file:
            file.write(msgspec.json.encode(digests) + b"\n")

    def _flush(self, *, is_last: bool = False) -> None:
        """Send what was ticked to the host, and write what has come; at the end all of it. Only the end waits for a device."""
        if self._values:
            self._sent.append(_Sent(self._values))
            self._values = []
        with (self._path / VALUES).open("a") as file:
            while self._sent and (is_last or self._sent[0].is_there):
                for step, values in self._sent.popleft().read():
                    file.write(json.dumps({"step": step, **values}) + "\n")
                    self._sinks.each("values", step, values)

    def _speed(self) -> RunSpeed | None:
        if len(self._durations) < _WARM_UP:
            return None
        found = median_estimate(self._durations)
        return RunSpeed(num_steps=len(self._durations), median_s=found.value, low_s=found.low, high_s=found.high)


class _Sent:
    """Ticked values on their way to the host, one copy for those of each device."""

    def __init__(self, rows: list[tuple[int, dict[str, Any]]]) -> None:
        """Begin the copies."""
        self._rows = rows
        self._there: list[torch.cuda.Event] = []
        by_device: dict[torch.device, list[tuple[dict[str, Any], str]]] = {}
        for _, values in rows:
            for name, value in values.items():
                if isinstance(value, Tensor) and value.is_cuda:
                    by_device.setdefault(value.device, []).append((values, name))
        for device, places in by_device.items():
            together = torch.stack([values[name].double().view(()) for values, name in places])
            on_host = torch.empty(len(places), dtype=torch.float64, pin_memory=True)
            on_host.copy_(together, non_blocking=True)
            there = torch.cuda.Event()
            there.record(torch.cuda.current_stream(device))
            self._there.append(there)
            for (values, name), number in zip(places, on_host, strict=True):
                values[name] = number

    @property
    def is_there(self) -> bool:
        """Whether reading waits for nothing."""
        return all(there.query() for there in self._there)

    def read(self) -> list[tuple[int, dict[str, float]]]:
        """Steps with their values, once all are there."""
        for there in self._there:
            there.synchronize()
        return [(step, {k: float(v) for k, v in values.items()}) for step, values in self._rows]


def read_run(path: Path) -> RunRecord:
    """The record of a run's folder. Raises RecordError when it holds none."""
    try:
        data = read_regular_file(path / RECORD)
    except OSError as e:
        raise RecordError(f"'{path}' holds no {RECORD}: {e.strerror or e}; give the folder of a run") from e
    return from_json(data, RunRecord)


def read_digests(path: Path) -> list[StepDigests]:
    """The checksums of a run's first steps; a line that was cut off ends them."""
    found: list[StepDigests] = []
    try:
        lines = read_regular_file(path / STEPS).splitlines()
    except OSError:
        return found
    for line in lines:
        try:
            found.append(from_json(line, StepDigests))
        except RecordError:
            break
    return found


def runs_in(folder: Path) -> list[tuple[Path, RunRecord]]:
    """All runs of a folder, the oldest first; what cannot be read is passed over."""
    found = []
    for path in sorted(folder.glob(f"*/{RECORD}")):
        try:
            found.append((path.parent, read_run(path.parent)))
        except RecordError:
            continue
    return sorted(found, key=lambda pair: (pair[1].began, pair[0].name))


def slower_than_before(path: Path, record: RunRecord) -> str:
    """A sentence when a run is slower than those before it of the same command on the same device; '' when not."""
    if record.speed is None:
        return ""
    before = [
        r.speed.median_s
        for p, r in runs_in(path.parent)
        if p != path and r.speed is not None and r.command == record.command
        if r.surroundings.device == record.surroundings.device and r.began <= record.began
    ]
    if not before:
        return ""
    usual = sorted(before)[len(before) // 2]
    if record.speed.low_s < _SLOWER * usual:
        return ""
    return (
        f"a step took {record.speed.median_s * 1e3:.2f} ms ({record.speed.low_s * 1e3:.2f} - {record.speed.high_s * 1e3:.2f}), "
        f"{record.speed.median_s / usual:.2f} times as long as in {len(before)} run(s) before; `flatout runs diff` says why"
    )


def _new_folder(folder: Path, name: str) -> Path:
    """A new folder for a run. Raises UsageError when it cannot be made."""
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    for number in range(1000):
        path = folder / (f"{stamp}-{name}" + (f"-{number}" if number else ""))
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as e:
            raise UsageError(
                f"the folder '{folder}' for runs cannot be made: {e.strerror or e}; give one that can"
            ) from e
        return path.absolute()
    raise UsageError(f"'{folder}' has a thousand runs of this second; give another folder")


def _shown(config: object, left_out: list[FileLeftOut]) -> dict[str, str]:
    """A configuration as text, without what looks like a credential. Raises UsageError for what is none."""
    if config is None:
        return {}
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        config = dataclasses.asdict(config)
    if isinstance(config, Namespace):
        config = vars(config)
    if not isinstance(config, Mapping):
        raise UsageError(f"config is a {type(config).__name__}; give a mapping, a dataclass or an argparse Namespace")
    shown, secret = without_secret_values({str(name): str(value) for name, value in config.items()})
    left_out += [FileLeftOut(name=f"config {name}", because=CREDENTIAL) for name in secret]
    return shown


def _keep_cells(path: Path) -> None:
    """The cells of a notebook in the order in which they were run."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None:
        return
    cells = [cell for cell in shell.history_manager.input_hist_parsed if cell and not is_secret_text(cell)]
    text = "".join(f"# %% cell {number}\n{cell}\n\n" for number, cell in enumerate(cells, start=1))
    write_whole_file(path / "code" / "cells.py", text.encode())
