from __future__ import annotations

from pathlib import Path
from textwrap import dedent
from typing import Any

import msgspec
import pytest
import torch
from tests.evidence_builder import EvidenceBuilder
from tests.lever_tools import ran

from flatout.core.errors import EditError
from flatout.core.records.lever import Candidate, Refusal
from flatout.tune.levers.graph.capture_update import LEVER, edit

HEAD = """
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Linear(4, 2)
optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
criterion = nn.MSELoss()
batches = [(torch.randn(3, 4), torch.randn(3, 2)) for _ in range(4)]
seen = []
is_clipped = True
"""
PLAIN = """
# every batch twice
for epoch in range(2):
    for x, y in batches:
        optimizer.zero_grad()
        loss = criterion(net(x), y)
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
"""
BUSY = """
total = 0.0
for epoch in range(2):
    for i, (x, y) in enumerate(batches):
        # the forward
        output = net(x)
        with torch.no_grad():
            error = (output - y).abs().mean()
            seen.append(error.item())
        loss = criterion(output, y)
        if is_clipped:
            loss = loss + 0.1 * output.square().mean()
        else:
            loss = loss * 1.0
        total += loss.item()
        optimizer.zero_grad()
        loss.backward()
        if is_clipped:
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        if i % 2:
            seen.append(loss.item() + error.item())
seen.append(total)
"""
OF_A_GENERATOR = """
import numpy as np

np.random.seed(0)
for epoch in range(2):
    for x, y in batches:
        net.train()
        optimizer.zero_grad()
        # noise
        z = torch.from_numpy(np.random.normal(0, 1, (x.shape[0], 4)).astype("float32"))
        loss = criterion(net(x + z), y)
        loss.backward()
        optimizer.step()
        seen.append(loss.item() + np.random.rand())
"""
IN_METHOD = """
class Agent:
    def __init__(self, net):
        self.net, self.weight, self.calls = net, 1.0, 0
        self.optimizer = torch.optim.Adam(net.parameters(), lr=0.1)

    def learn(self, batches, index=0):
        self.calls += 1
        x, y = batches[index]

        # what is to be learnt
        with torch.no_grad():
            target = y * 0.5

        loss = criterion(self.net(x), target) * self.weight
        self.optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        self.weight = self.weight * 0.9
        return loss.item()


agent = Agent(net)
for number in range(8):
    seen.append(agent.learn(batches, number % 4))
""".replace("        optimizer.step()", "        self.optimizer.step()")
OF_A_STEP = """
def train_step(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.item()


for number in range(8):
    seen.append(train_step(net, optimizer, *batches[number % 4]))
"""
IN_FUNCTION = """
def train(model, optimizer, batches, epoch):
    model.train()
    for x, y in batches:
        optimizer.zero_grad()
        output = model(x)
        loss = criterion(output, y)
        loss.backward()
        optimizer.step()
        seen.append(loss.item())


for epoch in range(3):
    train(net, optimizer, batches, epoch)
"""


def place(function: str = "<module>") -> dict[str, Any]:
    return {"file": "train.py", "function": function, "code": "optimizer.step()"}


@pytest.mark.parametrize(
    ("body", "function", "expected"),
    [
        (PLAIN, "<module>", ["def update(x, y):", "loss = update(x, y)\n        seen.append(loss.item())"]),
        (
            BUSY,
            "<module>",
            [
                "def update(x, y):\n    output = net(x)\n    with torch.no_grad():\n        error =",
                "return error, loss",
                "        # the forward\n        error, loss = update(x, y)\n"
                "        with torch.no_grad():\n            seen.append(error.item())\n        total += loss.item()\n",
            ],
        ),
        (
            IN_FUNCTION,
            "train",
            ["    model.train()\n\n    @captured_update(optimizer)\n    def update(x, y):\n", "loss = update(x, y)"],
        ),
    ],
)
@pytest.mark.slow
def test_the_edited_script_learns_the_same(body: str, function: str, expected: list[str]) -> None:
    new = edit(HEAD + body, place(function))
    assert "from flatout import captured_update" in new
    for part in expected:
        assert part in new
    before, after = ran(HEAD + body), ran(new)
    assert before["seen"] == after["seen"] and len(before["seen"]) >= 8
    assert torch.equal(before["net"].weight, after["net"].weight)


