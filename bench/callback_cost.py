"""What a callback costs a training.

    python bench/callback_cost.py [--libraries transformers lightning accelerate] [--steps 150] [--pairs 12] [--out FILE]
    python bench/callback_cost.py --whole [--steps 1400] [--pairs 3] [--out FILE]

The model is a small transformer on random tokens: a step takes hundredths to tenths of a second on two CPU cores. What a
callback costs is a fixed time, whatever the length of a training: it watches for ten seconds, looks inside two steps, and
reports once. So the first form measures that time: trainings of some seconds with and without it in turn, in one process, and
the differences of neighbours. On a machine that is a few per cent faster or slower from minute to minute, that time drowns in the
differences of long trainings. `--whole` compares these: each in a process of its own.

Prints the differences' median with its 95 % interval, and the median of what the callback says of itself in the same trainings:
its own count is right where the two agree. Long trainings give the median of the paired ratios watched / plain, of seconds and of
the processor time of all threads. Both trainings have to end with the same weights.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from statistics import median
from time import perf_counter, process_time

from flatout.core.units import duration
from flatout.machine.measure.probe import cpu_model
from flatout.machine.measure.stats import median_estimate, ratio_estimate

LIBRARIES = ("transformers", "lightning", "accelerate")
SIDES = ("plain", "watched")
SAYS = "flatout: watching took "
WIDTH, LENGTH, BATCH, VOCABULARY = 128, 64, 8, 1000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--libraries", nargs="+", choices=LIBRARIES, default=LIBRARIES)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--pairs", type=int)
    parser.add_argument("--whole", action="store_true", help="long trainings, each in a process of its own")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--train", nargs="+", metavar=("LIBRARY", "SIDE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    steps = options.steps or (1400 if options.whole else 150)
    pairs = options.pairs or (3 if options.whole else 12)
    if options.train:
        library, *sides = options.train
        for side in sides:
            train(library, steps, is_watched=side == "watched")
        return 0
    result: dict[str, object] = {
        "steps": steps,
        "processor": cpu_model(),
        "cores": os.cpu_count(),
        "versions": {name: version(name) for name in ("torch", "transformers", "lightning", "accelerate")},
    }
    for library in options.libraries:
        result[library] = (whole if options.whole else in_turn)(library, steps, pairs)
        save(options.out, result)
    return 0


def in_turn(library: str, steps: int, pairs: int) -> dict[str, object]:
    """Short trainings with and without the callback in one process: the first pair warms up, then each pair's order changes."""
    sides = [side for number in range(pairs + 1) for side in (SIDES if number % 2 else SIDES[::-1])]
    ran = run(library, steps, *sides)
    if len({str(one["weights"]) for one in ran}) > 1:
        raise SystemExit(f"{library}: the weights differ with the callback")
    seconds = {
        side: [float(str(one["seconds"])) for one, s in zip(ran, sides, strict=True) if s == side][1:] for side in SIDES
    }
    own = [seconds_in(str(one["says"])) for one, s in zip(ran, sides, strict=True) if s == "watched"]
    more = median_estimate([w - p for w, p in zip(seconds["watched"], seconds["plain"], strict=True)])
    print(
        f"{library}: watched - plain {more.value:.2f} s ({more.low:.2f} - {more.high:.2f}), n = {more.num_samples}, plain "
        f"{duration(median(seconds['plain']))}; by its own count {median(own[1:]):.2f} s, {own[0]:.2f} s the first time",
        flush=True,
    )
    return {
        "more_s": more.value, "low_s": more.low, "high_s": more.high, "num_pairs": more.num_samples,
        "own_s": median(own[1:]), "first_own_s": own[0], "seconds": seconds, "own": own,
    }  # fmt: skip


def whole(library: str, steps: int, pairs: int) -> dict[str, object]:
    """Long trainings with and without the callback, each in a process of its own."""
    times: dict[str, dict[str, list[float]]] = {side: {"seconds": [], "cpu_seconds": []} for side in SIDES}
    own = []
    for number in range(pairs):
        ran = {side: run(library, steps, side)[0] for side in (SIDES if number % 2 else SIDES[::-1])}
        if ran["plain"]["weights"] != ran["watched"]["weights"]:
            raise SystemExit(f"{library}: the weights differ with the callback")
        for side, of_side in times.items():
            for name, values in of_side.items():
                values.append(float(str(ran[side][name])))
        own.append(str(ran["watched"]["says"]))
    plain, watched = times["plain"], times["watched"]
    ratio = ratio_estimate(watched["seconds"], plain["seconds"])
    cpu = ratio_estimate(watched["cpu_seconds"], plain["cpu_seconds"])
    print(
        f"{library}: watched / plain {ratio.value:.4f} ({ratio.low:.4f} - {ratio.high:.4f}), processor time {cpu.value:.4f} "
        f"({cpu.low:.4f} - {cpu.high:.4f}), n = {ratio.num_samples}, plain {median(plain['seconds']):.1f} s; {own[-1]}",
        flush=True,
    )
    return {
        "ratio": ratio.value, "low": ratio.low, "high": ratio.high, "num_pairs": ratio.num_samples,
        "cpu_ratio": cpu.value, "cpu_low": cpu.low, "cpu_high": cpu.high, "times": times, "says": own,
    }  # fmt: skip


