"""Write docs/against-the-best.md: plans of `flatout tune` beside the best public ways to train the same, from the newest results.

python docs/generate_best.py            writes the page
python docs/generate_best.py --check    writes nothing; exits with 1 when the page is out of date

Results are those of bench/best_device.py (`best_ROW.json` of plans of tune, `by_hand_ROW.json`, `losses_ROW.json`), of
bench/best/account.py (`account_ROW_SIDE.json`) and of bench/best_cpu.py (`best_cpu.json`); which scripts of the manifest a lever
was proved on comes from that and all results of bench/world/tune.py.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from statistics import geometric_mean
from typing import Any, Final

from best_accounts import accounts_part, newest_results
from generate_results import RESULTS, ROOT, write_or_check

for folder in ("bench", "bench/world"):
    sys.path.insert(0, str(ROOT / folder))
ROWS = import_module("best_device").ROWS
_cpu = import_module("best_cpu")
PAGE: Final = ROOT / "docs" / "against-the-best.md"
_NONE: Final = "-"
HEAD: Final = """\
# Against the best

Naive scripts are easy to beat. Here `flatout tune` takes a plain script, as a person would write it first. Its plan is raced
against the best public way to train the same that we know: compiled, in bfloat16, fused, at the setting that was fastest here.
"""
GPU_HEAD: Final = """\
## On a GPU

`python bench/best_device.py OUT` tunes the plain script and races the plan and all settings of the peer; where these are
several, the plan and the fastest alone take new stretches of steps then. Ratios are medians of paired stretches with 95 %
intervals, of samples a second: above 1 the plan is faster. Peers, their versions and settings are in `bench/best`. Plans "by
hand" are not of `flatout tune`: we chose their levers, to see what these gain. GPT-2 and the Llamas are tuned with smaller
batches than they race with, since untouched they do not fit, or take seconds a step.
"""
CPU_HEAD: Final = """\
## On two CPU cores

`python bench/best_cpu.py CHECKOUTS OUT` runs ten public scripts, unchanged: as they come, with the plan, and with `torch.compile`
of each outermost module (its default, max-autotune, and bfloat16). The mode that was fastest in a first round is raced again.
A run is a whole process with empty caches, so compiling counts. Ratios are of whole runs, the rounds after the first. In a
script of reinforcement learning episodes last as long as their numbers let them, so that compiled runs have other episodes.
"""
LEVERS_HEAD: Final = """\
## The same levers elsewhere

