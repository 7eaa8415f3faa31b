"""communication.trim-padding: what is padding in every row is cut off."""

from __future__ import annotations

from textwrap import dedent
from typing import Any

import pytest
import torch
from tests.evidence_builder import EvidenceBuilder
from tests.lever_tools import found, pulled
from torch import Tensor, nn

from flatout.core.errors import EditError, PlanError
from flatout.core.records.lever import Candidate, Refusal
from flatout.tune.levers.communication.trim_padding import LEVER, edit

PAD = 7


class Mean(nn.Module):
    """The mean vector of the words of each row."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(PAD + 1, 3)
        self.widths: list[int] = []

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        self.widths.append(tokens.shape[1])
        assert mask.shape == tokens.shape
        words: Tensor = self.embed(tokens) * mask[..., None]
        return words.sum(1) / mask.sum(1, keepdim=True)


def batch(*lengths: int, width: int = 9) -> tuple[Tensor, Tensor]:
    tokens = torch.full((len(lengths), width), PAD)
    for row, length in enumerate(lengths):
        tokens[row, :length] = torch.arange(length) % PAD
    return tokens, tokens != PAD


@pytest.mark.parametrize(("lengths", "width"), [((2, 4), 4), ((9, 1), 9), ((0, 0), 1)])
def test_batches_are_cut_to_their_longest_row(lengths: tuple[int, ...], width: int) -> None:
    tokens, mask = batch(*lengths)
    model = Mean()
    expected = model(tokens, mask)
    with pulled(LEVER, pad=PAD) as hooks:
        torch.testing.assert_close(model(tokens, mask=mask), expected, equal_nan=True)
        assert model.widths == [9, width]
        assert bool(hooks.done) == (width < 9)
    model(tokens, mask)
    assert model.widths[-1] == 9


@pytest.mark.parametrize(("length", "width"), [(2, 4), (4, 4), (5, 8), (8, 8)])
def test_widths_are_rounded_up_to_the_multiple(length: int, width: int) -> None:
    tokens, mask = batch(length, 1)
    model = Mean()
    with pulled(LEVER, pad=PAD, multiple=4):
        model(tokens, mask)
    assert model.widths == [width]


def test_a_batch_that_is_rounded_past_its_width_stays_as_it_is() -> None:
    tokens, mask = batch(8, 1, width=9)
    model = Mean()
    with pulled(LEVER, pad=PAD, multiple=6) as hooks:
        model(tokens, mask)
    assert model.widths == [9]
    assert not hooks.done


def test_a_multiple_below_one_is_an_error() -> None:
    with pytest.raises(PlanError, match="'multiple' is 0 and must be at least 1"), pulled(LEVER, pad=PAD, multiple=0):
        pass


CASES = {
    "enumerated rows": """
        def f(rows, width):
            tokens = torch.full((len(rows), width), 7)
            for i, row in enumerate(rows):
                tokens[i, : len(row)] = row
            return tokens
        """,
    "rows by number": """
        def f(rows, width):
            order = torch.arange(len(rows))
            tokens = torch.full([len(rows), width], 7)
            mask = order > 0
            for i, at in enumerate(order.tolist()):
                tokens[i, : len(rows[at])] = rows[at]
            return tokens
        """,
    "pairs, nested subscript": """
        def f(rows, width):
            marks = list(range(len(rows)))
            tokens = torch.zeros(len(rows), width, dtype=torch.int64)
            for i, (row, mark) in enumerate(zip(rows, marks)):
                tokens[i][: row.shape[0]] = row
            return tokens
        """,
}


@pytest.mark.parametrize(("multiple", "width"), [(4, 8), (8, 8), (16, 11)])
def test_the_edit_rounds_up_to_the_multiple_and_never_past_the_width(multiple: int, width: int) -> None:
    text = "import torch\n" + dedent(CASES["enumerated rows"])
    place = {"file": "a.py", "function": "f", "code": "tokens = torch.full((len(rows), width), 7)"}
    made: dict[str, Any] = {}
    exec(edit(text, {"pad": 7, "multiple": multiple, **place}), made)
    assert made["f"]([torch.arange(3), torch.arange(5)], 11).shape == (2, width)


@pytest.mark.parametrize("name", CASES)
def test_the_edit_makes_the_batch_as_wide_as_its_longest_row(name: str) -> None:
    text = "import torch\n" + dedent(CASES[name])
    code = next(line.strip() for line in text.splitlines() if "tokens = " in line)
    results = []
    for one in (text, edit(text, {"pad": 7, "file": "a.py", "function": "f", "code": code})):
        made: dict[str, Any] = {}
        exec(one, made)
        results.append(made["f"]([torch.arange(3), torch.arange(5)], 11))
    assert results[1].shape == (2, 5)
    assert torch.equal(results[0][:, :5], results[1])


CALLED = {
    "a tensor": "model(tokens)",
    "a tuple": "model((tokens, lengths))",
    "several": "model(tokens, lengths)",
    "unpacked": "model(*(tokens, lengths))",
    "by name": "model(**dict(x=tokens, y=lengths))",
}


@pytest.mark.parametrize("how", CALLED)
def test_the_edit_cuts_what_the_model_is_called_with_where_the_batch_is_made_elsewhere(how: str) -> None:
    text = f"import torch\n\n\ndef f(model, tokens, lengths):\n    out = {CALLED[how]}\n    return out\n"
    place = {"file": "a.py", "function": "f", "code": f"out = {CALLED[how]}"}
    made: dict[str, Any] = {}
    exec(edit(text, {"pad": 7, "multiple": 4, **place}), made)

    def model(*args: Any, **kwargs: Any) -> Any:
        return args or tuple(kwargs.values())

    tokens, _ = batch(5, 3, width=11)
    lengths = torch.tensor([5, 3])
    got = made["f"](model, tokens, lengths)
    got = got[0] if how == "a tuple" else got
    assert torch.equal(got[0], tokens[:, :8])
    assert len(got) == 1 or torch.equal(got[1], lengths)
    everything, _ = batch(0, 0, width=11)
    got = made["f"](model, everything, lengths)
    assert torch.equal((got[0] if how == "a tuple" else got)[0], everything)


def test_tokens_inside_other_inputs_are_cut() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(PAD + 1, 3)

        def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
            words: Tensor = self.embed(pair[0])
            return words

    tokens, _ = batch(4, 2)
    with pulled(LEVER, pad=PAD) as hooks:
        assert Pair()((tokens, torch.tensor([4, 2]))).shape == (2, 4, 3)
        assert hooks.done == [LEVER.id]


REFUSED = {
    "something else": "FILLED; for i, row in enumerate(rows):\n        tokens[i, : len(row)] = row\n        count += 1",
    "only once": "FILLED; for i, row in enumerate(map(list, rows)):\n        tokens[i, : len(row)] = row",
    "from its start": "FILLED; for i, row in enumerate(rows):\n        tokens[i, -len(row) :] = row",
    "row's number": "FILLED; for i, row in enumerate(rows):\n        tokens[i, : lengths[i]] = row",
    "no loop": "FILLED; tokens.copy_(rows)",
    "names some of its inputs": "out = model(tokens, mask=mask)",
    "0 calls of a model": "out = torch.relu(tokens)",
    "2 calls of a model": "out = model(tokens) + other(tokens)",
    "unpacks more than one": "out = model(*tokens, *mask)",
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_cannot_be_told_from_the_text_is_left(why: str) -> None:
    filled = "tokens = torch.full((9, width), 7)"
    body = REFUSED[why].replace("FILLED; ", f"{filled}\n    ")
    text = f"import torch\n\n\ndef f(rows, width, model, other, tokens, mask):\n    {body}\n"
    with pytest.raises(EditError, match=why):
        edit(text, {"pad": 7, "file": "a.py", "function": "f", "code": body.splitlines()[0]})


@pytest.mark.parametrize(("longest", "kind"), [(0.6, Candidate), (1.0, Refusal)])
def test_it_is_offered_where_the_longest_rows_leave_room(longest: float, kind: type) -> None:
    run = EvidenceBuilder()
    run.padding(longest_fraction=longest)
    [said] = LEVER.propose(run.build(), [found(0.01)])
    assert isinstance(said, kind)
    if isinstance(said, Candidate):
        assert said.parameters["pad"] == 0


@pytest.mark.parametrize(
    ("ops", "is_risky"),
    [
        (["aten.mkldnn_rnn_layer"], True),
        (["aten.convolution"], True),
        (["aten._pack_padded_sequence", "aten._cudnn_rnn"], False),
        (["aten.addmm", "aten._softmax"], False),
    ],
)
def test_it_is_tried_alone_where_layers_read_the_padding(ops: list[str], is_risky: bool) -> None:
    run = EvidenceBuilder()
    run.padding(longest_fraction=0.6)
    for op in ops:
        run.operator(op)
    [said] = LEVER.propose(run.build(), [found(0.01)])
    assert isinstance(said, Candidate) and said.is_risky == is_risky


@pytest.mark.parametrize(
    ("width", "device", "multiple"), [(512, "cuda", 32), (64, "cuda", 8), (512, "cpu", 32), (24, "cpu", None)]
)
def test_widths_are_few_and_aligned_on_a_gpu(width: int, device: str, multiple: int | None) -> None:
    run = EvidenceBuilder(device_s=0.1 if device == "cuda" else None)
    run.padding(longest_fraction=0.6, shape=(4, width))
    [said] = LEVER.propose(run.build(), [found(0.01)])
    assert isinstance(said, Candidate)
    assert said.parameters.get("multiple") == multiple
