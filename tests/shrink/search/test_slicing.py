"""Weights cut to a smaller model: the same units everywhere, and the function kept where the units that go did nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.plain_models import Transformer, plain
from torch import Tensor, nn

from flatout.core.errors import UsageError
from flatout.shrink.search.slicing import inherit


@torch.no_grad()
def silenced(linears: list[tuple[nn.Module, nn.Module]], dead: list[int]) -> None:
    """Units that are made and used with tiny weights: the ones to go."""
    for out, into in linears:
        for tensor, dim in ((out.weight, 0), (out.bias, 0), (into.weight, 1)):
            assert isinstance(tensor, Tensor)
            tensor.index_fill_(dim, torch.tensor(dead), 0.0)


def test_units_that_do_nothing_are_the_ones_that_go_in_a_chain() -> None:
    torch.manual_seed(0)

    def chain(a: int, b: int) -> nn.Sequential:
        return nn.Sequential(nn.Linear(5, a), nn.ReLU(), nn.Linear(a, b), nn.ReLU(), nn.Linear(b, 3))

    original, candidate = chain(8, 8), chain(4, 4)
    silenced([(original[0], original[2])], [0, 2, 5, 7])
    silenced([(original[2], original[4])], [1, 2, 3, 6])  # other units of a layer of the same size
    found = inherit(candidate, original)
    x = torch.randn(6, 5)
    torch.testing.assert_close(candidate(x), original(x))
    assert found.fraction == 1 and not found.fresh and "2.weight" in found.cut


def test_channels_flattened_into_a_linear_layer_stay_together() -> None:
    torch.manual_seed(0)

    def net(width: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(1, width, 3), nn.BatchNorm2d(width), nn.ReLU(), nn.Flatten(), nn.Linear(width * 16, 3)
        )

    original, candidate = net(6), net(3)
    with torch.no_grad():
        original[4].weight.view(3, 6, 16)[:, [0, 3, 4]] = 0
        for tensor in (original[0].weight, original[0].bias, original[1].weight, original[1].bias):
            tensor[[0, 3, 4]] = 0
    inherit(candidate, original)
    x = torch.randn(2, 1, 6, 6)
    torch.testing.assert_close(candidate.eval()(x), original.eval()(x))


@pytest.mark.parametrize("name", ["gru_step", "lstm_step"])
def test_gates_are_cut_gate_by_gate(name: str) -> None:
    original, candidate = plain(name, width=8), plain(name, width=4)
    dead = torch.tensor([1, 2, 6, 7])
    with torch.no_grad():
        for name_, p in original.module.named_parameters():
            for dim, size in enumerate(p.shape):
                if size % 8 == 0 and size != 16 and "head" not in name_:
                    p.view(*p.shape[:dim], size // 8, 8, *p.shape[dim + 1 :]).index_fill_(dim + 1, dead, 0.0)
        original.module.head.weight[:, dead] = 0  # type: ignore[union-attr,index]
    inherit(candidate.module, original.module)
    with torch.no_grad():
        big, small = original.module(*original.inputs), candidate.module(original.inputs[0], *candidate.inputs[1:])
    torch.testing.assert_close(small[0], big[0])


def test_heads_packed_in_one_dimension_are_cut_as_the_layout_says() -> None:
    layout = {
        "blocks.*.qkv.weight": ("3 4 head*", "width"),
        "blocks.*.qkv.bias": ("3 4 head*",),
        "blocks.*.out.weight": ("width", "4 head*"),
        "blocks.*.gate.weight": ("inner*", "width"),
        "blocks.*.gate.bias": ("inner*",),
        "blocks.*.up.weight": ("inner*", "width"),
        "blocks.*.up.bias": ("inner*",),
        "blocks.*.down.weight": ("width", "inner*"),
    }
    torch.manual_seed(0)
    original, candidate = Transformer(16), Transformer(8)
    found = inherit(candidate, original, layout=layout)
    assert not found.fresh
    rows = [_rows_of(candidate.blocks[0].qkv.weight, original.blocks[0].qkv.weight, original, candidate)]
    assert all(
        row % 4 == rows[0][at % 2] % 4 for at, row in enumerate(rows[0])
    )  # two of a head's four, the same in each head
    assert [row // 4 for row in rows[0]] == [at // 2 for at in range(24)]  # q, k, v and their heads in their places


def _rows_of(own: Tensor, source: Tensor, original: Any, candidate: Any) -> list[int]:
    """Which row of the original model each row of the candidate is, by the columns that both have."""
    columns = [int((original.words.weight[0] == v).nonzero()) for v in candidate.words.weight[0]]
    cut = source[:, columns]
    return [int((cut == row).all(1).nonzero()) for row in own]


def test_the_residual_stream_is_the_same_everywhere() -> None:
    original, candidate = plain("cnn", width=8).module, plain("cnn", width=4, seed=1).module
    inherit(candidate, original)
    big, small = (dict(m.named_parameters()) for m in (original, candidate))
    units = [int((big["stem.0.bias"] == v).nonzero()) for v in small["stem.0.bias"]]
    torch.testing.assert_close(small["inner.3.bias"], big["inner.3.bias"][units])
    torch.testing.assert_close(small["down.weight"][0], big["down.weight"][_row(big, small)][units])


def _row(big: dict[str, Any], small: dict[str, Any]) -> int:
    return int((big["down.bias"] == small["down.bias"][0]).nonzero())


def test_what_the_given_model_has_not_stays_as_it_was_made() -> None:
    original, candidate = plain("mlp", width=8).module, plain("mlp", width=16, seed=3).module
    before = [p.clone() for p in candidate.parameters()]
    found = inherit(candidate, original)
    assert {"0.weight", "2.weight", "5.weight"} <= set(found.fresh)
    assert found.fraction < 0.1
    torch.testing.assert_close(next(candidate.parameters()), before[0])


def test_equal_shapes_take_over_everything() -> None:
    original, candidate = plain("transformer").module, plain("transformer", seed=1).module
    inherit(candidate, original)
    assert all(torch.equal(a, b) for a, b in zip(original.parameters(), candidate.parameters(), strict=True))


@pytest.mark.parametrize(
    "layout", [{"0.weight": ("a",)}, {"0.weight": ("5 a", "64")}, {"0.weight": ("a b", "64")}, {"*.weight": ("a", "a")}]
)
def test_a_layout_that_does_not_fit_is_refused(layout: Any) -> None:
    with pytest.raises(UsageError):
        inherit(plain("mlp", width=16).module, plain("mlp", width=32).module, layout=layout)
