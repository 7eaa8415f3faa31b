from __future__ import annotations

import pickle
import random

import numpy as np
import pytest
import torch

from flatout.core.tensors.generators import generator_states, restore_generator

DRAWS = {"python": random.random, "numpy": np.random.random, "torch": lambda: torch.rand(()).item()}


@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_moves_its_generator_alone_and_can_be_made_again(name: str) -> None:
    np.random.randn()  # leaves the second of a pair for the next call
    before = generator_states()
    first = DRAWS[name]()
    after = generator_states()
    assert [one for one in before if before[one] != after[one]] == [name]
    restore_generator(name, pickle.loads(pickle.dumps(before[name])))
    assert generator_states() == before
    assert DRAWS[name]() == first


def test_another_generator_is_an_error() -> None:
    with pytest.raises(ValueError, match="'cuda' is no generator of the host"):
        restore_generator("cuda", ())
