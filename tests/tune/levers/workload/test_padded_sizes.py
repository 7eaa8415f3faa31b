from __future__ import annotations

from typing import Any, Final

import pytest
import torch
from tests.evidence_builder import EvidenceBuilder
from tests.lever_tools import found, pulled
from torch import nn

from flatout.core.errors import EditError
from flatout.core.records.lever import Candidate, Parameters, Refusal
from flatout.tune.levers.workload.padded_sizes import LEVER, edit

_TEXT: Final = """import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(64, 97)

    def forward(self, x):
        return self.head(x.tanh())


def run():
    torch.manual_seed(0)
    net = Net()
    net(torch.randn(3, 5, 64)).square().sum().backward()
    return net(torch.ones(3, 5, 64)).detach(), *(p.grad for p in net.parameters())
"""
_AT: Final[Parameters] = {
    "file": "model.py",
    "function": "Net.forward",
    "code": "return self.head(x.tanh())",
    "multiple": 64,
}


def _net(bias: bool) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(70, 97, bias=bias), nn.ReLU(), nn.Linear(97, 64), nn.ReLU(), nn.Linear(64, 10)
    ).double()


def _results(net: nn.Module) -> list[torch.Tensor]:
    torch.manual_seed(1)
    output = net(torch.randn(3, 5, 70, dtype=torch.float64))
    output.view(-1, 10).square().sum().backward()
    return [output.detach(), *(p.grad for p in net.parameters() if p.grad is not None)]


@pytest.mark.parametrize("bias", [True, False])
def test_padded_layers_compute_the_same_and_are_themselves_afterwards(bias: bool) -> None:
    net, expected = _net(bias), _results(_net(bias))
    before = list(net.state_dict())
    with pulled(LEVER, multiple=64) as hooks:
        results = _results(net)
        assert hooks.done == [LEVER.id]
        assert ["forward" in vars(layer) for layer in net] == [True, False, True, False, False]
    assert not any("forward" in vars(layer) for layer in net)
    assert list(net.state_dict()) == before
    for one, other in zip(results, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_the_products_have_the_padded_sizes() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    shapes: list[tuple[int, ...]] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.addmm.default:
                shapes.append(tuple(args[2].shape))
            return func(*args, **(kwargs or {}))

    net = _net(True)
    with pulled(LEVER, multiple=64), Watch():  # type: ignore[no-untyped-call]
        net(torch.randn(3, 70, dtype=torch.float64))
    assert shapes == [(128, 128), (128, 64), (64, 10)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # dynamo's own
def test_a_padded_model_is_compiled_as_one_graph() -> None:
    torch._dynamo.reset()  # what tests before it compiled counts towards a limit
    net, x = _net(True), torch.randn(3, 70, dtype=torch.float64)
    expected = net(x)
    with pulled(LEVER, multiple=64):
        net.compile(backend="eager", fullgraph=True)
        torch.testing.assert_close(net(x), expected)


def test_models_with_aligned_sizes_are_left_alone() -> None:
    net = nn.Linear(64, 128)
    with pulled(LEVER, multiple=64) as hooks:
        net(torch.randn(2, 64))
        assert "forward" not in vars(net)
        assert not hooks.done


def test_the_edit_pads_at_the_call() -> None:
    after = edit(_TEXT, dict(_AT))
    assert "nn.functional.pad(self.head.weight, (0, 0, 0, -self.head.out_features % 64))" in after
    results: list[tuple[torch.Tensor, ...]] = []
    for text in (after, _TEXT):
        scope: dict[str, Any] = {"__name__": "model"}
        exec(compile(text, "model.py", "exec"), scope)
        results.append(scope["run"]())
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


def test_a_line_without_a_linear_layer_is_not_edited() -> None:
    with pytest.raises(EditError, match="0 calls"):
        edit(_TEXT.replace("nn.Linear(64, 97)", "make(64, 97)"), dict(_AT))
    with pytest.raises(EditError, match="library"):
        edit(_TEXT, {"multiple": 64})


def test_it_is_offered_on_a_device_where_it_was_tried() -> None:
    [candidate] = LEVER.propose(EvidenceBuilder(device_s=0.09).build(), (found(0.01),))
    assert isinstance(candidate, Candidate)
    assert 0 < candidate.saved_s[0] < candidate.saved_s[1] == 0.01
    assert candidate.parameters["multiple"] == 64


def test_processors_and_aligned_products_are_refused() -> None:
    for run in (EvidenceBuilder(), EvidenceBuilder(device_s=0.09)):
        [refusal] = LEVER.propose(run.build(), ())
        assert isinstance(refusal, Refusal)
