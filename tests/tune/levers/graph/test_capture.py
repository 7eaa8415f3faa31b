from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.evidence_builder import EvidenceBuilder
from tests.lever_tools import found, pulled
from torch import Tensor, nn

from flatout.core.errors import EditError, PlanError
from flatout.core.records.lever import Candidate, Refusal
from flatout.tune.levers.cuda_graphs import GraphedForward
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


def test_a_model_called_several_times_a_step_is_left_to_the_compiler() -> None:
    [compiled] = LEVER.propose(_run(device_s=0.03, calls=4).build(), [found(0.05)])
    assert isinstance(compiled, Candidate) and compiled.parameters["how"] == "compiled"


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


class _Captures:
    """Stands for the capturing of a device: runs the module three times, then replays it by running it."""

    def __init__(self) -> None:
        self.num = 0

    def __call__(self, module: nn.Module, samples: tuple[Tensor, ...]) -> Callable[..., Any]:
        self.num += 1
        for _ in range(3):
            module(*samples)
        return module


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.linear = nn.Linear(3, 2)

    def forward(self, x: Tensor, *, scale: float, noise: bool = False) -> dict[str, Tensor]:
        h = self.linear(self.norm(x)) * scale
        return {"h": h + torch.rand_like(h) if noise else h}


def _outputs(graphed: bool) -> tuple[list[Tensor], _Captures]:
    torch.manual_seed(0)
    net, captures = _Net(), _Captures()
    if graphed:
        net.forward = GraphedForward(net, captures)  # type: ignore[method-assign]
    kept = []
    for rows in (4, 4, 4, 4, 4, 5, 4):
        output = net(torch.randn(rows, 3), scale=2.0, noise=True)["h"]
        net.zero_grad()
        output.sum().backward()
        kept += [output.detach(), *(p.grad.clone() for p in net.parameters() if p.grad is not None)]
    kept.append(net.norm.running_mean.clone())  # type: ignore[union-attr]
    return kept, captures


def test_replayed_calls_give_what_the_calls_gave_and_capturing_leaves_no_trace() -> None:
    plain, _ = _outputs(graphed=False)
    graphed, captures = _outputs(graphed=True)
    assert captures.num == 1  # five equal calls; the one of another shape is not captured
    assert all(torch.equal(a, b) for a, b in zip(plain, graphed, strict=True))


def test_with_gradients_the_first_call_is_captured_and_without_what_comes_again() -> None:
    net, captures, x = _Net(), _Captures(), torch.randn(4, 3)
    net.forward = GraphedForward(net, captures)  # type: ignore[method-assign]
    for _ in range(5):
        assert torch.equal(net(x, scale=2.0)["h"] * 2, net(x, scale=4.0)["h"])
    assert captures.num == 1
    net.norm.eval()
    for _ in range(5):
        net(x, scale=2.0)
    with torch.no_grad():
        for _ in range(5):
            assert not net(x, scale=2.0)["h"].requires_grad
    assert captures.num == 2


def test_a_call_with_something_that_is_no_number_is_never_captured() -> None:
    net, captures = nn.Identity(), _Captures()
    net.forward = GraphedForward(net, captures)  # type: ignore[method-assign]
    for _ in range(6):
        net({"x": torch.randn(2), "who": object()})
    assert captures.num == 0


def test_the_edit_compiles_with_graphs() -> None:
    text = "net = make()\noptimizer = SGD(net.parameters())\nnet(x)\n"
    changed = edit(text, {"how": "compiled"})
    assert changed == text.replace("()\noptimizer", '()\nnet.compile(backend="cudagraphs")\noptimizer')
    with pytest.raises(EditError, match="sample inputs"):
        edit(text, {"how": "graphs"})
