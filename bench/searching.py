"""A search for a model 3 times as fast as an over-wide one on digits, at equal accuracy; killed in the middle, and gone on with.

    python bench/searching.py [--out bench/results/<date>-<hardware>/searching.json] [--only cnn,mlp] [--budget 120] [--quick]

Given: a CNN and an MLP of many times the width that digits need, trained. Searched: widths, and depth of the CNN, under the limit
of a third of the given model's latency, measured beside it in interleaved rounds on 32 images, one thread; by accuracy on 300
samples that are not trained on. Candidates start from the given model's weights, cut to size, and are distilled from it. The
search runs in a process of its own that is killed with SIGKILL after `--kill` seconds, and is begun again. The winner is trained
anew with three seeds and judged, beside the given model, by 597 samples that nobody has seen; 0.02 of accuracy is what so many
samples can tell apart, and what is allowed.

Told: seconds of everything together (training of the given model apart), the measured ratio of latencies with its interval, the
difference in accuracy with its interval (Newcombe, paired), trials before and after the kill, and the whole table.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import sys
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from native_machine import hardware, versions
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.plain_tasks import Task, digits

from flatout.blocks.training.schedules import set_rate, warm_up_cosine
from flatout.core.records.architecture_search import SpaceValue
from flatout.machine.measure.timer import HostClock
from flatout.report.parts.architecture_search import search_blocks
from flatout.report.text import plain_lines
from flatout.shrink.distil.losses import logit_loss
from flatout.shrink.distil.samples import Shuffled
from flatout.shrink.search.costs import Limit
from flatout.shrink.search.search import SearchResult, search_architecture
from flatout.shrink.search.space import Range, Space

Record = dict[str, Any]
NUM_JUDGED = 300
BATCH = 32


class Case(NamedTuple):
    build: Callable[[Mapping[str, SpaceValue]], nn.Module]
    space: Space
    original: dict[str, SpaceValue]
    is_image: bool
    epochs: int


class Cnn(nn.Module):
    """Stem, residual blocks of one width with an inner width of their own, a strided layer, a head."""

    def __init__(self, width: int, inner: int, blocks: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
        self.blocks = nn.ModuleList(residual(width, inner) for _ in range(blocks))
        self.down, self.head = nn.Conv2d(width, 2 * width, 3, 2, 1), nn.Linear(2 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = F.relu(x + block(x))
        return self.head(F.relu(self.down(x)).mean((2, 3)))


def residual(width: int, inner: int) -> nn.Sequential:
    up, down = nn.Conv2d(width, inner, 3, padding=1), nn.Conv2d(inner, width, 3, padding=1)
    return nn.Sequential(up, nn.BatchNorm2d(inner), nn.ReLU(), down, nn.BatchNorm2d(width))


def mlp(architecture: Mapping[str, SpaceValue]) -> nn.Module:
    first, second = int(architecture["first"]), int(architecture["second"])
    layers = {"into": nn.Linear(64, first), "a": nn.ReLU(), "mid": nn.Linear(first, second), "b": nn.ReLU()}
    return nn.Sequential(OrderedDict({**layers, "head": nn.Linear(second, 10)}))


def cnn(architecture: Mapping[str, SpaceValue]) -> nn.Module:
    return Cnn(int(architecture["width"]), int(architecture["inner"]), int(architecture["blocks"]))


CASES = {
    "cnn": Case(
        cnn,
        {"width": Range(8, 48, 4), "inner": Range(8, 48, 8), "blocks": [1, 2]},
        {"width": 64, "inner": 64, "blocks": 2},
        True,
        10,
    ),
    "mlp": Case(
        mlp,
        {"first": Range(32, 1024, 32), "second": Range(32, 1024, 32)},
        {"first": 1536, "second": 1536},
        False,
        30,
    ),
}


def parts(case: Case) -> tuple[Task, Tensor, Tensor, Tensor, Tensor]:
    """(task, x and y to train with, x and y that the search judges by)."""
    task = digits(is_image=case.is_image)
    return task, task.x[:-NUM_JUDGED], task.y[:-NUM_JUDGED], task.x[-NUM_JUDGED:], task.y[-NUM_JUDGED:]


def trained(
    model: nn.Module, x: Tensor, y: Tensor, teacher: nn.Module | None, *, epochs: int, seed: int
) -> Iterator[None]:
    """By the targets, and with a teacher after its outputs; yields four times, the last time at the end."""
    batches = Shuffled(x, y, batch_size=64, seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.02)
    rate = warm_up_cosine(3e-3, warm_up=10, steps=epochs * len(batches))
    for epoch in range(epochs):
        for number, batch in enumerate(batches.epoch(epoch)):
            outputs = model(batch.inputs)
            assert batch.targets is not None
            loss = F.cross_entropy(outputs, batch.targets)
            if teacher is not None:
                with torch.no_grad():
                    goal = teacher(batch.inputs)
                loss = 0.3 * loss + 0.7 * logit_loss(outputs, goal)
            optimizer.zero_grad()
            loss.backward()
            set_rate(optimizer, rate(epoch * len(batches) + number))
            optimizer.step()
        if (epoch + 1) % (epochs // 4 or 1) == 0 or epoch + 1 == epochs:
            yield


def right(x: Tensor, y: Tensor) -> Callable[[nn.Module], Tensor]:
    return lambda model: (model(x).argmax(-1) == y).float()


def searched(name: str, folder: Path, budget_s: float, epochs: int) -> SearchResult:
    torch.set_num_threads(1)
    case = CASES[name]
    task, x, y, judged_x, judged_y = parts(case)
    original = case.build(case.original)
    original.load_state_dict(torch.load(folder / "given.pt"))
    original.eval()
    return search_architecture(
        case.build,
        case.space,
        lambda model, seed: trained(model, x, y, original, epochs=epochs, seed=seed),
        right(judged_x, judged_y),
        original=original,
        inputs=x[:BATCH],
        limit=Limit(latency_fraction=1 / 3),
        storage=folder / "search.journal",
        budget_s=budget_s,
        prove_with=right(task.held_x, task.held_y),
        num_seeds=3,
        allowed_loss=0.02,
    )


def of_case(name: str, folder: Path, *, budget_s: float, kill_s: float, share: int) -> Record:
    case, clock = CASES[name], HostClock()
    _, x, y, _, _ = parts(case)
    torch.manual_seed(0)
    original = case.build(case.original)
    epochs = max(4, case.epochs // share)
    given_s = clock.elapsed_s(lambda: [*trained(original, x, y, None, epochs=epochs, seed=0)], 1)
    torch.save(original.state_dict(), folder / "given.pt")
    found: list[SearchResult] = []
    left: list[int] = []

    def run() -> None:
        process = multiprocessing.get_context("spawn").Process(target=searched, args=(name, folder, budget_s, epochs))
        process.start()
        process.join(kill_s)
        assert process.pid is not None
        if process.is_alive():
            os.kill(process.pid, signal.SIGKILL)
        process.join()
        left.append(process.exitcode or 0)
        left.append(ended_trials(folder / "search.journal"))
        found.append(searched(name, folder, budget_s, epochs))

    total_s = clock.elapsed_s(run, 1)
    report = found[0].report
    choices = [json.dumps(row.architecture, sort_keys=True) for row in report.trials]
    return {
        "part": "case",
        "model": name,
        "given_s": given_s,
        "total_s": total_s,
        "killed": left[0] == -signal.SIGKILL,
        "trials_at_kill": left[1],
        "trials": len(report.trials),
        "repeated": len(choices) - len(set(choices)),
        "choice": found[0].architecture,
        "faster": inverse(report.winner_cost.latency_fraction) if report.winner_cost else None,
        "report": json.loads(report_json(found[0])),
        "text": "\n".join(plain_lines(search_blocks(report))),
    }


def report_json(found: SearchResult) -> bytes:
    from flatout.core.records.record import to_json

    return to_json(found.report)


def ended_trials(journal: Path) -> int:
    """Trials with a row: Optuna's journal is JSON lines."""
    return sum(b'"row"' in line for line in journal.read_bytes().splitlines()) if journal.exists() else 0


