"""Source that takes values to NumPy: whether what left comes back, and on which lines."""

from __future__ import annotations

from textwrap import dedent

import pytest

from flatout.check.observe.array_flow import ArrayFlow, array_flows

HEAD = "import numpy as np, torch\nfrom scipy import ndimage\n"


def flow_of(body: str) -> ArrayFlow | None:
    """The flow of a file with this text below two lines of imports; its calls of `.numpy()` were all observed."""
    text = HEAD + dedent(body).lstrip("\n")
    away = [number for number, line in enumerate(text.splitlines(), start=1) if ".numpy()" in line]
    flows = array_flows(text, away)
    assert len(flows) <= 1
    return flows[0] if flows else None


@pytest.mark.parametrize(
    "body",
    [
        "x = torch.from_numpy(np.sort(y.detach().numpy()))",
        "a = y.numpy()\nb = np.sort(a)[::-1] * 2\nx = torch.tensor(b.copy(), dtype=torch.float32)",
        "rows = []\nfor t in ts:\n    rows.append(ndimage.zoom(t.numpy(), 2))\nx = torch.as_tensor(np.stack(rows))",
        "a = [np.roll(t, 1) for t in y.cpu().numpy()]\nx = torch.FloatTensor(a)",
        "a = y.numpy()\na[0] = 0\nself.kept = a\nx = torch.tensor(self.kept)",
        "while True:\n    x = torch.tensor(state)\n    state = np.tanh(x.numpy())",
    ],
)
def test_what_comes_back_is_followed(body: str) -> None:
    assert flow_of(body) is not None


@pytest.mark.parametrize(
    "body",
    [
        "losses.append(loss.detach().numpy())\nx = torch.from_numpy(data[0])",
        "accuracy = np.mean(np.argmax(y.numpy(), 1) == labels)\nz = torch.FloatTensor(np.random.normal(0, 1, (4, 8)))",
        "obs, reward = env.step(action.cpu().numpy())\nx = torch.Tensor(obs)",
        "text = tokenizer.decode(y.numpy())\nx = torch.tensor(tokenizer.encode(text))",
        "a = y.numpy()\na = load(path)\nx = torch.from_numpy(a)",
        "x = torch.zeros(y.numpy().shape)",
        "def (",
    ],
)
def test_what_only_leaves_or_only_comes_is_none(body: str) -> None:
    assert flow_of(body) is None


def test_the_lines_between_are_those_that_work_on_the_values() -> None:
    flow = flow_of(
        """
        def smooth(a):
            return np.convolve(a, [1, 2, 1])

        def step(model, x, y):
            out = model(x)
            a = out.detach().numpy()
            loss = (out - y).square().mean()
            b = smooth(a)
            loss.backward()
            return torch.from_numpy(b)
        """
    )

    assert flow == ArrayFlow(away=(8,), back=(12,), spans=((3, 4), (8, 8), (10, 10), (12, 12)))
