from __future__ import annotations

import copy
import inspect
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from flatout.core.runtime.patches import AttentionCall, Patches, attention_function, replace_forward, set_attributes


class Parent:
    def greet(self) -> str:
        return "parent"


class Child(Parent):
    own = 1


def test_undo_restores_an_attribute_and_removes_one_that_was_inherited() -> None:
    inherited = Child.greet
    patches = Patches()
    patches.set(Child, "own", 2)
    patches.set(Child, "greet", lambda self: "patched")
    assert (Child.own, Child().greet()) == (2, "patched")

    patches.undo()

    assert Child.own == 1
    assert "greet" not in vars(Child)
    assert Child.greet is inherited


def test_undo_of_two_patches_of_one_attribute_restores_the_first_value() -> None:
    patches = Patches()
    patches.set(Child, "own", 2)
    patches.set(Child, "own", 3)

    patches.undo()
    patches.undo()

    assert Child.own == 1


def test_a_replaced_forward_is_the_instances_and_goes_again() -> None:
    layer, other = nn.Linear(2, 2), nn.Linear(2, 2)
    undo = replace_forward(layer, lambda x: x)
    assert layer(1) == 1
    assert "forward" not in vars(other)
    undo()
    undo()
    assert "forward" not in vars(layer)


def test_a_forward_that_was_the_instances_own_comes_back() -> None:
    layer = nn.Linear(2, 2)
    own = partial(nn.Linear.forward, layer)
    layer.forward = own
    replace_forward(layer, lambda x: x)()
    assert vars(layer)["forward"] is own


def test_a_forward_that_was_replaced_since_is_left_alone() -> None:
    layer = nn.Linear(2, 2)
    first, second = replace_forward(layer, lambda x: x), replace_forward(layer, lambda x: 2 * x)
    first()
    assert layer(1) == 2
    second()


def test_attributes_that_their_owner_computes_are_set_and_come_back() -> None:
    backend = torch.backends.cuda.matmul
    before = backend.allow_bf16_reduced_precision_reduction
    undo = set_attributes(backend, allow_bf16_reduced_precision_reduction=not before)
    assert backend.allow_bf16_reduced_precision_reduction is not before

    undo()

    assert backend.allow_bf16_reduced_precision_reduction is before


def test_attention_is_called_with_torchs_arguments_by_place_or_name() -> None:
    calls = []

    def replacement(call: AttentionCall) -> torch.Tensor:
        calls.append(call)
        return call.run(F.scaled_dot_product_attention)

    attention = attention_function(replacement)
    q, k, v = torch.randn(3, 1, 2, 4, 8, generator=torch.Generator().manual_seed(0)).unbind(0)
    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    assert torch.equal(attention(q, k, v, mask), F.scaled_dot_product_attention(q, k, v, mask))
    out = attention(q, key=k, value=v, is_causal=True, scale=0.5)
    assert torch.equal(out, F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.5))
    assert calls[0].attn_mask is mask
    assert calls[1].is_causal
    with pytest.raises(TypeError, match="unexpected"):
        attention(q, k, v, window=3)


class Owner:
    value = 1


def test_a_lifted_patch_comes_back() -> None:
    patches = Patches()
    patches.set(Owner, "value", 2)

    again = patches.lift(Owner, "value")
    assert Owner.value == 1
    again()
    assert Owner.value == 2
    patches.undo()
    assert Owner.value == 1


def test_a_patch_that_something_else_has_replaced_is_not_lifted() -> None:
    patches, others = Patches(), Patches()
    patches.set(Owner, "value", 2)
    others.set(Owner, "value", 3)

    patches.lift(Owner, "value")()

    assert Owner.value == 3
    others.undo()
    patches.undo()
    assert Owner.value == 1


def test_a_device_context_reaches_a_function_of_torch_that_is_replaced() -> None:
    from torch.utils._device import _device_constructors

    _device_constructors.cache_clear()
    original, patches = torch.tensor, Patches()
    patches.set(torch, "tensor", lambda *args, **kwargs: original(*args, **kwargs))  # noqa: PLW0108  # a function of ours
    try:
        with torch.device("meta"):
            during = torch.tensor([])
    finally:
        patches.undo()
    with torch.device("meta"):
        after = torch.tensor([])

    assert (during.device.type, after.device.type) == ("meta", "meta")


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
@pytest.mark.parametrize("has_own", [False, True])
def test_copies_have_the_forward_of_before_and_compute_with_their_own_parameters(copied: Any, has_own: bool) -> None:
    torch.manual_seed(0)  # of other weights all that the ReLU lets through may be zeros
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    layer = model[0]
    if has_own:
        layer.forward = torch.exp
    expected = copied(model)
    replace_forward(layer, lambda input: layer.weight.sum() + input)
    other = copied(model)
    for one in (expected, other):
        one[0].weight.data.zero_()
    x = torch.randn(2, 3)
    assert torch.equal(other(x), expected(x))
    assert not torch.equal(model(x), expected(x)), "the original has the new one"
    assert has_own or list(inspect.signature(layer.forward).parameters) == ["input"]
