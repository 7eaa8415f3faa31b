from __future__ import annotations

import os
import subprocess
from pathlib import Path

from flatout.blocks.recording.code import PATCH, keep_code


def git(root: Path, *arguments: str) -> None:
    names = ("-c", "user.name=n", "-c", "user.email=e@example.org")
    subprocess.run(["git", "-C", str(root), *names, *arguments], check=True, capture_output=True)


def test_gits_index_stays_as_it_is_though_files_were_touched(tmp_path: Path) -> None:
    root, into = tmp_path / "project", tmp_path / "run"
    root.mkdir()
    into.mkdir()
    for name in ("same.py", "changed.py"):
        (root / name).write_text("x = 1\n")
    git(root, "init", "-q")
    git(root, "add", ".")
    git(root, "commit", "-qm", "first")
    (root / "changed.py").write_text("x = 2\n")
    os.utime(root / "same.py", (1e9, 1e9))  # git would note in the index that it has looked
    before = (root / ".git" / "index").read_bytes()

    code, _ = keep_code(root, into)

    assert (root / ".git" / "index").read_bytes() == before
    assert code.changed == ("changed.py",)
    assert b"+x = 2" in (into / PATCH).read_bytes()
