"""A loss with products in float8 as a lever: whom it is offered, where it finds the loss, and what it makes of a text."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
import torch
from tests.evidence_builder import MACHINE, EvidenceBuilder, tensor

from flatout.core.errors import EditError
from flatout.core.records.compilation import Compilation
from flatout.core.records.evidence import Evidence
from flatout.core.records.lever import Candidate, Refusal
from flatout.tune.levers.workload.float8_loss import LEVER, edit
from flatout.tune.rewrite.source import project_files

_MODEL: Final = """import torch
import torch.nn as nn
import torch.nn.functional as F


class GPT(nn.Module):
    def __init__(self, vocab=97, width=16):
        super().__init__()
        self.token = nn.Embedding(vocab, width)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, idx, targets=None):
        x = self.token(idx).tanh()
        if targets is not None:
            # the loss as well
            logits = self.head(x)
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        else:
            logits = self.head(x[:, [-1], :])
            loss = None
        return logits, loss


def run(train=True):
    torch.manual_seed(0)
    net, idx = GPT(), torch.randint(97, (3, 8))
    with torch.set_grad_enabled(train):
        logits, loss = net(idx, torch.randint(97, (3, 8)))
    if train:
        loss.backward()
    return logits, loss.detach(), *(p.grad for p in net.parameters())
