"""Tuning among levers that fail in every way: each costs itself alone, and is listed with its reason."""

from __future__ import annotations

import importlib.util
import os
import textwrap
from pathlib import Path

import pytest
from tests.evidence_builder import EvidenceBuilder, proposed

from flatout.check.rules.run import debug_mode
from flatout.core.records.lever import Lever
from flatout.report.parts.ladder import ladder_blocks
from flatout.report.text import plain_text
from flatout.tune.levers.graph import debug_off
from flatout.tune.search.script_search import SearchSettings, search_script
from flatout.tune.search.search_log import SearchLog
from flatout.tune.verify.proof_terms import ProofTerms
from flatout.tune.verify.side_process import Request

SCRIPT = """
    import torch
    from torch import nn

    torch.autograd.set_detect_anomaly(True)
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(12)), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    x, y = torch.randn(64, 32), torch.randn(64, 1)
    for step in range(20000):
        loss = (net(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""

LEVERS = """
    import os, signal, time
    from flatout.core.records.lever import Candidate, Lever

    def failing(id, harm):
        def propose(evidence, findings):
            saved_s = 0.9 * evidence.steps.whole_s
            yield Candidate(lever=id, saved_s=(saved_s, saved_s), because="it looks good")

        def apply(hooks, parameters):
            calls = []

            def change(module, given):
                calls.append(1)
                if len(calls) > 3:
                    harm(module)
                return given

            hooks.on_inputs(change)

        return Lever(id=id, title=id, guarantee="bounded", module=__name__, propose=propose, apply=apply)

    kept = []

    def leak(module):
        kept.append(bytearray(b"x" * (8 << 20)))

    def spoil(module):
        weight = next(module.parameters())
        if weight.grad is not None:
            weight.data.mul_(1.01)

    SEGFAULT = failing("fault.segfault", lambda module: os.kill(os.getpid(), signal.SIGSEGV))
    HANG = failing("fault.hang", lambda module: time.sleep(1000))
    WRONG = failing("fault.wrong", spoil)
    LEAK = failing("fault.leak", leak)
    GREEDY = failing("fault.greedy", lambda module: kept.append(bytearray(os.urandom(1 << 20) * (40 << 10))))
"""

ENTRY_POINTS = """
    [flatout.levers]
    segfault = faulty_levers:SEGFAULT
    hang = faulty_levers:HANG
    wrong = faulty_levers:WRONG
    leak = faulty_levers:LEAK
    greedy = faulty_levers:GREEDY
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this process, and those that it starts, find the script and the package of levers."""
    site = tmp_path / "site"
    info = site / "faulty_levers-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty-levers\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(textwrap.dedent(ENTRY_POINTS))
    (site / "faulty_levers.py").write_text(textwrap.dedent(LEVERS))
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(site))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr("flatout.tune.verify.side_process._PATIENCE_S", 0.5)  # what hangs is signalled soon
    return tmp_path


def faulty_levers(folder: Path) -> list[Lever]:
    spec = importlib.util.spec_from_file_location("faulty_levers", folder / "site" / "faulty_levers.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return [value for value in vars(module).values() if isinstance(value, Lever)]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.long
def test_each_failure_costs_itself_alone_and_is_told(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = EvidenceBuilder(forward=0.04, backward=0.05)
    run.model(run.line("train.py", 13))
    run.setting("detect_anomaly", "True", run.line("train.py", 5))
    run.tried(*proposed(debug_mode.RULE, run.build()), kept=0.4)

    tuned = search_script(
        Request(target="train.py"),
        Path("train.py"),
        run.build(),
        [debug_mode.RULE],
        [debug_off.LEVER, *faulty_levers(folder)],
        SearchSettings(terms=ProofTerms(budget_s=2.0, timeout_s=15.0, decisive=1.3), budget_s=300.0, log=SearchLog()),
    )

    print(plain_text(ladder_blocks(tuned), width=160))
    printed = capfd.readouterr()
    assert "Traceback" not in printed.out + printed.err
    lines = " ".join(printed.out.split())
    for fault, why in {
        "fault.segfault": "killed by signal 11 (SIGSEGV)",
        "fault.hang": "did not answer within 15 s",
        "fault.wrong": "not equal: in step",
        "fault.leak": "memory grows by",
        "fault.greedy": "MemoryError",
    }.items():
        after = lines.split(fault, 1)[1][:400]
        assert why in after, (fault, after)
    assert [planned.id for planned in tuned.plan.lever] == ["graph.debug-off"]
    assert not _left_behind(folder)


def _left_behind(folder: Path) -> list[str]:
    """Commands of other processes that still work in the folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cwd"):
        try:
            if path.resolve() == folder.resolve() and path.parent.name != str(os.getpid()):
                found.append((path.parent / "cmdline").read_text())
        except OSError:
            continue
    return found
