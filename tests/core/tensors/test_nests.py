from __future__ import annotations

from collections import UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from flatout.core.tensors.nests import map_tensors, tensors_in

Pair = namedtuple("Pair", "first second")


class Batch(UserDict[str, Any]):
    """A mapping that torch does not know, with something besides its items."""

    label = "none"


@dataclass
class Output:
    logits: Tensor
    inner: Any = None


ONE, TWO = torch.ones(2), torch.zeros(3)
NESTS = [ONE, [ONE, 1, (TWO,)], {"a": ONE, "b": None}, Pair(ONE, [TWO]), Batch(a=ONE, b={"c": TWO})]


@pytest.mark.parametrize("nest", NESTS, ids=lambda nest: type(nest).__name__)
def test_mapping_keeps_the_containers_and_changes_each_tensor(nest: Any) -> None:
    changed = map_tensors(nest, lambda tensor: tensor + 1)
    assert type(changed) is type(nest)
    assert [t.tolist() for t in tensors_in(changed)] == [(t + 1).tolist() for t in tensors_in(nest)]


def test_a_class_of_batches_keeps_what_it_holds_besides() -> None:
    batch = Batch(a=ONE)
    batch.label = "validation"
    changed = map_tensors(batch, lambda tensor: tensor + 1)
    assert changed.label == "validation"
    assert batch["a"] is ONE


def test_a_size_stays_a_size() -> None:
    assert type(map_tensors([ONE.shape], torch.clone)[0]) is torch.Size


def test_tensors_come_in_order_from_dataclasses_too() -> None:
    found = list(tensors_in({"a": Output(TWO), "b": [ONE]}))
    assert found[0] is TWO
    assert found[1] is ONE


def test_a_dataclass_that_holds_itself_ends() -> None:
    output = Output(ONE)
    output.inner = output
    assert all(t is ONE for t in tensors_in(output))
