"""Packs what scripts import for a machine without network: `python bench/world/pack.py PACKAGE[==VERSION] ... --out site.tar.xz`.

The packages and what they need, as wheels for another version of Python on Linux: in the versions that are asked for or that
this environment has, else the newest. There: unpack the archive and put its folder `site` on PYTHONPATH.

    build/world/venv/bin/python bench/world/pack.py flatout gymnasium==0.29.1 mujoco==3.3.7 tyro ema-pytorch \\
        --for-python 3.12 --without torch numpy scipy transformers --out site.tar.xz
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.requirements import Requirement

_PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (17, 24, 27, 28, 31, 34)] + ["manylinux2014_x86_64"]
_UNUSED = ("tests", "__pycache__")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="+")
    parser.add_argument("--for-python", default="3.12", help="the version of Python there")
    parser.add_argument(
        "--without", nargs="*", default=["torch", "numpy"], help="what is there, with all that it needs"
    )
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    wanted = [Requirement(package) for package in options.packages]
    pins = closure(wanted, {_name(name) for name in options.without})
    with tempfile.TemporaryDirectory() as name:
        wheels, site = Path(name) / "wheels", Path(name) / "site"
        platforms = [f"--platform={platform}" for platform in _PLATFORMS]
        target = [f"--python-version={options.for_python}", "--implementation=cp", "--only-binary=:all:", *platforms]
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "download", "--no-deps", *target, "--dest", str(wheels), *pins], check=True)
        files = map(str, wheels.glob("*.whl"))
        subprocess.run([*pip, "install", "--no-deps", "--no-index", *target, "--target", str(site), *files], check=True)
        for folder in [folder for unused in _UNUSED for folder in site.rglob(unused)]:
            shutil.rmtree(folder, ignore_errors=True)
        with tarfile.open(options.out, "w:xz") as archive:
            archive.add(site, "site")
    print(f"{len(pins)} packages, {options.out.stat().st_size / 2**20:.0f} MiB: {' '.join(pins)}")
    return 0


def closure(wanted: Iterable[Requirement], without: set[str]) -> list[str]:
    """What to download: these packages and what they need, each pinned to the version that is installed here, if it is."""
    pins: dict[str, str] = {}
    left = list(wanted)
    while left:
        requirement = left.pop()
        name = _name(requirement.name)
        if name in pins or name in without:
            continue
        pinned = next((s.version for s in requirement.specifier if s.operator == "=="), None)
        try:
            pins[name] = f"{name}=={pinned or version(name)}"
            needs = [Requirement(line) for line in requires(name) or ()]
        except PackageNotFoundError:
            pins[name] = str(requirement)
            needs = []
        for need in needs:
            extras = [*requirement.extras, ""]
            if need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in extras):
                left.append(need)
    pins.pop("flatout", None)  # its own code travels as files
    return sorted(pins.values())


def _name(text: str) -> str:
    return re.sub(r"[-_.]+", "-", text).lower()


if __name__ == "__main__":
    sys.exit(main())
