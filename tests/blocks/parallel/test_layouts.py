"""Every kind of layout and every schedule computes what one process computes: loss and all gradients, on 2 and 4 ranks."""

from __future__ import annotations

import json

import pytest
from tests.blocks.parallel.forked import lines_of

pytestmark = pytest.mark.slow

TWO = {
    "replicated": {"data": 2, "global_batch": 4},
    "state sharded": {"data": 2, "global_batch": 4, "shard": 1},
    "gradients sharded": {"data": 2, "global_batch": 4, "shard": 2},
    "weights sharded": {"data": 2, "global_batch": 4, "shard": 3},
    "tensor": {"tensor": 2, "global_batch": 2},
    "tensor by tokens": {"tensor": 2, "global_batch": 4, "micro_batch": 2, "is_sequence_parallel": True},
    "tensor, recomputed": {"tensor": 2, "recompute": "full"},
    "attention recomputed": {"tensor": 2, "recompute": "selective"},
    "context": {"context": 2, "global_batch": 2},
    "gpipe": {"pipeline": 2, "global_batch": 4, "schedule": "gpipe"},
    "1f1b": {"pipeline": 2, "global_batch": 4},
    "interleaved": {"pipeline": 2, "global_batch": 4, "schedule": "interleaved", "chunks": 2},
    "looped-bfs": {"pipeline": 2, "global_batch": 4, "schedule": "looped-bfs", "chunks": 2},
    "zero-bubble": {"pipeline": 2, "global_batch": 4, "schedule": "zero-bubble", "chunks": 2},
    "zbv": {"pipeline": 2, "global_batch": 4, "schedule": "zbv"},
    "dualpipev": {"pipeline": 2, "global_batch": 4, "schedule": "dualpipev"},
    "experts divided": {"data": 2, "global_batch": 4, "expert": 2},
    "two samples at once": {"pipeline": 2, "global_batch": 8, "micro_batch": 2, "recompute": "full"},
}
FOUR = {
    "sharded in groups": {"data": 4, "global_batch": 4, "shard": 3, "shard_ranks": 2},
    "tensor, weights sharded": {"tensor": 2, "data": 2, "global_batch": 4, "shard": 3},
    "tensor by tokens, replicated": {"tensor": 2, "data": 2, "global_batch": 2, "is_sequence_parallel": True},
    "context, weights sharded": {"context": 2, "data": 2, "global_batch": 4, "shard": 3},
    "context, tensor": {"context": 2, "tensor": 2, "shard": 3, "is_sequence_parallel": True},
    "pipeline, weights sharded": {"pipeline": 2, "data": 2, "global_batch": 8, "shard": 3},
    "pipeline, replicated": {"pipeline": 2, "data": 2, "global_batch": 4},
    "pipeline, tensor": {"pipeline": 2, "tensor": 2, "global_batch": 4, "micro_batch": 2, "is_sequence_parallel": True},
    "pipeline, context": {"pipeline": 2, "context": 2, "global_batch": 2},
    "zero-bubble, state sharded": {
        "pipeline": 2,
        "data": 2,
        "global_batch": 8,
        "shard": 1,
        "schedule": "zero-bubble",
        "chunks": 2,
    },
    "zbv, tensor": {"pipeline": 2, "tensor": 2, "global_batch": 4, "schedule": "zbv"},
    "experts in copies, weights sharded": {"data": 4, "global_batch": 4, "expert": 2, "shard": 3},
    "experts, context": {"data": 2, "context": 2, "global_batch": 2, "expert": 2, "shard": 1},
    "four stages": {"pipeline": 4, "global_batch": 4},
}

ONE = {
    "alone": {"global_batch": 2},
    "weights streamed": {"global_batch": 2, "offload": "weights"},
    "streamed, recomputed": {"global_batch": 2, "offload": "weights", "recompute": "full"},
}

