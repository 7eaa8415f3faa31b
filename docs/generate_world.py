"""Write the pages in docs/world from the newest results: what `check` said of other people's scripts, what `tune` made of them.

python docs/generate_world.py            writes the pages
python docs/generate_world.py --check    writes nothing; exits with 1 when a page is out of date
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import groupby
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from generate_rules import written

sys.path.insert(0, str(Path(__file__).parents[1] / "bench" / "world"))
_bench = import_module("tune")
gain, step_gain, is_learnt = _bench.gain, _bench.step_gain, _bench.is_learnt
"""The benchmark's own arithmetic."""
FOLDER = Path(__file__).parent / "world"
RESULTS = Path(__file__).parents[1] / "bench" / "results"
_FINDINGS = 2
_WORTH = 1.15
_RACED_ON = "2026-11-25-epyc-2-cores"
_NONE = "-"


def page(
    result: dict[str, Any],
    source: str,
    *,
    on_device: dict[str, Any],
    device_source: str,
    raced: dict[str, Any],
    raced_source: str,
) -> str:
    """The page of results that `bench/world/run.py --out` wrote: on a CPU, on a GPU, and on the CPU that cures were raced on."""
    machine, scripts = result["machine"], result["scripts"]
    lines = [
        "# Other people's scripts",
        "",
        "`flatout check` on public training, fine-tuning, reinforcement-learning and inference scripts, each unchanged and at",
        "the commit named, with a small stand-in for its data set. A plain timer in the same process, which knows nothing of",
        f"flatout, says how long a step takes. {machine['cpu_model']}, one core a script, torch {machine['torch_version']},",
        f"{result['date']}; the figures lie in `{source}`, and `bench/world/README.md` says how to take them again.",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in result["summary"].items()),
        "",
        "A step is right within 10 % of the timer's in the same process or of the plain run's. A cure is a change that an",
        "expert would try, raced against the untouched script by `bench/world/measure.py`; it counts from 1.15x on.",
        "`unexplained` is the share of the step that the report cannot assign.",
        "",
        *_raced(raced, raced_source, scripts),
        "The rules were mended on earlier reports of the same scripts, so expect less on scripts that nobody has looked at.",
        "",
        "## Every script",
        "",
        "| script | step by the timer | by check | unexplained | what check names first |",
        "|---|---|---|---|---|",
        *(_row(script) for script in scripts),
        "",
        "## Cures that an expert measured",
        "",
        "| script | cure | measured | named | predicted |",
        "|---|---|---|---|---|",
        *_cures(scripts),
        "",
        *_device(on_device, device_source),
        "",
        "## Repositories",
        "",
        "| repository | commit | licence | scripts |",
        "|---|---|---|---|",
        *_repositories([*scripts, *on_device["scripts"]]),
    ]
    return "\n".join(lines) + "\n"


def tune_page(results: list[tuple[str, dict[str, Any]]]) -> str:
    """The page of results that `bench/world/tune.py --out` wrote, each with its path."""
    lines = [
        "# What `flatout tune` makes of other people's scripts",
        "",
        "`flatout tune` on public training scripts, unchanged, within the budget named. Then whole runs, process by process in",
        "turn: untouched, with `flatout run --plan`, with the text that `flatout edit` made of the plan, and with the best",
        "change of those that an expert raced by hand. `proved` is the speed-up of a step that the plan's own proof measured.",
        "`whole` is how much sooner a run of so many steps ends, its start and compilation included (`54 of 2,700`: the plan",
        "is for 2,700 steps, of which the run took 54, fewer than a compilation may need to pay); `later` how much less a step",
        "takes in the second half of it. `learnt`: whether the last losses",
        "on three seeds lie where those of the untouched script lie, on these seeds and with the rounding of one thread. One",
        "run a side where nothing else is said, so that differences of a tenth are noise. `bench/world/README.md` says how to",
        "take the figures again.",
        "",
    ]
    for source, result in results:
        machine, scripts = result["machine"], [s for s in result["scripts"] if "whole_run_s" in s or s["levers"]]
        commits = dict.fromkeys(s.get("flatout_commit") or result.get("flatout_commit", "") for s in scripts)
        planned = [s for s in scripts if s["levers"]]
        means = [
            f"- {words} with a plan {_mean_gain(planned, gain_of, 'plan')}, with its text {_mean_gain(planned, gain_of, 'edit')},"
            f" by hand {_mean_gain(planned, gain_of, 'by hand')} (geometric means)"
            for words, gain_of in (("whole runs", gain), ("later steps", step_gain))
        ]
        lines += [
            f"## {machine['name']}",
            "",
            f"{machine['num_cores']} cores, torch {machine['torch_version']}, {result['date']}, {result['budget']} a script;",
            f"code of flatout: {', '.join(filter(None, commits))}; `{source}`.",
            "",
            f"- a plan for {len(planned)} of {len(scripts)} scripts, for {_of_worth(scripts)} where a change by hand gains 1.15x",
            *means,
            "",
            "| script | levers | proved | steps | whole: plan | text | by hand | later: plan | text | by hand | learnt | tune |",
            "|---|---|---|---|---|---|---|---|---|---|---|---|",
            *(_tuned_row(script) for script in scripts),
            "",
        ]
    return "\n".join(lines)


def _tuned_row(script: dict[str, Any]) -> str:
    found = [gain_of(script, side) for gain_of in (gain, step_gain) for side in ("plan", "edit", "by hand")]
    gains = [_NONE if one is None else f"{one:.2f}x" for one in found]
    levers = ", ".join(f"`{name}`" for name in dict.fromkeys(script["levers"])) or script["because"]
    proved = f"{script['claimed'][0]:.2f}x" if script["levers"] and script.get("claimed") else _NONE
    num_steps, num_planned = script["num_steps"], script.get("num_planned") or 0
    steps = f"{num_steps:,} of {num_planned:,}" if num_planned > num_steps else f"{num_steps:,}"
    return (
        f"| {script['name']} | {levers} | {proved} | {steps} | {' | '.join(gains)} | {_learnt(script)} "
        f"| {script['tune_s']:.0f} s |"
    )


