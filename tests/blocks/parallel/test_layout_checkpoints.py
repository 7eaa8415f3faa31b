"""Checkpoints of laid out models: bitwise on the same layout, and on any other within rounding."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.blocks.parallel.forked import lines_of

pytestmark = [pytest.mark.slow, pytest.mark.long]

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
Pairs = list[tuple[str, dict[str, object], dict[str, dict[str, object]]]]
PAIRS: Pairs = [
    ("sharded", SHARDED, {"the same": SHARDED, "half as many": HALF, "stages": STAGES}),
    ("stages", STAGES, {"alone": ALONE, "tensors": TENSORS}),
    ("alone", ALONE, {"folded stages": FOLDED}),
]
MORE: Pairs = [
    ("tensors", TENSORS, {"the same": TENSORS, "sharded": SHARDED}),
    ("stages", STAGES, {"the same": STAGES}),
    ("half", HALF, {"twice as many": SHARDED}),
]
NUM_LAYERS = {"stages": 4, "alone": 4}
"""Two blocks a stage, or folded ones; one a stage, else."""
Losses = dict[tuple[str, str], list[float]]


def cases(pairs: Pairs) -> list[tuple[str, str]]:
    return [(one, other) for one, _, others in pairs for other in others]


def losses_of(pairs: Pairs, folder: Path) -> Losses:
    given = [(NUM_LAYERS.get(name, 2), one, list(others.values())) for name, one, others in pairs]
    reported = iter(json.loads(line) for line in lines_of(RUN, folder, json.dumps(given)))
    found = {}
    for one, _, others in pairs:
        found[one, ""] = next(reported)
        found |= {(one, other): next(reported) for other in others}
    return found


def require_resumed(one: str, other: str, losses: Losses) -> None:
    undisturbed = losses[one, ""]
    assert undisturbed[-1] < undisturbed[0]
    if other == "the same":
        assert losses[one, other] == undisturbed[3:]
    else:
        assert losses[one, other] == pytest.approx(undisturbed[3:], rel=1e-6)


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> Losses:
    return losses_of(PAIRS, tmp_path_factory.mktemp("saved"))


@pytest.fixture(scope="module")
def more_losses(tmp_path_factory: pytest.TempPathFactory) -> Losses:
    return losses_of(MORE, tmp_path_factory.mktemp("more"))


@pytest.mark.multi
@pytest.mark.parametrize("one,other", cases(PAIRS))
def test_a_run_goes_on_from_what_another_layout_saved(one: str, other: str, losses: Losses) -> None:
    require_resumed(one, other, losses)


@pytest.mark.multi
@pytest.mark.long
@pytest.mark.parametrize("one,other", cases(MORE))
def test_further_runs_go_on_from_what_another_layout_saved(one: str, other: str, more_losses: Losses) -> None:
    require_resumed(one, other, more_losses)
