"""Other people's loops with a cause planted in the user's own code: steps, phases and lines must be the user's."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any

import pytest

Check = Callable[..., Any]

SLOW_ITEMS = """
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

class Rows(Dataset):
    def __len__(self):
        return 480
    def __getitem__(self, i):
        total = 0.0
        for k in range(6000):  # slow item
            total += (i * k) % 7  # slow item
        return torch.full((16,), total * 1e-5)  # slow item

def prepared(x):
    return x
"""

LOOP_OVER_ROWS = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

class Rows(TensorDataset):
    def __init__(self):
        super().__init__(torch.randn(7680, 16))
    def __getitem__(self, i):
        return self.tensors[0][i]
    def __getitems__(self, indices):
        return list(self.tensors[0][indices].unbind())

def prepared(x):
    rows = []
    for i in range(len(x)):  # row by row
        row = x[i] * 2 + 1  # row by row
        rows.append(row.tanh().exp().neg().sigmoid())  # row by row
    return torch.stack(rows)
"""

NET = "nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))"

PLAIN = f"""
net = {NET}
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
for x in DataLoader(Rows(), batch_size=BATCH):
    loss = net(prepared(x)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

ACCELERATE = f"""
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
net = {NET}
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
net, optimizer, loader = accelerator.prepare(net, optimizer, DataLoader(Rows(), batch_size=BATCH))
for x in loader:
    loss = net(prepared(x)).square().mean()
    optimizer.zero_grad()
    accelerator.backward(loss)
    optimizer.step()
"""

FABRIC = f"""
from lightning.fabric import Fabric
fabric = Fabric(accelerator="cpu", devices=1)
fabric.launch()
net = {NET}
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
net, optimizer = fabric.setup(net, optimizer)
for x in fabric.setup_dataloaders(DataLoader(Rows(), batch_size=BATCH)):
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
trainer.fit(Regressor(), DataLoader(Rows(), batch_size=BATCH))
"""

TRANSFORMERS = f"""
from transformers import Trainer, TrainingArguments
class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = {NET}
    def forward(self, x):
        return {{"loss": self.net(prepared(x)).square().mean()}}
def collate(rows):
    return {{"x": torch.stack(rows)}}
arguments = TrainingArguments(output_dir="out", per_device_train_batch_size=BATCH, num_train_epochs=1, report_to=[],
                              use_cpu=True, disable_tqdm=True, save_strategy="no", logging_steps=1000,
                              remove_unused_columns=False, dataloader_pin_memory=False)
Trainer(model=Regressor(), args=arguments, train_dataset=Rows(), data_collator=collate).train()
"""

FRAMEWORKS = {
    "plain": PLAIN,
    "accelerate": ACCELERATE,
    "fabric": FABRIC,
    "lightning": LIGHTNING,
    "transformers": TRANSFORMERS,
}
PHASES = {"data", "forward", "backward", "optimizer"}


def checked(check: Check, causes: str, framework: str, *, batch_size: int) -> dict[str, Any]:
    body = textwrap.indent("torch.manual_seed(0)\n" + FRAMEWORKS[framework].replace("BATCH", str(batch_size)), "    ")
    ran = check(f'{causes}\nif __name__ == "__main__":\n{body}', "--seconds", "10")

    assert ran.code == 0, ran.err
    assert ran.report is not None
    report: dict[str, Any] = ran.report
    steps = report["evidence"]["steps"]
    assert steps["kind"] == "training"
    assert steps["num_seen"] == pytest.approx(29, abs=1)
    assert set(steps["phases"]) >= PHASES
    assert all(steps["phases"][phase] > 0 for phase in PHASES)
    for finding in report["findings"]:
        assert finding["file"].endswith("/train.py"), finding
    optimizers = report["evidence"]["optimizers"]
    assert all(o["step_s"] < 0.9 * steps["step_s"] for o in optimizers)
    assert {m["name"] for m in report["evidence"]["models"]} <= {"Sequential", "Regressor"}
    assert all(not o["module"].startswith("_") for o in report["evidence"]["operators"])
    return report


@pytest.mark.slow
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_slow_items_are_found_in_the_data_set(check: Check, framework: str) -> None:
    report = checked(check, SLOW_ITEMS, framework, batch_size=16)

    phases = report["evidence"]["steps"]["phases"]
    assert max(phases, key=lambda name: phases[name]) == "data"
    first = report["findings"][0]
    assert first["rule"] == "input.slow-loader"
    assert "# slow item" in first["text"]


@pytest.mark.slow
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_loop_over_rows_is_found_where_it_stands(check: Check, framework: str) -> None:
    report = checked(check, LOOP_OVER_ROWS, framework, batch_size=256)

    first = report["findings"][0]
    assert first["rule"].startswith("overhead.")
    assert "# row by row" in first["text"]
    # The user's loop runs inside the optimizer's step under Lightning; it is none of the optimizer's work.
    where = {o["phase"] for o in report["evidence"]["operators"] if o["op"] == "aten.sigmoid"}
    assert where <= {"other", "forward"}