"""
_AT: Final = {
    "file": "model.py",
    "function": "GPT.forward",
    "code": "loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)",
}


def _result(text: str, **options: Any) -> tuple[Any, ...]:
    scope: dict[str, Any] = {"__name__": "model"}
    exec(compile(text, "model.py", "exec"), scope)
    results: tuple[Any, ...] = scope["run"](**options)
    return results


def test_training_gets_float8_and_evaluation_stays() -> None:
    after = edit(_MODEL, dict(_AT))
    assert (
        "            # the loss as well\n            if torch.is_grad_enabled():\n"
        "                loss = linear_cross_entropy(x, self.head.weight, targets, ignore_index=-1, float8=True)\n"
        "                logits = None\n            else:\n                logits = self.head(x)\n"
    ) in after
    logits, *trained = _result(after)
    assert logits is None
    for one, other in zip(trained, _result(_MODEL)[1:], strict=True):
        assert 0 < float((one - other).norm() / other.norm()) < 0.1
    for one, other in zip(_result(after, train=False), _result(_MODEL, train=False), strict=True):
        assert one is other is None or torch.equal(one, other)


def test_a_loss_alone_needs_no_logits() -> None:
    text = _MODEL.replace("return logits, loss", "return loss").replace("logits, loss = net", "loss = net")
    text = text.replace("return logits, loss.detach()", "return None, loss.detach()")
    after = edit(text, dict(_AT))
    assert "logits = None" not in after
    assert _result(after)[0].isfinite()


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("return logits, loss", "return logits.argmax(-1), loss", "'logits' is used for more than the loss"),
        (
            "logits = self.head(x)\n",
            "logits = self.head(x)\n            count = len(idx)\n",
            "something else stands between",
        ),
        ("nn.Linear(width, vocab, bias=False)", "Head(width, vocab)", "no cross entropy of a linear layer's result"),
    ],
)
def test_what_is_not_certain_is_left(old: str, new: str, why: str) -> None:
    with pytest.raises(EditError, match=why):
        edit(_MODEL.replace(old, new), dict(_AT))


def test_a_loss_that_is_returned_with_its_logits_is_left() -> None:
    line = "return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)"
    text = _MODEL.replace(_AT["code"], line)
    with pytest.raises(EditError, match="is returned together with the loss"):
        edit(text, {**_AT, "code": line})


def _run(folder: Path, *, vocabulary: int = 50304, dtype: str = "bfloat16", is_compiled: bool = True) -> Evidence:
    """A step of 100 ms under autocast, or in float32 without it."""
    rates = {"float32": 50e12, "bfloat16": 700e12}
    run = EvidenceBuilder(device_s=0.09, machine=msgspec.structs.replace(MACHINE, matmul_flop_per_s=rates))
    line = run.line("train.py", 5, "out = net(x)")
    run.model(line)
    if dtype != "float32":
        run.fact("autocast", text=f"cuda:{dtype}")
    if is_compiled:
        run.operator(
            "inductor.graph",
            inputs=[tensor(vocabulary, 768), tensor(3072, 768), tensor(12, 1024, dtype="int64")],
            op_s=0.08,
            flop=int(700e12 * 0.05),
        )
        run.compilation = Compilation(compile_s=1.0, num_frames=1, num_graphs=1)
    else:
        pairs = [
            ((8192, 768), (768, vocabulary)),
            ((8192, vocabulary), (vocabulary, 768)),
            ((vocabulary, 8192), (8192, 768)),
        ]
        for phase, (a, b) in zip(("forward", "backward", "backward"), pairs, strict=True):
            inputs = [tensor(*one, dtype=dtype) for one in (a, b)]  # type: ignore[arg-type]
            flop = 2 * 8192 * 768 * vocabulary
            run.operator("aten.mm", line, inputs=inputs, op_s=0.01, phase=phase, flop=flop)  # type: ignore[arg-type]
    evidence = run.build()
    workload = msgspec.structs.replace(evidence.workload, command=("python", "train.py"), cwd=str(folder))
    return msgspec.structs.replace(evidence, workload=workload)


def _project(folder: Path) -> Path:
    (folder / "lib").mkdir()
    (folder / "lib" / "__init__.py").touch()
    (folder / "lib" / "model.py").write_text(_MODEL)
    (folder / "lib" / "other.py").write_text("from . import model\nimport lib.missing\n")
    (folder / "train.py").write_text("import os\nfrom lib.other import model\n\nnet = model.GPT()\n")
    return folder


def test_the_script_s_own_files_are_followed_through_its_imports(tmp_path: Path) -> None:
    files = [file for file, _ in project_files(_run(_project(tmp_path)))]
    assert files == ["train.py", "lib/other.py", "lib/__init__.py", "lib/model.py"]


@pytest.mark.parametrize("is_compiled", [True, False])
def test_a_large_vocabulary_in_bfloat16_is_offered_where_its_loss_stands(tmp_path: Path, is_compiled: bool) -> None:
    [candidate] = LEVER.propose(_run(_project(tmp_path), is_compiled=is_compiled), ())
    assert isinstance(candidate, Candidate)
    assert candidate.parameters == {**_AT, "file": "lib/model.py"}
    # of 50 ms of products, or of 30 ms: what the head's are, half of that, and the passes around them
    share = 50304 / (50304 + 3072) * 0.05 if is_compiled else 0.03
    assert candidate.saved_s == (0.0, pytest.approx(0.75 * share, rel=0.01))
    assert LEVER.guarantee == "quality"


def test_of_a_loss_in_float32_what_it_gains_in_bfloat16_is_promised(tmp_path: Path) -> None:
    [candidate] = LEVER.propose(_run(_project(tmp_path), dtype="float32", is_compiled=False), ())
    assert isinstance(candidate, Candidate)
    in_bfloat16_s = 3 * 2 * 8192 * 768 * 50304 / 700e12
    assert candidate.saved_s == (0.0, pytest.approx(0.75 * in_bfloat16_s, rel=0.01))
    assert candidate.replaces == ("memory.chunked-loss",)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"vocabulary": 1000}, "no layer over a large vocabulary"),
        ({"vocabulary": 1000, "is_compiled": False}, "no layer over a large vocabulary"),
        ({"dtype": "float16"}, "neither in bfloat16 nor in float32"),
    ],
)
def test_a_run_that_gains_nothing_is_told_why(tmp_path: Path, options: dict[str, Any], why: str) -> None:
    [refusal] = LEVER.propose(_run(_project(tmp_path), **options), ())
    assert isinstance(refusal, Refusal)
    assert why in refusal.because


def test_a_loss_of_a_library_is_told(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import transformers\n")
    [refusal] = LEVER.propose(_run(tmp_path), ())
    assert isinstance(refusal, Refusal)
    assert "was found in the script's files" in refusal.because
