"""`flatout survive --layout`: stages of a pipeline that are killed go on where they were, bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = """
import json, os, signal, sys
import torch
import flatout
from tests.blocks.parallel.networks import GPT, batch_of, loss_of

folder, victim = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)
torch.set_num_threads(1)
with flatout.World("cpu") as world:
    layout = flatout.layout_from_environment(world)
    ids, positions, target = batch_of(layout.global_batch)
    example = (ids[: layout.micro_batch], positions[: layout.micro_batch])
    parallel = flatout.parallelize(GPT(), layout, world, example=example)
    optimizer = parallel.optimizer(torch.optim.AdamW, lr=1e-2)
    kept = parallel.named_optimizer(optimizer)
    with flatout.Survivor(folder + "/checkpoints", every=1) as state:
        done = state.resume(model=parallel, optimizer=kept)
        while done < 8:
            mine = parallel.share((ids, positions, target))
            optimizer.zero_grad()
            loss = parallel.step(*mine[:2], target=mine[2], loss=loss_of).item()
            if done == 4 and world.rank == victim and not os.path.exists(folder + "/killed"):
                open(folder + "/killed", "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            done += 1
            if world.is_first:
                with open(folder + "/losses", "a") as file:
                    file.write(json.dumps([done, loss]) + "\\n")
            state.keep(done, model=parallel, optimizer=kept)
"""
LAYOUT = 'pipeline = 2\nmicro_batch = 1\nglobal_batch = 4\nschedule = "1f1b"\n'


def _losses(folder: Path, victim: int) -> tuple[dict[int, float], str]:
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    (folder / "layout.toml").write_text(LAYOUT)
    command = [
        sys.executable,
        "-m",
        "flatout",
        "survive",
        "--layout",
        str(folder / "layout.toml"),
        "--memory-folder",
        str(folder),
    ]
    ended = subprocess.run(
        [*command, str(folder / "train.py"), "--", str(folder), str(victim)],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    rows = [json.loads(line) for line in (folder / "losses").read_text().splitlines()]
    found: dict[int, float] = {}
    for step, loss in rows:
        assert found.setdefault(step, loss) == loss
    return found, ended.stderr


@pytest.mark.multi
@pytest.mark.long
def test_a_killed_stage_goes_on_bit_for_bit(tmp_path: Path) -> None:
    undisturbed, _ = _losses(tmp_path / "undisturbed", -1)
    disturbed, on_progress = _losses(tmp_path / "disturbed", 1)
    assert disturbed == undisturbed
    assert list(undisturbed) == list(range(1, 9))
    assert "SIGKILL" in on_progress or "signal 9" in on_progress