def test_random_numbers_of_numpy_are_drawn_before_the_update_and_modes_are_set_outside() -> None:
    new = edit(HEAD + OF_A_GENERATOR, place())
    assert "        net.train()\n        # noise\n        z = torch.from_numpy(" in new
    assert "        loss = update(x, z, y)\n        seen.append" in new
    before, after = ran(HEAD + OF_A_GENERATOR), ran(new)
    assert before["seen"] == after["seen"] and len(before["seen"]) == 8


def test_random_numbers_that_need_the_update_are_not_drawn_before_it() -> None:
    drawn = "z = torch.from_numpy(np.random.normal(0, 1, loss.shape))\n        loss = loss * z.mean()\n        loss.backward()"
    body = OF_A_GENERATOR.replace("net(x + z)", "net(x)").replace("loss.backward()", drawn)
    body = "\n".join(line for line in body.splitlines() if "x.shape[0]" not in line) + "\n"
    with pytest.raises(EditError, match="cannot wait until after the update, because of 'loss'"):
        edit(HEAD + body, place())


def test_an_update_in_a_method_gets_what_changes_between_calls() -> None:
    line = "self.optimizer.step()"
    new = edit(HEAD + IN_METHOD, {"file": "train.py", "function": "Agent.learn", "code": line})
    assert "        @captured_update(self.optimizer)\n        def update(x, target, weight):\n" in new
    assert "            return loss\n\n        loss = update(x, target, self.weight)\n        self.weight = " in new
    before, after = ran(HEAD + IN_METHOD), ran(new)
    assert before["seen"] == after["seen"] and len(before["seen"]) == 8
    assert torch.equal(before["net"].weight, after["net"].weight)


def test_an_update_that_is_a_function_reads_models_from_around_itself() -> None:
    new = edit(HEAD + OF_A_STEP, place("train_step"))
    assert "    @captured_update(optimizer)\n    def update(x, y):\n        optimizer.zero_grad()" in new
    before, after = ran(HEAD + OF_A_STEP), ran(new)
    assert before["seen"] == after["seen"] and len(before["seen"]) == 8


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("loss = self.loss(x, target)", "the loss is computed before the update"),
        (
            "loss = criterion(self.net(x), target) * self.weight\n        loss = self.loss(loss)",
            "the function sets 'self.calls'",
        ),
    ],
)
def test_a_method_whose_update_may_read_what_it_sets_is_left(line: str, why: str) -> None:
    body = IN_METHOD.replace("loss = criterion(self.net(x), target) * self.weight", line)
    method = "    def loss(self, *values):\n        return sum(values).sum() * self.calls\n\n"
    body = body.replace("    def learn(", method + "    def learn(")
    with pytest.raises(EditError, match=why):
        edit(HEAD + body, {"file": "train.py", "function": "Agent.learn", "code": "self.optimizer.step()"})


