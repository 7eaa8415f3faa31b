"""graph.compile-loop: loops of numbers are compiled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tests.evidence_builder import EvidenceBuilder
from tests.lever_tools import found

from flatout.core.errors import EditError
from flatout.core.records.lever import Candidate, Refusal
from flatout.core.records.workload import Source
from flatout.tune.levers.graph.compile_loop import LEVER, edit

HEAD = "import math\nimport random\n\nimport numpy as np\nimport torch\n\nSIZE = 6\nGAMMA = 0.9\nTABLE = {}\n\n\n"

CASES = {
    "a function of arrays": (
        "f",
        "out[row] = math.sin(image[row]) * SIZE",
        '''
def f(x):
    return torch.from_numpy(warp(x.numpy()))


def warp(image):
    """Text that stays."""
    out = np.zeros(len(image), dtype=np.float64)
    for row in range(len(image)):
        out[row] = math.sin(image[row]) * SIZE
    return out
''',
        "warp",
    ),
    "with a helper of the file": (
        "f",
        "return a * a + SIZE",
        """
def square(a):
    return a * a + SIZE


def f(x):
    return torch.from_numpy(squares(x.numpy()))


def squares(image):
    out = np.zeros_like(image)
    for i in reversed(range(image.shape[0] - 1)):
        out[i] = square(image[i])
    return out
""",
        "square",
    ),
    "a loop over tensors": (
        "f",
        "out[t] = running",
        """
def f(x):
    length = x.shape[0]
    out = torch.zeros(length, dtype=x.dtype)
    running = 0.0
    for t in reversed(range(length)):
        running = x[t].item() + GAMMA * running
        out[t] = running
    return out + running
""",
        "f",
    ),
    "a loop next to random numbers": (
        "f",
        "total += a[i] * noise",
        """
def f(x):
    noise = random.Random(0).gauss(0, 1)
    a = x.numpy()
    total = 0.0
    for i in range(len(a)):
        total += a[i] * noise
    return torch.tensor(total, dtype=x.dtype)
""",
        "f",
    ),
    "a loop in a method": (
        "f",
        "out[i] = self.decay * out[i - 1] + x[i]",
        """
class Filter:
    def __init__(self):
        self.decay = 0.5

    def run(self, x):
        out = x.clone()
        for i in range(1, x.size(0)):
            out[i] = self.decay * out[i - 1] + x[i]
        return out


def f(x):
    return Filter().run(x)
""",
        "Filter.run",
    ),
}


def edited(body: str, code: str, function: str) -> str:
    return edit(HEAD + body.strip("\n") + "\n", {"file": "a.py", "function": function, "code": code})


def results(text: str, name: str) -> Any:
    names: dict[str, Any] = {}
    exec(text, names)
    return names[name](torch.linspace(0.1, 2.0, 7, dtype=torch.float64))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "code", "body", "function"), CASES.values(), ids=list(CASES))
def test_the_numbers_are_the_same(name: str, code: str, body: str, function: str) -> None:
    new = edited(body, code, function)
    assert "@numba.njit" in new and "import numba" in new
    torch.testing.assert_close(results(HEAD + body, name), results(new, name), rtol=1e-14, atol=1e-14)


def test_a_loop_reads_as_a_person_would_have_moved_it() -> None:
    _, code, body, function = CASES["a loop over tensors"]
    assert edited(body, code, function) == HEAD.replace("import numpy", "import numba\nimport numpy") + (
        """@numba.njit
def f_loop(length, running, x, out):
    for t in range(length - 1, -1, -1):
        running = x[t] + GAMMA * running
        out[t] = running
    return running


def f(x):
    length = x.shape[0]
    out = torch.zeros(length, dtype=x.dtype)
    running = 0.0
    running = f_loop(length, running, x.numpy(), out.numpy())
    return out + running
