"""Processes that are killed at random moments, by SIGKILL, and started again end with the weights of one that was not."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

KILLS = 18
STEPS = 8
"""Optimizer steps of two micro-batches each; an epoch has four."""

SCRIPT = """
    # Reads lines 'folder workers kill'; each is run in a child, which kills itself before micro-step `kill` (-1: not at all),
    # while its thread writes a checkpoint; prints how the child ended.
    import hashlib, os, random, signal, sys
    import torch
    from torch import nn
    from torch.utils.data import Dataset
    import flatout
    from flatout.blocks.training.checkpoints import Checkpoints

    torch.set_num_threads(1)  # so that no threads are there to be forked
    torch.optim.AdamW([nn.Parameter(torch.zeros(1))]).step()  # imports what else each child would import

    LENGTHS = [1 + (7 * i) % 11 for i in range(40)]

    class Augmented(Dataset):
        def __len__(self):
            return len(LENGTHS)

        def __getitem__(self, index):
            return torch.randn(LENGTHS[index], 3) + index / 40 + random.random()

    def train(folder, workers, kill):
        torch.manual_seed(1)
        batches = flatout.Batches(LENGTHS, 12, accumulate=2, seed=4)
        feed = flatout.Feed(Augmented(), batches, workers=workers)
        net = nn.Sequential(nn.Linear(3, 64), nn.Dropout(0.2), nn.Linear(64, 1))
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        with Checkpoints(folder) as saves:
            done = saves.load(net=net, optimizer=optimizer, feed=feed) or 0
            micro = 2 * done
            while done < STEPS:
                for batch in feed:
                    if micro == kill:
                        os.kill(os.getpid(), signal.SIGKILL)
                    (net(batch.values).square().sum() * 1e-2).backward()
                    micro += 1
                    if micro % 2 == 0:
                        optimizer.step()
                        optimizer.zero_grad()
                        done += 1
                        saves.save(done, net=net, optimizer=optimizer, feed=feed)
                        if done == STEPS:
                            break
        data = b"".join(p.detach().numpy().tobytes() for p in net.parameters())
        open(folder + ".sum", "w").write(hashlib.sha256(data).hexdigest())

    for line in sys.stdin:
        folder, workers, kill = line.split()
        child = os.fork()
        if not child:
            train(folder, int(workers), int(kill))
            sys.stdout.flush()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.long
def test_killed_at_any_step_and_resumed_the_weights_are_bit_equal(tmp_path: Path) -> None:
    draw = random.Random(0)
    kills = [(number % 3 and (1, 4)[number % 3 - 1], draw.randrange(2 * STEPS)) for number in range(KILLS)]
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SCRIPT).replace("STEPS", f"{STEPS}")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        lines = [f"{tmp_path / 'whole'} 0 -1"]
        for number, (workers, kill) in enumerate(kills):
            lines += [f"{tmp_path / str(number)} {workers} {kill}", f"{tmp_path / str(number)} {workers} -1"]
        said, wrong = process.communicate("\n".join(lines) + "\n", timeout=280)
    codes = [int(line) for line in said.splitlines()]
    assert codes == [0] + [-9, 0] * KILLS, wrong[-3000:]
    expected = (tmp_path / "whole.sum").read_text()
    ended = {number: (tmp_path / f"{number}.sum").read_text() == expected for number in range(KILLS)}
    assert all(ended.values()), json.dumps([kills[n] for n, is_same in ended.items() if not is_same])