CHECK = """
    import json, warnings
    import flatout
    import flatout.blocks.parallel.layouts  # here, and not in each rank
    from flatout.blocks.parallel.agreement import check_layout
    from tests.blocks.parallel.networks import NETWORKS, batch_of, loss_of

    warnings.simplefilter("error")

    def checked(layouts):
        with flatout.World("cpu") as world:
            for name, kinds, layers, given in layouts:
                layout = flatout.Layout(**given)
                for kind in kinds:
                    torch.manual_seed(0)
                    model, (ids, positions, target) = NETWORKS[kind](layers), batch_of(layout.global_batch)
                    try:
                        found = check_layout(model, layout, world, ids, positions, target=target, loss=loss_of)
                        number, text = found.num_parameters, str(found)
                    except flatout.FlatoutError as e:
                        number, text = 0, str(e)
                    if world.is_first:
                        report(json.dumps([name, kind, number, text]))

    layouts = json.loads(sys.argv[1])
    as_ranks(int(sys.argv[2]), lambda: checked(layouts))
"""
Given = dict[str, dict[str, object]]


def _num_layers(given: dict[str, object]) -> int:
    """Stages, folded ones too, have one block or two each, and weights come while others are used; else two blocks will do."""
    return 4 if "pipeline" in given or "offload" in given else 2


def _num_parameters(kind: str, given: dict[str, object]) -> int:
    """At least: a weight that is embedding and output layer has two names, where stages hold it twice."""
    of_a_block, others = {"gpt": (12, 4), "llama": (9, 3), "mixture": (12, 5)}[kind]
    return of_a_block * _num_layers(given) + others


def _kinds(layouts: Given) -> list[tuple[str, list[str]]]:
    """Which networks go through each layout: all where tensors are divided, which depends on the code, else one in turn."""
    found = []
    for number, (name, given) in enumerate(layouts.items()):
        both = ["mixture"] if "expert" in given else ["gpt", "llama"]
        found.append((name, both if len(both) == 1 or given.get("tensor", 1) != 1 else [both[number % 2]]))
    return found


def _cases(layouts: Given) -> list[tuple[str, str]]:
    return [(name, kind) for name, kinds in _kinds(layouts) for kind in kinds]


def _checked(layouts: Given, ranks: int) -> dict[tuple[str, str], tuple[int, str]]:
    given = [(name, kinds, _num_layers(layouts[name]), layouts[name]) for name, kinds in _kinds(layouts)]
    told = [json.loads(line) for line in lines_of(CHECK, json.dumps(given), f"{ranks}")]
    return {(name, kind): (number, text) for name, kind, number, text in told}


@pytest.fixture(scope="module")
def on_one() -> dict[tuple[str, str], tuple[int, str]]:
    return _checked(ONE, 1)


@pytest.fixture(scope="module")
def on_two() -> dict[tuple[str, str], tuple[int, str]]:
    return _checked(TWO, 2)


@pytest.fixture(scope="module")
def on_four() -> dict[tuple[str, str], tuple[int, str]]:
    return _checked(FOUR, 4)


@pytest.mark.multi
@pytest.mark.parametrize("name,kind", _cases(ONE))
@pytest.mark.long
def test_one_rank_computes_what_a_plain_loop_does(
    name: str, kind: str, on_one: dict[tuple[str, str], tuple[int, str]]
) -> None:
    number, text = on_one[name, kind]
    assert number >= _num_parameters(kind, ONE[name]), text


@pytest.mark.multi
@pytest.mark.parametrize("name,kind", _cases(TWO))
def test_two_ranks_compute_what_one_does(name: str, kind: str, on_two: dict[tuple[str, str], tuple[int, str]]) -> None:
    number, text = on_two[name, kind]
    assert number >= _num_parameters(kind, TWO[name]), text


@pytest.mark.multi
@pytest.mark.parametrize("name,kind", _cases(FOUR))
@pytest.mark.long
def test_four_ranks_compute_what_one_does(
    name: str, kind: str, on_four: dict[tuple[str, str], tuple[int, str]]
) -> None:
    number, text = on_four[name, kind]
    assert number >= _num_parameters(kind, FOUR[name]), text


