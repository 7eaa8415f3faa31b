"""Each block inside Accelerate, Lightning Fabric and transformers' Trainer: the same weights as in a plain loop."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

COMMON = """
    import json, sys, warnings
    warnings.simplefilter("ignore")
    from functools import partial
    import torch
    from torch import Tensor, nn
    from torch.utils.data import DataLoader, Dataset
    import flatout

    LENGTHS = [1 + (5 * i) % 9 for i in range(64)]
    NAN_AT = int(sys.argv[1])

    class Texts(Dataset):
        def __len__(self):
            return len(LENGTHS)
        def __getitem__(self, i):
            return {"tokens": torch.randn(LENGTHS[i], 4), "scale": float(i == NAN_AT) * float("nan") if i == NAN_AT else 1.0}

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 1)])
        def forward(self, tokens, scale=None):
            values, offsets, _ = tokens
            out = self.layers[1](self.layers[0](values).tanh())
            return {"loss": out.square().sum() * scale.mean()}

    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.AdamW(flatout.layer_wise(net, decay=0.5, blocks="layers"), lr=1e-2)
    rate = flatout.warm_up_cosine(1e-2, warm_up=2, steps=16)
    batches = flatout.Batches(LENGTHS, 8, seed=1)
    watch, world = flatout.NanWatch(), flatout.World("cpu")

    def said():
        weights = torch.cat([p.detach().flatten() for p in net.parameters()]).double()
        print(json.dumps(weights.tolist()))
"""
LOOPS = {
    "plain": """
        feed = flatout.Feed(Texts(), batches)
        with flatout.Run("runs") as run:
            for number, batch in enumerate(feed):
                flatout.set_rate(optimizer, rate(number))
                loss = world.part_of_mean(net(**batch)["loss"], batches.step(number).num_tokens)
                loss.backward()
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                watch(loss)
                run.tick(loss=loss)
        said()
    """,
    "accelerate": """
        from accelerate import Accelerator
        it = Accelerator(cpu=True)
        model, opt = it.prepare(net, optimizer)
        feed = flatout.Feed(Texts(), batches, device=it.device)
        with flatout.Run("runs") as run:
            for number, batch in enumerate(feed):
                flatout.set_rate(opt, rate(number))
                with it.accumulate(model):
                    loss = world.part_of_mean(model(**batch)["loss"], batches.step(number).num_tokens)
                    it.backward(loss)
                    it.clip_grad_norm_(model.parameters(), 1.0)
                    opt.step()
                    opt.zero_grad()
                watch(loss)
                run.tick(loss=loss)
        said()
    """,
    "fabric": """
        from lightning.fabric import Fabric
        it = Fabric(accelerator="cpu", devices=1)
        model, opt = it.setup(net, optimizer)
        loader = it.setup_dataloaders(
            DataLoader(flatout.Keyed(Texts(), seed=1), batch_sampler=batches, collate_fn=flatout.collate_ragged),
            use_distributed_sampler=False,
        )
        with flatout.Run("runs") as run:
            for number, batch in enumerate(loader):
                flatout.set_rate(opt, rate(number))
                with flatout.accumulating(model, is_last=True):
                    loss = world.part_of_mean(model(**batch)["loss"], batches.step(number).num_tokens)
                    it.backward(loss)
                watch(loss)  # before Fabric looks for NaN itself
                it.clip_gradients(model, opt, max_norm=1.0)
                opt.step()
                opt.zero_grad()
                run.tick(loss=loss)
        said()
    """,
    "trainer": """
        from transformers import Trainer, TrainingArguments
        class Ours(Trainer):
            number = 0
            def get_train_dataloader(self):
                return DataLoader(flatout.Keyed(Texts(), seed=1), batch_sampler=batches, collate_fn=flatout.collate_ragged)
            def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
                flatout.set_rate(optimizer, rate(self.number))
                loss = world.part_of_mean(model(**inputs)["loss"], batches.step(self.number).num_tokens)
                self.number += 1
                watch(loss)
                return loss
            def _prepare_inputs(self, inputs):
                return inputs  # as they are: it would rebuild every tuple from a generator, which no NamedTuple takes
        arguments = TrainingArguments("out", num_train_epochs=1, max_grad_norm=1.0, use_cpu=True, report_to=[],
                                      save_strategy="no", disable_tqdm=True, logging_strategy="no", remove_unused_columns=False)
        constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        with flatout.Run("runs", ticks="optimizer"):
            Ours(net, arguments, train_dataset=Texts(), optimizers=(optimizer, constant)).train()
        said()
    """,
}  # fmt: skip

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def _ran(folder: Path, name: str, nan_at: int = -1) -> subprocess.CompletedProcess[str]:
    script = folder / f"with_{name}.py"
    script.write_text(textwrap.dedent(COMMON) + textwrap.dedent(LOOPS[name]))
    return subprocess.run(
        [sys.executable, str(script), str(nan_at)],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )


@pytest.mark.parametrize("name", ["accelerate", "fabric", "trainer"])
def test_the_weights_are_those_of_a_plain_loop(tmp_path: Path, name: str) -> None:
    weights = {}
    for one in ("plain", name):
        done = _ran(tmp_path, one)
        assert done.returncode == 0, done.stderr[-3000:]
        weights[one] = json.loads(done.stdout.strip().splitlines()[-1])
    assert weights[name] == pytest.approx(weights["plain"], abs=1e-6)
    recorded = [json.loads(p.read_text()) for p in (tmp_path / "runs").glob("*/run.json")]
    assert [r["num_steps"] for r in recorded] == [8, 8]
    assert all(r["outcome"] == "finished" for r in recorded)
    marks = [p.read_text().splitlines()[0] for p in sorted((tmp_path / "runs").glob("*/steps.jsonl"))]
    first = [json.loads(line)["inputs"] for line in marks]
    assert first[0] == first[1]  # the same samples with the same noise


@pytest.mark.parametrize("name", ["accelerate", "fabric", "trainer"])
def test_nan_is_noticed_there_too(tmp_path: Path, name: str) -> None:
    done = _ran(tmp_path, name, nan_at=20)
    assert done.returncode == 1
    assert "NotFiniteError: step" in done.stderr
