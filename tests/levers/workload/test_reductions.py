"""Levers that make a model cheaper: what each says and does to plain models; compositions are in tests/shrinking."""

from __future__ import annotations

import importlib

import pytest
import torch
from tests.plain_models import plain
from torch import Tensor, nn

from flatout.errors import FlatoutError
from flatout.levers.subjects import Purpose, Subject
from flatout.records.lever import Lever, Offer, Refusal
from flatout.registry import levers

LEVERS = [lever for lever in levers() if lever.reduction is not None]
every_lever = pytest.mark.parametrize("lever", LEVERS, ids=lambda lever: lever.id)


def subject(name: str) -> Subject:
    made = plain(name)
    model = made.module.eval()

    def batches() -> list[tuple[tuple[Tensor, ...], Tensor]]:
        with torch.no_grad():
            return [(made.inputs, torch.zeros_like(model(*made.inputs)))]

    purpose = Purpose(
        inputs=made.inputs, num_state=made.num_state, evaluate=lambda call: 1.0, batches=batches, recovery_s=0.1
    )
    return Subject.of(model, purpose)


@every_lever
def test_a_page_tells_the_price(lever: Lever) -> None:
    text = importlib.import_module(lever.module).__doc__ or ""
    if lever.id != "graph.compile":
        assert "\nPrice " in text
    assert "\nGuarantee " in text


@every_lever
@pytest.mark.parametrize("name", ["mlp", "cnn", "transformer"])
def test_what_is_offered_can_be_done_or_is_refused_and_leaves_the_model_alone(lever: Lever, name: str) -> None:
    if lever.reduction is not None and lever.reduction.kind == "engine":
        pytest.skip("compilers take long: tests/shrinking and tests/levers/graph try them")
    given = subject(name)
    before = {k: v.clone() for k, v in given.model.state_dict().items()}
    assert lever.reduction is not None
    for said in [*lever.reduction.offers(given)][:1]:
        if isinstance(said, Refusal):
            assert said.because
            continue
        try:
            made = lever.reduction.apply(_copied(given, lever), said.parameters)
        except FlatoutError as e:
            assert str(e)
            continue
        assert isinstance(said, Offer)
        assert len(made.told) == 1
        with torch.no_grad():
            assert torch.as_tensor(made.call(*made.inputs)).shape == given.model(*given.inputs).shape
    after = given.model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[k], v) for k, v in after.items())


def _copied(given: Subject, lever: Lever) -> Subject:
    """Levers of training change the model they are given, which is a copy."""
    import copy

    assert lever.reduction is not None
    if lever.reduction.kind != "training":
        return given
    return Subject.of(copy.deepcopy(given.model), given.purpose)


def test_a_model_on_its_way_counts_shared_weights_once() -> None:
    shared = nn.Linear(4, 4, bias=False)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    assert Subject.of(model, Purpose(inputs=(torch.zeros(1, 4),), evaluate=lambda call: 0.0)).num_bytes == 64
