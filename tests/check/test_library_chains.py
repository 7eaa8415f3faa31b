"""Scripts whose loop is a library's: causes are told by the way from the user's line to the library's."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from flatout.check.capture import Capture
from flatout.check.libraries.table import with_settings
from flatout.check.observe.steps.schedule import Schedule
from flatout.check.rules.overhead.recomputed_constant import RULE as CONSTANT
from flatout.core.records.evidence import Evidence
from flatout.core.registry import rules
from flatout.machine.cost.lines import covering_line

TRAINER = """
    class Trainer:
        def __init__(self, model, optimizer, batches):
            self.model, self.optimizer, self.batches = model, optimizer, batches

        def train(self):
            for batch in self.batches:
                self.training_step(batch)

        def training_step(self, batch):
            loss = self.model(batch)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
"""
MODELS = """
    import torch
    from torch import nn

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(6))

        def forward(self, x):
            for layer in self.layers:
                x = torch.tanh(layer(x))
            distances = torch.arange(400.0)[:, None] - torch.arange(400.0)[None, :]
            decay = torch.exp(-distances.abs()).sum()  # the library's constant
            return x.square().mean() * decay
"""
SCRIPT = """
    import torch
    from minitrainer.models import Model
    from minitrainer.trainer import Trainer

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = Trainer(model, optimizer, [torch.randn(32, 256) for _ in range(24)])
    trainer.train()
"""


def run_observed(script: Path, propose: Callable[[Evidence], Any] = lambda _: ()) -> Evidence:
    capture = Capture(
        command=(script.name,), cwd=str(script.parent), schedule=Schedule(), machine=None, propose=propose
    )
    capture.start()
    try:
        exec(compile(script.read_text(), str(script), "exec"), {"__name__": "__main__"})
    finally:
        evidence = capture.finish(exit="finished", exit_code=0)
    return evidence


@pytest.fixture
def evidence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Evidence]:
    """A run of a script whose trainer and model are of an installed package."""
    package = tmp_path / "site-packages" / "minitrainer"
    package.mkdir(parents=True)
    for name, text in (("__init__", ""), ("trainer", TRAINER), ("models", MODELS)):
        (package / f"{name}.py").write_text(dedent(text))
    monkeypatch.syspath_prepend(package.parent)
    script = tmp_path / "train.py"
    script.write_text(dedent(SCRIPT))
    yield run_observed(script)
    for name in [n for n in sys.modules if n.partition(".")[0] == "minitrainer"]:
        del sys.modules[name]


@pytest.mark.slow
def test_the_steps_lines_are_the_librarys(evidence: Evidence) -> None:
    covering = covering_line(evidence)
    chains = {tuple(f.file for f in s.via) for s in evidence.sources if s.text == "trainer.train()"}

    assert covering is not None
    assert (Path(covering.file).name, covering.line) == ("train.py", 9)
    assert ("minitrainer/trainer.py",) in chains, "what the trainer does itself"
    assert ("minitrainer/trainer.py", "minitrainer/models.py") in chains


@pytest.mark.slow
def test_a_constant_of_a_librarys_model_is_told_there_and_no_edit_of_it_is_printed(evidence: Evidence) -> None:
    [found] = CONSTANT.check(evidence)
    [finding] = with_settings([found], evidence, rewriting=frozenset({CONSTANT.id}))

    assert found.where is not None
    assert found.where.text == "trainer.train()"
    assert found.where.via[0].text == "loss = self.model(batch)"
    assert found.where.via[-1].function == "Model.forward"
    assert "minitrainer's own code" in finding.edit


@pytest.mark.slow
@pytest.mark.long
def test_a_run_of_transformers_trainer_names_its_lines_and_what_to_set(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    script = tmp_path / "train.py"
    script.write_text(
        dedent(
            f"""
            import torch
            from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

            config = BertConfig(
                vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
            )
            config._attn_implementation = "eager"
            ids = torch.randint(1, 100, (96, 48))
            rows = [dict(input_ids=row, labels=0) for row in ids]
            settings = TrainingArguments(
                output_dir={str(tmp_path)!r}, per_device_train_batch_size=4, num_train_epochs=1, report_to=[], save_strategy="no",
                use_cpu=True, disable_tqdm=True, optim="adamw_torch",
            )
            trainer = Trainer(model=BertForSequenceClassification(config), args=settings, train_dataset=rows)
            trainer.train()
            """
        )
    )
    evidence = run_observed(script, lambda e: [t for r in rules() if r.propose is not None for t in r.propose(e)][:2])

    attention = [s for s in evidence.sources if s.via and s.via[-1].file == "transformers/models/bert/modeling_bert.py"]
    assert attention
    assert {s.text for s in attention} == {"trainer.train()"}
    assert all(s.via[0].file == "transformers/trainer.py" for s in attention)
    [optimizer] = evidence.optimizers
    constructed = evidence.source_of(optimizer.constructed)
    assert constructed is not None
    assert constructed.via[-1].file == "transformers/trainer.py"
