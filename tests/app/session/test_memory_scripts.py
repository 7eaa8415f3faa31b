"""`flatout check` on a script whose memory grows: the report names the lines that keep things alive."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Check = Callable[..., Any]

SCRIPT = """
    import torch
    from torch import nn

    class Features:
        def __init__(self):
            self.table = torch.randn(5000, 64)
            self.seen = {}

        def __call__(self, index):
            if index not in self.seen:
                self.seen[index] = self.table[torch.randint(5000, (2048,))] * 2  # the cache
            return self.seen[index]

    def main():
        net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
        optimizer = torch.optim.Adam(net.parameters())
        total = 0
        for step in range(40):
            x = features(step)
            loss = (net(x) - x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            validation = (net(held_out) - held_out).square().mean()
            history["train"].append(loss.item())
            history["validation"].append(validation)  # the history
            total = total + loss  # the running sum
        print("mean", total.item() / 40)

    features = Features()
    held_out = torch.randn(256, 64)
    history = {"train": [], "validation": []}
    main()
"""


@pytest.mark.slow
@pytest.mark.long
def test_each_line_that_leaks_is_named(check: Check) -> None:
    ran = check(SCRIPT, "--seconds", "2", "--no-trials")

    assert ran.code == 0, ran.err
    assert ran.report is not None
    told = [(f["rule"], f["text"]) for f in ran.report["findings"]] + [
        (note["rule"], (note["where"] or {}).get("text", "")) for note in ran.report["diagnosis"]["notes"]
    ]
    for rule, line in (
        ("capacity.growing-store", "# the cache"),
        ("capacity.loss-history", "# the history"),
        ("capacity.loss-history", "# the running sum"),
    ):
        assert any(r == rule and text.endswith(line) for r, text in told), (line, told)
