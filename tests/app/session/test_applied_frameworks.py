"""A plan in other people's loops: `flatout.apply` before Accelerate and a Trainer, `flatout run --plan` on their scripts."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from flatout.core.records.lever import PlannedLever
from flatout.core.records.plan import Plan, to_toml

pytestmark = pytest.mark.slow

FUSED = PlannedLever(id="parallelism.fused-optimizer", guarantee="bounded")
IN_MEMORY = PlannedLever(id="communication.prepare-in-memory", guarantee="exact")
FREEZE = PlannedLever(id="workload.freeze", guarantee="exact", parameters={"modules": ("Net.body",)})
DEBUG_OFF = PlannedLever(id="graph.debug-off", guarantee="exact")

ACCELERATE = """
    import sys
    import torch
    from accelerate import Accelerator
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(16, 32), nn.Linear(32, 1)

        def forward(self, x):
            return self.head(self.body(x).relu())

    def train(plan):
        torch.manual_seed(0)
        accelerator = Accelerator(cpu=True)
        net = Net()
        optimizer = torch.optim.AdamW(net.head.parameters(), lr=1e-3)
        loader = DataLoader(TensorDataset(torch.randn(96, 16)), batch_size=16, shuffle=True)
        if plan:
            import flatout
            live = flatout.apply(plan, model=net, optimizer=optimizer, loader=loader)
            print("not applied", live.not_applied)
            net, optimizer, loader = live.model, live.optimizer, live.loader
        net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
        for _ in range(2):
            for (x,) in loader:
                loss = net(x).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        frozen = not next(net.body.parameters()).requires_grad
        if plan:
            live.undo()
        return loss.item(), bool(optimizer.defaults["fused"]), frozen, next(net.body.parameters()).requires_grad

    one, two = train(None), train("plan.toml")
    print("same", abs(one[0] - two[0]) < 1e-5, "frozen", two[2], "afterwards", two[1], two[3])
"""

TRAINER = """
    import torch
    from torch import nn
    from torch.utils.data import Dataset
    from transformers import Trainer, TrainingArguments

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(8, 16), nn.Linear(16, 1)

        def forward(self, x, labels):
            return {"loss": (self.head(self.body(x).relu())[:, 0] - labels).square().mean()}

    class Rows(Dataset):
        made = 0

        def __len__(self):
            return 32

        def __getitem__(self, i):
            Rows.made += 1
            return {"x": torch.full((8,), i / 32), "labels": torch.tensor(i / 7)}

    torch.manual_seed(0)
    torch.autograd.set_detect_anomaly(True)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    APPLY
    arguments = TrainingArguments(output_dir="out", per_device_train_batch_size=8, num_train_epochs=4, report_to=[],
                                  use_cpu=True, disable_tqdm=True, save_strategy="no", logging_strategy="no")
    trainer = Trainer(model=net, args=arguments, train_dataset=Rows(), optimizers=(optimizer, None))
    trainer.train()
    print("steps", trainer.state.global_step, "fused", all(g["fused"] for g in optimizer.param_groups),
          "frozen", not net.body.weight.requires_grad, "anomaly", torch.is_anomaly_enabled(),
          "moved", bool(net.head.weight.grad is not None or optimizer.state))
"""


def python(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


def write(folder: Path, script: str, *levers: PlannedLever) -> None:
    (folder / "train.py").write_text(textwrap.dedent(script))
    (folder / "plan.toml").write_bytes(to_toml(Plan(script="train.py", lever=levers)))


@pytest.mark.long
def test_applied_before_accelerate_prepares_it_and_before_a_trainer_is_made(tmp_path: Path) -> None:
    applied = "import flatout; live = flatout.apply('for_trainer.toml', model=net, optimizer=optimizer)"
    write(tmp_path, ACCELERATE + TRAINER.replace("APPLY", applied), FUSED, FREEZE, IN_MEMORY)
    (tmp_path / "for_trainer.toml").write_bytes(to_toml(Plan(script="train.py", lever=(FUSED, FREEZE))))
    done = python(tmp_path, "train.py")
    assert done.returncode == 0, done.stderr
    assert "not applied ()" in done.stdout
    assert "same True frozen True afterwards False True" in done.stdout
    assert "steps 16 fused True frozen True anomaly True moved True" in done.stdout


@pytest.mark.long
def test_an_unchanged_script_with_a_trainer_runs_with_a_plan(tmp_path: Path) -> None:
    write(tmp_path, TRAINER.replace("APPLY", ""), DEBUG_OFF, FUSED, FREEZE)
    done = python(tmp_path, "-m", "flatout", "run", "--plan", "plan.toml", "train.py")
    assert done.returncode == 0, done.stderr
    assert "steps 16 fused True frozen True anomaly False moved True" in done.stdout
    assert "met nothing" not in done.stderr