Nothing in these plans was made for one script. Of the scripts of other people in `bench/world`, each lever was proved on so many,
by itself or in a plan: equal results within its guarantee, and faster, as `flatout tune` judged it there.
"""


def raced_rows(stem: str) -> dict[str, tuple[dict[str, Any], Path]]:
    """The newest result of each row that was raced on a GPU: `stem` is 'best' for plans of tune, 'by_hand' for others."""
    found = {path.stem.removeprefix(f"{stem}_"): path for path in newest_results(RESULTS, f"{stem}_*.json").values()}
    return {name: (json.loads(found[name].read_text(encoding="utf-8")), found[name]) for name in ROWS if name in found}


def gpu_rows() -> dict[str, tuple[dict[str, Any], Path]]:
    """The newest result of each row: of a plan of tune where there is one."""
    return raced_rows("by_hand") | raced_rows("best")


def _gpu(results: dict[str, tuple[dict[str, Any], Path]]) -> Iterator[str]:
    yield from GPU_HEAD.splitlines()
    if not results:
        yield from ("", "No row has been raced on a GPU yet. These are the workloads, and the goal of each:")
    yield from ("", "| workload | peer | goal | plan over peer | by hand | peer, a second | plan |")
    yield "|---|---|---|---|---|---|---|"
    by_hand = raced_rows("by_hand")
    for name, row in ROWS.items():
        found = results[name][0] if name in results else {}
        is_tuned = found.get("planned_by") == "tune"
        for peer, wanted in row.peers.items():
            raced = found.get("over_peers", {}).get(peer)
            setting, ratio, rate = peer, "not raced yet", _NONE
            if raced is not None:
                setting = raced["setting"]
                ratio = _ratio(raced["ratio"]) if is_tuned else ratio
                rate = f"{found['a_second'][setting]:,.0f} {found['unit']}"
            chosen = by_hand[name][0].get("over_peers", {}).get(peer) if name in by_hand else None
            hand = _ratio(chosen["ratio"]) if chosen is not None else _NONE
            levers = ", ".join(f"`{lever}`" for lever in found.get("plan", ())) or _NONE
            levers = f"by hand: {levers}" if not is_tuned and found else levers
            yield f"| {row.title} | {setting} | {wanted.goal:.2f}x | {ratio} | {hand} | {rate} | {levers} |"
    losses = {path.stem.removeprefix("losses_"): path for path in newest_results(RESULTS, "losses_*.json").values()}
    for name, (found, path) in results.items():
        if name in losses:
            yield from _losses(name, json.loads(losses[name].read_text(encoding="utf-8")))
        yield from (
            "",
            f"Source of {ROWS[name].title}: `{path.relative_to(ROOT)}`, {found['device']}, torch {found['torch']}.",
        )
        yield from _peaks(found)
    yield from accounts_part(RESULTS, ROWS)


def _peaks(found: dict[str, Any]) -> Iterator[str]:
    """What the plan and the best setting of each peer held of the device."""
    peaks: dict[str, float] = {side: size for side, size in found.get("peak_gib", {}).items() if size}
    shown = ["flatout", *(one["setting"] for one in found.get("over_peers", {}).values())]
    if all(side in peaks for side in shown):
        yield "Peak of device memory: " + ", ".join(f"{side} {peaks[side]:.1f} GiB" for side in shown) + "."


def _losses(name: str, found: dict[str, Any]) -> Iterator[str]:
    losses: dict[str, list[float | None]] = found["losses"]
    rows = f" of {found['loss_batch']} rows" if found["loss_batch"] else ""
    num_seeds = max(map(len, losses.values()))
    yield from (
        "",
        f"Losses of {ROWS[name].title} after {found['steps']} steps{rows}, on {num_seeds} seeds ({found['device']}):",
        "",
        "| side | mean | from - to | each |",
        "|---|---|---|---|",
    )
    for side, values in losses.items():
        known = [v for v in values if v is not None]
        mean = f"{sum(known) / len(known):.4f} | {min(known):.4f} - {max(known):.4f}" if known else f"{_NONE} | {_NONE}"
        yield f"| {side} | {mean} | {', '.join(_NONE if v is None else f'{v:.4f}' for v in values)} |"


def _cpu_part() -> Iterator[str]:
    """The ten scripts on a CPU."""
    paths = sorted(RESULTS.glob("*/best_cpu.json"))
    if not paths:
        return
    result = json.loads(paths[-1].read_text(encoding="utf-8"))
    summary, machine = result["summary"], result["machine"]
    low, high = summary["interval"]
    yield from ("", *CPU_HEAD.splitlines(), "")
    yield f"{machine['name']}, {result['date']}, torch {machine['torch_version']}, {result['run_seconds']:.0f} s a run:"
    yield f"the geometric mean of {summary['scripts']} scripts is **{summary['sooner_than_best_compile']:.2f}x** of the"
    yield f"best compile ({low:.2f} - {high:.2f}), and {summary['sooner_than_untouched']:.2f}x of the untouched scripts."
    longer = summary.get(f"sooner_than_best_compile_{_cpu.LONG_S:.0f}_s")
    if longer:
        yield f"Runs of {_cpu.LONG_S:.0f} s untouched, worked out from the later steps, would end {longer:.2f}x as soon."
    yield from ("", f"Source: `{paths[-1].relative_to(ROOT)}`.", "")
    yield "| script | best compile | plan over it | later steps | plan over untouched | plan |"
    yield "|---|---|---|---|---|---|"
    for row in result["rows"]:
        if not row.get("peer"):
            yield f"| {row['name']} | {_NONE} | {row.get('error', 'not raced')[:60]} | {_NONE} | {_NONE} | {_NONE} |"
            continue
        over_peer, over_plain = (geometric_mean(_cpu.ratios(row, than)) for than in (row["peer"], "untouched"))
        later = _cpu.later_ratio(row, row["peer"])
        levers = ", ".join(f"`{lever}`" for lever in row["levers"]) or "empty"
        shown = f"{later:.2f}x" if later else _NONE
        yield f"| {row['name']} | {row['peer']} | {over_peer:.2f}x | {shown} | {over_plain:.2f}x | {levers} |"


def proofs() -> dict[str, dict[str, set[str]]]:
    """By lever and kind of machine, the manifest's scripts on which it was proved: by itself, or in a plan that was."""
    found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for path, rows in (("world_tune*.json", "scripts"), ("best_cpu.json", "rows")):
        for result in sorted(RESULTS.glob(f"*/{path}")):
            machine = "GPU" if "h200" in result.parent.name else "CPU"
            for script in json.loads(result.read_text(encoding="utf-8"))[rows]:
                proved = [tried["lever"] for tried in script.get("tried") or () if tried["outcome"] == "proved"]
                for lever in (*proved, *(script.get("levers") or ())):
                    found[lever][machine].add(script["name"])
    return found


def _levers(results: dict[str, tuple[dict[str, Any], Path]]) -> Iterator[str]:
    """The levers of the plans above, with the scripts of the manifest on which each was proved."""
    used: dict[str, list[str]] = defaultdict(list)
    for name, (found, _) in results.items():
        for lever in found["plan"]:
            used[lever].append(ROWS[name].title)
    paths = sorted(RESULTS.glob("*/best_cpu.json"))
    for row in json.loads(paths[-1].read_text(encoding="utf-8"))["rows"] if paths else ():
        for lever in row["levers"]:
            used[lever].append(row["name"])
    if not used:
        return
    elsewhere = proofs()
    yield from (
        "",
        *LEVERS_HEAD.splitlines(),
        "",
        "| lever | plans here | scripts on a CPU | on a GPU |",
        "|---|---|---|---|",
    )
    for lever in sorted(used, key=lambda name: (-len(set().union(*elsewhere[name].values())), name)):
        cpu, gpu = (len(elsewhere[lever][kind]) for kind in ("CPU", "GPU"))
        yield f"| [`{lever}`](levers/{lever}.md) | {len(used[lever])} | {cpu} | {gpu} |"


def _ratio(estimate: list[float]) -> str:
    value, low, high = estimate
    return f"{value:.2f}x ({low:.2f} - {high:.2f})"


def page() -> str:
    """The page as Markdown."""
    results = gpu_rows()
    lines = [*HEAD.splitlines(), "", *_gpu(results), *_cpu_part(), *_levers(results)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(write_or_check(PAGE, page()))
