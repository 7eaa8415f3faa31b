from __future__ import annotations

from pathlib import Path
from textwrap import dedent
from typing import Any

import msgspec
import pytest
import torch
from tests.evidence_builder import EvidenceBuilder
from tests.lever_tools import ran

from flatout.check.rules.overhead.copy_waits import RULE
from flatout.core.errors import EditError
from flatout.core.records.evidence import Evidence
from flatout.core.records.lever import Candidate, Parameter, PlannedLever, Refusal
from flatout.core.records.plan import Plan
from flatout.tune.apply import applied
from flatout.tune.levers.communication.non_blocking_copies import LEVER, edit
from flatout.tune.rewrite.source import changed_places

SCRIPT = dedent("""\
    import torch

    def main(device):
        tokens = torch.arange(100).to(device)
        total = 0
        for step in range(5):
            rows = torch.randint(100, (4,)).to(device)
            weights = torch.full((4,), 0.5)
            total = total + (tokens[rows] * weights.to(device, torch.float64)).sum()
            total = total + scale(weights.to(device=device), rows.to("cpu").to(torch.float32))
        return total

    def scale(a, b):
        return (a * b.cpu()).sum()
    """)
ROWS = "rows = torch.randint(100, (4,)).to(device)"
SCALED = 'total = total + scale(weights.to(device=device), rows.to("cpu").to(torch.float32))'


def at(code: str, **more: Parameter) -> dict[str, Parameter]:
    return {"file": "train.py", "function": "main", "code": code} | more


def test_all_named_copies_stop_waiting_and_nothing_else_changes() -> None:
    text = SCRIPT
    for place in changed_places(at(ROWS, also=(f"train.py: main: {SCALED}",))):
        text = edit(text, place)
    expected = SCRIPT.replace(ROWS, "rows = torch.randint(100, (4,)).to(device, non_blocking=True)").replace(
        "weights.to(device=device)", "weights.to(device=device, non_blocking=True)"
    )
    assert text == expected
    torch.manual_seed(0)
    before = ran(SCRIPT)["main"]("cpu")
    torch.manual_seed(0)
    assert torch.equal(ran(text)["main"]("cpu"), before)


def test_larger_tensors_go_through_pinned_memory_where_there_is_a_device() -> None:
    text = edit(SCRIPT, at(SCALED, pinned=True))
    pinned = "(weights.pin_memory() if torch.cuda.is_available() else weights).to(device=device, non_blocking=True)"
    assert text == SCRIPT.replace("weights.to(device=device)", pinned)
    torch.manual_seed(0)
    before = ran(SCRIPT)["main"]("cpu")
    torch.manual_seed(0)
    assert torch.equal(ran(text)["main"]("cpu"), before)


def test_torch_is_imported_where_the_file_has_no_name_for_it() -> None:
    text = "from torch import ones\n\ndef f(x, device):\n    y = x.cuda()\n    return y\n"
    place = {"file": "train.py", "function": "f", "code": "y = x.cuda()"}
    assert "import torch\n" in (new := edit(text, place | {"pinned": True}))
    assert "y = (x.pin_memory() if torch.cuda.is_available() else x).cuda(non_blocking=True)" in new
    assert edit(text, place) == text.replace("x.cuda()", "x.cuda(non_blocking=True)")


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("x = y.to(torch.float16)", "no copy"),
        ("x = y.to('cpu')", "no copy"),
        ("x = y.to(device, non_blocking=True)", "no copy"),
        ("x = y.to(*where)", "no copy"),
        ("x = y + 1", "no copy"),
        ("for x in y.to(device):", "head of a block"),
    ],
)
def test_what_is_not_certain_is_left(line: str, why: str) -> None:
    text = f"import torch\n{line}\n" + ("    pass\n" if line.endswith(":") else "")
    with pytest.raises(EditError, match=why):
        edit(text, {"file": "train.py", "function": "<module>", "code": line})


def evidence(folder: Path, *, memory: str = "pageable", num_bytes: int = 64) -> Evidence:
    """A step of 100 ms on a device that idles for 40 of them, at two lines of SCRIPT."""
    (folder / "train.py").write_text(SCRIPT)
    run = EvidenceBuilder(device_s=0.06)
    for code, seconds in ((ROWS, 0.03), (SCALED, 0.002)):
        number = SCRIPT.splitlines().index(f"        {code}") + 1
        line = run.line("train.py", number, code, function="main")
        run.upload(line, num_bytes=num_bytes, seconds=seconds, memory=memory)  # type: ignore[arg-type]
    built = run.build()
    workload = msgspec.structs.replace(built.workload, command=("python", "train.py"), cwd=str(folder))
    sources = tuple(msgspec.structs.replace(s, file=str(folder / "train.py")) for s in built.sources)
    return msgspec.structs.replace(built, workload=workload, sources=sources)


@pytest.mark.parametrize(("num_bytes", "is_pinned"), [(64, False), (100_000, True)])
def test_it_is_proposed_for_all_lines_together(tmp_path: Path, num_bytes: int, is_pinned: bool) -> None:
    seen = evidence(tmp_path, num_bytes=num_bytes)
    [candidate] = LEVER.propose(seen, list(RULE.check(seen)))
    assert isinstance(candidate, Candidate)
    assert candidate.parameters == at(ROWS, also=(f"train.py: main: {SCALED}",)) | (
        {"pinned": True} if is_pinned else {}
    )
    assert "non_blocking" in edit(SCRIPT, candidate.parameters)


def test_a_plan_changes_all_places_of_the_running_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    planned = PlannedLever(id=LEVER.id, guarantee="exact", parameters=at(ROWS, also=(f"train.py: main: {SCALED}",)))
    with applied(Plan(lever=(planned,)), root=str(tmp_path)) as hooks:
        code = hooks.code_of(str(tmp_path / "train.py"))
    assert code is not None and hooks.done == [LEVER.id]
    left: dict[str, Any] = {"__name__": "train"}
    exec(code, left)
    sent: list[bool] = []
    original = torch.Tensor.to

    def noting(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        sent.append(kwargs.get("non_blocking", False))
        return original(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", noting)
    left["main"]("cpu")
    assert sum(sent) == 2 * 5, "both lines, in each of five steps"


def test_copies_from_memory_that_the_script_pinned_are_refused(tmp_path: Path) -> None:
    seen = evidence(tmp_path, memory="pinned")
    [refusal] = LEVER.propose(seen, list(RULE.check(seen)))
    assert isinstance(refusal, Refusal) and "pinned" in refusal.because


def test_it_is_refused_where_nothing_waits(tmp_path: Path) -> None:
    [refusal] = LEVER.propose(evidence(tmp_path), [])
    assert isinstance(refusal, Refusal) and "waits for no copy" in refusal.because
