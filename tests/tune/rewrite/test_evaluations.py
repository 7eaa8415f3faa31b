"""Evaluations that are kept from being compiled, in texts that run."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest
import torch

from flatout.tune.rewrite.evaluations import with_plain_evaluations
from flatout.tune.rewrite.source import parsed

SCRIPT = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x):
        with torch.no_grad():
            scale = self.linear(x).mean()
        return self.linear(x) * scale

@torch.no_grad()
def generate(network, x):
    for _ in range(3):
        x = torch.cat([x, network(x)[:, :1] * 0 + x], dim=0)
    return network(x)

torch.manual_seed(0)
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
data = torch.randn(8, 4)
losses = []
for step in range(3):
    loss = net(data).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        shown = loss * 2
    net.eval()
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        losses.append(net(data[:step + 2]).sum())
    net.train()
samples = generate(net, data[:1])
"""


def run(text: str) -> dict[str, Any]:
    namespace: dict[str, Any] = {"__name__": "script"}
    exec(textwrap.dedent(text), namespace)
    return namespace


def test_calls_without_gradients_are_kept_from_being_compiled() -> None:
    new = with_plain_evaluations(parsed(SCRIPT)).code
    stance = 'torch.compiler.set_stance("force_eager")'
    assert f"@torch.no_grad()\n@{stance}\ndef generate" in new
    assert f'    with torch.no_grad(), torch.autocast("cpu", enabled=False), {stance}:\n        losses' in new
    assert new.count("set_stance") == 2, "neither in the model nor where no model is called"
    before, after = run(SCRIPT), run(new)
    assert torch.equal(before["samples"], after["samples"])


def test_training_alone_is_compiled_then() -> None:
    from torch._dynamo.testing import CompileCounter

    counts = []
    for text in (SCRIPT, with_plain_evaluations(parsed(SCRIPT)).code):
        torch._dynamo.reset()
        counter = CompileCounter()
        compiled = text.replace("net = Net()\n", "net = Net()\nnet.compile(backend=counter)\n")
        namespace: dict[str, Any] = {"__name__": "script", "counter": counter}
        exec(compiled, namespace)
        counts.append(counter.frame_count)
    assert counts[1] == 1 < counts[0]


@pytest.mark.parametrize(
    "text", ["import torch\nx = 1\n", "import torch\nwith torch.no_grad():\n    x = torch.ones(2)\n"]
)
def test_other_files_stay_as_they_are(text: str) -> None:
    assert with_plain_evaluations(parsed(text)).code == text
