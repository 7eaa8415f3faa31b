"""Write docs/results.md: what each benchmark measures, its command, and its results by date and hardware.

python docs/generate_results.py            writes the page
python docs/generate_results.py --check    writes nothing; exits with 1 when the page is out of date
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from fnmatch import fnmatch
from pathlib import Path
from typing import Final

from generate_rules import plain

ROOT: Final = Path(__file__).parents[1]
RESULTS: Final = ROOT / "bench" / "results"
PAGE: Final = ROOT / "docs" / "results.md"
BY_HAND: Final = "By hand"
# Results whose file is not named like its script: the first pattern that fits, of the path below the date's folder.
NAMED: Final = (
    ("tune_plans/*", "bench/tune_examples.py"),
    ("tune/*", "bench/tune_device.py"),
    ("world_tune*", "bench/world/tune.py"),
    ("world_cures*", "bench/world/measure.py"),
    ("cures*", "bench/world/measure.py"),
    ("world*", "bench/world/run.py"),
    ("generated*", "bench/world/generated.py"),
    ("best_earlier/*", "bench/best_device.py"),
    ("best_*", "bench/best_device.py"),
    ("by_hand_*", "bench/best_device.py"),
    ("ways_*", "bench/compile_ways.py"),
    ("few_channels*", "bench/few_channels.py"),
    ("gelu_products*", "bench/gelu_products_device.py"),
    ("float8_gating*", "bench/float8_gating_device.py"),
    ("losses_*", "bench/best_device.py"),
    ("search_*", "bench/best_device.py"),
    ("account_*", "bench/best/account.py"),
    ("beyond*", "bench/beyond_device.py"),
    ("layouts*", "bench/layouts_device.py"),
    ("llama_layers*", "bench/llama_layers_device.py"),
    ("state_space*", "bench/state_space_device.py"),
    ("rows_device*", "bench/feeding_device.py"),
    ("callback*", "bench/callback_cost.py"),
    ("watch_cost*", "bench/watch_cost.py"),
    ("watch_look*", "bench/watch_cost.py"),
    ("fleet_store*", "bench/fleet_store.py"),
    ("watched_job*", BY_HAND),
    ("ranks*", "bench/ranks_device.py"),
    ("native*", "bench/native.py"),
    ("attention_shapes*", "bench/attention_shapes_device.py"),
    ("held_out*", "bench/check_examples.py"),
    ("gpt2-small*", "bench/device_check.py"),
    ("host-bound*", "bench/device_check.py"),
    ("summary*", "bench/device_check.py"),
    ("nanogpt_step*", BY_HAND),
    ("captured_updates*", BY_HAND),
    ("policies_and_language_models*", BY_HAND),
    ("run_start*", BY_HAND),
    ("float8_loss*", BY_HAND),
    ("machine*", "flatout machine"),
)
HARDWARE: Final = {
    "h200": "NVIDIA H200",
    "h200-x2": "2 NVIDIA H200",
    "h200-x4": "4 NVIDIA H200",
    "a100-published": "A100, as published by others",
    "published": "many devices, as published by others",
    "epyc-2-cores": "AMD EPYC, 2 cores",
    "epyc-family25-2-cores": "AMD EPYC (family 25), 2 cores",
    "epyc-family26-2-cores": "AMD EPYC (family 26), 2 cores",
    "xeon-2-cores": "Intel Xeon, 2 cores",
    "xeon-family6-2-cores": "Intel Xeon (family 6), 2 cores",
}


def script_of(path: Path) -> str:
    """The script, or the command, that writes a result."""
    inside = path.relative_to(RESULTS).as_posix().partition("/")[2]
    named = ROOT / "bench" / f"{path.stem}.py"
    if named.exists():
        return f"bench/{path.stem}.py"
    for pattern, script in NAMED:
        if fnmatch(inside, pattern):
            return script
    longest = max((p.stem for p in (ROOT / "bench").glob("*.py") if path.stem.startswith(p.stem)), key=len, default="")
    if not longest:
        raise SystemExit(f"{path}: no script is known that writes it; name it in docs/generate_results.py")
    return f"bench/{longest}.py"


def described(script: str) -> tuple[str, str]:
    """What a script measures, and how it is called, from its docstring."""
    if script == BY_HAND:
        return "Single measurements without a script; each file says what ran and how often.", ""
    if script.startswith("flatout "):
        return "What this machine can do.", script
    path = ROOT / script
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    first = " ".join(docstring.partition("\n\n")[0].split())
    usage = next(
        (line.strip() for line in docstring.splitlines() if line.strip().startswith("python ")), f"python {script}"
    )
    return first, usage


def results() -> dict[str, dict[str, list[Path]]]:
    """Paths by script and by folder, which is a date and a machine."""
    found: dict[str, dict[str, list[Path]]] = defaultdict(lambda: defaultdict(list))
    for path in sorted(p for p in RESULTS.rglob("*") if p.is_file() and p.parent != RESULTS):
        found[script_of(path)][path.relative_to(RESULTS).parts[0]].append(path)
    return found


def page() -> str:
    """The page as Markdown."""
    lines = [
        "# All results",
        "",
        "Every benchmark with a stored result: what it measures, the command, and the files in `bench/results`, the newest",
        "first. Results hold all samples or their intervals; [Benchmarks](benchmarks.md) says what follows from them.",
    ]
    for script, by_folder in sorted(results().items()):
        first, usage = described(script)
        lines += ["", f"## {script}", "", plain(first)]
        lines += ["", "```text", usage, "```"] if usage else []
        lines += ["", "| date | hardware | files |", "|---|---|---|"]
        for folder, paths in sorted(by_folder.items(), reverse=True):
            date, hardware = folder[:10], HARDWARE.get(folder[11:], folder[11:])
            names = [p.relative_to(RESULTS / folder).as_posix() for p in paths]
            shown = ", ".join(f"`{name}`" for name in names[:4])
            more = f" and {len(names) - 4} more" if len(names) > 4 else ""
            lines.append(f"| {date} | {hardware} | {shown}{more} |")
    return "\n".join(lines) + "\n"


def write_or_check(path: Path, wanted: str) -> int:
    """Write a page, or with --check say whether it is as wanted; the exit code."""
    if "--check" in sys.argv[1:]:
        if not path.exists() or path.read_text(encoding="utf-8") != wanted:
            sys.stdout.write(f"docs/{path.name} is out of date; run 'make docs' and commit it\n")
            return 1
        return 0
    path.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(write_or_check(PAGE, page()))
