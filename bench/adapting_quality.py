"""What training less costs of the metric: each reduction that trains fewer parameters beside full training, on real data.

    python bench/adapting_quality.py [--out bench/results/<date>-<hardware>/adapting_quality.json] [--only mlp,cnn,transformer]
                                     [--seeds 0,1,2] [--rate R] [--quick]

A model is trained on one part of the data and adapted to another, AdamW at a constant rate, no tricks:

  mlp, cnn                  handwritten digits (scikit-learn, 8 x 8), then the same digits turned by a quarter. Accuracy
  mlp_classes, cnn_classes  the digits 0 to 4, then 5 to 9: classes that it never saw, without a new head. Accuracy
  transformer               Python's manual, then the source of Python's library: prose, then code, in the same characters. Minus
                            bits a character

Each reduction is applied as `flatout shrink --objective train-cost` pulls it: its own options, its own factor on the rate
(low-rank
pairs and bottlenecks 4, biases 10, prompts 30, last layers 1), as many steps as full training, on the same batches. The prompt
is put before the blocks by hand: this model has two embeddings, and the reduction refuses that. `as it is` is the model before.

  score        mean of the seeds, and the lowest and highest. A seed has its own split, first weights, and batches
  difference   to full training from the same start on the same batches, with its 95 % interval, paired by held sample over all
               seeds (Newcombe for accuracies); it tells what other samples would change, the range of seeds what others would
  step, call   a training step, and a call without gradients, over the plain model's: interleaved rounds on one thread, first
               seed. These models are small; larger ones are timed in bench/adapting.py
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from native_machine import hardware, versions, write_results
from torch import Tensor, nn

from flatout.core.records.adapt import Prompt
from flatout.core.records.reduction import Option
from flatout.machine.measure.timer import HostClock, compare_times
from flatout.shrink.candidate import CandidateModel, ShrinkTask
from flatout.shrink.compose.training import Training
from flatout.shrink.distil.scoring import Score, accuracy, negative_bits, scores_of
from flatout.shrink.reductions.training import bias_only, bottleneck_adapters, last_layers, low_rank, prompt_tuning
from flatout.shrink.score_intervals import paired_difference

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.plain_models import plain
from tests.plain_tasks import Task, digits, manual

Record = dict[str, Any]
Pull = Callable[[CandidateModel], CandidateModel]
REDUCTIONS = (low_rank, bottleneck_adapters, bias_only, last_layers)
FULL, BEFORE = "full training", "as it is"


class Case(NamedTuple):
    """A model and its two tasks: what it is trained on first, and what it is adapted to."""

    width: int
    first_steps: int
    steps: int
    batch_size: int
    score: Score
    first_rate: float
    rate: float
    """Of full training: within a point of the best of 1e-3, 3e-3 and 1e-2 (transformer: of the first two), on seed 7."""


CASES = {
    "mlp": Case(256, 300, 300, 64, accuracy, 3e-3, 3e-3),
    "cnn": Case(32, 200, 200, 64, accuracy, 3e-3, 3e-3),
    "mlp_classes": Case(256, 200, 300, 64, accuracy, 3e-3, 3e-3),
    "cnn_classes": Case(32, 200, 200, 64, accuracy, 3e-3, 3e-3),
    "transformer": Case(64, 700, 180, 16, negative_bits, 3e-3, 3e-3),
}


def tasks_of(name: str, seed: int) -> tuple[Task, Task]:
    if name == "transformer":
        return manual(length=32), library(seed)
    kind, _, is_classes = name.partition("_")
    whole = digits(is_image=kind == "cnn", seed=seed)
    return (classes(whole, range(5)), classes(whole, range(5, 10))) if is_classes else (whole, turned(whole))


def turned(task: Task) -> Task:
    x, held_x = (torch.rot90(x.view(-1, 8, 8), dims=(1, 2)).reshape(x.shape) for x in (task.x, task.held_x))
    return Task(x, task.y, held_x, task.held_y)


def classes(task: Task, wanted: range) -> Task:
    own, held = ((y >= wanted.start) & (y < wanted.stop) for y in (task.y, task.held_y))
    return Task(task.x[own], task.y[own], task.held_x[held], task.held_y[held])


def library(seed: int, *, length: int = 32, held: int = 600, words: int = 64) -> Task:
    """Windows of the source of some of Python's modules, in the characters of `manual`; the seed says which are held."""
    import argparse
    import ast
    import inspect
    import tarfile
    import typing
    from collections import Counter
    from pydoc_data.topics import topics

    manual_text = "\n".join(topics[name] for name in sorted(topics))
    known = {c: i for i, (c, _) in enumerate(Counter(manual_text).most_common(words - 1), start=1)}
    text = "\n".join(inspect.getsource(module) for module in (argparse, ast, inspect, tarfile, typing))
    ids = torch.tensor([known.get(c, 0) for c in text])
    num = (len(ids) - 1) // length
    order = torch.randperm(num, generator=torch.Generator().manual_seed(seed))
    x, y = (ids[at : at + num * length].view(num, length)[order] for at in (0, 1))
    return Task(x[:-held], y[:-held], x[-held:], y[-held:])


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def shrink_task_of(task: Task, case: Case, seed: int, rate: float) -> ShrinkTask:
    generator = torch.Generator()
    passes = 0

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        """Each pass in another order; the same orders for each purpose of the seed."""
        nonlocal passes
        passes += 1
        order = torch.randperm(len(task.x), generator=generator.manual_seed(1000 * seed + passes))
        for at in range(0, len(order) - case.batch_size + 1, case.batch_size):
            yield task.x[order[at : at + case.batch_size]], task.y[order[at : at + case.batch_size]]

    return ShrinkTask(
        inputs=(task.x[: case.batch_size],),
        evaluate=lambda call: 0.0,
        batches=batches,
        loss=loss,
        learning_rate=rate,
        seed=seed,
    )


