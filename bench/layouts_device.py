"""The planner against measured steps of all feasible layouts of one model, and a sample of another's, on the GPUs at hand.

    torchrun --standalone --nproc-per-node N bench/layouts_device.py OUT [--device-id h200] [--all wide] [--small]

A minute of calibration on a few layers (what `flatout calibrate` does), on which constants are fitted, and the layouts; all of
that in `--rounds` rounds, of which the means count, since a host's speed changes within minutes.
Judged are how much slower than the best measured one the planner's first choice is, the error of predicted seconds, and the
error of predicted peaks, with "fits" that were false. `--small` runs it on CPUs with a tiny model: the figures then mean nothing.

    python bench/layouts_device.py OUT --judge

judges the steps in a file again, with the formulas as they are now, without GPUs.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path

import msgspec
import torch

from flatout.blocks.parallel.layout_measurement import averaged, measured_steps
from flatout.blocks.parallel.world import World
from flatout.core.files import write_whole_file
from flatout.core.records.scale import Cluster, Layout, MeasuredStep, ModelShape
from flatout.machine.measure.stats import median, quantile
from flatout.scale.calibration import Calibrated, TimedLayout
from flatout.scale.calibration_steps import calibration_steps
from flatout.scale.candidates import layouts
from flatout.scale.executor import EXECUTOR
from flatout.scale.inputs import cluster_of
from flatout.scale.memory import memory_of, with_libraries

MODELS = {
    "wide": ModelShape(
        hidden=4096, layers=8, heads=32, kv_heads=8, ffn=14336, vocab=32000, seq=2048, is_gated=True, is_tied=False
    ),
    "deep": ModelShape(hidden=2048, layers=24, heads=16, vocab=50304, seq=1024),
}
SMALL = {
    "wide": ModelShape(hidden=64, layers=4, heads=4, kv_heads=2, vocab=256, seq=64, is_gated=True),
    "deep": ModelShape(hidden=32, layers=8, heads=4, vocab=256, seq=32),
}
SOFTWARE = EXECUTOR


def candidates(shape: ModelShape, ranks: int, device: str, room: int | None, batch: int) -> list[Layout]:
    """What the planner would look at and fits with room left, of one schedule: FSDP x TP x PP x micro-batch x recompute."""
    found = []
    for layout in layouts(shape, cluster_of(f"{ranks}x{device}"), batch):
        peak = max(stage.total_bytes for stage in memory_of(shape, layout, SOFTWARE))
        is_plain = layout.schedule == "1f1b" and layout.micro_batch <= 8
        if (room is None or peak <= 0.9 * room) and is_plain:
            found.append(layout)
    return found


def judged(steps: list[MeasuredStep], calibrated: Calibrated) -> dict[str, object]:
    """What the planner said of steps that were measured."""
    done = [s for s in steps if s.seconds is not None]
    said = [calibrated.predict(s.model, s.layout) for s in done]
    errors = [abs(p.seconds / s.seconds - 1) for p, s in zip(said, done, strict=True) if s.seconds]
    at_speed = [calibrated.predict(s.model, s.layout, host_layer_s=s.host_layer_s) for s in done]
    errors_at_speed = [abs(p.seconds / s.seconds - 1) for p, s in zip(at_speed, done, strict=True) if s.seconds]
    first = min(range(len(done)), key=lambda i: said[i].seconds)
    best = min(s.seconds for s in done if s.seconds)
    inside = [p.low_s <= (s.seconds or 0) <= p.high_s for p, s in zip(said, done, strict=True)]
    memory = []
    for step in done:
        if step.peak_bytes is not None:
            stages = memory_of(step.model, step.layout, SOFTWARE)
            tensors = max(stage.total_bytes - stage.slack_bytes for stage in stages)
            bound, peak = max(stage.total_bytes for stage in stages), max(step.peak_bytes)
            memory.append((tensors / peak - 1, bound < with_libraries(peak)))
    return {
        "layouts": len(done),
        "refused": [s.why for s in steps if s.seconds is None],
        "regret": (done[first].seconds or 0) / best - 1,
        "error_mean": sum(errors) / len(errors),
        "error_p95": quantile(errors, 0.95),
        "error_mean_at_measured_host_speed": sum(errors_at_speed) / len(errors_at_speed),
        "inside": sum(inside) / len(inside),
        "memory_error_median": median([abs(m) for m, _ in memory]) if memory else None,
        "memory_error_worst": max((abs(m) for m, _ in memory), default=None),
        "too_low_bounds": sum(low for _, low in memory),
        "chosen": msgspec.to_builtins(done[first].layout),
    }


def judged_again(path: Path) -> None:
    """The file's measured steps by the present formulas; writes what they say into it."""
    result = msgspec.json.decode(path.read_bytes())
    cluster = cluster_of(f"{result['ranks']}x{result.get('device_id', 'h200')}")
    steps = msgspec.convert(result["calibration"], list[MeasuredStep])
    calibrated = Calibrated(
        [TimedLayout(s.model, s.layout, s.seconds, s.host_layer_s) for s in steps if s.seconds], cluster, SOFTWARE
    )
    result["constants"] = msgspec.to_builtins(calibrated.constants)
    for name in MODELS:
        if name in result:
            found = judged(msgspec.convert(result[name]["steps"], list[MeasuredStep]), calibrated)
            result[name] |= found
            print(name, {k: v for k, v in found.items() if k != "chosen"})
    write_whole_file(path, msgspec.json.format(msgspec.json.encode(result)))