def seconds_in(line: str) -> float:
    """The time that a callback's last line says watching took."""
    value, unit = line.removeprefix(SAYS).split()[:2]
    return float(value) * {"ms": 1e-3, "s": 1.0}[unit]


def save(path: Path | None, result: dict[str, object]) -> None:
    """Write what there is so far."""
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")


def run(library: str, steps: int, *sides: str) -> list[dict[str, object]]:
    """Trainings one after the other in a process and a folder of its own: of each its figures, and what the callback says."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, str(Path(__file__).resolve()), "--steps", str(steps), "--train", library, *sides],
            cwd=folder,
            env=os.environ,
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    found: list[dict[str, object]] = []
    says = ""
    for line in done.stdout.splitlines():
        if line.startswith(SAYS):
            says = line
        elif line.startswith('{"seconds"'):
            found.append({**json.loads(line), "says": says})
            says = ""
    return found


def train(library: str, steps: int, *, is_watched: bool) -> None:
    """Train, and print the seconds and a checksum of the weights as JSON."""
    import hashlib
    import warnings

    import torch
    from torch import Tensor, nn
    from torch.nn import functional as F
    from torch.utils.data import DataLoader

    import flatout.callbacks

    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    rows = [{"tokens": row} for row in torch.randint(VOCABULARY, (steps * BATCH, LENGTH))]

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(VOCABULARY, WIDTH)
            layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True)
            self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
            self.head = nn.Linear(WIDTH, VOCABULARY)

        def forward(self, tokens: Tensor) -> dict[str, Tensor]:
            scores = self.head(self.layers(self.embedding(tokens)))
            return {"loss": F.cross_entropy(scores[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())}

    net = Network()
    if library == "transformers":
        from transformers import Trainer, TrainingArguments

        arguments = TrainingArguments(
            "out", max_steps=steps, per_device_train_batch_size=BATCH, use_cpu=True, report_to=[], disable_tqdm=True,
            save_strategy="no", logging_steps=50, remove_unused_columns=False, dataloader_pin_memory=False,
        )  # fmt: skip
        callbacks = [flatout.callbacks.TrainerReport()] if is_watched else []
        trainer = Trainer(model=net, args=arguments, train_dataset=rows, callbacks=callbacks)
        began, cpu_began = perf_counter(), process_time()
        trainer.train()
    elif library == "lightning":
        import lightning

        class Module(lightning.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.net = net

            def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
                return self.net(**batch)["loss"]

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return torch.optim.AdamW(self.parameters(), lr=1e-3)

        fit = lightning.Trainer(
            max_steps=steps, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, callbacks=[flatout.callbacks.LightningReport()] if is_watched else [],
        )  # fmt: skip
        module, loader = Module(), DataLoader(rows, batch_size=BATCH)
        began, cpu_began = perf_counter(), process_time()
        fit.fit(module, loader)
    else:
        from contextlib import nullcontext

        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
        model, optimizer, loader = accelerator.prepare(
            net, torch.optim.AdamW(net.parameters(), lr=1e-3), DataLoader(rows, batch_size=BATCH)
        )
        report = flatout.callbacks.AccelerateReport(accelerator) if is_watched else nullcontext()
        began, cpu_began = perf_counter(), process_time()
        with report:
            for batch in loader:
                accelerator.backward(model(**batch)["loss"])
                optimizer.step()
                optimizer.zero_grad()
    seconds, cpu_seconds = perf_counter() - began, process_time() - cpu_began
    bits = b"".join(p.detach().numpy().tobytes() for p in net.parameters())
    found = {"seconds": seconds, "cpu_seconds": cpu_seconds, "weights": hashlib.sha256(bits).hexdigest()}
    print("\n" + json.dumps(found), flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