def pulls(name: str, model: nn.Module, shrink_task: ShrinkTask) -> dict[str, Pull]:
    """What each reduction offers for the model, and the prompt."""
    found: dict[str, Pull] = {}
    for reduction in REDUCTIONS:
        for said in reduction.options(CandidateModel.of(model, shrink_task)):
            assert isinstance(said, Option)
            found[said.name] = lambda candidate, reduction=reduction, said=said: reduction.apply(
                candidate, said.parameters
            )
    if name == "transformer":
        found["prompt of 8"] = prompted
    return found


def prompted(candidate: CandidateModel) -> CandidateModel:
    return candidate.adapted(Prompt(before="blocks", num_vectors=8), prompt_tuning._RATE)


class Seeded(NamedTuple):
    """Of one seed: scores of the held samples, and subjects that were trained, by way."""

    scores: dict[str, list[float]]
    subjects: dict[str, CandidateModel]


def of_seed(name: str, case: Case, seed: int, *, share: int, rate: float) -> Seeded:
    before, after = tasks_of(name, seed)
    model = plain(name.partition("_")[0], seed=seed, width=case.width).module
    Training(CandidateModel.of(model, shrink_task_of(before, case, seed, case.first_rate))).run(
        case.first_steps // share
    )
    ways: dict[str, Pull] = {FULL: lambda candidate: candidate}
    ways |= pulls(name, model, shrink_task_of(after, case, seed, rate))
    scores = {BEFORE: scores_of(model, after.held_x, after.held_y, score=case.score)}
    subjects = {}
    for way, pull in ways.items():
        candidate = pull(CandidateModel.of(copy.deepcopy(model), shrink_task_of(after, case, seed, rate)))
        Training(candidate).run(case.steps // share)
        scores[way] = scores_of(candidate.model, after.held_x, after.held_y, score=case.score)
        subjects[way] = candidate
    return Seeded(scores, subjects)


def ratios(subjects: dict[str, CandidateModel], seconds: float) -> dict[str, Record]:
    """Of a training step, and of a call without gradients, to the plain model's."""
    trainings = {way: Training(candidate) for way, candidate in subjects.items()}
    steps = {way: training.step for way, training in trainings.items()}
    calls = {way: calling(candidate) for way, candidate in subjects.items()}
    found: dict[str, Record] = {way: {} for way in subjects}
    for what, functions in (("step", steps), ("call", calls)):
        for way, timed in compare_times(
            functions, min_time_s=seconds / 2, max_time_s=seconds, clock=HostClock()
        ).items():
            ratio = timed.ratio
            found[way][f"{what}_s"] = timed.call_s.value
            found[way][f"{what}_ratio"] = [1.0] * 3 if ratio is None else [ratio.value, ratio.low, ratio.high]
    return found


def calling(candidate: CandidateModel) -> Callable[[], object]:
    model = candidate.model.eval()

    def call() -> object:
        with torch.inference_mode():
            return model(*candidate.inputs)

    return call


def of_case(name: str, seeds: Sequence[int], *, share: int, rate: float | None, seconds: float) -> list[Record]:
    case = CASES[name]
    case = replace_rate(case, rate)
    found = [of_seed(name, case, seed, share=share, rate=case.rate) for seed in seeds]
    times = ratios(found[0].subjects, seconds) if seconds and "_" not in name else {}
    pooled = {way: [s for one in found for s in one.scores[way]] for way in found[0].scores}
    rows = []
    for way in found[0].scores:
        means = [sum(one.scores[way]) / len(one.scores[way]) for one in found]
        fulls = [sum(one.scores[FULL]) / len(one.scores[FULL]) for one in found]
        apart = paired_difference(pooled[way], pooled[FULL])
        rows.append(
            {
                "part": "quality",
                "model": name,
                "way": way,
                "metric": case.score.__name__,
                "seeds": list(seeds),
                "num_held": len(pooled[way]),
                "scores": means,
                "differences": [mean - full for mean, full in zip(means, fulls, strict=True)],
                "difference": [apart.value, apart.low, apart.high, apart.method],
                "steps": case.steps // share,
                "rate": case.rate,
                **sizes(found[0].subjects.get(way)),
                **times.get(way, {}),
            }
        )
    return rows


def replace_rate(case: Case, rate: float | None) -> Case:
    return case if rate is None else case._replace(rate=rate)


def sizes(candidate: CandidateModel | None) -> Record:
    if candidate is None:
        return {}
    trained = [*candidate.model.parameters()] if candidate.trained is None else [*candidate.trained]
    return {
        "trained_parameters": sum(p.numel() for p in trained),
        "rate_factor": candidate.rate_factor,
        "training_bytes": Training(candidate).num_bytes,
    }


def table(rows: Sequence[Record]) -> str:
    lines = []
    widths = (-14, -18, 10, 24, 34, 24, 8, 8)
    heads = (
        "model",
        "way",
        "trained",
        "score (seeds)",
        "difference to full (95 %)",
        "difference by seeds",
        "step",
        "call",
    )
    for cells in (heads, *(cells_of(row) for row in rows)):
        lines.append(
            " ".join(c.ljust(-w) if w < 0 else c.rjust(w) for c, w in zip(cells, widths, strict=True)).rstrip()
        )
    lines.append("")
    lines.append("Scores: accuracy; of the transformer minus bits a character. step, call: over the plain model's.")
    return "\n".join(lines)


def cells_of(row: Record) -> tuple[str, ...]:
    scores, differences = row["scores"], row["differences"]
    value, low, high, _ = row["difference"]
    is_full = row["way"] == FULL
    return (
        row["model"],
        row["way"],
        str(row.get("trained_parameters", 0)),
        f"{sum(scores) / len(scores):.4f} ({min(scores):.4f} {max(scores):.4f})",
        "" if is_full else f"{value:+.4f} ({low:+.4f} to {high:+.4f})",
        "" if is_full else f"{min(differences):+.4f} .. {max(differences):+.4f}",
        f"{row['step_ratio'][0]:.2f}" if "step_ratio" in row else "",
        f"{row['call_ratio'][0]:.2f}" if "call_ratio" in row else "",
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None, help="JSON lines; the table goes beside it, as .txt")
    parser.add_argument("--only", default=",".join(CASES))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--rate", type=float, default=None, help="of full training, in place of each case's own")
    parser.add_argument("--seconds", type=float, default=3.0, help="of timing steps, and of timing calls; 0: none")
    parser.add_argument("--quick", action="store_true", help="a tenth of the steps, to see that it runs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    seeds = [int(seed) for seed in options.seeds.split(",")]
    rows: list[Record] = []
    for name in options.only.split(","):
        share = 10 if options.quick else 1
        rows += of_case(name, seeds, share=share, rate=options.rate, seconds=options.seconds)
    machine: Record = {"part": "machine", **hardware(), **versions(), "threads": 1, "is_quick": options.quick}
    text = f"{machine['processor']}, one thread; torch {machine['versions']['torch']}\n\n{table(rows)}"
    write_results(options.out, [machine, *rows], text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
