"""Each block inside Accelerate, Lightning Fabric and transformers' Trainer: the same weights as in a plain loop."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

COMMON = """
    import json, sys, warnings
    warnings.simplefilter("ignore")
    from functools import partial
    import torch
    from torch import Tensor, nn
    from torch.utils.data import DataLoader, Dataset
    import flatout
    from flatout.blocks.data.epochs import KeyedDataset
    from flatout.core.errors import NotFiniteError
    from flatout.blocks.training.accumulation import accumulate_gradients
    from flatout.blocks.training.schedules import layer_wise

    LENGTHS = [1 + (5 * i) % 9 for i in range(64)]

    class Texts(Dataset):
        def __init__(self, nan_at):
            self.nan_at = nan_at
        def __len__(self):
            return len(LENGTHS)
        def __getitem__(self, i):
            return {"tokens": torch.randn(LENGTHS[i], 4), "scale": float("nan") if i == self.nan_at else 1.0}

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 1)])
        def forward(self, tokens, scale=None):
            values, offsets, _ = tokens
            out = self.layers[1](self.layers[0](values).tanh())
            return {"loss": out.square().sum() * scale.mean()}

    world = flatout.World("cpu")

    def in_this_loop(loop):
        # Twice: to the end, and with a sample that makes the loss NaN. Each time everything is made anew.
        said = {}
        for name, nan_at in (("weights", -1), ("error", 20)):
            torch.manual_seed(0)
            net = Net()
            optimizer = torch.optim.AdamW(layer_wise(net, decay=0.5, blocks="layers"), lr=1e-2)
            rate = flatout.warm_up_cosine(1e-2, warm_up=2, steps=16)
            batches = flatout.Batches(LENGTHS, 8, seed=1)
            try:
                loop(f"runs {name}", Texts(nan_at), net, optimizer, rate, batches, flatout.NanWatch())
                said[name] = torch.cat([p.detach().flatten() for p in net.parameters()]).double().tolist()
            except NotFiniteError as e:
                said[name] = str(e)
        print(json.dumps(said))
"""
LOOPS = {
    "plain": """
        def loop(runs, texts, net, optimizer, rate, batches, watch):
            feed = flatout.Feed(texts, batches)
            with flatout.Run(runs) as run:
                for number, batch in enumerate(feed):
                    flatout.set_rate(optimizer, rate(number))
                    loss = world.part_of_mean(net(**batch)["loss"], batches.step(number).num_tokens)
                    loss.backward()
                    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                    watch(loss)
                    run.tick(loss=loss)
    """,
    "accelerate": """
        from accelerate import Accelerator
        def loop(runs, texts, net, optimizer, rate, batches, watch):
            it = Accelerator(cpu=True)
            model, opt = it.prepare(net, optimizer)
            feed = flatout.Feed(texts, batches, device=it.device)
            with flatout.Run(runs) as run:
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
    """,
    "fabric": """
        from lightning.fabric import Fabric
        def loop(runs, texts, net, optimizer, rate, batches, watch):
            it = Fabric(accelerator="cpu", devices=1)
            model, opt = it.setup(net, optimizer)
            loader = it.setup_dataloaders(
                DataLoader(KeyedDataset(texts, seed=1), batch_sampler=batches, collate_fn=flatout.collate_ragged),
                use_distributed_sampler=False,
            )
            with flatout.Run(runs) as run:
                for number, batch in enumerate(loader):
                    flatout.set_rate(opt, rate(number))
                    with accumulate_gradients(model, is_last=True):
                        loss = world.part_of_mean(model(**batch)["loss"], batches.step(number).num_tokens)
                        it.backward(loss)
                    watch(loss)  # before Fabric looks for NaN itself
                    it.clip_gradients(model, opt, max_norm=1.0)
                    opt.step()
                    opt.zero_grad()
                    run.tick(loss=loss)
    """,
    "trainer": """
        from transformers import Trainer, TrainingArguments
        def loop(runs, texts, net, optimizer, rate, batches, watch):
            class Ours(Trainer):
                number = 0
                def get_train_dataloader(self):
                    keyed = KeyedDataset(texts, seed=1)
                    return DataLoader(keyed, batch_sampler=batches, collate_fn=flatout.collate_ragged)
                def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
                    flatout.set_rate(optimizer, rate(self.number))
                    loss = world.part_of_mean(model(**inputs)["loss"], batches.step(self.number).num_tokens)
                    self.number += 1
                    watch(loss)
                    return loss
                def _prepare_inputs(self, inputs):
                    return inputs  # as they are: it would rebuild every tuple from a generator, which no NamedTuple takes
            arguments = TrainingArguments("out", num_train_epochs=1, max_grad_norm=1.0, use_cpu=True, report_to=[],
                                          save_strategy="no", disable_tqdm=True, logging_strategy="no",
                                          remove_unused_columns=False)
            constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
            with flatout.Run(runs, ticks="optimizer"):
                Ours(net, arguments, train_dataset=texts, optimizers=(optimizer, constant)).train()
    """,
}  # fmt: skip

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def _ran(folder: Path, *names: str) -> dict[str, dict[str, Any]]:
    """What each loop says, all in one process."""
    script = folder / "train.py"
    loops = [textwrap.dedent(LOOPS[name]) + "in_this_loop(loop)\n" for name in names]
    script.write_text(textwrap.dedent(COMMON) + "".join(loops))
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"weights"')]
    return dict(zip(names, said, strict=True))


@pytest.mark.long
def test_the_weights_are_those_of_a_plain_loop_and_nan_is_noticed(tmp_path: Path) -> None:
    said = _ran(tmp_path, "plain", "accelerate", "fabric", "trainer")
    for name, found in said.items():
        assert found["weights"] == pytest.approx(said["plain"]["weights"], abs=1e-6), name
        assert found["error"].startswith("step"), name
    recorded = [json.loads(p.read_text()) for p in (tmp_path / "runs weights").glob("*/run.json")]
    assert [(r["outcome"], r["num_steps"]) for r in recorded] == [("finished", 8)] * 4
    firsts = [p.read_text().splitlines()[0] for p in (tmp_path / "runs weights").glob("*/steps.jsonl")]
    samples = [json.loads(line)["inputs"] for line in firsts]
    assert samples == samples[:1] * 4  # the same samples with the same noise
