"""The recipe for Ray Train with real Ray on this machine: a worker that is killed changes no loss."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'flatout[ray]'")
PAGE = Path(__file__).parents[3] / "docs" / "recipes" / "ray-train.md"


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_recipe_goes_on_from_memory_with_the_same_loss(tmp_path: Path) -> None:
    script = re.findall(r"```python title=\"train.py\"\n(.*?)```", PAGE.read_text(), re.DOTALL)[0]
    (tmp_path / "train.py").write_text(script)
    said = []
    for words in (["undisturbed"], ["killed", "dies"]):
        (tmp_path / words[0]).mkdir()
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "train.py", *words]
        ended = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280, check=False
        )
        assert ended.returncode == 0, ended.stderr[-3000:]
        said.append(re.findall(r"from step (\d+): loss (\S+)", ended.stdout)[0])
    assert said[0][0] == "0" and said[1][0] in ("38", "39")
    assert said[0][1] == said[1][1], "the losses are the same bit for bit"
