"""Thirty real trainings beside ten thousand built records: the worst of each kind comes first."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest
from tests.app.fleet.conftest import hooked
from tests.fleet_jobs import NOW_S, finding, fleet, job

from flatout.app.fleet.overview import FleetQuery, last_days, summarise
from flatout.blocks.recording.job_store.opening import open_store
from flatout.blocks.recording.job_store.parquet import write_parquet
from flatout.core.records.fleet import FleetSummary

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]

START = """
    import sys, time, torch
    from sklearn.datasets import load_digits
    from torch import nn
    from torch.utils.data import DataLoader, Dataset, TensorDataset
    torch.manual_seed(int(sys.argv[1]))
    seconds = float(sys.argv[2])
    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    def train(net, batches, loss_of=lambda net, x, y: nn.functional.cross_entropy(net(x), y)):
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for x, y in batches:
                loss = loss_of(net, x, y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if time.monotonic() > end:
                    break
"""
KINDS = {
    "mlp": """
    data = [(x, y) for x, y in zip(images.split(64), labels.split(64))]
    train(nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10)), data)
    """,
    "cnn": """
    data = [(x.view(-1, 1, 8, 8), y) for x, y in zip(images.split(64), labels.split(64))]
    train(nn.Sequential(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.Flatten(), nn.Linear(512, 10)), data)
    """,
    "attention": """
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.enter, self.leave = nn.Linear(8, 64), nn.Linear(64, 10)
            self.layer = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True, dropout=0.0)
        def forward(self, x):
            return self.leave(self.layer(self.enter(x)).mean(1))
    train(Net(), [(x.view(-1, 8, 8), y) for x, y in zip(images.split(64), labels.split(64))])
    """,
    "loader": """
    train(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)),
          DataLoader(TensorDataset(images, labels), batch_size=256, shuffle=True))
    """,
    "planted": """
    class Slow(Dataset):
        def __len__(self):
            return len(images)
        def __getitem__(self, i):
            pixels = [float(v) for v in images[i]]
            for _ in range(40):
                pixels = [max(0.0, min(1.0, v * 1.01)) for v in pixels]  # planted
            return torch.tensor(pixels), labels[i]
    train(nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10)), DataLoader(Slow(), batch_size=64))
    """,
}
NUMBER = 30
POLICY = "[watch]\ncost_fraction = 0.5\nheartbeat_s = 1\n[prices]\ngpu_hour = 2.5\ncore_hour = 0.05\n"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A store that has seen them all, the real ones written by their own watchers."""
    folder = tmp_path_factory.mktemp("digits")
    path = folder / "fleet"
    path.mkdir()
    (path / "fleet.toml").write_text(POLICY)
    names = [name for name in KINDS if name != "planted"]
    for name, text in KINDS.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(START) + textwrap.dedent(text))

    def run(number: int) -> None:
        kind = "planted" if number == 0 else names[number % len(names)]
        seconds = "24" if kind == "planted" else "9"
        done = subprocess.run(
            [sys.executable, f"{kind}.py", str(number), seconds],
            cwd=folder,
            env=hooked(path),
            capture_output=True,
            text=True,
            check=False,
            timeout=200,
        )
        assert (done.returncode, done.stderr) == (0, "")

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run, range(NUMBER)))
    ago_s = datetime.now(UTC).timestamp() - NOW_S
    worst = job(10**6, name="worst.py", seconds=72_000.0, findings=(finding((3.0, 4.0), line=77),), saved_fraction=0.75)
    built = [
        msgspec.structs.replace(
            r,
            began_s=r.began_s + ago_s,
            written_s=r.written_s + ago_s,
            last_step_s=None if r.last_step_s is None else r.last_step_s + ago_s,
        )
        for r in [*fleet(10_000), worst]
    ]
    write_parquet(path / "jobs" / "built.parquet", built)
    yield path


def of(store: Path, *where: tuple[str, str]) -> FleetSummary:
    return summarise(FleetQuery(store, where), last_days(7))


def test_every_real_job_has_left_its_record(store: Path) -> None:
    records = [r for r in open_store(store).read().jobs if r.device == "cpu"]

    assert len(records) == NUMBER
    assert {r.outcome for r in records} == {"finished"}
    looked = [r for r in records if not r.not_looked]
    assert len(looked) >= NUMBER - 3, [r.not_looked for r in records]  # one may end before its look
    assert all(r.flop_per_step and r.num_parameters and r.step_s for r in looked)


def test_the_planted_worst_of_ten_thousand_jobs_comes_first(store: Path) -> None:
    summary = of(store)

    assert summary.num_jobs > 5000
    assert (summary.jobs[0].name, summary.jobs[0].wastes[0].line) == ("worst.py", 77)


def test_the_planted_worst_of_the_real_jobs_comes_first_with_its_cause_and_line(store: Path) -> None:
    project = next(r.project for r in open_store(store).read().jobs if r.device == "cpu")
    summary = of(store, ("project", project))

    first, second = summary.jobs[:2]
    assert summary.num_jobs == NUMBER
    assert first.name == "planted.py"
    assert first.wasted_cost is not None
    assert sum(first.wasted_cost) > 2 * sum(second.wasted_cost or (0.0, 0.0))
    lines = (store.parent / "planted.py").read_text().splitlines()
    assert "# planted" in lines[first.wastes[0].line - 1], first.wastes[0]
