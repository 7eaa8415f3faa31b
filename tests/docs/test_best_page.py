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

LOSSES = {
    "steps": 500,
    "loss_batch": 16,
    "device": "NVIDIA H200",
    "losses": {"untouched": [3.25, None, 3.15], "nanoGPT: batch 64": [None, None, None]},
}


def test_rows_are_the_newest_of_each_and_the_others_are_still_to_be_raced(best: Any, tmp_path: Path) -> None:
    write(tmp_path / "2026-11-01-h200", "best_gpt2.json", RACED | {"plan": ["memory.fusion"]})
    write(tmp_path / "2026-11-02-h200", "best_gpt2.json", RACED)
    write(tmp_path / "2026-11-02-h200", "losses_gpt2.json", LOSSES)
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
    assert "Losses of GPT-2 124M, 1024 tokens after 500 steps of 16 rows, on 3 seeds (NVIDIA H200):" in lines
    assert "| untouched | 3.2000 | 3.1500 - 3.2500 | 3.2500, -, 3.1500 |" in lines
    assert "| nanoGPT: batch 64 | - | - | -, -, - |" in lines
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
    write(tmp_path / "2026-11-02-h200", "account_gpt2_peer.json", account | {"counts_in_place_twice": True})
    lines = best.page().splitlines()
    at = lines.index("### GPT-2 124M, 1024 tokens")
    rows = [line.split(" | ") for line in lines[at:] if line.startswith("| ")]
    rows = rows[1 : next(i for i, row in enumerate(rows) if row[0] == "| all") + 1]
    assert rows[0] == ["| family 12", "12,000", "6,000", "12,000", "6,000 |"]
    for column in (1, 3):
        parts = [float(row[column].replace(",", "")) for row in rows]
        assert sum(parts[:-1]) == parts[-1] == pytest.approx(100_000)
    floors = [row[2] for row in rows if row[2] != "-"]
    assert sum(float(each.replace(",", "")) for each in floors[:-1]) == float(floors[-1].replace(",", "")) == 39_000
    assert [row[0] for row in rows[-4:-1]] == ["| other kernels", "| busy without an operator", "| no kernel runs"]
    assert lines[at + 2].startswith(
        "- peer: a step takes 100,000 us while it is profiled; NVIDIA H200, torch 2.11.0, 800"
    )
    assert [line for line in lines[at : at + 6] if "Floors are too low" in line] == [lines[at + 4]]  # of the plan alone

    write(
        tmp_path / "2026-11-02-h200", "best_gpt2.json", RACED
    )  # there it was not profiled, and waited for its host less
    step_us, peer_us = 1e6 * 64 * 1024 / 575_000, 1e6 * 64 * 1024 / 513_000.4
    lines = best.page().splitlines()
    assert any(f"- plan: a step takes {step_us:,.0f} us in the race;" in line for line in lines)
    assert f"| no kernel runs | {peer_us - 90_000:,.0f} | 0 | {step_us - 90_000:,.0f} | 0 |" in lines


def test_how_far_a_plan_could_get_counts_the_kernels_of_libraries_as_they_are(best: Any, tmp_path: Path) -> None:
    families = {"attention": {"s": 0.04, "floor_s": 0.02}, "compiled kernels": {"s": 0.03, "floor_s": 0.01}}
    account = {"device": "NVIDIA H200", "torch": "2.11.0", "flop_per_s": 8e14, "bytes_per_s": 4e12}
    account |= {"step_s": 0.075, "busy_s": 0.07, "in_rows_s": 0.07, "families": families}
    write(tmp_path / "2026-11-02-h200", "account_gpt2_plan.json", account)
    assert "would take" not in best.page()
    write(tmp_path / "2026-11-02-h200", "account_gpt2_peer.json", account)
    [line] = [line for line in best.page().splitlines() if "would take" in line]
    assert line.endswith("the plan would take 50,000 us: 1.50x of the peer. The goal is 1.12x.")


def test_kernels_that_lose_most_are_named_with_what_they_lose(best: Any, tmp_path: Path) -> None:
    account = {"device": "a", "torch": "2", "flop_per_s": 8e14, "bytes_per_s": 4e12, "step_s": 0.1, "busy_s": 0.09}
    kernel = {
        "op": "inductor.triton_poi_fused_gelu_0",
        "calls": 12,
        "s": 5e-3,
        "floor_s": 2e-3,
        "inputs": [[64, 8], []],
    }
    small = {"op": "aten.add", "calls": 1, "s": 6e-5, "floor_s": 5e-5, "inputs": []}
    write(
        tmp_path / "2026-11-02-h200",
        "account_gpt2_plan.json",
        account | {"in_rows_s": 0.09, "families": {}, "rows": [kernel, small]},
    )
    lines = best.page().splitlines()
    at = lines.index("Furthest above their floor, plan:")
    assert lines[at + 2] == "- 3,000 us over 2,000: `triton_poi_fused_gelu_0`, 12 calls (64x8, number)"
    assert not any("aten.add" in line for line in lines)


def test_an_account_goes_with_the_race_of_its_plan(best: Any, tmp_path: Path) -> None:
    account = {"device": "a", "torch": "2", "flop_per_s": 8e14, "bytes_per_s": 4e12, "step_s": 0.1, "busy_s": 0.09}
    account |= {"in_rows_s": 0.09, "families": {}, "levers": ["memory.fusion"]}
    folder = tmp_path / "2026-11-02-h200"
    write(folder, "account_gpt2_plan.json", account)
    write(folder, "best_gpt2.json", RACED)  # of another plan
    assert any(line.startswith("- plan by hand: a step takes 100,000 us while") for line in best.page().splitlines())
    by_hand = json.loads(json.dumps(RACED | {"planned_by": "hand", "plan": ["memory.fusion"]}))
    by_hand["a_second"]["flatout"] = 600_000.0
    write(folder, "by_hand_gpt2.json", by_hand)
    step_us = 1e6 * 64 * 1024 / 600_000
    assert any(
        f"- plan by hand: a step takes {step_us:,.0f} us in the race;" in line for line in best.page().splitlines()
    )


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
