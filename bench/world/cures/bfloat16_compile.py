"""Every outermost module compiled and under bfloat16 autocast."""

import runpy
from pathlib import Path

HERE = Path(__file__).resolve().parent


def cure() -> None:
    for name in ("compile", "bfloat16"):
        runpy.run_path(str(HERE / f"{name}.py"))["cure"]()