TRAIN = """
    import json
    import flatout
    import flatout.blocks.parallel.layouts  # here, and not in each rank
    from tests.blocks.parallel.networks import NETWORKS, batch_of, loss_of

    def trained(name, kind, given):
        torch.manual_seed(0)
        layout = flatout.Layout(**given)
        ids, positions, target = batch_of(layout.global_batch)
        with flatout.World("cpu") as world:
            example = (ids[: layout.micro_batch], positions[: layout.micro_batch])
            mixed = torch.bfloat16 if "mixed" in name else None
            parallel = flatout.parallelize(NETWORKS[kind](), layout, world, example=example, mixed=mixed)
            optimizer = parallel.optimizer(torch.optim.AdamW, lr=1e-2)
            losses = []
            for step in range(6):
                mine = parallel.share((ids, positions, target))
                optimizer.zero_grad()
                losses.append(parallel.step(*mine[:2], target=mine[2], loss=loss_of).item())
                parallel.clip_grad_norm_(0.5)
                optimizer.step()
            mine = parallel.share((ids, positions, target))
            losses.append(parallel.evaluate(*mine[:2], target=mine[2], loss=loss_of).item())
            kept = parallel.compressed
            sent = kept.bytes_sent / kept.bytes_plain if kept else 1.0
            if world.is_first:
                report(json.dumps([name, losses, sent]))

    for name, kind, given in json.loads(sys.argv[1]):
        as_ranks(flatout.Layout(**given).num_devices, lambda: trained(name, kind, given))
"""
TRAINED = [
    ("gpt alone", "gpt", {"global_batch": 4}),
    ("gpt on stages, tied", "gpt", {"pipeline": 2, "global_batch": 4}),
    ("gpt on folded stages, tied", "gpt", {"pipeline": 2, "global_batch": 4, "schedule": "zbv"}),
    ("gpt in tensors", "gpt", {"tensor": 2, "data": 2, "global_batch": 4, "shard": 3, "is_sequence_parallel": True}),
    ("gpt offloaded", "gpt", {"global_batch": 4, "offload": "state"}),
    ("gpt in bfloat16", "gpt", {"data": 2, "global_batch": 4, "compression": "bfloat16"}),
    ("gpt in signs", "gpt", {"data": 2, "global_batch": 4, "compression": "sign"}),
    ("gpt alone, mixed", "gpt", {"global_batch": 4}),
    ("gpt sharded, mixed", "gpt", {"data": 2, "global_batch": 4, "shard": 3}),
    ("gpt replicated, mixed", "gpt", {"data": 2, "global_batch": 4}),
    ("gpt on stages, mixed", "gpt", {"pipeline": 2, "global_batch": 4}),
    ("gpt on split stages, mixed", "gpt", {"pipeline": 2, "global_batch": 4, "schedule": "zero-bubble"}),
    ("gpt on sharded stages, mixed", "gpt", {"pipeline": 2, "data": 2, "global_batch": 4, "shard": 1}),
    ("gpt in tensors, mixed", "gpt", {"tensor": 2, "global_batch": 4, "is_sequence_parallel": True}),
    ("mixture alone", "mixture", {"global_batch": 4}),
    ("mixture spread", "mixture", {"data": 2, "global_batch": 4, "expert": 2, "shard": 3}),
]


@pytest.fixture(scope="module")
def trained() -> dict[str, tuple[list[float], float]]:
    return {name: (losses, sent) for name, losses, sent in map(json.loads, lines_of(TRAIN, json.dumps(TRAINED)))}


@pytest.mark.multi
@pytest.mark.parametrize("name", [name for name, _, given in TRAINED if "compression" not in given])
@pytest.mark.long
def test_training_goes_as_in_one_process(name: str, trained: dict[str, tuple[list[float], float]]) -> None:
    kind = name.partition(" ")[0]
    losses, alone = trained[name][0], trained[f"{kind} alone"][0]
    assert losses == pytest.approx(alone, rel=0.03 if "mixed" in name else 1e-4)
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.multi
@pytest.mark.parametrize("name,most,near", [("gpt in bfloat16", 0.51, 0.02), ("gpt in signs", 0.05, None)])
@pytest.mark.long
def test_compressed_gradients_train_in_fewer_bytes(
    name: str, most: float, near: float | None, trained: dict[str, tuple[list[float], float]]
) -> None:
    losses, sent = trained[name]
    assert sent < most
    assert losses[-1] < 0.3 * losses[0]
    if near is not None:
        assert losses[-1] == pytest.approx(trained["gpt alone"][0][-1], rel=near)
    assert losses[1:] != trained["gpt alone"][0][1:]


