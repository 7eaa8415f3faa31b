"""One script, on one rank and on two under torchrun."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn

from flatout.errors import UsageError
from flatout.parallel.world import World

LOOP = """
    import json, sys
    import torch
    from torch import nn
    import flatout

    torch.manual_seed(0)
    lengths = [1 + (7 * i) % 13 for i in range(96)]
    texts = [torch.randn(n, 4) for n in lengths]

    with flatout.World("DEVICE") as world:
        model = world.place(nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)))
        optimizer = torch.optim.AdamW(model.parameters())
        rate = flatout.warm_up_cosine(1e-2, warm_up=3, steps=24)
        batches = flatout.Batches(lengths, 24, rank=world.rank, num_ranks=world.num_ranks, accumulate=ACCUMULATE)
        feed = flatout.Feed(texts, batches, device=world.device)
        precision, watch, losses = flatout.Precision("float32"), flatout.NanWatch(), []
        for epoch in range(3):
            for number, batch in enumerate(feed):
                step = batches.step(number // ACCUMULATE, epoch)
                with precision:
                    loss = world.part_of_mean(model(batch.values).square().sum(), step.num_tokens)
                precision.backward(loss)
                if (number + 1) % ACCUMULATE == 0:
                    flatout.set_rate(optimizer, rate(len(losses)))
                    precision.update(optimizer, max_norm=1.0)
                    optimizer.zero_grad()
                watch(loss)
                losses.append(world.total(loss).item() / world.num_ranks)
        watch.finish()
        weights = torch.cat([p.detach().flatten() for p in model.parameters()])
        if world.is_first:
            print(json.dumps([losses, weights.tolist()]))
"""


TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def _ran(folder: Path, *, ranks: int, accumulate: int, device: str = "cpu") -> tuple[list[float], torch.Tensor]:
    script = folder / "train.py"
    script.write_text(textwrap.dedent(LOOP).replace("ACCUMULATE", str(accumulate)).replace("DEVICE", device))
    starter = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    done = subprocess.run(
        [sys.executable, *starter, str(script)], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    losses, weights = json.loads(done.stdout.strip().splitlines()[-1])
    return losses, torch.tensor(weights, dtype=torch.float64)


@pytest.mark.multi
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=TWO_GPUS)])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_same_loop_trains_the_same_on_one_rank_and_on_two(tmp_path: Path, accumulate: int, device: str) -> None:
    alone, weights = _ran(tmp_path, ranks=1, accumulate=1, device=device)
    losses, found = _ran(tmp_path, ranks=2, accumulate=accumulate, device=device)
    per_step = [sum(losses[at : at + accumulate]) for at in range(0, len(losses), accumulate)]
    if accumulate == 1:  # with more, the rate is looked up by another number
        assert per_step == pytest.approx(alone, abs=1e-6)
        assert (weights - found).abs().max() < 1e-6
    assert len(per_step) == len(alone)
    assert per_step[0] == pytest.approx(alone[0], abs=1e-6)


def test_alone_it_is_one_rank_without_a_group() -> None:
    with World("cpu") as world:
        assert (world.rank, world.num_ranks, world.is_first, world.device.type) == (0, 1, True, "cpu")
        net = nn.Linear(2, 2)
        assert world.place(net) is net
        loss = torch.tensor(6.0)
        assert world.part_of_mean(loss, 3).item() == 2.0
        assert world.total(loss).item() == 6.0
        done: list[int] = []
        world.once(lambda: done.append(1))
        assert done == [1]
        assert not torch.distributed.is_initialized()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(UsageError, match="a CPU and no GPU"):
        World("cuda")
    with pytest.raises(UsageError, match="device 'tpu'"):
        World("tpu")


@pytest.mark.multi
@pytest.mark.parametrize("starter", [[], ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]])
def test_the_loop_of_the_readme_runs_unchanged(tmp_path: Path, starter: list[str]) -> None:
    text = (Path(__file__).parents[2] / "README.md").read_text()
    examples = [part.partition("```")[0] for part in text.split("```python\n")[1:]]
    [loop] = [example for example in examples if "flatout.World()" in example]
    (tmp_path / "loop.py").write_text(loop)
    done = subprocess.run(
        [sys.executable, *starter, "loop.py"], cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    [record] = [json.loads(p.read_text()) for p in tmp_path.glob("runs/*/run.json")]
    assert (record["outcome"], record["num_steps"]) == ("finished", 4)