"""
    )


@pytest.mark.slow
def test_what_it_writes_is_seen_in_the_tensor() -> None:
    name, code, body, function = CASES["a loop over tensors"]
    assert results(edited(body, code, function), name).abs().min() > 0


REFUSED = {
    "random numbers": (
        "out[i] = random.random()",
        "def f(out):\n    a = np.zeros(3)\n    for i in range(3):\n        out[i] = random.random()\n",
        "'random",
    ),
    "an object": (
        "out[i] = TABLE[i]",
        "def f(out):\n    for i in range(3):\n        out[i] = TABLE[i]\n",
        "is unknown|not known",
    ),
    "torch inside": (
        "out[i] = torch.sin(x[i])",
        "def f(x):\n    out = torch.zeros(3)\n    for i in range(3):\n        out[i] = torch.sin(x[i])\n    return out\n",
        "not known",
    ),
    "a list": (
        "total += values[i]",
        "def f(x):\n    values = [1.0, 2.0]\n    total = torch.zeros(2)\n    for i in range(2):\n        total += values[i]\n",
        "is a list",
    ),
    "objects gone through": (
        "out[i] = len(row)",
        "def f(rows):\n    out = torch.zeros(3)\n    for i, row in enumerate(rows):\n        out[i] = len(row)\n    return out\n",
        "iterated over",
    ),
    "a text": (
        "print('x', i)",
        "def f(x):\n    for i in range(2):\n        print('x', i)\n",
        "is a text",
    ),
    "no loop": ("y = x + 1", "def f(x):\n    y = x + 1\n    return y\n", "no loop"),
    "an exception caught": (
        "y = x[i]",
        "def f(x):\n    for i in range(3):\n        try:\n            y = x[i]\n        except IndexError:\n            pass\n",
        "no matter of numbers",
    ),
}


@pytest.mark.parametrize(("code", "text", "why"), REFUSED.values(), ids=list(REFUSED))
def test_it_refuses_what_is_not_certain(code: str, text: str, why: str) -> None:
    with pytest.raises(EditError, match=why):
        edited(text, code, "f")


def test_it_compiles_nothing_twice() -> None:
    _, code, body, function = CASES["a function of arrays"]
    once = edited(body, code, function)
    with pytest.raises(EditError, match="compiled already"):
        edit(once, {"file": "a.py", "function": function, "code": code})


def test_it_refuses_without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flatout.tune.levers.graph.compile_loop.find_spec", lambda name: None)
    [refused] = LEVER.propose(EvidenceBuilder().build(), [])
    assert isinstance(refused, Refusal) and "flatout[loops]" in refused.because
    _, code, body, function = CASES["a loop over tensors"]
    with pytest.raises(EditError, match="not installed"):
        edited(body, code, function)


def test_it_offers_itself_where_a_rule_saw_the_loop(tmp_path: Path) -> None:
    _, code, body, function = CASES["a loop over tensors"]
    script = tmp_path / "train.py"
    text = HEAD + body.strip("\n") + "\n"
    script.write_text(text, encoding="utf-8")
    number = next(i for i, line in enumerate(text.splitlines(), start=1) if line.strip() == code)
    evidence = EvidenceBuilder().build()
    workload = msgspec.structs.replace(evidence.workload, command=("python", "train.py"), cwd=str(tmp_path))
    evidence = msgspec.structs.replace(evidence, workload=workload)
    finding = msgspec.structs.replace(found(0.01), where=Source(file=str(script), line=number, function=function))

    [said] = LEVER.propose(evidence, [finding])
    assert isinstance(said, Candidate) and said.parameters["code"] == code
    assert said.saved_s[0] < said.saved_s[1]
    builder = EvidenceBuilder()
    builder.operator("aten.mul", builder.line("train.py", number, code), phase="backward")
    assert finding.where is not None
    differentiated = msgspec.structs.replace(builder.build(), workload=workload, sources=(finding.where,))
    [refused] = LEVER.propose(differentiated, [finding])
    assert isinstance(refused, Refusal)
    [refused] = LEVER.propose(evidence, [])
    assert isinstance(refused, Refusal) and LEVER.edit is edit
