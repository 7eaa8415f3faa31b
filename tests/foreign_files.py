"""Every kind of file that flatout reads and somebody else may have written: how a real one is made, and how it is read.

`python tests/foreign_files.py KIND NUM SEED` changes a real one NUM times and reads each, in a process whose memory has a limit;
it prints what came of it as JSON. A reading may succeed or raise a FlatoutError; anything else is a failure.
"""

from __future__ import annotations

import gzip
import json
import random
import resource
import shutil
import signal
import socket
import struct
import sys
import tempfile
import traceback
import warnings
import zlib
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from types import FrameType
from typing import Any, Final, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch
from tests.check.traces.kineto_builder import Kineto
from tests.mutations import mutated
from tests.plain_models import plain
from torch import nn

from flatout.core.errors import FlatoutError

MOST_MORE_BYTES: Final = 1 << 30
"""Address space that reading a file of some KiB may take beyond what the process has."""
MOST_S: Final = 20.0
"""Seconds of one reading, after which it hangs; a busy machine has them too."""


class Kind(NamedTuple):
    """A kind of file, or of folder: `write` makes a real one in a folder, `read` does all that a user's call does with it.

    `reseal` makes checksums right again after a change, as somebody who means harm would.
    """

    write: Callable[[Path], None]
    read: Callable[[Path], object]
    reseal: Callable[[Path], None] = lambda folder: None


# -- reports and traces --------------------------------------------------------------------------------------------------------


