from __future__ import annotations

from textwrap import dedent

import msgspec
import pytest
import torch
from tests.evidence_builder import EvidenceBuilder
from tests.lever_tools import edited, found, ran

from flatout.core.errors import EditError
from flatout.core.records.lever import Candidate, Refusal
from flatout.tune.levers.graph.hoist_constant import LEVER

FIELD = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    SCALE = 2.0

    def distances(x):
        return SCALE * (x[:, None] - x[None, :]).abs()

    class Field(nn.Module):
        def __init__(self, places, num):
            super().__init__()
            self.num = num
            self.register_buffer("places", places)
            self.weight = nn.Parameter(torch.ones(num))

        def features(self):
            steps = torch.arange(self.num, dtype=torch.float64)
            rows = []
            for step in steps:
                rows.append(torch.sin(self.places * step))
            return torch.stack(rows, dim=-1)

        def forward(self, x):
            distance = distances(self.places)
            near, index = distance.topk(self.num, dim=1, largest=False)
            known = self.features()
            return (x[index] * near + known).sum(dim=-1) * self.weight.sum()

    places = torch.randn(6, dtype=torch.float64)
    field = Field(places, 3).double()
    told = []
    for _ in range(3):
        value = field(torch.randn(6, dtype=torch.float64)).square().sum()
        value.backward()
        told.append((value.item(), field.weight.grad.tolist()))
"""


def hoisted(text: str, function: str, code: str) -> str:
    return edited(LEVER, text, file="train.py", function=function, code=code)


def test_constants_of_a_module_become_buffers_with_what_follows_from_them() -> None:
    text = hoisted(FIELD, "Field.forward", "distance = distances(self.places)")
    assert '        self.register_buffer("near", near, persistent=False)\n' in text
    assert "return (x[self.index] * self.near + known)" in text
    assert "distance" not in text.partition("def forward")[2]
    assert ran(text)["told"] == ran(FIELD)["told"]


def test_a_method_that_reads_buffers_alone_is_called_once() -> None:
    text = hoisted(FIELD, "Field.forward", "known = self.features()")
    assert 'self.register_buffer("known", self.features(), persistent=False)' in text and "+ self.known)" in text
    assert ran(text)["told"] == ran(FIELD)["told"]


def test_a_constant_of_a_data_set_becomes_an_attribute() -> None:
    text = """
        import torch
        from torch.utils.data import DataLoader, Dataset

        class Points(Dataset):
            def __init__(self, size):
                self.size = size

            def __len__(self):
                return 6

            def __getitem__(self, index):
                shift = torch.linspace(0, 1, self.size).square()
                return index + shift

        told = [batch.tolist() for batch in DataLoader(Points(3), 2)]
    """
    changed = hoisted(text, "Points.__getitem__", "shift = torch.linspace(0, 1, self.size).square()")
    assert "        self.shift = torch.linspace(0, 1, self.size).square()\n" in changed
    assert "register_buffer" not in changed
    assert ran(changed)["told"] == ran(text)["told"]


def test_a_part_of_an_expression_becomes_a_buffer() -> None:
    inline = FIELD.replace("known = self.features()", "pass").replace("+ known", "+ self.features()")
    text = hoisted(
        inline, "Field.forward", "return (x[index] * near + self.features()).sum(dim=-1) * self.weight.sum()"
    )
    assert 'self.register_buffer("features_", self.features(), persistent=False)' in text
    assert ran(text)["told"] == ran(inline)["told"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("distances(self.places)", "distances(self.weight)", "weight"),
        ("distances(self.places)", "distances(torch.rand(6))", "more than compute"),
        ("return SCALE", "print(x)\n        return SCALE", "analysed"),
        ("return SCALE", "x += 1\n        return SCALE", "written to"),
        ("value.backward()", "field.places.add_(1)", "may change"),
        ("value.backward()", "field.places = 2 * field.places", "may change"),
        ("value.backward()", "field.load_state_dict({})", "may change"),
        ("value.backward()", "SCALE += 1", "'SCALE' is written to"),
        ("near, index = distance", "distance.mul_(2)\n            near, index = distance", "written to"),
    ],
)
def test_what_may_change_stays(old: str, new: str, why: str) -> None:
    changed = FIELD.replace(old, new)
    assert changed != FIELD
    code = new if new.startswith("distances(") else "distances(self.places)"
    with pytest.raises(EditError, match=why):
        hoisted(changed, "Field.forward", f"distance = {code}")


LOOP = """
    import torch

    torch.manual_seed(0)
    told = []
    counts = [3, 4]
    for epoch in range(2):
        for step in range(3):
            x = torch.randn(2)
            shares = torch.tensor(counts) / sum(counts)
            told.append((x * shares + torch.ones(2).cumsum(0)).sum().item())
