"""Training with rounding: what is trained is what runs, and it regains what rounding loses."""

from __future__ import annotations

import shutil

import pytest
import torch
import torch.nn.functional as F
from tests.plain_models import plain
from tests.plain_tasks import Task, digits
from torch import nn

from flatout.core.errors import UsageError
from flatout.shrink.quantise import prepare_qat, quantise

pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="the kernel is compiled here: no C compiler"
)


def train(model: nn.Module, task: Task, *, steps: int, lr: float = 3e-3) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    source = torch.Generator().manual_seed(0)
    model.train()
    for _ in range(steps):
        at = torch.randint(len(task.x), (128,), generator=source)
        optimizer.zero_grad()
        F.cross_entropy(model(task.x[at]), task.y[at]).backward()
        optimizer.step()
    model.eval()


def correct(model: nn.Module, task: Task) -> float:
    with torch.inference_mode():
        return float((model(task.held_x).argmax(1) == task.held_y).double().mean())


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["int8", "int8-dynamic", "int4", "int4-dynamic"])
def test_what_was_trained_is_what_runs(scheme: str) -> None:
    task, model = digits(is_image=False), plain("mlp").module
    prepared = prepare_qat(model, scheme)
    train(prepared.module, task, steps=20)
    with torch.inference_mode():
        wanted, found = prepared(task.held_x), prepared.convert()(task.held_x)
    # A number that lies between two steps may be rounded up by one and down by the other.
    assert float((found - wanted).norm() / wanted.norm()) < (2e-3 if "dynamic" in scheme else 1e-4)


@pytest.mark.slow
def test_training_with_rounding_learns_digits_and_loses_nothing_when_converted() -> None:
    task, model = digits(is_image=False), plain("mlp").module
    prepared = prepare_qat(model, {"*": "int4"})
    train(prepared.module, task, steps=120)
    trained = correct(prepared.module, task)
    assert trained > 0.9
    assert correct(prepared.convert().module, task) == trained


@pytest.mark.slow
def test_a_finer_training_with_rounding_is_closer_to_the_labels_than_rounding_afterwards() -> None:
    task, model = digits(is_image=False), plain("mlp").module
    train(model, task, steps=150)
    rounded = quantise(model, "int4").module
    prepared = prepare_qat(model, "int4")
    train(prepared.module, task, steps=60, lr=1e-3)
    with torch.inference_mode():
        losses = [float(F.cross_entropy(m(task.x), task.y)) for m in (prepared.convert().module, rounded)]
    assert losses[0] < losses[1]


def test_the_model_and_its_names_stay_as_they_were() -> None:
    model = plain("mlp").module
    before = {k: v.clone() for k, v in model.state_dict().items()}
    prepared = prepare_qat(model, "int8")
    train(prepared.module, digits(is_image=False), steps=2)
    assert list(prepared.module.state_dict()) == list(before)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert type(prepared.float_model().get_submodule("0")) is nn.Linear
    assert torch.equal(prepared.float_model().get_parameter("0.weight"), prepared.module.get_parameter("0.weight"))


def test_layers_of_other_kinds_are_left_with_the_reason() -> None:
    prepared = prepare_qat(plain("cnn").module, "int8")
    assert set(prepared.schemes) == {"head"}
    assert prepared.unchanged["stem.0"] == "only Linear is trained with rounding"


def test_schemes_without_rounding_in_training_are_refused() -> None:
    with pytest.raises(UsageError, match="can be trained for"):
        prepare_qat(plain("mlp").module, "bf16.torch")
    with pytest.raises(UsageError, match="no Linear"):
        prepare_qat(plain("unet").module, "int8")