def main() -> None:
    """Measure, judge, write as it goes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device-id", default="h200")
    parser.add_argument(
        "--all", choices=tuple(MODELS), default="wide", help="the model of which all layouts are measured"
    )
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--calibration", type=float, default=60.0)
    parser.add_argument("--limit", type=float, default=240.0, help="seconds for that model; a third for the other")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--judge", action="store_true", help="what is in the file, once more")
    given = parser.parse_args()
    if given.judge:
        judged_again(given.out)
        return
    kind = "cpu" if given.small else "cuda"
    with World(kind) as world:
        room = torch.cuda.get_device_properties(world.device).total_memory if kind == "cuda" else None
        mixed = torch.bfloat16 if kind == "cuda" else None
        models = SMALL if given.small else MODELS
        ranks, began = world.num_ranks, time.perf_counter()
        result: dict[str, object] = {
            "device": torch.cuda.get_device_name() if kind == "cuda" else "cpu",
            "device_id": given.device_id,
            "ranks": ranks,
            "torch": str(torch.__version__),
        }
        calibrated_in: list[list[MeasuredStep]] = []
        measured_in: dict[str, list[list[MeasuredStep]]] = {name: [] for name in models}
        names = sorted(models, key=lambda n: n != given.all)
        for number in range(given.rounds):
            calibrated_in.append([])
            for shape in models.values():
                told = calibration_steps(shape, ranks, SOFTWARE, room)
                limit_s = given.calibration / len(models)
                calibrated_in[-1] += measured_steps(told, world, limit_s=limit_s, mixed=mixed)
            if not number:
                result["calibration_s"] = time.perf_counter() - began
            for name in names:
                shape = models[name]
                found = candidates(shape, ranks, given.device_id, room, batch=4 * ranks)
                random.Random(0).shuffle(found)  # the same on all ranks: what the limit cuts off is no kind of layout
                chosen = found if name == given.all else found[: max(8, len(found) // 4)]
                limit_s = given.limit if name == given.all else given.limit / 3
                measured_in[name].append([])
                steps = [(shape, layout) for layout in chosen]
                for step in measured_steps(steps, world, limit_s=limit_s, mixed=mixed):
                    measured_in[name][-1].append(step)
                    if world.is_first:
                        with given.out.with_suffix(".jsonl").open("ab") as lines:
                            lines.write(msgspec.json.encode(step) + b"\n")
            if world.is_first:
                result |= result_of(calibrated_in, measured_in, cluster_of(f"{ranks}x{given.device_id}"))
                write_whole_file(given.out, msgspec.json.format(msgspec.json.encode(result)))
                for name in names:
                    print(name, {k: v for k, v in result[name].items() if k not in ("steps", "chosen")}, flush=True)  # type: ignore[attr-defined]


def result_of(
    calibrated_in: list[list[MeasuredStep]], measured_in: dict[str, list[list[MeasuredStep]]], cluster: Cluster
) -> dict[str, object]:
    """Constants fitted to the means of all rounds, and what they say of the means of the layouts."""
    calibration = averaged(calibrated_in)
    runs = [TimedLayout(s.model, s.layout, s.seconds, s.host_layer_s) for s in calibration if s.seconds is not None]
    calibrated = Calibrated(runs, cluster, SOFTWARE)
    found: dict[str, object] = {
        "rounds": len(calibrated_in),
        "constants": msgspec.to_builtins(calibrated.constants),
        "calibration": msgspec.to_builtins(calibration),
        "rounds_differ": {name: rounds_differ(rounds) for name, rounds in measured_in.items()},
    }
    for name, rounds in measured_in.items():
        steps = averaged(rounds)
        found[name] = judged(steps, calibrated) | {"steps": msgspec.to_builtins(steps)}
    return found


def rounds_differ(rounds: list[list[MeasuredStep]]) -> float | None:
    """How far the last two rounds differ for the same layout, in the mean."""
    if len(rounds) < 2:
        return None
    before = {step.layout: step.seconds for step in rounds[-2] if step.seconds}
    far = [abs(step.seconds / before[step.layout] - 1) for step in rounds[-1] if step.seconds and step.layout in before]
    return sum(far) / len(far) if far else None


if __name__ == "__main__":
    main()
