from __future__ import annotations

import pytest
import torch
from tests.evidence_builder import EvidenceBuilder
from tests.lever_tools import found, pulled
from torch import nn

from flatout.core.errors import EditError, PlanError
from flatout.core.records.lever import Candidate, Refusal
from flatout.tune.levers.graph.capture import LEVER, edit


def _run(*, device_s: float | None, calls: float = 1.0) -> EvidenceBuilder:
    run = EvidenceBuilder(device_s=device_s)
    run.model(run.line("train.py", 5, "net(x)"), calls=calls)
    return run


def _refusal(run: EvidenceBuilder) -> str:
    [said] = LEVER.propose(run.build(), [found(0.05)])
    assert isinstance(said, Refusal)
    return said.because


def test_a_device_that_waits_for_launches_is_offered_graphs() -> None:
    graphs, compiled = LEVER.propose(_run(device_s=0.03).build(), [found(0.05)])
    assert isinstance(graphs, Candidate) and isinstance(compiled, Candidate)
    assert [graphs.parameters["how"], compiled.parameters["how"]] == ["graphs", "compiled"]
    assert 0 < graphs.saved_s[0] < graphs.saved_s[1] <= 0.07 + 1e-9


def test_processors_busy_devices_and_changing_shapes_are_refused() -> None:
    assert "no CUDA device" in _refusal(_run(device_s=None))
    assert "busy" in _refusal(_run(device_s=0.099))
    ragged = _run(device_s=0.03)
    for length in range(8):
        ragged.operator("aten.mm", ragged.line("train.py", 5), inputs=[(length, 4)], calls=0.1)
    assert "shapes change" in _refusal(ragged)


def test_modules_on_a_processor_are_left_alone() -> None:
    net, x = nn.Linear(3, 2), torch.randn(4, 3)
    for how in ("graphs", "compiled"):
        with pulled(LEVER, how=how) as hooks:
            net(x)
            assert not hooks.done
    with pytest.raises(PlanError, match="neither"), pulled(LEVER, how="else"):
        pass


def test_the_edit_compiles_with_graphs() -> None:
    text = "net = make()\noptimizer = SGD(net.parameters())\nnet(x)\n"
    changed = edit(text, {"how": "compiled"})
    assert changed == text.replace("()\noptimizer", '()\nnet.compile(backend="cudagraphs")\noptimizer')
    captured = edit(f"import torch\n\n{text}", {"how": "graphs"})
    assert captured == f"import torch\nfrom flatout import captured\n\n{text}".replace(
        "()\noptimizer", "()\ncaptured(net)\noptimizer"
    )
    with pytest.raises(EditError, match="compiles"):
        edit(text.replace("make()", "torch.compile(make())"), {"how": "graphs"})


def test_the_edit_captures_each_model() -> None:
    text = "g = make()\nd = make()\na, b = SGD(g.parameters()), SGD(d.parameters())\nd(g(x))\n"
    assert "g = make()\ncaptured(g)\nd = make()\ncaptured(d)\n" in edit(text, {"how": "graphs"})