def test_the_function_stands_before_the_outermost_loop_with_its_comment() -> None:
    new = edit(HEAD + PLAIN, place())
    assert "    optimizer.step()\n    return loss\n\n\n# every batch twice\nfor epoch in range(2):" in new
    assert "is_clipped = True\n\n\n@captured_update(optimizer)\ndef update(x, y):" in new


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("for x, y in batches:\n    loss = net(x).mean()\n    optimizer.step()\n", "backward is not in the same block"),
        ("loss = net(batches[0][0]).mean()\nloss.backward()\noptimizer.step()\n", "in no loop, and in no function"),
        (
            "for x, y in batches:\n    loss = net(x).mean()\n    if loss.item() > 9:\n        break\n    loss.backward()\n"
            "    optimizer.step()\n",
            "leaves the update in the midst",
        ),
        (
            "for x, y in batches:\n    loss = net(x).mean()\n    scale = loss.item()\n    loss = loss / scale\n"
            "    loss.backward()\n    optimizer.step()\n",
            "cannot wait until after the update, because of 'loss'",
        ),
        (
            "for x, y in batches:\n    loss = net(x).mean()\n    seen.append(net.weight.sum().item())\n    loss.backward()\n"
            "    optimizer.step()\n",
            "because of 'net'",
        ),
        (
            "for x, y in batches:\n    optimizer = torch.optim.SGD(net.parameters(), 0.1)\n    loss = net(x).mean()\n"
            "    loss.backward()\n    optimizer.step()\n",
            "the loop makes the optimizer",
        ),
        (
            "for x, y in batches:\n    criterion.reduction = 'sum'\n    loss = criterion(net(x), y)\n    loss.backward()\n"
            "    optimizer.step()\n",
            "the loop sets 'criterion.reduction'",
        ),
        (
            "for i, (x, y) in enumerate(batches):\n    loss = net(x).mean()\n    if is_clipped:\n        extra = loss * 2\n"
            "    loss.backward()\n    optimizer.step()\n    seen.append(extra)\n",
            "'extra' is assigned in some cases alone",
        ),
        (
            "for x, y in batches:\n    loss = torch.compile(net)(x).mean()\n    loss.backward()\n    optimizer.step()\n",
            "compiles",
        ),
    ],
)
def test_what_is_not_certain_is_left(body: str, why: str) -> None:
    with pytest.raises(EditError, match=why):
        edit(HEAD + body, place())


IN_A_ROW = """
table, labels = torch.randn(12, 4), torch.randn(12, 2)
for epoch in range(3):
    order = torch.randperm(12)
    # all of them
    for start in range(0, len(order), 3):
        end = start + 3
        part = order[start:end]
        loss = criterion(net(table[part]), labels[part])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    seen.append(sum(part for part in [1.0, 2.0]))
seen.append(net.weight.sum().item())
"""
OVER_PARTS = IN_A_ROW.replace("for start in range(0, len(order), 3):", "for part in order.split(3):").replace(
    "        end = start + 3\n        part = order[start:end]\n", ""
)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (
            IN_A_ROW,
            "    # all of them\n    update.each([(order[start:(start + 3)],) for start in range(0, len(order), 3)])\n",
        ),
        (OVER_PARTS, "    # all of them\n    update.each([(part,) for part in order.split(3)])\n"),
    ],
)
def test_a_loop_over_minibatches_is_one_call(body: str, expected: str) -> None:
    new = edit(HEAD + body, place())
    assert expected in new
    assert ran(new)["seen"] == ran(HEAD + body)["seen"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("        optimizer.step()\n", "        optimizer.step()\n        seen.append(start)\n"),
        ("seen.append(net.weight.sum().item())", "seen.append(start)"),
        ("end = start + 3", "end = min(start + 3, int(order.max()))"),
        ("end = start + 3", "end = seen.append(start) or start + 3"),
        ("for start in range(0, len(order), 3):", "for start in iter([0, 3]):"),
        ("        optimizer.step()\n", "        optimizer.step()\n        seen.append(loss.item())\n"),
    ],
)
def test_a_loop_that_does_more_stays_a_loop(before: str, after: str) -> None:
    body = IN_A_ROW.replace(before, after)
    assert body != IN_A_ROW
    new = edit(HEAD + body, place())
    assert ".each(" not in new and "update(part" in new
    assert ran(new)["seen"] == ran(HEAD + body)["seen"]


@pytest.mark.parametrize(
    ("lines", "results"),
    [
        ("        output = net(x)\n        seen.append(output.sum().item())\n", ""),
        (
            "        with torch.no_grad():\n            a, (output, *b) = 1, (net(x), 2)\n        seen.append(output)\n",
            "",
        ),
        (
            "        if x:\n            output = x\n        else:\n            output = y\n        seen.append(output)\n",
            "",
        ),
        ("        if is_clipped:\n            output = x\n        seen.append(output)\n", "output"),
        ("        for output in y:\n            pass\n        seen.append(output)\n", "output"),
        ("        seen.append(lambda: output)\n        output = x\n", "output"),
        ("        seen.append(output)\n        output = x\n", "output"),
    ],
)
def test_only_what_is_read_before_it_is_assigned_again_comes_back(lines: str, results: str) -> None:
    text = HEAD + dedent("""
        output = batches[0][1]
        for epoch in range(2):
            for x, y in batches:
        {lines}
                for _ in range(2):
                    output = net(x)
                    loss = criterion(output, y)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
        """).format(lines=lines.rstrip("\n"))
    new = edit(text, place())
    returned = [line.strip() for line in new.splitlines() if line.startswith("    return")]
    assert returned == ([f"return {results}"] if results else [])