@cache
def _report() -> bytes:
    """What `check` writes of a few steps: observed once for all kinds that read it."""
    from flatout.app.session import check
    from flatout.report.json_report import json_report

    torch.manual_seed(0)
    net = plain("mlp", width=16).module
    optimizer = torch.optim.Adam(net.parameters())

    def step(batch: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = net(batch).square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    checked = check(step, [torch.randn(8, 64) for _ in range(40)], observe_s=2.0)
    return json_report(checked.evidence, checked.diagnosis)


def _write_report(folder: Path) -> None:
    (folder / "report.json").write_bytes(_report())


def _read_report(folder: Path) -> None:
    from flatout.app.session import evidence_in

    evidence_in([folder / "report.json"])


def _draw_report(folder: Path) -> None:
    """All that `flatout report` does with it."""
    from flatout.app.session import diagnose_all, evidence_in
    from flatout.report.parts.diagnosis import diagnosis_blocks
    from flatout.report.text import plain_text

    evidence = evidence_in([folder / "report.json"])
    plain_text(diagnosis_blocks(evidence, diagnose_all(evidence)))


def _write_trace(folder: Path) -> None:
    trace = Kineto()
    for number in range(3):
        at = 1000 * number
        trace.step(number, at, 900)
        launch = trace.launch(at=at + 100, op="aten::mm")
        trace.kernel(launch, at=at + 150, dur=300)
    trace.write(folder / "trace.json")
    (folder / "rank1.json.gz").write_bytes(gzip.compress((folder / "trace.json").read_bytes()))


def _read_traces(folder: Path) -> None:
    from flatout.app.session import evidence_in

    for name in ("trace.json", "rank1.json.gz"):
        evidence_in([folder / name])


# -- plans and other texts -----------------------------------------------------------------------------------------------------


def _write_plan(folder: Path) -> None:
    from flatout.core.records.lever import PlannedLever
    from flatout.core.records.plan import Circumstances, LossSpread, Plan, to_toml

    place = {"file": "train.py", "code": "x = 1", "also": ("a: b: c",)}
    levers = (
        PlannedLever(id="workload.tf32", guarantee="bounded", parameters={"level": "high"}, predicted=(1.0, 1.2)),
        PlannedLever(id="parallelism.thread-count", guarantee="bounded", parameters={"num_threads": 2}),
        PlannedLever(id="communication.pin-memory", guarantee="exact", parameters=place),  # type: ignore[arg-type]
    )
    plan = Plan(
        script="train.py",
        arguments=("--lr", "1"),
        measured=(1.3, 1.2, 1.4),
        lever=levers,
        proved_on=Circumstances(num_cores=2, models=(3,)),
        losses=LossSpread(num_losses=50, means=(1.0, 1.1, 0.9)),
    )
    (folder / "plan.toml").write_bytes(to_toml(plan))


def _read_plan(folder: Path) -> None:
    from flatout.app.plans import environment_of, precision_of_plan, read_plan
    from flatout.core.registry import lever_of
    from flatout.tune.script_hooks import ScriptHooks

    plan = read_plan(folder / "plan.toml")
    environment_of(plan)
    precision_of_plan(plan)
    hooks = ScriptHooks(str(folder))
    for planned in plan.lever:
        apply = lever_of(planned.id).apply
        if apply is not None:
            apply(hooks, planned.parameters)


def _write_sizes(folder: Path) -> None:
    from flatout.core.records.record import to_json
    from flatout.core.records.scale import Layout, MeasuredStep, ModelShape
    from flatout.scale.inputs import layout_toml

    model = ModelShape(hidden=64, layers=2, heads=4, vocab=100, seq=32)
    fields = {name: getattr(model, name) for name in model.__struct_fields__}
    lines = [f"{name} = {json.dumps(value)}" for name, value in fields.items() if value is not None]
    (folder / "model.toml").write_text("\n".join(lines))
    (folder / "layout.toml").write_bytes(layout_toml(Layout(), comment="a layout"))
    one = to_json(MeasuredStep(model=model, layout=Layout(), seconds=0.5))
    (folder / "runs.json").write_bytes(b"[" + one + b"]")


def _read_sizes(folder: Path) -> None:
    from flatout.scale.inputs import read_layout, read_model, read_runs

    _each(
        lambda: read_model(folder / "model.toml"),
        lambda: read_layout(folder / "layout.toml"),
        lambda: read_runs(folder / "runs.json"),
    )


def _write_log(folder: Path) -> None:
    from tests.planning_world import verdict

    from flatout.core.records.lever import PlannedLever
    from flatout.core.records.plan import Attempt
    from flatout.core.records.verdict import Equality
    from flatout.tune.search.search_log import SearchLog

    lever = PlannedLever(id="workload.tf32", guarantee="bounded", parameters={"level": "high"})
    whole = verdict(Equality(guarantee="bounded", holds=True), None, "proved", "proved")
    log = SearchLog(folder / "search-log")
    for kind in ("add", "final"):
        log.add(Attempt(kind=kind, before=(), after=(lever,), lever=lever.id, verdict=whole))  # type: ignore[arg-type]


def _read_log(folder: Path) -> None:
    from flatout.tune.search.search_log import SearchLog

    SearchLog(folder / "search-log").find("add", (), ())


def _write_run(folder: Path) -> None:
    from flatout.blocks.recording.run import Run

    net = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with Run(folder / "runs") as run:
        for _ in range(3):
            loss = net(torch.randn(4, 3)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.tick(loss=loss)
    for name in ("run.json", "steps.jsonl"):
        shutil.copy(run.path / name, folder / name)
    shutil.rmtree(folder / "runs")


def _read_run(folder: Path) -> None:
    from flatout.blocks.recording.run import read_digests, read_run, slower_than_before

    read_digests(folder)
    slower_than_before(folder, read_run(folder))


# -- checkpoints ---------------------------------------------------------------------------------------------------------------


def _parts() -> dict[str, Any]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    net(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    return {"net": net, "optimizer": optimizer}


def _write_checkpoint(folder: Path) -> None:
    from flatout.blocks.training.checkpoints import Checkpoints

    with Checkpoints(folder / "checkpoints") as saved:
        saved.save(7, **_parts())


def _read_checkpoint(folder: Path) -> None:
    from flatout.blocks.training.checkpoints import Checkpoints

    with Checkpoints(folder / "checkpoints") as saved:
        saved.load(**_parts())


def _reseal_checkpoint(folder: Path) -> None:
    _sum_files(next(folder.glob("checkpoints/*/checkpoint.json"), None))


def _write_slot(folder: Path) -> None:
    from flatout.blocks.elastic.memory_slots import MemorySlot
    from flatout.blocks.training.checkpoint_parts import split_state

    MemorySlot(folder / "slot").write(7, "j" * 32, (0, 1), split_state(_parts(), 0))


def _read_slot(folder: Path) -> None:
    from flatout.blocks.elastic.memory_slots import MemorySlot, index_of, read_copy
    from flatout.blocks.training.checkpoint_parts import read_state

    MemorySlot(folder / "slot").head  # noqa: B018
    found = read_copy(folder / "slot")

    def fetch(name: str, chunk: object, there: tuple[slice, ...]) -> torch.Tensor:
        return found.tensor(name)[there] if there else found.tensor(name)

    # ranks agree on a failure of any of these: `RankAgreement.on_all_ranks`
    with suppress(RuntimeError, LookupError, TypeError, ValueError, AttributeError):
        read_state(index_of({0: found}), _parts(), "here", fetch, rank=0, num_ranks=1)


def _reseal_slot(folder: Path) -> None:
    """The JSON's checksum, and the header's."""
    data = bytearray((folder / "slot").read_bytes())
    head = struct.Struct("<8sqqqqqq32sI")
    if len(data) < 4096:
        return
    fields = list(head.unpack_from(data))
    fields[8] = zlib.crc32(data[max(0, fields[5]) : max(0, fields[5]) + max(0, fields[6])])
    packed = head.pack(*fields)
    data[: head.size + 4] = packed + struct.pack("<I", zlib.crc32(packed))
    (folder / "slot").write_bytes(data)


def _write_teacher(folder: Path) -> None:
    from flatout.shrink.distil.teacher_cache import write_teacher_cache

    torch.manual_seed(0)
    write_teacher_cache(folder / "cache", plain("mlp", width=16).module.eval(), torch.randn(20, 64), top=3)


def _read_teacher(folder: Path) -> None:
    from flatout.shrink.distil.samples import Shuffled
    from flatout.shrink.distil.teacher_cache import TeacherCache

    cache = TeacherCache(folder / "cache")
    inputs = torch.randn(20, 64, generator=torch.Generator().manual_seed(0))
    cache.rows(next(Shuffled(inputs, batch_size=8).epoch(0)), torch.device("cpu"))


def _reseal_teacher(folder: Path) -> None:
    _sum_files(folder / "cache" / "teacher.json")


def _sum_files(index: Path | None) -> None:
    """Sizes and CRC-32 of the files that an index names, as they are now."""
    if index is None or not index.is_file():
        return
    try:
        tree = json.loads(index.read_bytes())
        for name, entry in tree["files"].items():
            data = (index.parent / Path(name).name).read_bytes()
            entry.update(num_bytes=len(data), crc32=zlib.crc32(data))
    except (ValueError, TypeError, KeyError, AttributeError, OSError, RecursionError):
        return
    index.write_text(json.dumps(tree))


# -- models --------------------------------------------------------------------------------------------------------------------


def _write_quantised(folder: Path) -> None:
    from flatout.shrink.quantise.quantised_model import quantise

    quantise(_mlp(), "int8").save(folder / "quantised.pt")


def _read_quantised(folder: Path) -> None:
    from flatout.shrink.quantise.quantised_model import load_quantised

    load_quantised(folder / "quantised.pt", model=_mlp())


def _mlp() -> nn.Module:
    torch.manual_seed(0)
    return plain("mlp", width=16).module.eval()


def _write_shrunk(folder: Path) -> None:
    from flatout.core.records.reduction import Option
    from flatout.shrink.candidate import CandidateModel, ShrinkTask
    from flatout.shrink.compose.saved_model import write_shrunk

    made = plain("mlp", width=16)
    candidate = CandidateModel.of(
        made.module.eval(), ShrinkTask(inputs=made.inputs, num_state=0, evaluate=lambda call: 0.0)
    )
    write_shrunk(
        candidate, (Option(reduction="size.prune-units", name="half", parameters={"fraction": 0.5}),), folder / "shrunk"
    )


def _read_shrunk(folder: Path) -> None:
    from flatout.shrink.compose.saved_model import load_shrunk

    load_shrunk(folder / "shrunk", classes=[type(one) for one in _mlp().modules()])


def _write_shrunk_bits(folder: Path) -> None:
    from flatout.shrink.compose.described_model import describe_model
    from flatout.shrink.quantise.layers import FewBits, FewBitsLayers

    torch.manual_seed(0)
    layers = torch.nn.ModuleList(
        [FewBits(torch.randn(20, 70), torch.randn(20), bits=4, terms=2), FewBitsLayers(torch.nn.LSTM(4, 4), terms=1)]
    )
    for name, data in zip(("model.json", "model.safetensors"), describe_model(layers), strict=True):
        (folder / name).write_bytes(data)


def _read_shrunk_bits(folder: Path) -> None:
    from flatout.shrink.compose.described_model import model_of_description

    files = [(folder / name).read_bytes() for name in ("model.json", "model.safetensors")]
    found = model_of_description(*files)
    with suppress(
        TypeError, AttributeError, AssertionError, RuntimeError, IndexError, ValueError
    ):  # of a model that is another
        found[0](torch.ones(2, 70))
        found[1](torch.ones(3, 2, 4))


def _write_adapters(folder: Path) -> None:
    from flatout.core.records.adapt import Bottleneck, Lora
    from flatout.shrink.adapt.adapted_model import adapt

    for name, method in (("lora", Lora(rank=2)), ("bottleneck", Bottleneck(width=3))):
        adapted = adapt(_mlp(), method)
        adapted.save(folder / f"{name}.safetensors")
        if name == "lora":
            adapted.save_peft(folder / "peft")


def _read_adapters(folder: Path) -> None:
    from flatout.core.records.adapt import BitFit
    from flatout.shrink.adapt.adapted_model import adapt

    def plain_adapted() -> Any:
        return adapt(_mlp(), BitFit(), name="other")

    _each(
        lambda: plain_adapted().load(folder / "lora.safetensors"),
        lambda: plain_adapted().load(folder / "bottleneck.safetensors"),
        lambda: plain_adapted().load_peft(folder / "peft"),
    )


def _write_pruning(folder: Path) -> None:
    from flatout.shrink.prune.pruning import prune

    made = plain("mlp", width=16)
    prune(made.module.eval(), made.inputs).save(folder / "pruning.json")


def _read_pruning(folder: Path) -> None:
    from flatout.shrink.prune.pruning import read_pruning

    read_pruning(folder / "pruning.json")


def _write_steps(folder: Path) -> None:
    from flatout.tune.verify.recording import Recorder

    recorder = Recorder(folder)
    recorder.add_loss(torch.ones(()))
    recorder.add_output(torch.randn(3, 4))
    recorder.end(1)


def _read_steps(folder: Path) -> None:
    from flatout.tune.verify.recording import read_recorded_steps

    read_recorded_steps(folder)


def _write_engine(folder: Path) -> None:
    from tests.blocks.inference.native.hand_made import average, compiled_engine

    engine = compiled_engine(average(), cache=_code_cache())
    engine.save(folder / "engine")


def _read_engine(folder: Path) -> None:
    from flatout.blocks.inference.native.engine import Engine

    Engine.load(folder / "engine", cache=_code_cache())


def _reseal_engine(folder: Path) -> None:
    """Sums in weights.bin and engine.json, but of the library: somebody who may write that needs no damage to run code."""
    index = folder / "engine" / "engine.json"
    weights = folder / "engine" / "weights.bin"
    if not weights.is_file() or len(data := weights.read_bytes()) < 64:
        return
    packed = data[64:]
    weights.write_bytes(data[:24] + sha256(packed).digest() + data[56:])
    try:
        tree = json.loads(index.read_bytes())
        tree["weights_sum"] = sha256(packed).hexdigest()
        index.write_text(json.dumps(tree))
    except (ValueError, TypeError, OSError, RecursionError):
        return


_caches: list[Path] = []


def _code_cache() -> Path:
    """A folder for compiled code that lives as long as this process."""
    if not _caches:
        folder = tempfile.TemporaryDirectory(prefix="flatout-code-")
        _caches.append(Path(folder.name))
        _owners.append(folder)
    return _caches[0]


_owners: list[Any] = []


# -- caches and messages -------------------------------------------------------------------------------------------------------


def _write_machine(folder: Path) -> None:
    from tests.evidence_builder import EvidenceBuilder

    from flatout.core.records.record import to_json
    from flatout.machine.measure.cache import machine_path
    from flatout.machine.measure.probe import identify

    identity = identify(torch.device("cpu"))
    machine = EvidenceBuilder().build().machine
    data = json.loads(to_json(machine)) if machine is not None else {}
    data.update({name: getattr(identity, name) for name in identity.__struct_fields__})
    machine_path(folder, identity).write_text(json.dumps(data))


def _read_machine(folder: Path) -> None:
    from flatout.machine.measure.cache import read_machine
    from flatout.machine.measure.probe import identify

    read_machine(folder, identify(torch.device("cpu")))


def _write_messages(folder: Path) -> None:
    import msgspec

    from flatout.blocks.elastic.messages import Heartbeat, NodeIdle, ProcessEnded, RankProgress, StoreOpened

    messages = (
        StoreOpened(restart=0, port=1234),
        RankProgress(restart=0, rank=1, heartbeat=Heartbeat(3, 2, 1, 0.5), first_ago_s=1.0),
        ProcessEnded(restart=0, rank=1, code=-9, text="killed"),
        NodeIdle(restart=0),
    )
    (folder / "messages").write_bytes(b"".join(msgspec.json.encode(m) + b"\n" for m in messages))


def _read_messages(folder: Path) -> None:
    from flatout.blocks.elastic.messages import NodeLink

    here, there = socket.socketpair()
    with here, there:
        here.settimeout(5.0)
        there.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)
        there.settimeout(0.2)
        link = NodeLink(here)
        with suppress(TimeoutError):
            there.sendall((folder / "messages").read_bytes()[: 1 << 16])
        there.close()
        while link.is_open:
            link.received()


def _write_jobs(folder: Path) -> None:
    """A store in a folder and one in an SQLite file, with a policy."""
    import msgspec
    from tests.fleet_jobs import fleet

    from flatout.blocks.recording.job_store.folder import FolderStore
    from flatout.blocks.recording.job_store.sqlite import SqliteStore

    jobs, store = fleet(6), FolderStore(folder)
    for job in jobs[:3]:
        store.write(job)
    store.tidy(now_s=2e9)
    store.write(msgspec.structs.replace(jobs[3], outcome="running"))
    database = SqliteStore(folder / "jobs.sqlite")
    for job in jobs[4:]:
        database.write(job)
    (folder / "fleet.toml").write_text('[prices]\ngpu_hour = 2.5\n[redact]\nusers = true\n[teams]\nvision = ["ada"]\n')


def _read_jobs(folder: Path) -> None:
    """All that `flatout fleet` does with both."""
    from flatout.app.fleet.overview import FleetQuery, TimeSpan, summarise
    from flatout.report.html.fleet import fleet_page
    from flatout.report.markdown import markdown_report
    from flatout.report.parts.fleet import fleet_blocks
    from flatout.report.prometheus import prometheus_text
    from flatout.report.text import plain_text

    def show(path: Path) -> None:
        summary = summarise(FleetQuery(path), TimeSpan(0.0, 2e9))
        plain_text(fleet_blocks(summary, top=5), width=100)
        markdown_report(fleet_blocks(summary, top=5))
        fleet_page(summary)
        prometheus_text(summary)

    _each(lambda: show(folder), lambda: show(folder / "jobs.sqlite"))


def _each(*readings: Callable[[], object]) -> None:
    """All readings, whichever of them refuse; the first refusal at the end."""
    refused: list[FlatoutError] = []
    for reading in readings:
        try:
            reading()
        except FlatoutError as e:
            refused.append(e)
    if refused:
        raise refused[0]


KINDS: Final[dict[str, Kind]] = {
    "report": Kind(_write_report, _read_report),
    "drawn-report": Kind(_write_report, _draw_report),
    "trace": Kind(_write_trace, _read_traces),
    "plan": Kind(_write_plan, _read_plan),
    "sizes": Kind(_write_sizes, _read_sizes),
    "search-log": Kind(_write_log, _read_log),
    "run": Kind(_write_run, _read_run),
    "checkpoint": Kind(_write_checkpoint, _read_checkpoint, _reseal_checkpoint),
    "memory-copy": Kind(_write_slot, _read_slot, _reseal_slot),
    "teacher-cache": Kind(_write_teacher, _read_teacher, _reseal_teacher),
    "quantised": Kind(_write_quantised, _read_quantised),
    "shrunk": Kind(_write_shrunk, _read_shrunk),
    "shrunk-bits": Kind(_write_shrunk_bits, _read_shrunk_bits),
    "adapter": Kind(_write_adapters, _read_adapters),
    "pruning": Kind(_write_pruning, _read_pruning),
    "recorded-steps": Kind(_write_steps, _read_steps),
    "engine": Kind(_write_engine, _read_engine, _reseal_engine),
    "machine": Kind(_write_machine, _read_machine),
    "messages": Kind(_write_messages, _read_messages),
    "jobs": Kind(_write_jobs, _read_jobs),
}


# -- changing and reading ------------------------------------------------------------------------------------------------------


class Outcome(NamedTuple):
    """What came of many readings; `most_more_bytes`: how much the process grew at its peak."""

    kind: str
    num_read: int
    num_refused: int
    failures: dict[str, int]
    examples: list[str]
    most_more_bytes: int


def fuzz(name: str, num: int, seed: int) -> Outcome:
    """Change a real file of this kind `num` times and read it each time, in this process; its memory is limited from here on."""
    kind, rng = KINDS[name], random.Random(f"{name} {seed}")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory(prefix="flatout-fuzz-") as top:
        real, work, outside = (Path(top) / one for one in ("real", "work", "outside"))
        for folder in (real, outside):
            folder.mkdir()
        (outside / "secret").write_text("{}")
        kind.write(real)
        first = _read(kind, real)
        if first != "read":
            raise AssertionError(f"a real {name} was not read: {first}")
        files = sorted(p.relative_to(real) for p in real.rglob("*") if p.is_file())
        opened = _opened_below(outside)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        _limit_memory()
        outcomes: Counter[str] = Counter()
        examples: list[str] = []
        for number in range(num):
            shutil.rmtree(work, ignore_errors=True)
            shutil.copytree(real, work)
            for path in rng.sample(files, rng.choice((1, 1, 1, min(2, len(files))))):
                (work / path).write_bytes(mutated((work / path).read_bytes(), rng, str(outside)))
            if rng.random() < 0.7:
                kind.reseal(work)
            came = _read(kind, work)
            if opened:
                came = f"opened '{opened.pop()}'"
            outcomes[came.splitlines()[0]] += 1
            if came not in ("read", "refused") and len(examples) < 8 and outcomes[came.splitlines()[0]] == 1:
                examples.append(f"number {number}: {came}")
        more = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    failures = {what: n for what, n in outcomes.items() if what not in ("read", "refused")}
    return Outcome(name, outcomes["read"], outcomes["refused"], failures, examples, more << 10)


def _read(kind: Kind, folder: Path) -> str:
    signal.signal(signal.SIGALRM, _hangs)
    signal.setitimer(signal.ITIMER_REAL, MOST_S)
    try:
        kind.read(folder)
    except FlatoutError as e:
        return "refused" if str(e).strip() else f"{type(e).__name__} without a message"
    except BaseException as e:  # noqa: BLE001  # whatever it is, it is a failure
        where = traceback.extract_tb(e.__traceback__)
        own = next((f for f in reversed(where) if "/flatout/" in f.filename), where[-1])
        what = f"{type(e).__name__} at {Path(own.filename).name}:{own.lineno}"
        return f"{what}\n{str(e)[:300]}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return "read"


class Hangs(BaseException):
    """A reading took too long."""


def _hangs(number: int, frame: FrameType | None) -> None:
    raise Hangs


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MOST_MORE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _opened_below(folder: Path) -> list[str]:
    """Collects the paths below a folder that Python opens from here on."""
    found: list[str] = []

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], (str, bytes)):
            path = arguments[0] if isinstance(arguments[0], str) else arguments[0].decode(errors="replace")
            if path.startswith(str(folder)) or "outside/secret" in path or path == "/dev/zero":
                found.append(path)

    sys.addaudithook(hook)
    return found


if __name__ == "__main__":
    names = list(KINDS) if sys.argv[1] == "all" else sys.argv[1].split(",")
    for one in names:
        print(json.dumps(fuzz(one, int(sys.argv[2]), int(sys.argv[3]))._asdict()), flush=True)
