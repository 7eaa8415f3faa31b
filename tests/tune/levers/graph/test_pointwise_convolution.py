from __future__ import annotations

import pytest
import torch
from tests.evidence_builder import EvidenceBuilder
from tests.lever_tools import pulled, ran
from torch import nn

from flatout.core.errors import EditError
from flatout.core.records.lever import Candidate, Refusal
from flatout.tune.levers.graph.pointwise_convolution import LEVER, edit


def run(
    *, device_s: float | None = 0.099, weight: tuple[int, ...] = (16, 8, 1, 1), op_s: float = 0.02
) -> EvidenceBuilder:
    """A step of 100 ms with a convolution, forward and backward."""
    built = EvidenceBuilder(device_s=device_s)
    line = built.line("train.py", 5, "out = net(x)")
    built.model(line)
    image, result = (4, 8, 32, 32), (4, 16, 32, 32)
    built.operator("aten.convolution", line, inputs=[image, weight], output=result, op_s=op_s)
    built.operator("aten.convolution_backward", line, inputs=[result, image, weight], op_s=op_s, phase="backward")
    return built


def test_convolutions_of_one_pixel_on_a_gpu_are_proposed() -> None:
    [candidate] = LEVER.propose(run().build(), ())
    assert isinstance(candidate, Candidate)
    assert candidate.saved_s == (0.0, pytest.approx(0.8 * 0.04))


@pytest.mark.parametrize(
    ("built", "why"),
    [
        (run(device_s=None), "on processors"),
        (run(weight=(16, 8, 3, 3)), "take 0.00 ms"),
        (run(weight=(16, 4, 1, 1)), "take 0.00 ms"),  # of two groups
        (run(op_s=0.0001), "take 0.20 ms"),
    ],
)
def test_what_gains_nothing_is_refused(built: EvidenceBuilder, why: str) -> None:
    [refusal] = LEVER.propose(built.build(), ())
    assert isinstance(refusal, Refusal) and why in refusal.because


def test_layers_are_products_from_the_first_call_on_and_convolutions_again_afterwards() -> None:
    torch.manual_seed(0)
    net, other = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 3)), nn.Linear(3, 2)
    x = torch.randn(2, 3, 5, 5)
    wanted = net(x)
    with pulled(LEVER) as hooks:
        other(torch.randn(1, 3))
        assert hooks.done == []
        torch.testing.assert_close(net(x), wanted)
        assert type(net[0]) is not nn.Conv2d and hooks.done == [LEVER.id]
    assert type(net[0]) is nn.Conv2d


def test_one_line_is_written_behind_the_model() -> None:
    text = (
        "import torch\nfrom torch import nn\n\nnet = nn.Sequential(nn.Conv2d(3, 4, 1))\n"
        "torch.optim.SGD(net.parameters(), lr=0.1)\ny = net(torch.ones(1, 3, 2, 2))\n"
    )
    new = edit(text, {})
    assert "nn.Conv2d(3, 4, 1))\npointwise_convolutions_as_products(net)\n" in new
    assert type(ran(new)["net"][0]) is not nn.Conv2d
    with pytest.raises(EditError, match="already"):
        edit(new, {})
