"""Other people's loops with a cause planted in the user's own code: steps, phases and lines must be the user's.

Loops of the user's own, under Python alone, are in test_check_script.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any

import pytest

Check = Callable[..., Any]

CAUSES = """
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

class Rows(Dataset):
    def __len__(self):
        return 7680
    def __getitem__(self, i):
        total = 0.0
        for k in range(300):  # slow item
            total += (i * k) % 7  # slow item
        return torch.full((16,), total * 1e-5)  # slow item

def prepared(x):
    rows = []
    for i in range(len(x)):  # row by row
        row = x[i] * 2 + 1  # row by row
        rows.append(row.tanh().exp().neg().sigmoid())  # row by row
    return torch.stack(rows)
"""

NET = "nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))"

ACCELERATE = f"""
from accelerate import Accelerator
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
net = {NET}
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
net, optimizer, loader = accelerator.prepare(net, optimizer, DataLoader(Rows(), batch_size=128))
for x in loader:
    with accelerator.accumulate(net):
        loss = net(prepared(x)).square().mean()  # the loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
print("processes", accelerator.state.num_processes)
"""

FABRIC = f"""
from lightning.fabric import Fabric
fabric = Fabric(accelerator="cpu", devices=1)
fabric.launch()
net = {NET}
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
net, optimizer = fabric.setup(net, optimizer)
for x in fabric.setup_dataloaders(DataLoader(Rows(), batch_size=256)):
    loss = net(prepared(x)).square().mean()
    optimizer.zero_grad()
    fabric.backward(loss)
    optimizer.step()
"""

LIGHTNING = f"""
import lightning
class Regressor(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = {NET}
    def training_step(self, batch, index):
        loss = self.net(prepared(batch)).square().mean()
        self.log("loss", loss)
        return loss
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)
trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
                            enable_progress_bar=False, enable_model_summary=False)
trainer.fit(Regressor(), DataLoader(Rows(), batch_size=256))
"""

TRANSFORMERS = """
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
class Classifier(BertForSequenceClassification):
    def forward(self, x, labels):
        return super().forward(inputs_embeds=prepared(x)[:, None], labels=labels)
def collate(rows):
    return {"x": torch.stack(rows), "labels": torch.arange(len(rows)) % 2}
config = BertConfig(vocab_size=2, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
                    max_position_embeddings=2)
arguments = TrainingArguments(output_dir="out", per_device_train_batch_size=256, max_steps=30, report_to=[],
                              use_cpu=True, disable_tqdm=True, save_strategy="no", logging_steps=10,
                              remove_unused_columns=False, dataloader_pin_memory=False)
trainer = Trainer(model=Classifier(config), args=arguments, train_dataset=Rows(), data_collator=collate)
trainer.train()  # all of it
print("steps done", trainer.state.global_step)
"""

FRAMEWORKS = {
    "accelerate": ACCELERATE,
    "fabric": FABRIC,
    "lightning": LIGHTNING,
    "transformers": TRANSFORMERS,
}
SEEN = {
    "accelerate": ("processes 1", "# the loss", "", ""),
    "transformers": ("steps done 30", "# all of it", "transformers/models/bert", "Classifier.bert"),
}
"""What else is seen: printed, in a line of the user's, in a file of a library's, and as a module; '' is anything."""
PHASES = {"data", "forward", "backward", "optimizer"}


def heaviest_line(report: dict[str, Any], *phases: str) -> str:
    """The text of the line whose operators, with the Python around them, take most of these phases."""
    evidence = report["evidence"]
    seconds: dict[str, float] = {}
    for operator in evidence["operators"]:
        if operator["source"] >= 0 and operator["phase"] in phases:
            text = evidence["sources"][operator["source"]]["text"]
            seconds[text] = seconds.get(text, 0.0) + operator["op_s"] + operator["python_s"]
    return max(seconds, key=lambda text: seconds[text])


def most_called_line(report: dict[str, Any], *phases: str) -> str:
    """The text of the line that calls most operators in these phases: other than seconds, a busy machine does not change that."""
    evidence = report["evidence"]
    calls: dict[str, float] = {}
    for operator in evidence["operators"]:
        if operator["source"] >= 0 and operator["phase"] in phases:
            text = evidence["sources"][operator["source"]]["text"]
            calls[text] = calls.get(text, 0.0) + operator["num_calls"]
    return max(calls, key=lambda text: calls[text])


def is_noisy(report: dict[str, Any]) -> bool:
    """Whether the machine was so busy that a cause of this size is rightly kept back."""
    steps = report["evidence"]["steps"]
    return bool(steps["high_s"] - steps["low_s"] > 0.3 * steps["step_s"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "framework",
    ["accelerate", *(pytest.param(name, marks=pytest.mark.long) for name in ("fabric", "lightning", "transformers"))],
)
@pytest.mark.long
def test_steps_phases_and_lines_are_the_users(check: Check, framework: str) -> None:
    body = textwrap.indent("torch.manual_seed(0)\n" + FRAMEWORKS[framework], "    ")
    ran = check(f'{CAUSES}\nif __name__ == "__main__":\n{body}', "--seconds", "10")

    assert ran.code == 0, ran.err
    report = ran.report
    evidence = report["evidence"]
    steps = evidence["steps"]
    assert steps["kind"] == "training"
    assert steps["num_observed"] == pytest.approx(29, abs=1)
    assert all(steps["phases"].get(phase, 0.0) > 0 for phase in PHASES)
    assert "# slow item" in heaviest_line(report, "data")
    assert "# row by row" in most_called_line(report, "forward", "other")
    # The user's loop runs inside the optimizer's step under Lightning; it is none of the optimizer's work.
    assert {o["phase"] for o in evidence["operators"] if o["op"] == "aten.sigmoid"} <= {"other", "forward"}
    assert all(o["step_s"] < 0.5 * steps["step_s"] for o in evidence["optimizers"])
    assert {m["name"] for m in evidence["models"]} <= {"Sequential", "Regressor", "Classifier"}
    assert all(not o["module"].startswith("_") for o in evidence["operators"])
    assert all(f["file"].endswith("/train.py") for f in report["findings"])
    told, texts, libraries, modules = SEEN.get(framework, ("", "", "", ""))
    assert told in ran.out
    assert any(texts in s["text"] for s in evidence["sources"])
    assert any(libraries in s["library"] for s in evidence["sources"])
    assert any(o["module"].startswith(modules) for o in evidence["operators"])
    if not is_noisy(report):
        texts = {f["rule"]: f["text"] for f in report["findings"]}
        assert "# slow item" in texts["input.slow-loader"]
        assert "# row by row" in texts["overhead.python-loop"]