def test_what_the_loop_counts_or_sums_is_passed_or_waits() -> None:
    body = """
    factor = 1.0
    for x, y in batches:
        factor = factor * 0.5
        loss = criterion(net(x), y) * factor
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    """
    new = edit(HEAD + dedent(body), place())
    assert "def update(x, y, factor):" in new
    assert "    optimizer.step()\n    optimizer.zero_grad()\n    return loss" in new
    assert ran(HEAD + dedent(body))["seen"] == ran(new)["seen"]


def proposals(tmp_path: Path, text: str, *, device_s: float | None) -> list[Candidate | Refusal]:
    path = tmp_path / "train.py"
    path.write_text(text)
    run = EvidenceBuilder(device_s=device_s)
    number = text.splitlines().index("        optimizer.step()") + 1
    source = run.line(str(path), number, "optimizer.step()")
    run.sources[source] = msgspec.structs.replace(run.sources[source], file=str(path), function="<module>")
    run.optimizer(source)
    evidence = run.build()
    workload = msgspec.structs.replace(evidence.workload, command=("python", str(path)), cwd=str(tmp_path))
    return list(LEVER.propose(msgspec.structs.replace(evidence, workload=workload), ()))


def test_it_is_proposed_where_a_device_waits_for_an_update_that_can_be_captured(tmp_path: Path) -> None:
    candidate, compiled = proposals(tmp_path, HEAD + PLAIN, device_s=0.03)
    assert isinstance(candidate, Candidate) and isinstance(compiled, Candidate)
    assert candidate.parameters == place()
    assert compiled.parameters == place() | {"compiled": True} and compiled.saved_s[1] > candidate.saved_s[1]
    assert "@captured_update(optimizer, compiled=True)\n" in edit(HEAD + PLAIN, compiled.parameters)
    assert 0 < candidate.saved_s[0] < candidate.saved_s[1] <= 0.07 + 1e-9
    for device_s, why in ((None, "no CUDA device"), (0.099, "busy")):
        [refusal] = proposals(tmp_path, HEAD + PLAIN, device_s=device_s)
        assert isinstance(refusal, Refusal) and why in refusal.because
    [refusal] = proposals(tmp_path, HEAD + PLAIN.replace("loss.backward()", "help(loss)"), device_s=0.03)
    assert isinstance(refusal, Refusal) and "backward is not in the same block" in refusal.because


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (
            "for epoch in range(3):\n    for x, y in batches:\n        loss = net(x).mean()\n        if epoch:\n"
            "            loss = loss * 2\n        loss.backward()\n        optimizer.step()\n",
            "cannot wait until after the update",
        ),
        (
            "scale = 1.0\n\n\ndef anneal():\n    global scale\n    scale = 0.5\n\n\nfor x, y in batches:\n"
            "    loss = net(x).mean() * scale\n    loss.backward()\n    optimizer.step()\n",
            "'scale', which the update reads, is a global variable that a function sets",
        ),
    ],
)
def test_what_a_graph_would_take_for_constant_and_is_not_is_refused(body: str, why: str) -> None:
    with pytest.raises(EditError, match=why):
        edit(HEAD + body, place())


def test_a_sum_over_the_loop_waits_until_after_the_update() -> None:
    body = PLAIN.replace("seen.append(loss.item())", "seen.append(total.item())").replace(
        "        loss.backward()\n", "        total += loss.detach()\n        loss.backward()\n"
    )
    text = HEAD + "total = torch.zeros(())\n" + body
    new = edit(text, place())
    assert "loss = update(x, y)\n        total += loss.detach()\n" in new
    assert ran(text)["seen"] == ran(new)["seen"]
