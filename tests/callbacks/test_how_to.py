"""The examples of the page on callbacks run, and are as short as it promises."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.callbacks.conftest import RunScript

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "callbacks.md"
EXAMPLES = [part.partition("```")[0] for part in PAGE.read_text(encoding="utf-8").split("```python\n")[1:]]
MOST_LINES = 10

OF_THE_READER = """
import torch, lightning
seed()
rows, model = Rows(16), Net()
optimizer = torch.optim.Adam(model.parameters())
loader = DataLoader(rows, batch_size=8)

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()
    def training_step(self, batch, index):
        return self.net(**batch)["loss"]
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())
module = Module()

def train(accelerator, model, optimizer, loader):
    for batch in loader:
        accelerator.backward(model(**batch)["loss"])
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("number", range(3), ids=["transformers", "lightning", "accelerate"])
@pytest.mark.long
def test_an_example_prints_a_report_and_writes_its_page(number: int, run_script: RunScript, tmp_path: Path) -> None:
    ran = run_script(OF_THE_READER, EXAMPLES[number])

    assert ran.code == 0, ran.err
    assert "a training step" in ran.out
    assert "flatout: watching took" in ran.out
    assert (tmp_path / "report.html").stat().st_size > 10_000


def test_each_library_has_an_example_of_ten_lines_at_most() -> None:
    assert len(EXAMPLES) == 3
    assert all(len([line for line in text.splitlines() if line]) <= MOST_LINES for text in EXAMPLES)