def inverse(fraction: tuple[float, float, float] | None) -> list[float] | None:
    return [1 / fraction[0], 1 / fraction[2], 1 / fraction[1]] if fraction is not None else None


def table(records: list[Record]) -> str:
    machine = records[0]
    lines = [f"{machine['processor']}, one thread; torch {machine['versions']['torch']}"]
    for record in records[1:]:
        killed = "killed" if record["killed"] else "ended before it was killed"
        lines += [
            "",
            f"{record['model']}: {record['total_s']:.0f} s in all; {killed} after {record['trials_at_kill']} trials",
        ]
        lines += [
            f"of {record['trials']}, {record['repeated']} repeated; given model trained {record['given_s']:.1f} s"
        ]
        if record["faster"]:
            value, low, high = record["faster"]
            lines += [f"{value:.2f} times as fast ({low:.2f} to {high:.2f})"]
        lines += [record["text"]]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None, help="JSON lines; the table goes beside it, as .txt")
    parser.add_argument("--only", default=",".join(CASES))
    parser.add_argument("--budget", type=float, default=120.0, help="seconds of a search")
    parser.add_argument("--kill", type=float, default=30.0, help="seconds after which the search is killed")
    parser.add_argument("--quick", action="store_true", help="a third of the epochs, to see that it runs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    records: list[Record] = [{"part": "machine", **hardware(), **versions(), "is_quick": options.quick}]
    for name in options.only.split(","):
        with tempfile.TemporaryDirectory() as folder:
            share = 3 if options.quick else 1
            record = of_case(name, Path(folder), budget_s=options.budget, kill_s=options.kill, share=share)
        records.append(record)
        print(json.dumps(record), flush=True)
    text = table(records)
    print(f"\n{text}")
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text("".join(json.dumps(record) + "\n" for record in records))
        options.out.with_suffix(".txt").write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
