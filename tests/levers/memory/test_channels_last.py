from __future__ import annotations

import torch
from tests.evidence_builder import EvidenceBuilder
from tests.lever_tools import pulled
from torch import Tensor, nn

from flatout.levers.memory.channels_last import LEVER
from flatout.records.lever import Candidate, Refusal


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3)
        self.seen: list[bool] = []

    def forward(self, images: Tensor) -> Tensor:
        self.seen.append(images.is_contiguous(memory_format=torch.channels_last))
        result: Tensor = self.convolution(images)
        return result


def test_a_model_that_convolves_images_is_offered_and_others_refused() -> None:
    run = EvidenceBuilder()
    run.operator("aten.convolution", run.line("net.py", 3), inputs=[(8, 3, 32, 32), (8, 3, 3, 3)], op_s=0.02)
    [candidate] = LEVER.propose(run.build(), ())
    assert isinstance(candidate, Candidate)
    [refusal] = LEVER.propose(EvidenceBuilder().build(), ())
    assert isinstance(refusal, Refusal)


def test_weights_and_images_are_converted_and_afterwards_as_before() -> None:
    net, images = Net(), torch.randn(2, 3, 16, 16)
    weight = net.convolution.weight
    expected = net(images).detach()
    with pulled(LEVER) as seams:
        output = net(images)
        assert net.convolution.weight is weight
        assert weight.is_contiguous(memory_format=torch.channels_last)
        assert seams.done == [LEVER.id]
    assert net.seen == [False, True]
    assert weight.is_contiguous()
    assert images.is_contiguous()
    torch.testing.assert_close(output, expected)


def test_a_model_without_convolutions_is_left_alone() -> None:
    with pulled(LEVER) as seams:
        nn.Linear(4, 4)(torch.randn(2, 4))
    assert not seams.done
