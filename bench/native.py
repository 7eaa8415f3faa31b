"""Microseconds of one event of a small model on one core, batch 1, state carried: flatout's engine beside its peers, in one run.

    python bench/native.py [--out bench/results/<date>-<hardware>/native.json] [--only gru,lstm] [--peers c,flatout]
                           [--parts models,million,int8] [--quick]

Peers, all called from Python in one thread on one core, each carrying the state as it does it best (bench/native_peers.py):

  eager         PyTorch in inference mode
  compile       torch.compile, default mode
  aoti          AOTInductor, default; aoti_tuned with freezing, autotuned C++ products and stack allocation; both through
                the loader's own `run`. `..._copied`: the state made contiguous after each event, where the plain way is wrong
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
import json
import os
import subprocess
import sys
import tempfile
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter, perf_counter_ns
from typing import Any, NamedTuple

import numpy as np
import torch
from native_machine import Machine, hardware, percentiles, versions
from native_models import MODELS, Array, Case
from native_peers import PEERS, Event, NotThere, Peer, built, of_engine, output_shape, quietly
from native_table import table
from torch.utils.flop_counter import FlopCounterMode

from flatout.core.errors import FlatoutError
from flatout.machine.measure.stats import Estimate, median_estimate, quantile, ratio_estimate
from flatout.machine.measure.timer import HostClock

Record = dict[str, Any]
WRONG = (
    1e-4  # over the output's scale: float32 is below 1e-6 on these models, a state read in the wrong order above 1e-2
)
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

    def interleaved(self, peers: Sequence[Peer], over: str = "flatout") -> dict[str, Record]:
        """Times of each, and of the others over the one that is named, paired by round."""
        clock, samples = HostClock(), {peer.name: list[float]() for peer in peers}
        calls = {peer.name: layer_calls(peer, clock, self.amount.block_s) for peer in peers}
        for number in range(self.amount.rounds if peers else 0):
            at = number % len(peers)
            for peer in [*peers[at:], *peers[:at]]:
                per_call = clock.elapsed_s(peer.step, calls[peer.name]) / calls[peer.name]
                samples[peer.name].append(per_call / peer.events)
        ours = samples.get(over)
        return {name: times(taken, over, ours, calls[name]) for name, taken in samples.items()}

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


def layer_calls(peer: Peer, clock: HostClock, block_s: float) -> int:
    """Calls that take about `block_s`, after as long a warm-up."""
    num = 1
    while (took := clock.elapsed_s(peer.step, num)) < block_s:
        num *= 2
    return max(1, round(num * block_s / took))


def times(taken: Sequence[float], over: str, ours: Sequence[float] | None, calls: int) -> Record:
    record = {**spelled(median_estimate(taken)), "calls": calls}
    if ours is not None and ours is not taken:
        ratio = ratio_estimate(taken, ours)
        record[f"over_{over}"] = [ratio.value, ratio.low, ratio.high]
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
    size = (num, *output_shape(case))
    many, single = np.ones(size, np.float32), np.ones(size, np.float32)  # zeros would be mapped while events are timed
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
        floor = bench.floor(case)
    rates = {f"{name}_events_per_s": 1 / record["s"] for name, record in found.items()}
    return {"streams": num, **rates, "bitwise_as_single_steps": is_equal, "peers": found, **floor}


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
            found = bench.interleaved(peers, over="int8")
        faster = found["float32"]["over_int8"]
        layers = dict(peers[1].engine.manifest.precision)
        yield {"model": name, "error": errors, "peers": found, "faster": faster, "precision_of_layers": layers}


def alone() -> None:
    """Once more with one thread for everything that reads it from the environment, and with no compiled code from before."""
    if os.environ.get("OMP_NUM_THREADS") == "1":
        return
    with tempfile.TemporaryDirectory(prefix="native-cache-") as cache:
        kept = os.environ.get("TORCHINDUCTOR_CACHE_DIR", cache)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": kept}
        ended = subprocess.run([sys.executable, *sys.argv], env=environment, check=False).returncode
        sys.exit(
            f"ended by signal {-ended}: a peer's library, most likely; leave one out (--peers)" if ended < 0 else ended
        )


if __name__ == "__main__":
    alone()
    sys.exit(main())
