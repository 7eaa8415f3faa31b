"""What an expert's cures gain: `python bench/world/measure.py CHECKOUTS [--only NAME ...]`.

Each cure of the manifest is raced against the untouched script: processes in turn, the median step of each after its first
steps, the geometric mean of the ratios of neighbours with the smallest and the largest. `--write` puts `measured` and `interval`
into the manifest. On a machine that others use at the same time, `--clock cpu` compares CPU seconds of the script's process: for
scripts of one process on one core.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any

from run import timed
from scripts import BUILD, HERE, Script, median, read_manifest

_BETWEEN_STEPS = 8
"""A gap so many times as long as the median step holds something else than a step."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", type=Path)
    parser.add_argument("--only", nargs="*", default=None)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--seconds", type=float, default=6.0, help="how long each process is timed after its first step"
    )
    parser.add_argument("--lanes", type=int, default=1)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="what a step is timed in")
    parser.add_argument("--missing", action="store_true", help="only cures that were not measured yet")
    parser.add_argument("--write", action="store_true", help="write what was measured into the manifest")
    parser.add_argument("--manifest", type=Path, default=HERE / "manifest", help="another folder of manifest files")
    parser.add_argument("--python", default=str(BUILD / "venv" / "bin" / "python"))
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    os.environ |= {"WORLD_CLOCK": options.clock, "WORLD_SYNC": "1"}
    lanes: Queue[int | None] = Queue()
    for lane in range(options.lanes) or [None]:
        lanes.put(lane)

    def run(script: Script) -> list[dict[str, Any]]:
        lane = lanes.get()
        try:
            return [
                race_or_say(script, cure, options, lane)
                for cure in script.cures
                if not (options.missing and "measured" in cure)
            ]
        finally:
            lanes.put(lane)

    with ThreadPoolExecutor(max(1, options.lanes)) as pool:
        rows = [row for rows in pool.map(run, read_manifest(options.only, options.manifest)) for row in rows]
    if options.write:
        for row in rows:
            if row.get("gain"):
                write(row, options.manifest)
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


def race_or_say(script: Script, cure: dict[str, Any], options: argparse.Namespace, lane: int | None) -> dict[str, Any]:
    """The race's row, or one that says why it could not be run: the other cures go on."""
    try:
        return race(script, cure, options, lane)
    except (OSError, subprocess.SubprocessError, SystemExit) as e:
        print(f"{script.name:30} {cure['name']:28} {type(e).__name__}: {e}"[:300], flush=True)
        return {"script": script.name, "cure": cure["name"], "gain": None, "error": f"{type(e).__name__}: {e}"}


def race(script: Script, cure: dict[str, Any], options: argparse.Namespace, lane: int | None) -> dict[str, Any]:
    ratios, tail = [], ""
    for _ in range(options.rounds):
        pair = []
        for change in (None, cure):
            times, code, tail = timed(
                script, options, lane, seconds=options.seconds, name="cure" if change else "plain", cure=change
            )
            if not times:
                row = {"script": script.name, "cure": cure["name"], "gain": None, "exit": code, "tail": tail[-1500:]}
                print(f"{script.name:30} {cure['name']:28} no step was timed: exit {code}: {tail[-300:]!r}", flush=True)
                return row
            pair.append(times)
        ratios.append(ratio(*pair, is_episodic=script.kind == "reinforcement"))
    gain = statistics.geometric_mean(ratios)
    print(f"{script.name:30} {cure['name']:28} {gain:5.2f}x ({min(ratios):.2f} - {max(ratios):.2f})", flush=True)
    return {"script": script.name, "cure": cure["name"], "gain": gain, "low": min(ratios), "high": max(ratios)}


def ratio(plain: list[float], cured: list[float], *, is_episodic: bool) -> float:
    """How many times faster the cured steps are; episodes grow as an agent learns, so the same ones are compared there."""
    if is_episodic:
        same = min(len(plain), len(cured))
        return sum(plain[:same]) / sum(cured[:same])
    return settled(plain) / settled(cured)


def settled(times: list[float]) -> float:
    """The mean step of the later half, when compiling and first epochs are over, without what comes between steps.

    Waiting for workers comes in bursts and counts on average; evaluation, plots and checkpoints take far longer than a step.
    """
    later = times[len(times) // 2 :]
    usual = median(later) or 0.0
    return statistics.fmean(t for t in later if t <= _BETWEEN_STEPS * usual) if usual else 0.0


def write(row: dict[str, Any], manifest: Path) -> None:
    """Put the measured gain below the cure's name in the manifest."""
    for path in manifest.glob("*.toml"):
        text = path.read_text()
        parts = re.split(r"(?m)^(?=\[\[script\]\])", text)
        for index, part in enumerate(parts):
            if not re.search(rf'(?m)^name = "{re.escape(row["script"])}"$', part.split("[[script.cure]]")[0]):
                continue
            cures = part.split("[[script.cure]]")
            for number, cure in enumerate(cures[1:], 1):
                if re.search(rf'(?m)^name = "{re.escape(row["cure"])}"$', cure):
                    measured = f"measured = {row['gain']:.3f}\ninterval = [{row['low']:.3f}, {row['high']:.3f}]\n"
                    without = re.sub(r"(?m)^(measured|interval) = .*\n", "", cure)
                    cures[number] = re.sub(r"(?m)^(name = .*\n)", rf"\g<1>{measured}", without, count=1)
            parts[index] = "[[script.cure]]".join(cures)
            path.write_text("".join(parts))


if __name__ == "__main__":
    sys.exit(main())
