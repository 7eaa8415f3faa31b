from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import msgspec
import pytest
import torch
from tests.evidence_builder import EvidenceBuilder
from tests.lever_tools import ran

from flatout.core.errors import EditError
from flatout.core.records.evidence import Evidence
from flatout.core.records.lever import Candidate, Refusal
from flatout.core.records.memory import Memory, MemoryPart
from flatout.tune.levers.memory.accumulate import LEVER

MIB = 1 << 20

SCRIPT = """
    import torch
    from torch import nn
    import torch.nn.functional as F

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    data, labels = torch.randn(50, 6), torch.randint(3, (50,))
    rows = data.split(10)
    batches = [{"x": x, "y": y} for x, y in zip(data.split(10), labels.split(10))]
    losses = []
    LOOP
"""

LOOPS = {
    "rows of a loader": (
        "model = net(x)",
        """
        for x, y in zip(data.split(9), labels.split(9)):
            model = net(x)
            loss = F.cross_entropy(model, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        """,
    ),
    "rows drawn in the loop, all in one statement": (
        "loss = F.cross_entropy(net(data[chosen]), labels[chosen])",
        """
        for step in range(6):
            chosen = torch.randperm(50)[:13]
            optimizer.zero_grad()
            loss = F.cross_entropy(net(data[chosen]), labels[chosen])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        """,
    ),
    "a dictionary, a context, a scaler": (
        'with torch.autocast("cpu", enabled=False):',
        """
        for batch in batches:
            with torch.autocast("cpu", enabled=False):
                out = net(batch["x"].float())
                loss = F.cross_entropy(out, batch["y"])
            optimizer.zero_grad(set_to_none=True)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
        """,
    ),
    "numbered batches": (
        'loss = F.mse_loss(net(batch["x"]).mean(1), batch["x"][:, 0])',
        """
        for number, batch in enumerate(batches):
            loss = F.mse_loss(net(batch["x"]).mean(1), batch["x"][:, 0])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        """,
    ),
}


def text_of(loop: str) -> str:
    return dedent(SCRIPT).replace("LOOP", dedent(loop).strip())


def edited(loop: str, model: str, parts: int) -> str:
    text = text_of(loop)
    backward = next(line.strip() for line in text.splitlines() if ".backward()" in line)
    assert LEVER.edit is not None
    place = {"file": "train.py", "function": "<module>", "code": backward, "model": model}
    return LEVER.edit(text, {**place, "parts": parts})


@pytest.mark.slow
@pytest.mark.parametrize("parts", [2, 3, 8])
@pytest.mark.parametrize(("model", "loop"), LOOPS.values(), ids=LOOPS.keys())
def test_the_same_steps_come_of_parts(model: str, loop: str, parts: int) -> None:
    text = edited(loop, model, parts)
    before, after = ran(text_of(loop)), ran(text)
    assert "_part" in text
    torch.testing.assert_close(after["losses"], before["losses"], rtol=1e-5, atol=1e-6)
    for one, two in zip(before["net"].parameters(), after["net"].parameters(), strict=True):
        torch.testing.assert_close(two, one, rtol=1e-5, atol=1e-6)


def test_each_part_is_half_of_the_batch() -> None:
    model, loop = LOOPS["rows of a loader"]
    seen: list[int] = []
    text = (
        edited(loop, model, 2).replace("net = nn", "net = watch(nn").replace("nn.Linear(16, 3))", "nn.Linear(16, 3)))")
    )

    def watch(net: torch.nn.Module) -> torch.nn.Module:
        net.register_forward_pre_hook(lambda _, given: seen.append(len(given[0])))
        return net

    ran(text, watch=watch)
    assert seen[:4] == [5, 4, 5, 4]
    assert sum(seen) == 50


REFUSED = {
    "what the model gave is read later": (
        "model = net(x)",
        """
        for x, y in zip(data.split(9), labels.split(9)):
            model = net(x)
            loss = F.cross_entropy(model, y)
            loss.backward()
            optimizer.step()
            losses.append(model.argmax(1))
        """,
        "'model' is read outside",
    ),
    "something is done in between": (
        "model = net(x)",
        """
        for x, y in zip(data.split(9), labels.split(9)):
            model = net(x)
            print(model.shape)
            loss = F.cross_entropy(model, y)
            loss.backward()
        """,
        "is between the model's call and the backward",
    ),
    "nothing new comes in": (
        "loss = F.cross_entropy(net(data), labels)",
        """
        for step in range(3):
            loss = F.cross_entropy(net(data), labels)
            loss.backward()
        """,
        "nothing that comes anew",
    ),
    "two losses": (
        "one, two = net(x).chunk(2)",
        """
        for x in data.split(10):
            one, two = net(x).chunk(2)
            (one.mean() + two.mean()).backward()
        """,
        "not one name",
    ),
    "keywords in a dictionary": (
        "loss = net(**batch).sum()",
        """
        for batch in batches:
            loss = net(**batch).sum()
            loss.backward()
        """,
        "passes on more",
    ),
}


@pytest.mark.parametrize(("model", "loop", "why"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_not_certain_is_refused(model: str, loop: str, why: str) -> None:
    with pytest.raises(EditError, match=why):
        edited(loop, model, 2)


def observed(folder: Path, loop: str, *, activations: int) -> Evidence:
    """A run of the script whose model was called, and whose backward started, where the text says."""
    text = text_of(loop)
    path = folder / "train.py"
    path.write_text(text)
    lines = text.splitlines()
    builder = EvidenceBuilder()
    for what, put in (("net(x)", builder.model), (".backward()", builder.backward_at)):
        number = next(i for i, line in enumerate(lines, start=1) if what in line)
        put(builder.line(str(path), number, lines[number - 1].strip(), function="<module>"))
    parts = (MemoryPart(kind="activations", bytes=activations, num_tensors=9, module="Net"),)
    memory = Memory(device="cpu", peak_bytes=300 * MIB, peak_phase="backward", at_peak=parts)
    evidence = builder.build()
    workload = msgspec.structs.replace(evidence.workload, command=("python", "train.py"), cwd=str(folder))
    sources = tuple(msgspec.structs.replace(s, file=str(path)) for s in evidence.sources)
    return msgspec.structs.replace(evidence, workload=workload, memory=(memory,), sources=sources)


def test_more_parts_save_more_memory_and_cost_time(tmp_path: Path) -> None:
    _, loop = LOOPS["rows of a loader"]
    said = list(LEVER.propose(observed(tmp_path, loop, activations=200 * MIB), ()))
    offered = [c for c in said if isinstance(c, Candidate)]
    assert [c.parameters["parts"] for c in offered] == [2, 4, 8]
    assert [c.saved_bytes // MIB for c in offered] == [100, 150, 175]
    assert all(c.saved_s[0] < c.saved_s[1] < 0 for c in offered)
    assert offered[0].parameters["model"] == "model = net(x)"


@pytest.mark.parametrize(("activations", "why"), [(5 * MIB, "small part"), (200 * MIB, "is read outside")])
def test_where_it_saves_little_or_is_not_certain_it_says_why(tmp_path: Path, activations: int, why: str) -> None:
    _, loop, _ = REFUSED["what the model gave is read later"]
    [refusal] = LEVER.propose(observed(tmp_path, loop, activations=activations), ())
    assert isinstance(refusal, Refusal)
    assert why in refusal.because
