"""One script, on one rank and on two."""

from __future__ import annotations

import json
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.blocks.parallel.forked import lines_of
from torch import nn

from flatout.blocks.parallel.world import World
from flatout.core.errors import UsageError

pytestmark = pytest.mark.slow

LOOP = """
    import json
    from torch import nn
    import flatout
    from flatout import Batches, Feed, NanWatch, Precision, World  # here, and not in each rank

    def trained(accumulate):
        torch.manual_seed(0)
        lengths = [1 + (7 * i) % 13 for i in range(96)]
        texts = [torch.randn(n, 4) for n in lengths]
        with flatout.World("DEVICE") as world:
            model = world.place(nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)))
            optimizer = torch.optim.AdamW(model.parameters())
            rate = flatout.warm_up_cosine(1e-2, warm_up=3, steps=24)
            batches = flatout.Batches(lengths, 24, rank=world.rank, num_ranks=world.num_ranks, accumulate=accumulate)
            feed = flatout.Feed(texts, batches, device=world.device)
            precision, watch, losses = flatout.Precision("float32"), flatout.NanWatch(), []
            for epoch in range(3):
                for number, batch in enumerate(feed):
                    step = batches.step(number // accumulate, epoch)
                    with precision:
                        loss = world.part_of_mean(model(batch.values).square().sum(), step.num_tokens)
                    precision.backward(loss)
                    if (number + 1) % accumulate == 0:
                        flatout.set_rate(optimizer, rate(len(losses)))
                        precision.update(optimizer, max_norm=1.0)
                        optimizer.zero_grad()
                    watch(loss)
                    losses.append(world.total(loss).item() / world.num_ranks)
            watch.finish()
            weights = torch.cat([p.detach().flatten() for p in model.parameters()])
            if world.is_first:
                report(json.dumps([losses, weights.tolist()]))

    alone = os.fork()  # too: of a process that has used a GPU no fork could
    if not alone:
        trained(1)
        os._exit(0)
    assert os.waitpid(alone, 0)[1] == 0
    for accumulate in (1, 2):
        as_ranks(2, lambda: trained(accumulate))
"""


TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.mark.multi
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=TWO_GPUS)])
def test_the_same_loop_trains_the_same_on_one_rank_and_on_two(device: str) -> None:
    said = [json.loads(line) for line in lines_of(LOOP.replace("DEVICE", device))]
    (alone, weights), (losses, found), (of_micro_batches, _) = said
    assert losses == pytest.approx(alone, abs=1e-6)
    assert found == pytest.approx(weights, abs=1e-6)
    per_step = [sum(of_micro_batches[at : at + 2]) for at in range(0, len(of_micro_batches), 2)]
    assert len(per_step) == len(alone)
    assert per_step[0] == pytest.approx(alone[0], abs=1e-6)  # of later ones the rate is looked up by another number


def test_alone_it_is_one_rank_without_a_group() -> None:
    with World("cpu") as world:
        assert (world.rank, world.num_ranks, world.is_first, world.device.type) == (0, 1, True, "cpu")
        net = nn.Linear(2, 2)
        assert world.place(net) is net
        loss = torch.tensor(6.0)
        assert world.part_of_mean(loss, 3).item() == 2.0
        assert world.total(loss).item() == 6.0
        assert not torch.distributed.is_initialized()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(UsageError, match="a CPU and no GPU"):
        World("cuda")
    with pytest.raises(UsageError, match="device 'tpu'"):
        World("tpu")


@pytest.mark.multi
@pytest.mark.long
def test_the_loop_of_the_how_to_runs_unchanged_alone_and_under_torchrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (Path(__file__).parents[3] / "docs" / "how-to" / "write-a-loop.md").read_text()
    loop = text.split("```python\n")[1].partition("```")[0]
    monkeypatch.chdir(tmp_path)
    Path("loop.py").write_text(loop)

    def ran() -> list[tuple[str, int]]:
        return [
            (r["outcome"], r["num_steps"]) for r in (json.loads(p.read_text()) for p in Path("runs").glob("*/run.json"))
        ]

    runpy.run_path("loop.py", run_name="__main__")
    assert ran() == [("finished", 12)]
    shutil.rmtree("runs")
    starter = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *starter, "loop.py"], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert ran() == [("finished", 12)]
