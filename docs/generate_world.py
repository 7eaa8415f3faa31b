"""Write the page docs/world/index.md: what `flatout check` said of other people's scripts, from the newest results.

python docs/generate_world.py            writes the page
python docs/generate_world.py --check    writes nothing; exits with 1 when the page is out of date
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from generate_rules import written

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
    wanted = {"index.md": text}
    return written(FOLDER, wanted, description="Write docs/world/index.md from the newest results of bench/world.")


if __name__ == "__main__":
    sys.exit(main())
