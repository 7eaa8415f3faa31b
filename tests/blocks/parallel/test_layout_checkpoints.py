"""Checkpoints of laid out models: bitwise on the same layout, and on any other within rounding."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.blocks.parallel.forked import lines_of

pytestmark = pytest.mark.slow

SHARDED = {"data": 4, "global_batch": 4, "shard": 3}
TENSORS = {"tensor": 2, "data": 2, "global_batch": 4, "shard": 1, "is_sequence_parallel": True}
STAGES = {"pipeline": 2, "data": 2, "global_batch": 4}
FOLDED = {"pipeline": 2, "global_batch": 4, "schedule": "zbv"}
HALF = {"data": 2, "global_batch": 4, "shard": 3}
ALONE = {"global_batch": 4}

RUN = """
    import json
    import flatout
    import flatout.blocks.parallel.layouts, flatout.blocks.training.checkpoints, torch.distributed.checkpoint  # not in each rank
    from tests.blocks.parallel.networks import GPT, batch_of, loss_of

    def trained(layers, layout, folder, begin, end):
        # Losses of the steps from `begin`, where the state is read, to `end`; it is written there and after the third.
        torch.manual_seed(0)
        ids, positions, target = batch_of(layout.global_batch)
        with flatout.World("cpu") as world, flatout.Checkpoints(folder, keep=9) as checkpoints:
            example = (ids[: layout.micro_batch], positions[: layout.micro_batch])
            parallel = flatout.parallelize(GPT(layers), layout, world, example=example)
            optimizer = parallel.optimizer(torch.optim.AdamW, lr=1e-2)
            if begin:
                checkpoints.load(begin, model=parallel, optimizer=parallel.named_optimizer(optimizer))
            losses = []
            for step in range(begin, end):
                mine = parallel.share((ids, positions, target))
                optimizer.zero_grad()
                losses.append(parallel.step(*mine[:2], target=mine[2], loss=loss_of).item())
                optimizer.step()
                if step + 1 in (3, end):
                    checkpoints.save(step + 1, model=parallel, optimizer=parallel.named_optimizer(optimizer))
            checkpoints.wait()
            if world.is_first:
                report(json.dumps(losses))

    def on(layers, given, *rest):
        layout = flatout.Layout(**given)
        as_ranks(layout.num_devices, lambda: trained(layers, layout, *rest))

    folder = sys.argv[1]
    for number, (layers, one, others) in enumerate(json.loads(sys.argv[2])):
        on(layers, one, f"{folder}/{number}", 0, 5)
        for other in others:
            on(layers, other, f"{folder}/{number}", 3, 5)
"""
PAIRS = [
    ("sharded", SHARDED, {"the same": SHARDED, "half as many": HALF, "stages": STAGES}),
    ("tensors", TENSORS, {"the same": TENSORS, "sharded": SHARDED}),
    ("stages", STAGES, {"the same": STAGES, "alone": ALONE, "tensors": TENSORS}),
    ("half", HALF, {"twice as many": SHARDED}),
    ("alone", ALONE, {"folded stages": FOLDED}),
]
NUM_LAYERS = {"stages": 4, "alone": 4}
"""Two blocks a stage, or folded ones; one a stage, else."""
CASES = [(one, other) for one, _, others in PAIRS for other in others]


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], list[float]]:
    given = [(NUM_LAYERS.get(name, 2), one, list(others.values())) for name, one, others in PAIRS]
    folder: Path = tmp_path_factory.mktemp("kept")
    told = iter(json.loads(line) for line in lines_of(RUN, folder, json.dumps(given)))
    found = {}
    for one, _, others in PAIRS:
        found[one, ""] = next(told)
        found |= {(one, other): next(told) for other in others}
    return found


@pytest.mark.multi
@pytest.mark.parametrize("one,other", CASES)
def test_a_run_goes_on_from_what_another_layout_saved(
    one: str, other: str, losses: dict[tuple[str, str], list[float]]
) -> None:
    undisturbed = losses[one, ""]
    assert undisturbed[-1] < undisturbed[0]
    if other == "the same":
        assert losses[one, other] == undisturbed[3:]
    else:
        assert losses[one, other] == pytest.approx(undisturbed[3:], rel=1e-6)