def _mean_gain(scripts: list[dict[str, Any]], gain_of: Callable[..., float | None], side: str) -> str:
    gains = [one for script in scripts if (one := gain_of(script, side)) is not None]
    return f"{geometric_mean(gains):.2f}x ({len(gains)} scripts)" if gains else "not measured"


def _of_worth(scripts: list[dict[str, Any]]) -> str:
    worth = [s for s in scripts if (gain(s, "by hand") or 0.0) >= _WORTH]
    return f"{sum(bool(s['levers']) for s in worth)} of {len(worth)}"


def _learnt(script: dict[str, Any]) -> str:
    """Whether the plan's losses lie inside the untouched script's spread."""
    return {True: "yes", False: "no", None: _NONE}[is_learnt(script)]


def _raced(raced: dict[str, Any], source: str, scripts: list[dict[str, Any]]) -> Iterator[str]:
    """What the run on the CPU that the cures were raced on found of them, where the page's run is another."""
    cures = [cure for script in scripts for cure in script.get("cures", ())]
    missed = [cure for cure in cures if not cure["is_named"] and cure["measured"] >= _WORTH]
    if raced["scripts"] == scripts or not missed:
        return
    in_half = sum("bfloat16" in cure["name"] for cure in missed)
    yield f"{in_half} of the {len(missed)} cures that are not named here are bfloat16, for which this CPU has no units. On the"
    yield f"CPU that the cures were raced on an earlier run (`{source}`, by earlier rules, on evidence some hours older) named"
    yield f"{raced['summary']['of these named']} and priced {raced['summary']['predicted within 25 %']} within 25 %."
    yield ""


def _device(result: dict[str, Any], source: str) -> Iterator[str]:
    machine = result["machine"]
    yield f"## On one {machine['device_name']}"
    yield ""
    laws = result["summary"]["scripts with a law broken"]
    yield f"torch {machine['torch_version']}, {result['date']}, `{source}`: scripts with a law broken {laws}, steps right on"
    yield f"{result['summary']['steps right']}, of the cures of 1.15x and more {result['summary']['of these named']} named."
    yield ""
    yield "| script | step by the timer | by check | unexplained | what check names first |"
    yield "|---|---|---|---|---|"
    yield from (_row(script) for script in result["scripts"])
    yield ""
    yield "| script | cure | measured | named | predicted |"
    yield "|---|---|---|---|---|"
    yield from _cures(result["scripts"])


def _row(script: dict[str, Any]) -> str:
    if not script.get("is_reported"):
        return f"| {script['name']} | {_time(script.get('plain_step_s'))} | {_NONE} | {_NONE} | no report |"
    found = [
        f"`{finding['rule']}` {finding['line']} {finding['gain'][0]:.2f}x to {finding['gain'][1]:.2f}x"
        for finding in script["findings"][:_FINDINGS]
    ]
    return (
        f"| {script['name']} | {_time(script['timer_step_s'])} | {_time(script['check_step_s'])} "
        f"| {script['unexplained']:.0%} | {'; '.join(found) or 'nothing'} |"
    )


def _cures(scripts: list[dict[str, Any]]) -> Iterator[str]:
    for script in scripts:
        for cure in script.get("cures", ()):
            predicted = f"{cure['predicted']:.2f}x" if cure["predicted"] else _NONE
            named = "yes" if cure["is_named"] else "no"
            yield f"| {script['name']} | {cure['name']} | {cure['measured']:.2f}x | {named} | {predicted} |"


def _repositories(scripts: list[dict[str, Any]]) -> Iterator[str]:
    key = lambda script: (script["repository"].lower(), script.get("commit", ""))  # noqa: E731
    for _, members in groupby(sorted(scripts, key=key), key=key):
        own = list(members)
        one, names = own[0], ", ".join(script["name"] for script in own)
        link = f"[{one['repository']}](https://github.com/{one['repository']})"
        yield f"| {link} | `{one.get('commit', '')[:12]}` | {one['licence']} | {names} |"


def _time(seconds: float | None) -> str:
    """Seconds in a unit that fits."""
    if seconds is None:
        return _NONE
    return (
        f"{seconds * 1e6:.0f} us"
        if seconds < 1e-3
        else f"{seconds * 1e3:.3g} ms"
        if seconds < 1
        else f"{seconds:.2f} s"
    )


def main() -> int:
    """The exit status: 1 where --check finds the page out of date."""
    results = {path: json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("*/world.json"))}
    is_device = {path: r["machine"]["device_name"].startswith("NVIDIA") for path, r in results.items()}
    newest, device = ([path for path in results if is_device[path] == kind][-1] for kind in (False, True))
    sources = [str(path.relative_to(RESULTS.parents[1])) for path in (newest, device)]
    raced = RESULTS / _RACED_ON / "world.json"
    text = page(
        results[newest],
        sources[0],
        on_device=results[device],
        device_source=sources[1],
        raced=results[raced],
        raced_source=str(raced.relative_to(RESULTS.parents[1])),
    )
    tuned = {path: json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("*/world_tune.json"))}
    last = {r["machine"]["name"]: (str(path.relative_to(RESULTS.parents[1])), r) for path, r in tuned.items()}
    wanted = {"index.md": text, "tune.md": tune_page(list(last.values()))}
    return written(FOLDER, wanted, description="Write docs/world from the newest results of bench/world.")


if __name__ == "__main__":
    sys.exit(main())
