"""What few bits cost of the metric: models trained on real data, all layers in each scheme, and as native code in 8 bits.

    python bench/quantising_quality.py [--out bench/results/<date>-<hardware>/quantising_quality.json]
                                       [--only mlp,cnn,transformer] [--seeds 0,1,2] [--quick]

  mlp, cnn      handwritten digits (scikit-learn, 8 x 8), accuracy on held ones
  transformer   characters of Python's manual, minus bits a character on held windows

Every layer that has the scheme takes it, whether that is faster or not; `flatout.shrink.quantise.quantise_where_faster` takes
some, and loses less. `native int8` is what `flatout.blocks.inference.native.build(precision="int8")` gives: layers where 8 bits
are faster, and outputs within 1 % of their largest number (of the first seed alone, for it takes half a minute).
No training after rounding. Differences are to the float32 model, over all seeds, paired by held sample, with their 95 % interval
(Newcombe for accuracies). What gains time is in bench/shrinking.py.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from adapting_quality import Case, Record, purpose_of
from native_machine import hardware, versions, write_results
from torch import Tensor, nn

from flatout.blocks.inference.native import build
from flatout.core.errors import FlatoutError
from flatout.shrink.candidate import CandidateModel
from flatout.shrink.compose.training import Training
from flatout.shrink.distil.scoring import Score, accuracy, negative_bits, scores_of
from flatout.shrink.quantise import quantise
from flatout.shrink.score_intervals import paired_difference

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.plain_models import plain
from tests.plain_tasks import Task, digits, manual

SCHEMES = ("int8", "int8-dynamic", "int4", "int4-dynamic")
NATIVE = "native int8"
CASES = {
    "mlp": Case(512, 300, 0, 64, accuracy, 1e-3, 0.0),
    "cnn": Case(32, 300, 0, 64, accuracy, 3e-3, 0.0),
    "transformer": Case(64, 1000, 0, 16, negative_bits, 3e-3, 0.0),
}


def task_of(name: str, seed: int) -> Task:
    return manual(length=32) if name == "transformer" else digits(is_image=name == "cnn", seed=seed)


def of_seed(name: str, case: Case, seed: int, share: int, *, with_native: bool) -> dict[str, list[float] | str]:
    """Scores of the held samples by way, or why there are none."""
    task = task_of(name, seed)
    model = plain(name, seed=seed, width=case.width).module
    Training(CandidateModel.of(model, purpose_of(task, case, seed, case.first_rate))).run(case.first_steps // share)
    model.eval()
    found: dict[str, list[float] | str] = {"float32": scores_of(model, task.held_x, task.held_y, score=case.score)}
    for scheme in SCHEMES:
        found[scheme] = scores_or_reason(lambda scheme=scheme: few_bits(model, scheme, task, case.score))
    if with_native:
        found[NATIVE] = scores_or_reason(lambda: native(model, task, case.score))
    return found


def scores_or_reason(run: Callable[[], list[float]]) -> list[float] | str:
    try:
        return run()
    except FlatoutError as e:
        return str(e)


def few_bits(model: nn.Module, scheme: str, task: Task, score: Score) -> list[float]:
    kinds = (nn.Linear,) if scheme.startswith("int4") else (nn.Linear, nn.Conv2d)
    chosen = {name: scheme for name, module in model.named_modules() if isinstance(module, kinds)}
    made = quantise(model, chosen)
    return scores_of(made.module, task.held_x, task.held_y, score=score)


def native(model: nn.Module, task: Task, score: Score) -> list[float]:
    """A sample a step: the engine's sizes are those of its example."""
    engine = build(model, (task.held_x[:1],), precision="int8", events=0)
    outputs: list[Tensor] = []
    for x in task.held_x:
        with torch.inference_mode():
            out = torch.empty_like(model(x[None])) if not outputs else torch.empty_like(outputs[0])
        engine.step(x[None].contiguous(), out)
        outputs.append(out)
    return score(torch.cat(outputs), task.held_y).double().tolist()


def of_case(name: str, seeds: Sequence[int], share: int) -> list[Record]:
    case = CASES[name]
    found = [of_seed(name, case, seed, share, with_native=seed == seeds[0]) for seed in seeds]
    rows = []
    for way in found[0]:
        there = [one for one in found if way in one]
        given = [one[way] for one in there]
        row: Record = {"part": "quality", "model": name, "way": way, "metric": case.score.__name__}
        row["seeds"] = list(seeds[: len(there)])
        if any(isinstance(scores, str) for scores in given):
            rows.append({**row, "because": next(scores for scores in given if isinstance(scores, str))})
            continue
        own: list[Any] = given
        plain_scores: list[Any] = [one["float32"] for one in there]
        apart = paired_difference([s for one in own for s in one], [s for one in plain_scores for s in one])
        row["scores"] = [sum(one) / len(one) for one in own]
        row["differences"] = [
            sum(one) / len(one) - sum(other) / len(other) for one, other in zip(own, plain_scores, strict=True)
        ]
        row["difference"] = [apart.value, apart.low, apart.high, apart.method]
        rows.append(row)
    return rows


def table(rows: Sequence[Record]) -> str:
    lines = [f"{'model':14}{'way':16}{'score':>9}  {'difference to float32 (95 %)':32}by seeds"]
    for row in rows:
        if "because" in row:
            lines.append(f"{row['model']:14}{row['way']:16}{'':>9}  {row['because'][:90]}")
            continue
        value, low, high, _ = row["difference"]
        score = sum(row["scores"]) / len(row["scores"])
        span = f"{value:+.4f} ({low:+.4f} to {high:+.4f})"
        seeds = f"{min(row['differences']):+.4f} .. {max(row['differences']):+.4f}"
        lines.append(f"{row['model']:14}{row['way']:16}{score:>9.4f}  {span:32}{seeds}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None, help="JSON lines; the table goes beside it, as .txt")
    parser.add_argument("--only", default=",".join(CASES))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--quick", action="store_true", help="a tenth of the steps, to see that it runs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    seeds = [int(seed) for seed in options.seeds.split(",")]
    rows = [row for name in options.only.split(",") for row in of_case(name, seeds, 10 if options.quick else 1)]
    machine: Record = {"part": "machine", **hardware(), **versions(), "threads": 1, "is_quick": options.quick}
    text = f"{machine['processor']}, one thread; torch {machine['versions']['torch']}\n\n{table(rows)}"
    write_results(options.out, [machine, *rows], text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
