"""`flatout check` on scripts whose memory grows: the report names the line that keeps things alive."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Check = Callable[..., Any]

RUNNING_SUM = """
    import torch
    from torch import nn

    def main():
        net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 1))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        total = 0
        for step in range(40):
            loss = net(torch.randn(64, 64)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total = total + loss  # the leak
        print("mean", total.item() / 40)

    main()
"""

VALIDATION = """
    import torch
    from torch import nn

    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    optimizer = torch.optim.Adam(net.parameters())
    held_out = torch.randn(256, 64)
    history = {"train": [], "validation": []}
    for step in range(40):
        x = torch.randn(256, 64)
        loss = (net(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        validation = (net(held_out) - held_out).square().mean()
        history["train"].append(loss.item())
        history["validation"].append(validation)  # the leak
"""

CACHE = """
    import torch
    from torch import nn

    class Features:
        def __init__(self):
            self.table = torch.randn(5000, 64)
            self.seen = {}

        def __call__(self, index):
            if index not in self.seen:
                self.seen[index] = self.table[torch.randint(5000, (2048,))] * 2  # the leak
            return self.seen[index]

    features = Features()
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 1))
    optimizer = torch.optim.AdamW(net.parameters())
    for step in range(40):
        loss = net(features(step)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "rule"),
    [
        (RUNNING_SUM, "capacity.loss-history"),
        (VALIDATION, "capacity.loss-history"),
        (CACHE, "capacity.growing-store"),
    ],
    ids=["running sum", "validation history", "cache"],
)
def test_the_line_that_leaks_is_named(check: Check, script: str, rule: str) -> None:
    ran = check(script, "--seconds", "2")

    assert ran.code == 0, ran.err
    assert ran.report is not None
    told = ran.report["findings"] + [
        {"rule": n["rule"], "text": (n["where"] or {}).get("text", "")} for n in ran.report["diagnosis"]["notes"]
    ]
    assert [f["text"] for f in told if f["rule"] == rule and f["text"].endswith("# the leak")]
