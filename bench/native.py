"""Microseconds of one event of a small model on one core, batch 1, state carried: flatout's engine beside its peers, in one run.

    python bench/native.py [--out bench/results/<date>-<hardware>/native.json] [--only gru,lstm] [--peers c,flatout]
                           [--parts models,million,int8] [--quick]

Peers, all called from Python in one thread on one core, each carrying the state as it does it best (bench/native_peers.py):

  eager         PyTorch in inference mode
  compile       torch.compile, default mode
  aoti          AOTInductor, default; aoti_tuned with freezing, autotuned C++ products and stack allocation; both through
                the loader's own `run`. `..._copied`: the state made contiguous after each event, tried where the plain way is wrong
  ort           ONNX Runtime, inputs and outputs bound once, the state in two buffers in turn
  c             written by hand for five of the models (bench/native_c), as an extension of Python; c_loop: its loop in C
  flatout       Engine.step(x, out); flatout_loop: Engine.step_many

Each is checked first: outputs of 1000 events from a state of zeros against the same model in float64; `error` is the largest
distance over the largest number. One above WRONG is reported as wrong, and not timed. Then all are timed in rounds: a block of
many calls of each, in an order that rotates; medians of the blocks with an interval, and the ratio to flatout paired by round.
Then single events: p50, p99 and p99.9 of 100 000 of flatout and ort, with the clock's own time beside.

The floor is the larger of two times: the weights' bytes at the measured bandwidth of this core over a buffer as large, and the
event's operations at its measured rate of multiply-adds.

Other parts: million (a million events of the GRU through step_many; 256 streams beside one; are they bit for bit what single
steps give), int8 (precision="int8" beside float32: time, and error over the output's scale).

Compiling takes most of the time: about a minute a model on two idle cores. Needs `pip install 'flatout[bench]'` and a C compiler.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import json
import os
import platform
import subprocess
import sys
import tempfile
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter, perf_counter_ns
from typing import Any, NamedTuple

import numpy as np
import torch
from native_models import MODELS, Array, Case
from native_peers import PEERS, Event, NotThere, Peer, built, compile_shared, compiler, of_engine, output_shape, quietly
from torch.utils.flop_counter import FlopCounterMode

from flatout.errors import FlatoutError
from flatout.measure.stats import Estimate, median_estimate, quantile, ratio_estimate
from flatout.measure.timer import HostClock

Record = dict[str, Any]
WRONG = (
    1e-4  # over the output's scale: float32 is below 1e-6 on these models, a state read in the wrong order above 1e-2
)
OURS = "c", "c_loop", "flatout", "flatout_loop"
PARTS = "models", "million", "int8"


class Amount(NamedTuple):
    """How much is measured."""

    rounds: int
    block_s: float
    checked: int
    latencies: int
    million: int


FULL = Amount(rounds=21, block_s=0.03, checked=1000, latencies=100_000, million=1_000_000)
QUICK = Amount(rounds=5, block_s=0.005, checked=100, latencies=2_000, million=20_000)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None, help="JSON lines; the table goes beside it, as .txt")
    parser.add_argument("--only", type=names_of(MODELS), default=list(MODELS), metavar="MODEL,...")
    parser.add_argument("--peers", type=names_of(PEERS), default=list(PEERS), metavar="PEER,...")
    parser.add_argument("--parts", type=names_of(PARTS), default=list(PARTS), metavar="PART,...")
    parser.add_argument("--quick", action="store_true", help="to see that it runs; the figures mean little")
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)))
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="native-") as folder:
        bench = Bench(options, Path(folder))
        if "models" in options.parts:
            for name in options.only:
                bench.write({"part": "models", "model": name, **bench.model(MODELS[name](), options.peers)})
        for part, work in (("million", million), ("int8", int8)):
            if part in options.parts:
                for record in work(bench):
                    bench.write({"part": part, **record})
    text = table(bench.records)
    print(f"\n{text}")
    if options.out is not None:
        options.out.with_suffix(".txt").write_text(text + "\n")
    return 0


def names_of(known: Any) -> Callable[[str], list[str]]:
    def names(text: str) -> list[str]:
        chosen = text.split(",")
        if unknown := [name for name in chosen if name not in known]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not one of {', '.join(known)}")
        return chosen

    return names


class Bench:
    """One machine and what was seen on it, written line by line."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.amount: Amount = QUICK if options.quick else FULL
        self.out: Path | None = options.out
        self.folder, self.core = folder, options.core
        self.machine = Machine(folder)
        self.records: list[Record] = []
        if self.out is not None:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            self.out.write_text("")
        with self.pinned():
            rate = self.machine.flop_per_s()
        self.rate_flop_per_s = rate
        self.write({"part": "machine", **hardware(), **versions(), "flop_per_s": rate, "is_quick": options.quick})

    def write(self, record: Record) -> None:
        self.records.append(record)
        print(json.dumps(record), flush=True)
        if self.out is not None:
            with self.out.open("a") as file:
                file.write(json.dumps(record) + "\n")

    @contextmanager
    def pinned(self) -> Iterator[None]:
        """This thread on one core: to measure, not to compile."""
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {self.core})
        try:
            with torch.inference_mode():
                yield
        finally:
            os.sched_setaffinity(0, before)

    def model(self, case: Case, names: Sequence[str]) -> Record:
        began = perf_counter()
        peers, found = self.prepared(case, names)
        events = case.events(self.amount.checked, seed=1)
        exact = in_float64(case, events)
        with self.pinned():
            right = [peer for one in peers for peer in self.checked(one, events, exact, found)]
            for name, times in self.interleaved(right).items():
                found[name].update(times)
            for peer in right:
                if peer.name in ("flatout", "ort"):
                    found[peer.name]["event"] = latencies(peer.step, self.amount.latencies)
                if peer.engine is not None:
                    found[peer.name]["event_in_c"] = self.machine.latencies(peer.engine, case, self.amount.latencies)
            floor = self.floor(case)
        return {"about": case.about, **floor, "peers": found, "seconds": round(perf_counter() - began, 1)}

    def prepared(self, case: Case, names: Sequence[str]) -> tuple[list[Peer], dict[str, Record]]:
        """The peers that have this model, and for each name what is known so far."""
        peers: list[Peer] = []
        found: dict[str, Record] = {}
        for name in names:
            room = Path(tempfile.mkdtemp(dir=self.folder))
            began = perf_counter()
            try:
                made = quietly(PEERS[name], case, room)
            except NotThere as e:
                found[name] = {"not_there": str(e)}
            except Exception as e:  # noqa: BLE001  # a peer that fails must not cost the others
                found[name] = {"failed": f"{type(e).__name__}: {str(e)[:400]}"}
            else:
                peers += made
                found.update({peer.name: {"prepare_s": round(perf_counter() - began, 2)} for peer in made})
        return peers, found

    def checked(self, peer: Peer, events: Sequence[Event], exact: Array, found: dict[str, Record]) -> Iterator[Peer]:
        """The peer, or one that mends it; nothing where both are wrong."""
        record = found.setdefault(peer.name, {})
        try:
            record["error"] = error = relative(peer.rollout(events), exact)
        except Exception as e:  # noqa: BLE001  # the same
            record["failed"] = f"{type(e).__name__}: {str(e)[:400]}"
            return
        if error <= WRONG:
            yield peer
            return
        record["wrong"] = True
        if peer.mend is not None:
            yield from self.checked(peer.mend(), events, exact, found)

    def interleaved(self, peers: Sequence[Peer]) -> dict[str, Record]:
        clock, samples = HostClock(), {peer.name: list[float]() for peer in peers}
        calls = {peer.name: calls_of(peer, clock, self.amount.block_s) for peer in peers}
        for number in range(self.amount.rounds if peers else 0):
            at = number % len(peers)
            for peer in [*peers[at:], *peers[:at]]:
                per_call = clock.elapsed_s(peer.step, calls[peer.name]) / calls[peer.name]
                samples[peer.name].append(per_call / peer.events)
        ours = samples.get("flatout")
        return {name: times(taken, ours, calls[name]) for name, taken in samples.items()}

    def floor(self, case: Case) -> Record:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            case.module(*case.inputs)
        work = case.work_flop or max(counter.get_total_flops(), case.read_bytes // 2)
        bandwidth = self.machine.bytes_per_s(case.read_bytes)
        bytes_s, flop_s = case.read_bytes / bandwidth, work / self.rate_flop_per_s
        return {
            "weight_bytes": case.read_bytes,
            "work_flop": work,
            "bytes_per_s": bandwidth,
            "floor_bytes_s": bytes_s,
            "floor_flop_s": flop_s,
            "floor_s": max(bytes_s, flop_s),
        }


# ----------------------------------------------------------------------------------------------------------------- measuring


def in_float64(case: Case, events: Sequence[Event]) -> Array:
    """The first output of each event, from a state of zeros: [T, numbers]."""
    exact = copy.deepcopy(case.module).double()
    state, found = [s.double() for s in case.inputs[case.num_inputs :]], []
    with torch.no_grad():
        for event in events:
            y = exact(*(x.double() if x.is_floating_point() else x for x in event), *state)
            if case.state:
                y, *state = y
            found.append(y.flatten())
    return torch.stack(found).numpy()


def relative(got: Array, exact: Array) -> float:
    """Largest distance over the largest number; inf where something is not a number."""
    away = float(np.abs(got - exact).max() / np.abs(exact).max())
    return away if np.isfinite(away) else float("inf")


def calls_of(peer: Peer, clock: HostClock, block_s: float) -> int:
    """Calls that take about `block_s`, after as long a warm-up."""
    num = 1
    while (took := clock.elapsed_s(peer.step, num)) < block_s:
        num *= 2
    return max(1, round(num * block_s / took))


def times(taken: Sequence[float], ours: Sequence[float] | None, calls: int) -> Record:
    record = {**spelled(median_estimate(taken)), "calls": calls}
    if ours is not None and ours is not taken:
        ratio = ratio_estimate(taken, ours)
        record["over_flatout"] = [ratio.value, ratio.low, ratio.high]
    return record


def spelled(estimate: Estimate) -> Record:
    return {"s": estimate.value, "low_s": estimate.low, "high_s": estimate.high, "rounds": estimate.num_samples}


def latencies(step: Callable[[], object], num: int) -> Record:
    """Of single events, the clock's two readings in them; what those alone take is `clock_s`."""
    taken, alone = array("q", bytes(8 * num)), array("q", bytes(8 * 1000))
    for _ in range(num // 20):
        step()
    for i in range(len(alone)):
        began = perf_counter_ns()
        alone[i] = perf_counter_ns() - began
    for i in range(num):
        began = perf_counter_ns()
        step()
        taken[i] = perf_counter_ns() - began
    return {**percentiles(taken), "clock_s": quantile(alone, 0.5) * 1e-9}


def percentiles(taken_ns: Any) -> Record:
    p50, p99, p999 = np.quantile(np.asarray(taken_ns), [0.5, 0.99, 0.999]) * 1e-9
    return {"p50_s": p50, "p99_s": p99, "p999_s": p999, "most_s": int(max(taken_ns)) * 1e-9, "events": len(taken_ns)}


class Machine:
    """What the core does, by bench/native_c/machine.c."""

    def __init__(self, folder: Path) -> None:
        compile_shared(Path(__file__).parent / "native_c" / "machine.c", folder / "machine.so")
        self.library = ctypes.CDLL(str(folder / "machine.so"))
        self.library.seconds_of_reading.restype = self.library.seconds_of_products.restype = ctypes.c_double
        self.library.seconds_of_reading.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
        self.library.seconds_of_products.argtypes = [ctypes.c_int64]
        self.library.times_of_events.argtypes = [ctypes.c_void_p] * 6 + [ctypes.c_int64, ctypes.c_void_p]

    def bytes_per_s(self, num_bytes: int) -> float:
        """Of reading a buffer of that many bytes again and again; the best of nine, since this is a bound."""
        whole = max(512, num_bytes // 512 * 512)
        buffer = np.ones(whole + 64, np.uint8)  # written to: pages of zeros would all be one page
        at, again = -(-buffer.ctypes.data // 64) * 64, max(1, 100_000_000 // whole)
        return max(whole * again / self.library.seconds_of_reading(at, whole, again) for _ in range(9))

    def flop_per_s(self) -> float:
        again = 200_000
        return max(again * 12 * 32 / self.library.seconds_of_products(again) for _ in range(9))

    def latencies(self, engine: Any, case: Case, num: int) -> Record:
        """Of single events in a loop in C, through the library and the weights of the engine's folder."""
        from flatout.inference.native.folder import read_weights
        from flatout.inference.native.library import Table, open_library

        with tempfile.TemporaryDirectory(prefix="engine-") as name:
            engine.save(Path(name))
            library = open_library(Path(name) / f"lib{engine.manifest.name}.so")
            weights = aligned(read_weights(Path(name) / "weights.bin"))
        table = Table.from_address(library.address)
        state, work = aligned(bytes(library.state_bytes)), aligned(bytes(library.work_bytes))
        x, y = case.events(1, seed=1)[0][0].numpy(), np.zeros(output_shape(case), np.float32)
        ins, outs = (ctypes.c_void_p * 1)(x.ctypes.data), (ctypes.c_void_p * 1)(y.ctypes.data)
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(table.reset)(state.ctypes.data)
        taken = np.zeros(num + 1, np.int64)
        for count in (num // 20, num):  # warm, then measured
            step = table.step, weights.ctypes.data, state.ctypes.data, work.ctypes.data
            self.library.times_of_events(*step, ctypes.addressof(ins), ctypes.addressof(outs), count, taken.ctypes.data)
        return {**percentiles(taken[:num]), "clock_s": int(taken[num]) * 1e-9}


def aligned(data: bytes) -> Array:
    """These bytes at a multiple of 64."""
    whole = np.zeros(len(data) + 64, np.uint8)
    at = -whole.ctypes.data % 64
    whole[at : at + len(data)] = np.frombuffer(data, np.uint8)
    return whole[at : at + len(data)]


# --------------------------------------------------------------------------------------------------------------------- parts


def million(bench: Bench) -> Iterator[Record]:
    """A long series through step_many, and 256 streams beside one; both against single steps."""
    case, num, streams = MODELS["gru"](), bench.amount.million, 256
    try:
        engine = built(case)
    except (NotThere, FlatoutError) as e:
        yield {"flatout": str(e)}
        return
    generator = np.random.default_rng(0)
    xs = generator.standard_normal((num, *case.inputs[0].shape), np.float32)
    many, single = np.zeros((num, *output_shape(case)), np.float32), np.zeros((num, *output_shape(case)), np.float32)
    with bench.pinned():
        engine.reset()
        took = HostClock().elapsed_s(lambda: engine.step_many(xs, many), 1)
        engine.reset()
        began = perf_counter()
        for x, y in zip(xs, single, strict=True):
            engine.step(x, y)
        singly = perf_counter() - began
    is_equal = many.tobytes() == single.tobytes()
    yield {
        "events": num,
        "many_s": took,
        "events_per_s": num / took,
        "singly_s": singly,
        "bitwise_as_single_steps": is_equal,
    }
    yield of_streams(bench, case, engine, streams)


def of_streams(bench: Bench, case: Case, engine: Any, num: int) -> Record:
    """`num` streams stepped together beside one stream, and each of them against a stream of its own stepped alone."""
    events = 64
    generator = np.random.default_rng(1)
    xs = generator.standard_normal((events, num, *case.inputs[0].shape), np.float32)
    ys, alone = np.zeros((events, num, *output_shape(case)), np.float32), np.zeros(output_shape(case), np.float32)
    one = np.ascontiguousarray(xs[:, 0]), np.zeros((events, *output_shape(case)), np.float32)
    streams = engine.streams(num)
    with bench.pinned():
        for t in range(events):
            streams.step(xs[t], ys[t])
        is_equal = True
        for i in range(num):
            engine.reset()
            for t in range(events):
                engine.step(xs[t, i], alone)
                is_equal = is_equal and ys[t, i].tobytes() == alone.tobytes()

        def rollout(unused: Sequence[Event]) -> Array:
            return np.zeros(0)

        peers = [
            Peer("streams", lambda: streams.step(xs[0], ys[0]), rollout, events=num),
            Peer("streams_many", lambda: streams.step_many(xs, ys), rollout, events=num * events),
            Peer("one", lambda: engine.step_many(*one), rollout, events=events),
        ]
        found = bench.interleaved(peers)
    rates = {f"{name}_events_per_s": 1 / record["s"] for name, record in found.items()}
    return {"streams": num, **rates, "bitwise_as_single_steps": is_equal, "peers": found}


def of_precision(case: Case, precision: str) -> Peer:
    engine = built(case, precision=precision)
    return of_engine(engine, case)[0]._replace(name=precision)


def int8(bench: Bench) -> Iterator[Record]:
    """Times in rounds of both precisions, and errors of both against float64."""
    for name in ("lstm", "mlp_layernorm"):
        case = MODELS[name]()
        events = case.events(bench.amount.checked, seed=1)
        exact = in_float64(case, events)
        try:
            peers = [of_precision(case, precision) for precision in ("float32", "int8")]
        except (NotThere, FlatoutError) as e:
            yield {"model": name, "flatout": str(e)}
            continue
        with bench.pinned():
            errors = {peer.name: relative(peer.rollout(events), exact) for peer in peers}
            found = bench.interleaved(peers)
        faster = found["float32"]["s"] / found["int8"]["s"]
        layers = dict(peers[1].engine.manifest.precision)
        yield {"model": name, "error": errors, "peers": found, "faster": faster, "precision_of_layers": layers}


# --------------------------------------------------------------------------------------------------------------------- saying


def hardware() -> Record:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    flags = next((line.split(":", 1)[1].split() for line in lines if line.startswith("flags")), [])
    caches = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        kind = (index / "type").read_text().strip()
        caches[f"L{(index / 'level').read_text().strip()} {kind.lower()}"] = (index / "size").read_text().strip()
    known = ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile")
    return {
        "processor": names[0] if names else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "vectors": [flag for flag in known if flag in flags],
        "caches": caches,
        "load": os.getloadavg()[0],
    }


def versions() -> Record:
    found = {"python": platform.python_version()}
    for package in ("torch", "numpy", "onnx", "onnxruntime", "onnxscript", "flatout"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    said = subprocess.run([compiler(), "--version"], capture_output=True, text=True, check=True).stdout
    return {"versions": {**found, "compiler": said.splitlines()[0]}}


def table(records: Sequence[Record]) -> str:
    machine = records[0]
    rows = [r for r in records if r["part"] == "models"]
    lines = [
        f"{machine['processor']}, {machine['cores']} cores; one thread; microseconds of an event, median of rounds"
    ]
    lines += [f"{name} {what}" for name, what in machine["versions"].items()]
    if rows:
        names = list(dict.fromkeys(name for row in rows for name in row["peers"]))
        head = [*names, "floor", "x best"]
        lines += ["", *columns("model", head, {r["model"]: times_of(r, names) for r in rows})]
        lines += ["x best: the fastest of the peers that are not written by hand, over flatout"]
        wrong = [(r["model"], name, p["error"]) for r in rows for name, p in r["peers"].items() if p.get("wrong")]
        lines += [f"wrong: {name} of {model}, {error:.2g} of the output's scale away" for model, name, error in wrong]
        for kind, named in (("failed", "failed"), ("not_there", "has none")):
            said = [(r["model"], name, p[kind]) for r in rows for name, p in r["peers"].items() if kind in p]
            lines += [f"{named}: {name} of {model}: {what}" for model, name, what in said if what != "not written"]
        lines += ["", "largest error over 1e-7 of the output's scale, against float64"]
        lines += columns("model", names, {r["model"]: errors_of(r, names) for r in rows})
        lines += ["", "single events: p50 / p99 / p99.9, the clock's readings in them"]
        for row in rows:
            for name, peer in row["peers"].items():
                said = {name: peer.get("event"), f"{name}, in C": peer.get("event_in_c")}
                lines += [f"{row['model']:14} {who:14} {tails(event)}" for who, event in said.items() if event]
    lines += [said for record in records for said in of_part(record)]
    return "\n".join(lines)


def of_part(record: Record) -> Iterator[str]:
    """A record of the other parts, in words."""
    if record["part"] in ("models", "machine"):
        return
    yield ""
    same = f"bit for bit as single steps: {record.get('bitwise_as_single_steps')}"
    if "flatout" in record:
        yield f"{record['part']}: flatout: {record['flatout']}"
    elif "events" in record:
        yield f"{record['events']} events of the GRU through step_many: {record['many_s']:.3g} s; {same}"
    elif "streams" in record:
        rates = ", ".join(f"{name} {1e-6 / peer['s']:.3g}" for name, peer in record["peers"].items())
        yield f"{record['streams']} streams of the GRU beside one, million events a second: {rates}; {same}"
    else:
        times = ", ".join(f"{name} {peer['s'] * 1e6:.3g} us" for name, peer in record["peers"].items())
        errors = ", ".join(f"{error:.2g}" for error in record["error"].values())
        yield f"{record['model']}: {times}: {record['faster']:.3g}x; errors over the output's scale: {errors}"


def columns(head: str, names: Sequence[str], rows: dict[str, list[str]]) -> list[str]:
    widths = [max(len(name), 7) + 2 for name in names]
    lines = [f"{head:14}" + "".join(f"{name:>{w}}" for name, w in zip(names, widths, strict=True))]
    for name, cells in rows.items():
        lines.append(f"{name:14}" + "".join(f"{cell:>{w}}" for cell, w in zip(cells, widths, strict=True)))
    return lines


def times_of(row: Record, names: Sequence[str]) -> list[str]:
    def cell(peer: Record) -> str:
        if "s" in peer:
            return f"{peer['s'] * 1e6:.3g}"
        return "wrong" if peer.get("wrong") else "failed" if "failed" in peer else "-"

    peers = row["peers"]
    rest = [p["s"] for name, p in peers.items() if "s" in p and name not in OURS]
    ours = peers.get("flatout", {}).get("s")
    best = f"{min(rest) / ours:.3g}" if rest and ours else "-"
    return [*(cell(peers.get(name, {})) for name in names), f"{row['floor_s'] * 1e6:.3g}", best]


def errors_of(row: Record, names: Sequence[str]) -> list[str]:
    found = [row["peers"].get(name, {}).get("error") for name in names]
    return ["-" if error is None else f"{error * 1e7:.2g}" for error in found]


def tails(event: Record) -> str:
    shown = " / ".join(f"{event[key] * 1e6:.3g}" for key in ("p50_s", "p99_s", "p999_s"))
    return f"{shown}, of which the clock {event['clock_s'] * 1e6:.2g}"


def alone() -> None:
    """Once more with one thread for everything that reads it from the environment, and with no compiled code from before."""
    if os.environ.get("OMP_NUM_THREADS") == "1":
        return
    with tempfile.TemporaryDirectory(prefix="native-cache-") as cache:
        kept = os.environ.get("TORCHINDUCTOR_CACHE_DIR", cache)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": kept}
        sys.exit(subprocess.run([sys.executable, *sys.argv], env=environment, check=False).returncode)


if __name__ == "__main__":
    alone()
    sys.exit(main())
