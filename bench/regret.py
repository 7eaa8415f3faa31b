"""How good the first choice of layouts is, on published measurements: regret, error of step times, coverage of intervals.

    python bench/regret.py vtrain_single_node_measured.csv [--out FILE] [--folds 12]

The file: 1440 steps on 1 to 8 A100 GPUs, 144 groups of (model, global batch, GPUs), each a sweep of layouts (vTrain, MICRO 2024,
arXiv 2312.12391, MIT licence). Groups are dealt to folds. For each fold constants are fitted on at most 5 % of all rows, none of
them of the fold's groups; rows to fit on are taken by their layouts, not by their times: those that differ most from the ones
taken before. Regret is the measured time of the layout that is predicted to be fastest, over that of the fastest, less 1.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import sys
from collections import defaultdict
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

from flatout.core.records.record import to_json
from flatout.core.records.scale import Cluster, Layout, ModelShape, Software, Tier
from flatout.machine.measure.stats import quantile
from flatout.scale.calibration import Calibrated, TimedLayout

SHARE = 0.05
CLUSTER = Cluster(
    device="nvidia-a100-80gb",
    num_devices=8,
    tiers=(Tier(name="nvswitch", reach=8, bytes_per_s=3e11, latency_s=5e-6),),
)
SOFTWARE = Software(dtype="float16", attention="megatron", has_overlap=False)
"""Megatron-DeepSpeed: float16, scores written, fused softmax."""


class Row(NamedTuple):
    group: tuple[str, ...]
    run: TimedLayout


def read(path: Path) -> list[Row]:
    rows = []
    with path.open(newline="") as opened:
        for line in csv.DictReader(opened):
            model = ModelShape(
                hidden=int(line["hidden"]),
                layers=int(line["layers"]),
                heads=int(line["heads"]),
                vocab=50257,
                seq=int(line["seq"]),
            )
            layout = Layout(
                tensor=int(line["TP"]),
                pipeline=int(line["PP"]),
                data=int(line["DP"]),
                micro_batch=int(line["micro_batch"]),
                global_batch=int(line["global_batch"]),
                recompute="full",
            )
            group = tuple(line[name] for name in ("hidden", "heads", "layers", "seq", "global_batch", "GPUs"))
            rows.append(Row(group, TimedLayout(model, layout, float(line["iter_ms"]) * 1e-3)))
    return rows


def spread(rows: list[Row], num: int, rng: random.Random) -> list[Row]:
    """Rows whose layouts lie far from each other: each next one is the furthest of a few drawn ones."""

    def sizes(row: Row) -> tuple[int, ...]:
        model, layout = row.run.model, row.run.layout
        return (model.hidden, layout.micro_batch, layout.tensor, layout.pipeline, layout.data, model.layers)

    def distance(a: Row, b: Row) -> float:
        weights = (3, 3, 3, 1, 1, 0.5)
        return sum(w * (x != y) for w, x, y in zip(weights, sizes(a), sizes(b), strict=True))

    taken = [rng.choice(rows)]
    while len(taken) < num:
        some = rng.sample(rows, 40)
        taken.append(max(some, key=lambda row: min(distance(row, t) for t in taken)))
    return taken


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--folds", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rows = read(options.file)
    groups = sorted({row.group for row in rows})
    rng = random.Random(options.seed)
    rng.shuffle(groups)
    by_group = defaultdict(list)
    for row in rows:
        by_group[row.group].append(row.run)
    regrets, errors, covered = [], [], 0
    begun_s = perf_counter()
    for fold in range(options.folds):
        judged = set(groups[fold :: options.folds])
        others = [row for row in rows if row.group not in judged]
        chosen = spread(others, int(SHARE * len(rows)), rng)
        calibrated = Calibrated([row.run for row in chosen], CLUSTER, SOFTWARE)
        for group in judged:
            runs = by_group[group]
            predicted = [calibrated.predict(run.model, run.layout) for run in runs]
            first = min(range(len(runs)), key=lambda i: predicted[i].seconds)
            regrets.append(runs[first].seconds / min(run.seconds for run in runs) - 1)
            errors += [abs(p.seconds / run.seconds - 1) for p, run in zip(predicted, runs, strict=True)]
            covered += sum(p.low_s <= run.seconds <= p.high_s for p, run in zip(predicted, runs, strict=True))
        print(f"fold {fold + 1}/{options.folds}: {calibrated.constants}", flush=True)
    found = {
        "groups": len(groups),
        "rows": len(rows),
        "rows_fitted_on": int(SHARE * len(rows)),
        "regret_mean": sum(regrets) / len(regrets),
        "regret_p95": quantile(regrets, 0.95),
        "regret_max": max(regrets),
        "best_chosen": sum(r == 0 for r in regrets) / len(regrets),
        "error_mean": sum(errors) / len(errors),
        "error_p95": quantile(errors, 0.95),
        "covered": covered / len(rows),
        "seconds": perf_counter() - begun_s,
        "constants_of_the_last_fold": json.loads(to_json(calibrated.constants)),
    }
    print(json.dumps(found, indent=1))
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
