"""Record a command in a terminal as an animated picture: docs/images/check.svg, which a browser plays without any script.

    python docs/generate_recording.py [--out FILE] [--seconds S] [-- COMMAND ...]

The command is typed, then its output appears line by line, in a few seconds whatever it took. Rich draws the picture.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.text import Text

ROOT: Final = Path(__file__).parents[1]
OUT: Final = ROOT / "docs" / "images" / "check.svg"
COMMAND: Final = ("flatout", "check", "examples/slow/char_gpt.py")
END: Final = "The floor, line by line"
"""The recording ends before this part of the report."""
WIDTH: Final = 100
TYPING_S: Final = 1.5
PAUSE_S: Final = 1.0
_LINE: Final = re.compile(r'(<(?:text|rect) )([^>]*?clip-path="url\(#[\w-]+-line-(\d+)\)")')
_FONTS: Final = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


def recorded(command: list[str], *, width: int) -> str:
    """What the command prints on a terminal of that width, colours included."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    environment = {**os.environ, "PATH": path, "COLUMNS": str(width), "FORCE_COLOR": "1", "TERM": "xterm-256color"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.partition(END)[0].rstrip() + "\n"


def animated(command: list[str], printed: str, *, width: int, seconds: float) -> str:
    """The picture: the command on the first line, and each line of the output at its time."""
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text(f"$ {shlex.join(command)}", style="bold"))
    for line in printed.splitlines():
        console.print(Text.from_ansi(line), soft_wrap=False, overflow="ellipsis", no_wrap=True)
    svg = _FONTS.sub("", console.export_svg(title="flatout"))
    num_lines = printed.count("\n")
    start_s = TYPING_S + PAUSE_S

    def at_its_time(match: re.Match[str]) -> str:
        number = int(match[3])
        delay_s = 0.0 if number == 0 else start_s + seconds * (number - 1) / max(1, num_lines)
        kind = "typed" if number == 0 else "shown"
        return f'{match[1]}style="animation: {kind} {TYPING_S if number == 0 else 0.2}s {delay_s:.2f}s both" {match[2]}'

    frames = """
    @keyframes shown { from { opacity: 0 } to { opacity: 1 } }
    @keyframes typed { from { clip-path: inset(0 100% 0 0) } to { clip-path: inset(0 0 0 0) } }
    @media (prefers-reduced-motion: reduce) { text, rect { animation: none !important } }
    </style>"""
    return _LINE.sub(at_its_time, svg).replace("</style>", frames, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--seconds", type=float, default=6.0, help="how long the output takes to appear")
    parser.add_argument("--text", type=Path, help="a file with the output, in place of running the command")
    parser.add_argument("command", nargs="*")
    options = parser.parse_args()
    command = options.command or list(COMMAND)
    printed = options.text.read_text() if options.text else recorded(command, width=WIDTH)
    options.out.write_text(animated(command, printed, width=WIDTH, seconds=options.seconds))


if __name__ == "__main__":
    main()
