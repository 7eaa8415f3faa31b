"""docs/generate_best.py: what the page says of results."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The generator, with results of its own."""
    monkeypatch.syspath_prepend(str(DOCS))
    before = set(sys.modules)
    import generate_best

    monkeypatch.setattr(generate_best, "RESULTS", tmp_path)
    monkeypatch.setattr(generate_best, "ROOT", tmp_path)
    yield generate_best
    for name in set(sys.modules) - before:  # 'tune' and 'scripts' of bench/world, among others
        if str(getattr(sys.modules[name], "__file__", "") or "").startswith((str(DOCS), str(DOCS.parent / "bench"))):
            del sys.modules[name]


def write(folder: Path, name: str, found: object) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(found))


RACED = {
    "title": "GPT-2",
    "plan": ["graph.compile"],
    "unit": "tokens",
    "device": "NVIDIA H200",
    "torch": "2.11.0",
    "a_second": {"nanoGPT: batch 64": 513_000.4, "flatout": 575_000.0},
    "over_peers": {"nanoGPT": {"setting": "nanoGPT: batch 64", "goal": 1.12, "ratio": [1.121, 1.101, 1.139]}},
    "planned_by": "tune",
}


def test_rows_are_the_newest_of_each_and_the_others_are_still_to_be_raced(best: Any, tmp_path: Path) -> None:
    write(tmp_path / "2026-11-01-h200", "best_gpt2.json", RACED | {"plan": ["memory.fusion"]})
    write(tmp_path / "2026-11-02-h200", "best_gpt2.json", RACED)
    write(tmp_path / "2026-11-02-h200", "losses_gpt2.json", {"untouched": [3.25, None]})
    write(
        tmp_path / "2026-11-03-h200",
        "world_tune.json",
        {
            "scripts": [
                {"name": n, "tried": [{"lever": "graph.compile", "outcome": o}]}
                for n, o in (("a", "proved"), ("b", "equal"))
            ]
        },
    )
    lines = best.page().splitlines()
    [gpt2] = [line for line in lines if line.startswith("| GPT-2 124M")]
    assert gpt2.split(" | ")[1:] == [
        "nanoGPT: batch 64",
        "1.12x",
        "1.12x (1.10 - 1.14)",
        "-",
        "513,000 tokens",
        "`graph.compile` |",
    ]
    assert sum("not raced yet" in line for line in lines) == len([p for r in best.ROWS.values() for p in r.peers]) - 1
    assert "| untouched | 3.2500, - |" in lines
    assert "| [`graph.compile`](levers/graph.compile.md) | 1 | 0 | 1 |" in lines


def test_plans_by_hand_are_no_plans_of_tune(best: Any, tmp_path: Path) -> None:
    by_hand = json.loads(json.dumps(RACED | {"planned_by": "hand", "plan": ["memory.fusion"]}))
    by_hand["over_peers"]["nanoGPT"]["ratio"] = [1.2, 1.1, 1.3]
    write(tmp_path / "2026-11-03-h200", "by_hand_gpt2.json", by_hand)

    def gpt2() -> list[str]:
        [line] = [line for line in best.page().splitlines() if line.startswith("| GPT-2 124M")]
        return line.split(" | ")[3:]

    assert gpt2() == ["not raced yet", "1.20x (1.10 - 1.30)", "513,000 tokens", "by hand: `memory.fusion` |"]
    write(tmp_path / "2026-11-02-h200", "best_gpt2.json", RACED)
    assert gpt2() == ["1.12x (1.10 - 1.14)", "1.20x (1.10 - 1.30)", "513,000 tokens", "`graph.compile` |"]


