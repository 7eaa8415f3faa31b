"""What distillation gives back to a model that was cut in half: accuracy on digits, bits a character on Python's manual.

    python bench/distilling.py [--out bench/results/<date>-<hardware>/distilling.json] [--only mlp,cnn,transformer] [--quick]

A teacher is trained on the real data of tests/plain_tasks.py. Half of its units are pruned (`flatout.shrink.prune`, by
Taylor importance): in `transformer` half of the heads and of the hidden units, the residual stream whole (55 % of the weights
stay), in `transformer_all` half of that, too (28 % stay). That student is trained, one core, in four ways of as many steps each:

  distilled     after the teacher's outputs and the targets: `distil` as it is
  cached        the same from a cache of the teacher's outputs, the 8 likeliest classes of each place
  targets       by the targets alone, with the same optimizer and schedule
  from_scratch  the same architecture with new weights, by the targets alone

Each is scored on held samples beside the teacher: the difference with its 95 % interval, paired by sample. Within 1 % of the
teacher's score is the aim; `within` says whether the middle is, `proved` whether the whole interval is. Seconds are those of the
training. The teacher's own training is told beside (`teacher_s`), for one that stops early is easily reached.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from native_machine import hardware, versions
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.plain_models import plain
from tests.plain_tasks import Task, digits, manual

from flatout.machine.measure.timer import HostClock
from flatout.shrink.distil.distillation import Distilled, HeldOut, Length, Recipe, distil
from flatout.shrink.distil.losses import hard_loss
from flatout.shrink.distil.samples import Shuffled
from flatout.shrink.distil.scoring import Score, accuracy, negative_bits, scores_of
from flatout.shrink.distil.teacher_cache import write_teacher_cache
from flatout.shrink.distil.teachers import DistilObjective
from flatout.shrink.prune import prune
from flatout.shrink.score_intervals import paired_difference

Record = dict[str, Any]
WITHIN = 0.01


class Case(NamedTuple):
    """A teacher, how long it and its students are trained, and how they are scored."""

    width: int
    teacher_steps: int
    steps: int
    batch_size: int
    score: Score
    rate: float = 2e-3
    temperature: float = 2.0
    cut: Any = 0.5
    """What is pruned: a share of all units, or of those of some modules."""


CASES = {
    "mlp": Case(128, 600, 800, 64, accuracy),
    "cnn": Case(32, 400, 600, 64, accuracy),
    "transformer": Case(64, 1500, 2000, 32, negative_bits, 1e-2, 1.0, {"blocks.*.qkv": 0.5, "blocks.*.gate": 0.5}),
    "transformer_all": Case(64, 1500, 2000, 32, negative_bits, 1e-2, 1.0),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None, help="JSON lines; the table goes beside it, as .txt")
    parser.add_argument("--only", default=",".join(CASES))
    parser.add_argument("--ways", default="distilled,cached,targets,from_scratch")
    parser.add_argument("--quick", action="store_true", help="a tenth of the steps, to see that it runs")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    records: list[Record] = [{"part": "machine", **hardware(), **versions(), "is_quick": options.quick}]
    for name in options.only.split(","):
        for record in of_case(name, CASES[name], options.ways.split(","), quick=options.quick, seed=options.seed):
            records.append(record)
            print(json.dumps(record), flush=True)
    text = table(records)
    print(f"\n{text}")
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text("".join(json.dumps(record) + "\n" for record in records))
        options.out.with_suffix(".txt").write_text(text + "\n")
    return 0


def of_case(name: str, case: Case, wanted: Sequence[str], *, quick: bool, seed: int) -> list[Record]:
    kind = name.partition("_")[0]
    task = {"mlp": lambda: digits(is_image=False), "cnn": digits, "transformer": manual}[kind]()
    held_out = HeldOut(task.held_x, task.held_y, case.score)
    share = 10 if quick else 1
    teacher = plain(kind, seed=seed, width=case.width).module
    teacher_s = HostClock().elapsed_s(
        lambda: by_targets(teacher, task, case, case.teacher_steps // share, seed, None), 1
    )
    teacher.eval()
    student = pruned(teacher, task, case)
    fresh = copy.deepcopy(student)
    renew(fresh, seed)
    batches = Shuffled(task.x, task.y, batch_size=case.batch_size, seed=seed + 1)
    length, recipe = Length(steps=case.steps // share), Recipe(rate=case.rate)
    given = {"length": length, "held_out": held_out, "seed": seed, "recipe": recipe}
    given["objective"] = DistilObjective(temperature=case.temperature)
    with tempfile.TemporaryDirectory() as folder:
        cache: list[Any] = []

        def write() -> None:
            made = write_teacher_cache(Path(folder) / "cache", teacher, task.x, top=8, temperature=case.temperature)
            cache.append(made)

        write_s = HostClock().elapsed_s(write, 1)
        ways = {
            "distilled": lambda: distil(copy.deepcopy(student), teacher, batches, **given),
            "cached": lambda: distil(copy.deepcopy(student), cache[0], batches, **given),
            "targets": lambda: by_targets(copy.deepcopy(student), task, case, case.steps // share, seed, held_out),
            "from_scratch": lambda: by_targets(fresh, task, case, case.steps // share, seed, held_out),
        }
        found = [case_record(name, way, run(), teacher, held_out) for way, run in ways.items() if way in wanted]
    own = {"teacher_s": teacher_s, "cache_s": write_s, "teacher_parameters": num(teacher), "parameters": num(student)}
    return [{**record, **own} for record in found]


def pruned(teacher: nn.Module, task: Task, case: Case) -> nn.Module:
    """Without the units whose going changes the loss least (Taylor), by a few batches of what is trained on."""
    samples = [(task.x[at : at + 64], task.y[at : at + 64]) for at in range(0, 512, 64)]

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return hard_loss(model(batch[0]), batch[1])

    made = prune(teacher, (task.x[:4],), fraction=case.cut, importance="taylor", batches=samples, loss=loss)
    return made.model.train()


def by_targets(model: nn.Module, task: Task, case: Case, steps: int, seed: int, held_out: HeldOut | None) -> Distilled:
    """The same loop with no weight on the teacher: what it would say is not asked."""

    class Silent:
        def loss(self, outputs: torch.Tensor, batch: object, objective: DistilObjective) -> torch.Tensor:
            return outputs.new_zeros(())

    batches = Shuffled(task.x, task.y, batch_size=case.batch_size, seed=seed)
    objective = DistilObjective(soft_fraction=0.0, hard=hard_loss)
    recipe = Recipe(rate=case.rate)
    return distil(
        model,
        Silent(),
        batches,
        length=Length(steps=steps),
        objective=objective,
        held_out=held_out,
        seed=seed,
        recipe=recipe,
    )


def renew(model: nn.Module, seed: int) -> None:
    """New weights, as its layers make them; embeddings and norms with them."""
    torch.manual_seed(seed + 100)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


def case_record(name: str, way: str, found: Distilled, teacher: nn.Module, held_out: HeldOut) -> Record:
    judged = held_out.inputs, held_out.targets
    own = scores_of(found.student, *judged, score=held_out.score)
    others = scores_of(teacher, *judged, score=held_out.score)
    difference = paired_difference(own, others)
    base = abs(sum(others) / len(others))
    report = found.report
    return {
        "part": "case",
        "model": name,
        "way": way,
        "metric": held_out.score.__name__,
        "teacher": sum(others) / len(others),
        "before": report.before.value if report.before is not None else None,
        "after": sum(own) / len(own),
        "difference": [difference.value, difference.low, difference.high, difference.method],
        "within": difference.value >= -WITHIN * base,
        "proved": difference.low >= -WITHIN * base,
        "steps": report.num_steps,
        "seconds": report.seconds,
    }


def num(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def table(records: Sequence[Record]) -> str:
    machine = records[0]
    names = ("parameters", "teacher", "pruned", "after", "difference, 95 % interval", "within 1 %", "s")
    lines = [
        f"{machine['processor']}, one thread; torch {machine['versions']['torch']}",
        "",
        row("model", "way", *names),
    ]
    for r in records[1:]:
        value, low, high, _ = r["difference"]
        said = "proved" if r["proved"] else "yes" if r["within"] else "no"
        scores = (f"{r[name]:.4f}" for name in ("teacher", "before", "after"))
        span = f"{value:+.4f} ({low:+.4f} to {high:+.4f})"
        sizes = f"{r['parameters']} of {r['teacher_parameters']}"
        lines.append(row(r["model"], r["way"], sizes, *scores, span, said, f"{r['seconds']:.1f}"))
    times = {r["model"]: (r["teacher_s"], r["cache_s"]) for r in records[1:]}
    lines += [
        "",
        "pruned: before training; new weights in from_scratch. Scores: accuracy; for transformer minus bits a character",
    ]
    lines += [f"{model}: teacher trained {a:.1f} s, its cache written in {b:.1f} s" for model, (a, b) in times.items()]
    return "\n".join(lines)


def row(*cells: str) -> str:
    widths = (-16, -13, 16, 8, 8, 8, 30, 11, 7)
    return " ".join(c.ljust(-w) if w < 0 else c.rjust(w) for c, w in zip(cells, widths, strict=True)).rstrip()


if __name__ == "__main__":
    sys.exit(main())
