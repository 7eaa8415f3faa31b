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
_NONE = "-"


def page(result: dict[str, Any], source: str) -> str:
    """The page of one result that `bench/world/run.py --out` wrote."""
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
        "## Repositories",
        "",
        "| repository | commit | licence | scripts |",
        "|---|---|---|---|",
        *_repositories(scripts),
    ]
    return "\n".join(lines) + "\n"


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
    newest = max(RESULTS.glob("*/world.json"), key=lambda path: path.parent.name)
    source = str(newest.relative_to(RESULTS.parents[1]))
    wanted = {"index.md": page(json.loads(newest.read_text(encoding="utf-8")), source)}
    return written(FOLDER, wanted, description="Write docs/world/index.md from the newest results of bench/world.")


if __name__ == "__main__":
    sys.exit(main())
