from __future__ import annotations

import pytest
import torch
from tests.evidence_builder import EvidenceBuilder
from tests.lever_tools import edited, pulled, ran
from torch import Tensor, nn

from flatout.core.errors import EditError
from flatout.core.records.lever import Candidate, Refusal
from flatout.tune.levers.memory.channels_last import LEVER


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


@pytest.mark.parametrize(
    ("op", "shape", "guarantee"),
    [
        ("aten.randn_like", (8, 3, 32, 32), None),  # told to draw in order
        ("aten.native_dropout", (8, 16, 30, 30), "distribution"),
        ("aten.native_dropout", (8, 4, 64, 64), None),  # attention's weights are no images
        ("aten.randn", (8, 3, 32, 32), None),  # drawn in order, whatever is made of it
    ],
)
def test_random_numbers_in_the_order_of_memory_weaken_what_it_promises(
    op: str, shape: tuple[int, ...], guarantee: str | None
) -> None:
    run = EvidenceBuilder()
    images = [(8, 3, 32, 32), (16, 3, 3, 3)]
    run.operator("aten.convolution", run.line("net.py", 3), inputs=images, output=(8, 16, 30, 30), op_s=0.02)
    run.operator(op, run.line("net.py", 4), inputs=[shape], output=shape)
    [candidate] = LEVER.propose(run.build(), ())
    assert isinstance(candidate, Candidate)
    assert candidate.guarantee == guarantee
    assert ("draws other random numbers" in candidate.because) == (guarantee is not None)
    assert candidate.parameters == ({"ordered_draws": True} if op == "aten.randn_like" else {})


def test_noise_of_the_shape_of_an_image_is_the_noise_from_before() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution = nn.Conv2d(3, 3, 3, padding=1)

        def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, ...]:
            normal, uniform = torch.randn_like(images), torch.rand_like(self.convolution(images))
            wide = torch.randn_like(images, memory_format=torch.contiguous_format, dtype=torch.float64)
            return normal, uniform, wide

    net, images = Noisy(), torch.ones(2, 3, 8, 8)

    def drawn() -> tuple[torch.Tensor, ...]:
        torch.manual_seed(0)
        found: tuple[torch.Tensor, ...] = net(images)
        return found

    expected, before = drawn(), (torch.randn_like, torch.rand_like)
    with pulled(LEVER, ordered_draws=True):
        found = drawn()
        assert [t.is_contiguous(memory_format=torch.channels_last) for t in found] == [True, True, False]
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    assert (torch.randn_like, torch.rand_like) == before
    with pulled(LEVER):
        assert not torch.equal(drawn()[0], expected[0])


def test_weights_and_images_are_converted_and_afterwards_as_before() -> None:
    net, images = Net(), torch.randn(2, 3, 16, 16)
    weight = net.convolution.weight
    expected = net(images).detach()
    with pulled(LEVER) as hooks:
        output = net(images)
        assert net.convolution.weight is weight
        assert weight.is_contiguous(memory_format=torch.channels_last)
        assert hooks.done == [LEVER.id]
    assert net.seen == [False, True]
    assert weight.is_contiguous()
    assert images.is_contiguous()
    torch.testing.assert_close(output, expected)


def test_a_model_without_convolutions_is_left_alone() -> None:
    with pulled(LEVER) as hooks:
        nn.Linear(4, 4)(torch.randn(2, 4))
    assert not hooks.done


HEAD = """
    import torch
    from torch import nn


    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())

        def forward(self, images):
            return self.block(images)


    def build(width):
        net = nn.Sequential(nn.Conv2d(3, width, 3), nn.ReLU())
        return net


    torch.manual_seed(0)
    model = MADE
    output = model(torch.randn(2, 3, 8, 8))
"""


@pytest.mark.parametrize(
    "made",
    [
        "Net()",
        "build(8)",
        'Net().to("cpu")',
        "nn.Sequential(\n    nn.Conv2d(3, 8, 3),\n).eval()",
        "nn.Sequential(Net())",
    ],
)
def test_edited_the_weights_are_channels_last_and_the_output_within_rounding(made: str) -> None:
    text = HEAD.replace("MADE", made.replace("\n", "\n    "))
    after = edited(LEVER, text)
    assert after.count("memory_format=torch.channels_last") == 1
    before, left = ran(text), ran(after)
    weight = next(left["model"].parameters())
    assert weight.is_contiguous(memory_format=torch.channels_last) and not weight.is_contiguous()
    torch.testing.assert_close(left["output"], before["output"])


def test_a_move_to_a_device_takes_the_layout_along() -> None:
    assert 'Net().to("cpu", memory_format=torch.channels_last)' in edited(
        LEVER, HEAD.replace("MADE", 'Net().to("cpu")')
    )


MADE_ELSEWHERE = """
    import torch
    from torch import nn, optim

    zoo = {"small": lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())}


    def main():
        torch.manual_seed(0)
        model = zoo["small"]()
        # one group
        optimizer = optim.SGD(
            model.parameters(),
            lr=0.1,
        )
        return model, model(torch.randn(2, 3, 8, 8)), optimizer


    model, output, optimizer = main()
"""


def test_a_model_that_is_made_elsewhere_is_converted_before_its_optimizer() -> None:
    after = edited(LEVER, MADE_ELSEWHERE)
    assert after.count("model.to(memory_format=torch.channels_last)\n") == 1
    before, left = ran(MADE_ELSEWHERE), ran(after)
    weight = next(left["model"].parameters())
    assert weight.is_contiguous(memory_format=torch.channels_last) and not weight.is_contiguous()
    assert left["optimizer"].param_groups[0]["params"][0] is weight
    torch.testing.assert_close(left["output"], before["output"])


@pytest.mark.parametrize("made", ["nn.Linear(3, 3)", "loaded", "Net().to(memory_format=torch.channels_last)"])
def test_what_is_no_model_with_images_or_is_converted_is_not_edited(made: str) -> None:
    with pytest.raises(EditError):
        edited(LEVER, HEAD.replace("MADE", made))


def test_an_object_that_is_given_a_model_is_not_taken_for_one() -> None:
    holder = """

    class Pair:
        def __init__(self, net):
            self.net = net

        def __call__(self, x):
            return self.net(x)

"""
    text = HEAD.replace("\n    torch.manual_seed", holder + "\n    torch.manual_seed").replace("MADE", "Pair(Net())")
    after = edited(LEVER, text)
    assert "Pair(Net().to(memory_format=torch.channels_last))" in after
    torch.testing.assert_close(ran(after)["output"], ran(text)["output"])