"""


def test_what_no_loop_changes_goes_before_the_outermost() -> None:
    text = hoisted(LOOP, "<module>", "shares = torch.tensor(counts) / sum(counts)")
    assert "\nshares = torch.tensor(counts) / sum(counts)\nfor epoch in range(2):\n" in text
    assert ran(text)["told"] == ran(LOOP)["told"]


def test_a_part_of_a_line_goes_before_the_loop() -> None:
    text = hoisted(LOOP, "<module>", "told.append((x * shares + torch.ones(2).cumsum(0)).sum().item())")
    assert "cumsum = torch.ones(2).cumsum(0)\nfor epoch" in text
    assert ran(text)["told"] == ran(LOOP)["told"]


def test_what_the_outer_loop_changes_stays_in_it() -> None:
    outer = LOOP.replace("for step", "counts.append(1)\n        del counts[2:]\n        for step")
    text = hoisted(outer, "<module>", "shares = torch.tensor(counts) / sum(counts)")
    assert "    shares = torch.tensor(counts) / sum(counts)\n    for step in range(3):\n" in text
    assert ran(text)["told"] == ran(outer)["told"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("x = torch", "counts[0] += 1\n            x = torch"),
        ("x = torch", "x = shares if step else torch"),
        ("shares = torch", "if step:\n                pass\n            shares = x * torch"),
        ("told.append", "shares.mul_(2)\n            told.append"),
    ],
)
def test_what_a_loop_changes_stays(old: str, new: str) -> None:
    code = "shares = x * torch.tensor(counts) / sum(counts)" if "x * torch" in new else ""
    with pytest.raises(EditError):
        hoisted(LOOP.replace(old, new), "<module>", code or "shares = torch.tensor(counts) / sum(counts)")


TEXTS = """
    import re
    import numpy as np

    WORD = re.compile("[a-z]+")

    def words(text):
        return [len(word) for word in WORD.findall(text.lower())]

    def window(tone):
        rows = []
        for start in range(2):
            rows.append(np.abs(tone[start:]).sum())
        return np.array(rows)

    told = []
    for text in ("a bc", "def", "a bc"):
        told.extend(words(text))
        told.append(window(np.arange(len(text))).tolist())
"""


def test_a_function_of_texts_whose_result_is_only_read_is_cached() -> None:
    text = hoisted(TEXTS, "words", "return [len(word) for word in WORD.findall(text.lower())]")
    assert "@functools.cache\ndef words(text):" in text and "import functools" in text
    left = ran(text)
    assert left["told"] == ran(TEXTS)["told"]
    assert left["words"].cache_info().hits == 1


def test_a_function_of_arrays_is_remembered() -> None:
    text = hoisted(TEXTS, "window", "rows.append(np.abs(tone[start:]).sum())")
    assert "@memoise\ndef window(tone):" in text and "from flatout import memoise" in text
    assert ran(text)["told"] == ran(TEXTS)["told"]


LOSS = """
import torch
from torch import nn
from torch.nn import functional as F


class Net(nn.Module):
    def forward(self, x):
        return x * 2, x + 1


net = Net().to("cpu")


def loss_of(output, x, mean):
    bce = F.mse_loss(output, x.view(-1, 3), reduction="sum")
    return bce + mean.square().sum()


for x in torch.randn(4, 2, 3):
    output, mean = net(x)
    loss = loss_of(output, x, mean)
    print(loss.item())
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("", ""),
        ("= loss_of(output, x, mean)", "= loss_of(net(x)[0], x, x)"),
        (
            "    output, mean = net(x)\n    loss = loss_of(output, x, mean)\n",
            "    loss = loss_of(x, x, x)\n    loss.backward()\n",
        ),
    ],
)
def test_a_function_of_what_a_model_computes_is_not_remembered(old: str, new: str) -> None:
    with pytest.raises(EditError, match="what a model has computed"):
        hoisted(LOSS.replace(old, new), "loss_of", 'bce = F.mse_loss(output, x.view(-1, 3), reduction="sum")')