WRONG = """
    import json
    import flatout
    from flatout.blocks.parallel.layouts import parallelize
    from tests.blocks.parallel.networks import GPT, NETWORKS, batch_of, loss_of

    class Counting(GPT):
        # Counts its tokens itself: wrong where a rank has a part of them.
        def forward(self, ids, positions):
            return super().forward(ids, torch.arange(ids.shape[1]).expand_as(ids))

    class Written(torch.nn.Module):
        # Attention without scaled_dot_product_attention.
        def __init__(self):
            super().__init__()
            self.blocks = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(8, 8)) for _ in range(2))

        def forward(self, x):
            for block in self.blocks:
                x = (x @ x.mT).softmax(-1) @ block(x)
            return x

    def tried(world, name, action):
        try:
            said = str(action())
        except flatout.FlatoutError as e:
            said = f"{type(e).__name__}: {e}"
        if world.is_first:
            report(json.dumps([name, said]))

    def wrong():
        torch.manual_seed(0)
        with flatout.World("cpu") as world:
            def check(model, samples=2, **given):
                ids, positions, target = batch_of(samples)
                layout = flatout.Layout(**given)
                return flatout.check_layout(model, layout, world, ids, positions, target=target, loss=loss_of)

            tried(world, "ranks", lambda: check(GPT(), data=4, global_batch=4))
            tried(world, "positions", lambda: check(Counting(), context=2, global_batch=2))
            tried(world, "samples", lambda: check(GPT(), samples=3, tensor=2, global_batch=2))
            tried(world, "stages", lambda: check(GPT(2), pipeline=2, global_batch=2, schedule="zbv"))
            tried(world, "split", lambda: check(GPT(), pipeline=2, global_batch=2, schedule="zbv", shard=3))
            tried(world, "heads", lambda: parallelize(torch.nn.Linear(4, 4), flatout.Layout(tensor=2), world))
            x = torch.randn(1, 4, 8)
            parallel = parallelize(Written(), flatout.Layout(context=2), world)
            tried(world, "attention", lambda: parallel.step(x, target=x, loss=lambda out, target: out.square().mean()))
            tried(world, "tokens", lambda: parallelize(
                GPT(), flatout.Layout(tensor=2, is_sequence_parallel=True), world, example=batch_of(1)[0][:, :15].split(1) * 2
            ))
            ids, positions, _ = batch_of(1)
            whole = parallelize(GPT(), flatout.Layout(tensor=2), world, example=(ids, positions))
            tried(world, "divided", lambda: whole.divided_fraction)
            tried(world, "example", lambda: parallelize(GPT(), flatout.Layout(tensor=2), world))

    as_ranks(2, wrong)
"""


@pytest.fixture(scope="module")
def errors() -> dict[str, str]:
    return dict(json.loads(line) for line in lines_of(WRONG))


@pytest.mark.multi
@pytest.mark.parametrize(
    "name,part",
    [
        ("ranks", "PlanError: the layout is of 4 devices"),
        ("positions", "VerificationError: the layout computes another gradient"),
        ("samples", "UsageError: a tensor of shape [3, 16] for a global batch of 2"),
        ("stages", "PlanError: 2 blocks cannot be divided into 4 parts"),
        ("split", "PlanError: schedule 'zbv' with shard 3"),
        ("heads", "PlanError: the model has no repeated blocks"),
        ("attention", "UsageError: the model called no scaled_dot_product_attention"),
        ("tokens", "PlanError: 15 tokens are no multiple of 2 tensor ranks"),
        ("divided", "0.97"),
        ("example", "PlanError: tensor and pipeline ranks need an example"),
    ],
)
@pytest.mark.long
def test_what_cannot_be_laid_out_is_report(name: str, part: str, errors: dict[str, str]) -> None:
    assert part in errors[name]
