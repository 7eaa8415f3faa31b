"""docs/benchmarks.md: its figures come from stored results, and from nowhere else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
SCRIPT = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import generate_benchmarks as page
from benchmark_claims import Claim, Run
path = page.RESULTS / sys.argv[2]
page.stored = lambda pattern: ([path], {"extra": {"flatout": 7, "fabric": 68}})
print(page.run_lines(Run(sys.argv[2], [Claim("Python calls a step: {flatout}, {" + sys.argv[3] + "}.", lambda r: r["extra"])])))
"""
RESULT = "2026-11-22-epyc-2-cores/loop_overhead.json"


def generated(name: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", SCRIPT, str(DOCS), RESULT, name]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_claim_has_the_figures_of_its_result_with_hardware_date_command_and_file() -> None:
    text = generated("fabric").stdout
    assert "Python calls a step: 7, 68." in text
    assert f"AMD EPYC, 2 cores, 2026-11-22** (`bench/results/{RESULT}`)" in text
    assert "python bench/loop_overhead.py" in text


def test_a_result_without_that_figure_is_an_error() -> None:
    run = generated("accelerate")
    assert run.returncode == 1
    assert (
        f"bench/results/{RESULT} does not hold what docs/benchmark_claims.py reads: KeyError('accelerate')"
        in run.stderr
    )