def test_a_list_that_a_caller_may_write_to_is_remembered_as_a_copy() -> None:
    kept = TEXTS.replace(
        "told.extend(words(text))", "mine = words(text)\n        mine.append(0)\n        told.extend(mine)"
    )
    text = hoisted(kept, "words", "return [len(word) for word in WORD.findall(text.lower())]")
    assert "@memoise\ndef words" in text
    assert ran(text)["told"] == ran(kept)["told"]


@pytest.mark.parametrize(
    "line", ["rows.append(np.random.rand())", "tone[0] = 1", "COUNT.append(1)", "rows = open(tone)"]
)
def test_a_function_that_does_more_than_compute_is_refused(line: str) -> None:
    with pytest.raises(EditError):
        hoisted(TEXTS.replace("rows.append(np.abs(tone[start:]).sum())", line), "window", line)


def test_a_function_that_others_call_is_refused() -> None:
    handed = TEXTS.replace("told.extend(words(text))", "told.extend(*map(words, [text]))")
    with pytest.raises(EditError, match="handed on"):
        hoisted(handed, "words", "return [len(word) for word in WORD.findall(text.lower())]")


def test_the_callers_line_is_offered_where_the_constant_can_be_made_before(tmp_path: object) -> None:
    from pathlib import Path

    path = Path(str(tmp_path)) / "train.py"
    path.write_text(dedent(FIELD))
    lines = path.read_text().splitlines()
    number = {text.strip(): n for n, text in enumerate(lines, 1)}
    run = EvidenceBuilder()

    def line(text: str, function: str) -> int:
        index = run.line(str(path), number[text], text)
        run.sources[index] = msgspec.structs.replace(run.sources[index], file=str(path), function=function)
        return index

    inner = line("return SCALE * (x[:, None] - x[None, :]).abs()", "distances")
    outer = line("distance = distances(self.places)", "Field.forward")
    run.callers[inner] = (outer,)
    evidence = run.build()
    workload = msgspec.structs.replace(evidence.workload, command=("python", str(path)), cwd=str(tmp_path))
    evidence = msgspec.structs.replace(evidence, workload=workload)
    finding = msgspec.structs.replace(found(0.01), where=evidence.sources[inner], rule="overhead.recomputed-constant")
    [candidate] = LEVER.propose(evidence, [finding])
    assert isinstance(candidate, Candidate)
    assert candidate.parameters["code"] == "distance = distances(self.places)"
    assert candidate.where == evidence.sources[outer] and candidate.saved_s[1] >= 0.01


def test_a_run_without_constants_is_refused() -> None:
    [refusal] = LEVER.propose(EvidenceBuilder().build(), [])
    assert isinstance(refusal, Refusal)


def test_buffers_move_with_the_module() -> None:
    left = ran(hoisted(FIELD, "Field.forward", "known = self.features()"))
    assert left["field"].known.dtype is torch.float64 and "known" not in left["field"].state_dict()


def test_an_expression_of_arguments_is_computed_once_for_the_same_tensors() -> None:
    text = """
        import torch

        class Layer(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = torch.nn.Parameter(torch.ones(3, 2))

            def forward(self, input, adj):
                edge = adj.nonzero().t()
                return (input @ self.weight)[edge[0]]
    """
    after = edited(LEVER, text, function="Layer.forward", code="edge = adj.nonzero().t()")
    assert "@memoise\ndef _forward_of_adj(adj):\n    return adj.nonzero().t()" in after
    assert "        edge = _forward_of_adj(adj)\n" in after
    names = ran(after)
    layer, adj = names["Layer"](), torch.eye(600)
    first = layer(torch.ones(600, 3), adj)
    assert torch.equal(layer(torch.ones(600, 3), adj), first) and len(first) == 600
    adj[0, 1] = 1
    assert len(layer(torch.ones(600, 3), adj)) == 601


@pytest.mark.parametrize(
    "line",
    ["adj = adj.nonzero()", "edge = (input @ self.weight).nonzero()", "edge = torch.rand_like(adj)", "edge = adj"],
)
def test_an_expression_of_more_than_unchanged_arguments_is_refused(line: str) -> None:
    text = f"""
        import torch

        class Layer(torch.nn.Module):
            def forward(self, input, adj):
                {line}
                return input
    """
    with pytest.raises(EditError):
        edited(LEVER, text, function="Layer.forward", code=line)
