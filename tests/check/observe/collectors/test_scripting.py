"""Scripts that use TorchScript while they are observed."""

from __future__ import annotations

import os

import pytest
import torch
from tests.check.observe.test_observer import model, observe, train
from torch import Tensor


def scaled(x: Tensor) -> Tensor:
    return x * torch.ones(3) + torch.zeros(3)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*(deprecated|not supported):DeprecationWarning")
def test_functions_that_make_tensors_can_be_scripted_and_traced() -> None:
    found: list[Tensor] = []

    def loop() -> None:
        train(model(), steps=8)
        x = torch.rand(3)
        found.extend([torch.jit.script(scaled)(x), torch.jit.trace(scaled, (x,))(x), scaled(x)])
        train(model(), steps=8)

    evidence = observe(loop)

    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[2])
    assert evidence.steps.num_observed > 0


def test_a_forked_child_is_not_observed() -> None:
    net = model()
    reading, writing = os.pipe()

    def loop() -> None:
        train(net, steps=6)
        child = os.fork()
        if child == 0:
            from flatout.check.observe.observer import _installed

            os.write(writing, b"1" if all(o.is_complete for o in _installed) else b"0")
            os._exit(0)
        os.waitpid(child, 0)
        train(net, steps=6)

    evidence = observe(loop)

    assert os.read(reading, 1) == b"1"
    assert evidence.steps.num_observed > 0
    os.close(reading)
    os.close(writing)
