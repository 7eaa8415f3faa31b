"""communication.bucket-lengths: rows of like length are computed together."""

from __future__ import annotations

import pytest
import torch
from tests.evidence_builder import EvidenceBuilder
from tests.lever_tools import edited, found, pulled, ran
from torch import Tensor, nn

from flatout.core.errors import EditError, PlanError
from flatout.core.records.lever import Candidate, Refusal
from flatout.tune.levers.communication.bucket_lengths import LEVER


class Mean(nn.Module):
    """The mean vector of the words of each row."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(9, 3)
        self.shapes: list[tuple[int, ...]] = []

    def forward(self, tokens: Tensor) -> Tensor:
        self.shapes.append(tuple(tokens.shape))
        mask = (tokens != 0)[..., None]
        result: Tensor = (self.embed(tokens) * mask).sum(1) / mask.sum(1)
        return result


def batch(*lengths: int, width: int = 16) -> Tensor:
    tokens = torch.zeros(len(lengths), width, dtype=torch.int64)
    for row, length in enumerate(lengths):
        tokens[row, :length] = 1 + torch.arange(length) % 8
    return tokens


def test_the_same_results_come_from_groups_of_rows() -> None:
    model, tokens = Mean(), batch(3, 16, 1, 9, 2, 8, 15, 4)
    expected = model(tokens)
    with pulled(LEVER, pad=0, groups=2, multiple=1) as hooks:
        torch.testing.assert_close(model(tokens), expected)
        assert model.shapes[1:] == [(4, 4), (4, 16)]
        assert hooks.done == [LEVER.id]
    model(tokens)
    assert model.shapes[-1] == (8, 16)


def test_a_model_without_tokens_is_called_as_it_is() -> None:
    model = nn.Linear(3, 2)
    with pulled(LEVER, pad=0, groups=2, multiple=1) as hooks:
        assert model(torch.ones(4, 3)).shape == (4, 2)
    assert not hooks.done


def test_a_model_that_returns_its_loss_does_not_go_with_it() -> None:
    class Loss(Mean):
        def forward(self, tokens: Tensor) -> Tensor:
            return super().forward(tokens).square().mean()

    with pytest.raises(PlanError, match="not one result a row"), pulled(LEVER, pad=0, groups=2, multiple=1):
        Loss()(batch(1, 16, 2, 9))


@pytest.mark.parametrize("wrong", [{"groups": 1}, {"multiple": 0}, {"pad": "x"}])
def test_wrong_parameters_are_errors(wrong: dict[str, int]) -> None:
    with pytest.raises(PlanError), pulled(LEVER, **({"pad": 0, "groups": 2, "multiple": 1} | wrong)):
        pass


TEXT = """
    import torch
    from torch import nn

    class Mean(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(9, 3)

        def forward(self, tokens, scale=1.0):
            calls.append(tuple(tokens.shape))
            mask = (tokens != 0)[..., None]
            return scale * (self.embed(tokens) * mask).sum(1)

    torch.manual_seed(0)
    model = Mean()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        loss = model(tokens, scale=2.0).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


def test_the_edit_calls_the_model_by_length_and_learns_the_same() -> None:
    calls: list[tuple[int, ...]] = []
    tokens = batch(3, 16, 1, 9, 2, 8, 15, 4)
    changed = edited(LEVER, TEXT, pad=0, groups=2, multiple=4)
    assert "flatout.call_by_length(model, tokens, scale=2.0, pad=0, groups=2, multiple=4)" in changed
    before, after = (ran(text, tokens=tokens, calls=calls)["loss"] for text in (TEXT, changed))
    torch.testing.assert_close(after, before)
    assert calls == [(8, 16)] * 3 + [(4, 4), (4, 16)] * 3


def test_a_file_without_such_a_call_has_no_edit() -> None:
    with pytest.raises(EditError, match="no loop of the file calls a model"):
        edited(LEVER, "loss = model(tokens)\n", pad=0, groups=2, multiple=4)


def proposed(run: EvidenceBuilder, saved_s: float = 0.05) -> list[Candidate | Refusal]:
    return list(LEVER.propose(run.build(), [found(saved_s)] if saved_s else []))


def ragged(
    *, rows: int = 32, mean: float = 100.0, longest: float = 400.0, device_s: float | None = None
) -> EvidenceBuilder:
    run = EvidenceBuilder(device_s=device_s)
    run.padding(shape=(rows, 512), padding_fraction=1 - mean / 512, longest_fraction=longest / 512)
    run.operator("aten.addmm", op_s=0.08)
    return run


def test_four_groups_are_tried_before_two() -> None:
    four, two = proposed(ragged())
    assert isinstance(four, Candidate) and isinstance(two, Candidate)
    assert four.parameters == {"pad": 0, "groups": 4, "multiple": 32}
    assert two.parameters == {"pad": 0, "groups": 2, "multiple": 32}
    assert four.saved_s[1] > two.saved_s[1] > 0
    assert "34 % of the positions remain" in four.because.replace("%", " %")
    assert [c.parameters["groups"] for c in proposed(ragged(rows=8)) if isinstance(c, Candidate)] == [2]


@pytest.mark.parametrize(
    ("run", "because"),
    [
        (EvidenceBuilder(), "no padded tokens"),
        (ragged(rows=7), "7 rows, too few"),
        (ragged(mean=390.0), "of nearly one length"),
        (ragged(device_s=0.02), "the device waits for its host"),
    ],
)
def test_where_groups_gain_nothing_it_says_why(run: EvidenceBuilder, because: str) -> None:
    [refusal] = proposed(run)
    assert isinstance(refusal, Refusal) and because in refusal.because


def test_statistics_over_a_batch_are_left_alone() -> None:
    run = ragged()
    run.operator("aten.native_batch_norm", op_s=0.01)
    [refusal] = proposed(run)
    assert isinstance(refusal, Refusal) and "batch norm" in refusal.because


def test_a_model_that_computes_its_loss_is_not_divided() -> None:
    for function, is_refused in (("GPT.forward", True), ("main", False)):
        run = ragged()
        line = run.line("model.py", 40, "loss = F.cross_entropy(logits, targets)", function=function)
        run.operator("aten.nll_loss_forward", line, op_s=0.001)
        first = proposed(run)[0]
        assert isinstance(first, Refusal) is is_refused
        assert not isinstance(first, Refusal) or "computes the loss" in first.because


def test_other_masks_are_drawn_where_the_model_draws() -> None:
    run = ragged()
    run.operator("aten.native_dropout", op_s=0.01, module="model.drop")
    assert {c.guarantee for c in proposed(run) if isinstance(c, Candidate)} == {"distribution"}
