"""Unchanged scripts that train through other people's loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Check = Callable[..., Any]


@pytest.mark.slow
def test_a_script_with_accelerate(check: Check) -> None:
    ran = check(
        """
        import torch
        from accelerate import Accelerator
        from torch import nn
        from torch.utils.data import DataLoader, TensorDataset

        torch.manual_seed(0)
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        loader = DataLoader(TensorDataset(torch.randn(960, 16)), batch_size=16, shuffle=True)
        net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
        for (x,) in loader:
            with accelerator.accumulate(net):
                loss = net(x).square().mean()  # the loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        print("done", accelerator.state.num_processes)
        """
    )

    assert ran.code == 0, ran.err
    assert "done 1" in ran.out
    assert ran.report is not None
    evidence = ran.report["evidence"]
    assert evidence["steps"]["kind"] == "training"
    assert evidence["steps"]["num_seen"] == pytest.approx(29, abs=1)  # 60 micro-batches, two to a step
    lines = {s["text"] for s in evidence["sources"]}
    assert "loss = net(x).square().mean()  # the loss" in lines
    assert evidence["steps"]["phases"]["data"] > 0
    assert evidence["operators"]


@pytest.mark.slow
def test_a_script_with_transformers_trainer(check: Check) -> None:
    ran = check(
        """
        import torch
        from torch.utils.data import Dataset
        from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

        class Sentences(Dataset):
            def __len__(self):
                return 320
            def __getitem__(self, i):
                generator = torch.Generator().manual_seed(i)
                ids = torch.randint(1, 100, (24,), generator=generator)
                return {"input_ids": ids, "attention_mask": torch.ones(24, dtype=torch.long), "labels": int(ids[0]) % 2}

        config = BertConfig(vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
                            intermediate_size=64, max_position_embeddings=32)
        arguments = TrainingArguments(output_dir="out", per_device_train_batch_size=8, max_steps=30, report_to=[],
                                      use_cpu=True, disable_tqdm=True, save_strategy="no", logging_steps=10)
        trainer = Trainer(model=BertForSequenceClassification(config), args=arguments, train_dataset=Sentences())
        trainer.train()  # all of it
        print("steps done", trainer.state.global_step)
        """
    )

    assert ran.code == 0, ran.err
    assert "steps done 30" in ran.out
    assert ran.report is not None
    evidence = ran.report["evidence"]
    assert evidence["steps"]["kind"] == "training"
    assert evidence["steps"]["num_seen"] == pytest.approx(29, abs=1)
    sources = evidence["sources"]
    assert "trainer.train()  # all of it" in {s["text"] for s in sources}
    assert any("transformers/models/bert" in s["library"] for s in sources)
    assert any(o["module"].startswith("BertForSequenceClassification.bert") for o in evidence["operators"])
