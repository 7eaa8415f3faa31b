"""Reductions: what each says and does to plain models; compositions are in tests/shrink/compose."""

from __future__ import annotations

import importlib

import pytest
import torch
from tests.plain_models import plain
from torch import Tensor, nn

from flatout.core.errors import FlatoutError
from flatout.core.records.reduction import Option, Reduction, ReductionRefusal
from flatout.core.registry import reductions
from flatout.shrink.candidate import CandidateModel, ShrinkTask
from flatout.shrink.reductions.training import prompt_tuning

every_reduction = pytest.mark.parametrize("reduction", reductions(), ids=lambda reduction: reduction.id)


def candidate(name: str) -> CandidateModel:
    result = plain(name)
    model = result.module.eval()

    def batches() -> list[tuple[tuple[Tensor, ...], Tensor]]:
        with torch.no_grad():
            return [(result.inputs, torch.zeros_like(model(*result.inputs)))]

    task = ShrinkTask(
        inputs=result.inputs, num_state=result.num_state, evaluate=lambda call: 1.0, batches=batches, recovery_s=0.1
    )
    return CandidateModel.of(model, task)


@every_reduction
def test_a_page_tells_the_price(reduction: Reduction) -> None:
    text = importlib.import_module(reduction.module).__doc__ or ""
    if reduction.guarantee == "quality":
        assert "\nPrice " in text
    assert "\nGuarantee " in text


@pytest.mark.slow
@every_reduction
@pytest.mark.parametrize("name", ["mlp", "cnn", "transformer"])
@pytest.mark.long
def test_what_is_offered_can_be_done_or_is_refused_and_leaves_the_model_alone(reduction: Reduction, name: str) -> None:
    if reduction.kind == "engine":
        pytest.skip("compilers take long: tests/shrink/compose tries them")
    original = candidate(name)
    before = {k: v.clone() for k, v in original.model.state_dict().items()}
    for answer in [*reduction.options(original)][:1]:
        if isinstance(answer, ReductionRefusal):
            assert answer.because
            continue
        try:
            result = reduction.apply(_copy_of(original, reduction), answer.parameters)
        except FlatoutError as e:
            assert str(e)
            continue
        assert isinstance(answer, Option)
        assert len(result.notes) == 1
        with torch.no_grad():
            assert torch.as_tensor(result.call(*result.inputs)).shape == original.model(*original.inputs).shape
    after = original.model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[k], v) for k, v in after.items())


def test_a_prompt_is_offered_where_vectors_in_front_of_the_tokens_reach_the_outputs_and_are_cut_off() -> None:
    original = candidate("transformer")
    with torch.no_grad():
        expected = original.model(*original.inputs)
    (option,) = prompt_tuning.options(original)
    assert isinstance(option, Option) and option.parameters == {"before": "blocks", "num_vectors": 8}
    result = prompt_tuning.apply(_copy_of(original, prompt_tuning.REDUCTION), option.parameters)
    with torch.no_grad():
        outputs = result.call(*result.inputs)
        assert torch.equal(original.model(*original.inputs), expected)
    assert outputs.shape == expected.shape and not torch.equal(outputs, expected)
    assert [p.shape for p in result.trained or ()] == [(8, 32)]


def test_a_prompt_is_refused_where_no_token_looks_at_another() -> None:
    model = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 4)).eval()
    task = ShrinkTask(inputs=(torch.arange(6).view(2, 3),), evaluate=lambda call: 0.0)
    (refusal,) = prompt_tuning.options(CandidateModel.of(model, task))
    assert isinstance(refusal, ReductionRefusal) and "nowhere" in refusal.because


def _copy_of(original: CandidateModel, reduction: Reduction) -> CandidateModel:
    """Reductions of training change the model they are given, which is a copy."""
    import copy

    if reduction.kind != "training":
        return original
    return CandidateModel.of(copy.deepcopy(original.model), original.task)


def test_a_model_on_its_way_counts_shared_weights_once() -> None:
    shared = nn.Linear(4, 4, bias=False)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    assert CandidateModel.of(model, ShrinkTask(inputs=(torch.zeros(1, 4),), evaluate=lambda call: 0.0)).num_bytes == 64
