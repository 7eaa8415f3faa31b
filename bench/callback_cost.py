"""What a callback costs a training: trainings with and without it in turn, each in a process of its own.

    python bench/callback_cost.py [--libraries transformers lightning accelerate] [--steps 300] [--pairs 7] [--out FILE]

The model is a small transformer on random tokens: a step takes hundredths to tenths of a second on two CPU cores. Compared is
the time from the start of the training to its end, without imports. Prints for each library the median of the paired ratios
watched / plain with its 95 % interval, and what the callback itself says that watching took. Both trainings have to end with the
same weights.
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
from time import perf_counter

from flatout.machine.measure.probe import cpu_model
from flatout.machine.measure.stats import ratio_estimate

LIBRARIES = ("transformers", "lightning", "accelerate")
WIDTH, LENGTH, BATCH, VOCABULARY = 128, 64, 8, 1000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--libraries", nargs="+", choices=LIBRARIES, default=LIBRARIES)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--train", nargs=2, metavar=("LIBRARY", "WATCHED"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        library, is_watched = options.train
        train(library, options.steps, is_watched=is_watched == "watched")
        return 0
    result: dict[str, object] = {
        "steps": options.steps,
        "processor": cpu_model(),
        "cores": os.cpu_count(),
        "versions": {name: version(name) for name in ("torch", "transformers", "lightning", "accelerate")},
    }
    for library in options.libraries:
        plain, watched, own = [], [], []
        for number in range(options.pairs):
            order = ("plain", "watched") if number % 2 else ("watched", "plain")
            ran = {side: run(library, options.steps, side) for side in order}
            if ran["plain"]["weights"] != ran["watched"]["weights"]:
                raise SystemExit(f"{library}: the weights differ with the callback")
            plain.append(float(ran["plain"]["seconds"]))
            watched.append(float(ran["watched"]["seconds"]))
            own.append(str(ran["watched"]["says"]))
        ratio = ratio_estimate(watched, plain)
        result[library] = {
            "ratio": ratio.value,
            "low": ratio.low,
            "high": ratio.high,
            "num_pairs": ratio.num_samples,
            "plain_s": median(plain),
            "says": own,
        }
        print(
            f"{library}: watched / plain {ratio.value:.4f} ({ratio.low:.4f} - {ratio.high:.4f}), n = {ratio.num_samples}, "
            f"plain {median(plain):.1f} s; {own[-1]}"
        )
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def run(library: str, steps: int, side: str) -> dict[str, object]:
    """One training in a process and a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, str(Path(__file__).resolve()), "--steps", str(steps), "--train", library, side],
            cwd=folder,
            env=os.environ,
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    lines = done.stdout.splitlines()
    found: dict[str, object] = json.loads(lines[-1])
    return {**found, "says": next((line for line in lines if line.startswith("flatout: watching took")), "")}


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
        began = perf_counter()
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
        began = perf_counter()
        fit.fit(module, loader)
    else:
        from contextlib import nullcontext

        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
        model, optimizer, loader = accelerator.prepare(
            net, torch.optim.AdamW(net.parameters(), lr=1e-3), DataLoader(rows, batch_size=BATCH)
        )
        report = flatout.callbacks.AccelerateReport(accelerator) if is_watched else nullcontext()
        began = perf_counter()
        with report:
            for batch in loader:
                accelerator.backward(model(**batch)["loss"])
                optimizer.step()
                optimizer.zero_grad()
    seconds = perf_counter() - began
    bits = b"".join(p.detach().numpy().tobytes() for p in net.parameters())
    print("\n" + json.dumps({"seconds": seconds, "weights": hashlib.sha256(bits).hexdigest()}), flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