def test_a_step_is_accounted_for_to_its_end(best: Any, tmp_path: Path) -> None:
    families = {f"family {i}": {"s": 1e-3 * i, "floor_s": 5e-4 * i, "unknown_s": 0.0} for i in range(12, 0, -1)}
    account = {
        "device": "NVIDIA H200",
        "torch": "2.11.0",
        "flop_per_s": 8e14,
        "bytes_per_s": 4e12,
        "step_s": 0.1,
        "busy_s": 0.09,
        "idle_s": 0.01,
        "in_rows_s": 0.078,
        "families": families,
    }
    write(tmp_path / "2026-11-02-h200", "account_gpt2_plan.json", account)
    lines = best.page().splitlines()
    at = lines.index("### Where a step of GPT-2 124M, 1024 tokens goes: plan")
    rows = [line.split(" | ") for line in lines[at:] if line.startswith("| ")][1:]
    assert rows[0] == ["| family 12", "12,000", "6,000", "6,000 |"]
    assert sum(float(row[1].replace(",", "")) for row in rows[:12]) == pytest.approx(100_000)
    assert [row[0] for row in rows[-3:]] == ["| other kernels", "| busy without an operator", "| no kernel runs"]
    assert any("a step takes 100,000 us while it is profiled." in line for line in lines)

    write(
        tmp_path / "2026-11-02-h200", "best_gpt2.json", RACED
    )  # there it was not profiled, and waited for its host less
    step_us = 1e6 * 64 * 1024 / 575_000
    lines = best.page().splitlines()
    assert any(f"a step takes {step_us:,.0f} us in the race." in line for line in lines)
    assert f"| no kernel runs | {step_us - 90_000:,.0f} | 0 | {step_us - 90_000:,.0f} |" in lines


def test_an_account_goes_with_the_race_of_its_plan(best: Any, tmp_path: Path) -> None:
    account = {"device": "a", "torch": "2", "flop_per_s": 8e14, "bytes_per_s": 4e12, "step_s": 0.1, "busy_s": 0.09}
    account |= {"in_rows_s": 0.09, "families": {}, "levers": ["memory.fusion"]}
    folder = tmp_path / "2026-11-02-h200"
    write(folder, "account_gpt2_plan.json", account)
    write(folder, "best_gpt2.json", RACED)  # of another plan
    lines = best.page().splitlines()
    at = lines.index("### Where a step of GPT-2 124M, 1024 tokens goes: plan by hand")
    assert "a step takes 100,000 us while it is profiled." in lines[at + 2]
    by_hand = json.loads(json.dumps(RACED | {"planned_by": "hand", "plan": ["memory.fusion"]}))
    by_hand["a_second"]["flatout"] = 600_000.0
    write(folder, "by_hand_gpt2.json", by_hand)
    lines = best.page().splitlines()
    assert f"a step takes {1e6 * 64 * 1024 / 600_000:,.0f} us in the race." in lines[at + 2]


def test_the_scripts_on_a_cpu_have_their_ratios(best: Any, tmp_path: Path) -> None:
    def script(name: str, plan_s: float, levers: list[str]) -> dict[str, Any]:
        taken = {"untouched": [60.0] * 3, "plan": [plan_s] * 3, "compile": [45.0] * 3}
        later = {side: [s / 100 for s in seconds] for side, seconds in taken.items()}
        return {"name": name, "peer": "compile", "levers": levers, "whole_run_s": taken, "later_step_s": later}

    rows = [
        script("a", 30.0, ["memory.fusion"]),
        script("b", 20.0, ["memory.fusion"]),
        {"name": "c", "levers": [], "error": "no"},
    ]
    found = {
        "machine": {"name": "a CPU", "torch_version": "2.13.0"},
        "date": "2026-11-02",
        "run_seconds": 60.0,
        "summary": best._cpu.summarise(rows),
        "rows": rows,
    }
    write(tmp_path / "2026-11-02-cpu", "best_cpu.json", found)
    text = best.page()
    assert "| a | compile | 1.50x | 1.50x | 2.00x | `memory.fusion` |" in text
    assert "| b | compile | 2.25x | 2.25x | 3.00x | `memory.fusion` |" in text
    assert "| c | - | no | - | - | - |" in text
    assert "the geometric mean of 2 scripts is **1.84x** of the" in text
