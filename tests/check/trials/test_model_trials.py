"""The trials that rules about the model ask for, run on real loops: that they measure, refuse with a reason, and undo "
"their switches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from flatout.check.capture import Capture
from flatout.check.observe.collectors.settings import is_flushing_denormals
from flatout.check.observe.steps.schedule import Schedule
from flatout.check.trials.module_call import copied_module
from flatout.core.records.evidence import Evidence
from flatout.core.records.trial import (
    TimeAttentionCall,
    TimeForeach,
    TimeLoraLinear,
    TimeMergedLinears,
    TimeModel,
    TimeSparseEmbedding,
    TimeStackedLinears,
    TimeStrides,
    Trial,
    TrialResult,
)

pytestmark = pytest.mark.slow

ATTENTION = TimeAttentionCall(
    batch=1,
    heads=2,
    q_len=32,
    kv_len=32,
    head_dim=8,
    dtype="float32",
    masked=True,
    dropout=0.0,
    backward=True,
    cure="causal",
)
LINEARS = TimeMergedLinears(rows=16, in_features=8, out_features=(8, 4), dtype="float32", bias=True, backward=True)
LORA = TimeLoraLinear(
    rows=64, in_features=32, out_features=16, rank=2, dtype="float32", bias=True, frozen=True, backward=True
)
STACKED = TimeStackedLinears(num=4, rows=16, in_features=8, out_features=4, dtype="float32", bias=True, backward=True)


def try_on(loop: Callable[[], object], propose: Callable[[Evidence], Iterable[Trial]]) -> TrialResult:
    """What came of the one trial proposed; a switch that it throws is never taken for the script's."""
    capture = Capture(command=("test",), cwd=".", schedule=Schedule(), machine=None, propose=propose)
    capture.start()
    try:
        loop()
    finally:
        evidence = capture.finish(exit="finished", exit_code=0)
    assert not [s for s in evidence.workload.settings if s.source is not None]
    (result,) = evidence.trials
    return result


def row_of(evidence: Evidence, op: str) -> int:
    return next(i for i, o in enumerate(evidence.operators) if o.op == op)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 2))


NET = net()


def train_images() -> None:
    optimizer = torch.optim.SGD(NET.parameters(), lr=0.1)
    for _ in range(14):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = NET(torch.randn(4, 3, 8, 8)).float().square().mean()
        loss.backward()
        optimizer.step()


def measured(result: TrialResult) -> None:
    assert not result.refused
    assert result.now_s is not None
    assert result.now_s > 0
    assert result.cured_s is not None
    assert result.cured_s > 0


@pytest.mark.parametrize("variant", ["float32", "channels-last", "flush-denormal", "threads"])
def test_a_variant_of_the_model_is_measured_and_its_switch_thrown_back(variant: str) -> None:
    before = (torch.get_num_threads(), is_flushing_denormals(), torch.autocast.__init__)
    weights = [p.detach().clone() for p in NET.parameters()]
    trial = TimeModel(model=0, variant=variant, backward=True)  # type: ignore[arg-type]

    result = try_on(train_images, lambda _: [trial])

    if variant != "threads":  # beside other work threads may be hopeless, which is refused with that reason
        measured(result)
    assert (torch.get_num_threads(), is_flushing_denormals(), torch.autocast.__init__) == before
    assert all(p.is_contiguous() for p in NET.parameters())
    assert any(not torch.equal(a, b) for a, b in zip(weights, NET.parameters(), strict=True))


@pytest.mark.parametrize("trial", [ATTENTION, LINEARS, LORA, STACKED], ids=lambda t: type(t).__name__)
def test_a_call_and_its_cure_are_measured(trial: Trial) -> None:
    measured(try_on(train_images, lambda _: [trial]))


def test_a_loop_over_parameters_is_replayed_gathered() -> None:
    def loop() -> None:
        layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
        optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
        for _ in range(14):
            optimizer.zero_grad()
            layers(torch.randn(4, 8)).mean().backward()
            for parameter in layers.parameters():
                parameter.grad.mul_(0.5)
            optimizer.step()

    def propose(evidence: Evidence) -> list[Trial]:
        rows = tuple(i for i, o in enumerate(evidence.operators) if o.op == "aten.mul_" and o.phase == "other")
        return [TimeForeach(operators=rows)] if rows else []

    result = try_on(loop, propose)

    measured(result)
    assert result.parts["gathered"] == pytest.approx(1 - 1 / 12)


def embedded(
    loop_optimizer: type[torch.optim.Optimizer], kind: Callable[..., nn.Module] = nn.Embedding
) -> Callable[[], None]:
    def loop() -> None:
        table = kind(500, 8)
        optimizer = loop_optimizer(table.parameters(), lr=0.1)  # type: ignore[call-arg]
        for _ in range(14):
            optimizer.zero_grad()
            table(torch.randint(0, 50, (4, 5))).mean().backward()
            optimizer.step()

    return loop


def propose_sparse(evidence: Evidence) -> list[Trial]:
    return [TimeSparseEmbedding(operator=row_of(evidence, "aten.embedding_dense_backward"), optimizer=0)]


def test_a_table_is_updated_densely_and_sparsely() -> None:
    result = try_on(embedded(torch.optim.Adam), propose_sparse)

    measured(result)
    assert 1 <= result.parts["touched"] <= 20


def test_a_bag_of_embeddings_is_updated_densely_and_sparsely() -> None:
    result = try_on(
        embedded(torch.optim.Adagrad, nn.EmbeddingBag),
        lambda evidence: [TimeSparseEmbedding(operator=row_of(evidence, "aten._embedding_bag_backward"), optimizer=0)],
    )

    measured(result)
    assert 1 <= result.parts["touched"] <= 20


def test_bags_of_maxima_have_no_sparse_gradients() -> None:
    result = try_on(
        embedded(torch.optim.SGD, partial(nn.EmbeddingBag, mode="max")),
        lambda evidence: [TimeSparseEmbedding(operator=row_of(evidence, "aten._embedding_bag_backward"), optimizer=0)],
    )
    assert result.refused


def test_an_optimizer_without_sparse_counterpart_is_refused() -> None:
    assert "sparse" in try_on(embedded(torch.optim.RMSprop), propose_sparse).refused


def test_a_table_whose_weight_is_another_layers_is_refused() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(500, 8)
            self.head = nn.Linear(8, 500, bias=False)
            self.head.weight = self.words.weight

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            scores: torch.Tensor = self.head(self.words(tokens))
            return scores

    result = try_on(embedded(torch.optim.Adam, lambda *_: Tied()), propose_sparse)

    assert result.refused.startswith("another layer shares the table's weight")


def test_a_module_that_a_gradient_goes_through_is_not_run_without_a_graph() -> None:
    def loop() -> None:
        torch.manual_seed(0)
        net, judge = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 1))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(14):
            optimizer.zero_grad()
            judge(net(torch.randn(4, 8))).mean().backward()
            optimizer.step()

    def propose(evidence: Evidence) -> list[Trial]:
        index = next((i for i, m in enumerate(evidence.models) if m.name == "Sequential"), None)
        return [] if index is None else [TimeModel(model=index, variant="without-graph", backward=True)]

    assert try_on(loop, propose).refused == "a gradient goes through the module to its inputs"


def test_a_copy_and_its_reader_are_measured_without_the_copy() -> None:
    def loop() -> None:
        layer = nn.Linear(8, 8)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        other = torch.randn(8, 8)
        for _ in range(14):
            optimizer.zero_grad()
            (layer(torch.randn(8, 8)).t().contiguous() @ other).mean().backward()
            optimizer.step()

    def propose(evidence: Evidence) -> list[Trial]:
        rows = [i for i, o in enumerate(evidence.operators) if o.op == "aten.mm" and o.phase != "backward"]
        return [TimeStrides(copy=row_of(evidence, "aten.clone"), reader=rows[0], argument=0)]

    measured(try_on(loop, propose))


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4 * 8 * 8)
        self.convolutions = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 3, padding=1))

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        images: torch.Tensor = self.convolutions(self.linear(z).view(-1, 4, 8, 8))
        return images


class Judge(nn.Module):
    def __init__(self, flatten: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3, padding=1)
        self.linear = nn.Linear(4 * 8 * 8, 1)
        self.flatten = flatten

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        score: torch.Tensor = self.linear(self.flatten(self.convolution(images)))
        return score


def viewed(images: torch.Tensor) -> torch.Tensor:
    return images.view(images.shape[0], -1)


def reshaped(images: torch.Tensor) -> torch.Tensor:
    return images.reshape(images.shape[0], -1)


def adversarial(
    after: Callable[[torch.Tensor], torch.Tensor], in_judge: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """The generator's images go to another module and to a line of the script's own."""
    torch.manual_seed(0)
    generator, judge = Generator(), Judge(in_judge)
    optimizer = torch.optim.SGD([*generator.parameters(), *judge.parameters()], lr=0.01)
    for _ in range(16):
        images = generator(torch.randn(4, 8))
        loss = judge(images).mean() + after(images).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def of_generator(evidence: Evidence) -> list[Trial]:
    index = next((i for i, m in enumerate(evidence.models) if m.name == "Generator"), None)
    return (
        []
        if index is None or not evidence.operators
        else [TimeModel(model=index, variant="channels-last", backward=True)]
    )


@pytest.mark.parametrize(
    ("after", "in_judge", "refusal"),
    [
        (viewed, reshaped, ".view raises on images in channels_last at test_model_trials.py:"),
        (
            reshaped,
            viewed,
            "Judge gets its result in channels_last: the module does not take these inputs (RuntimeError: view",
        ),
    ],
    ids=["a line of the script", "another module"],
)
def test_channels_last_is_refused_where_the_script_views_the_images(
    after: Callable[[torch.Tensor], torch.Tensor], in_judge: Callable[[torch.Tensor], torch.Tensor], refusal: str
) -> None:
    result = try_on(partial(adversarial, after, in_judge), of_generator)

    assert result.refused.startswith(refusal)
    assert result.refused.endswith("; .reshape there would take them")


def test_channels_last_is_tried_where_the_script_reshapes_the_images() -> None:
    measured(try_on(partial(adversarial, reshaped, reshaped), of_generator))


class StoresItsLoss(nn.Module):
    """Has a weight that is computed anew in each forward, and keeps its last loss with its graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.utils.weight_norm(nn.Linear(8, 8))
        self.saved: list[Tensor] = []
        self.last_loss: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.last_loss = self.layer(x).square().mean()
        self.saved = [self.last_loss]
        return self.last_loss


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")
def test_a_module_that_stores_results_with_their_graphs_is_copied() -> None:
    module = StoresItsLoss()
    module(torch.randn(4, 8)).backward()

    twin = copied_module(module)
    twin(torch.randn(4, 8)).backward()
    again = copied_module(twin)

    assert isinstance(again, StoresItsLoss)
    assert module.last_loss is not None
    assert module.last_loss.grad_fn is not None
    assert again.last_loss is again.saved[0]


class OfAnyLength(nn.Module):
    """Notes in LENGTHS with how many positions it is called, also as a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        LENGTHS.append(tokens.shape[1])
        out: Tensor = self.table(tokens)
        return out


LENGTHS: list[int] = []


def test_a_batch_is_cropped_to_several_lengths_in_turn() -> None:
    model = OfAnyLength()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loop() -> None:
        for _ in range(14):
            optimizer.zero_grad()
            model(torch.randint(0, 20, (4, 32))).square().mean().backward()
            optimizer.step()

    LENGTHS.clear()
    trial = TimeModel(model=0, variant="cropped", backward=True, length=32, lengths=(8, 12, 16))
    result = try_on(loop, lambda _: [trial])

    measured(result)
    assert result.parts["new_length"] > 0
    assert "8, 12, 16, 8, 12, 16" in str(LENGTHS), (
        "in turn, so that no two calls that follow one another have one shape"
    )


class Graph:
    """A batch in an object of the user's, as graph libraries have them."""

    def __init__(self, nodes: Tensor) -> None:
        self.nodes = nodes


class OfGraph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, graph: Graph) -> Tensor:
        return self.layer(graph.nodes)


def test_a_batch_in_an_object_of_its_own_class_is_not_repeated() -> None:
    net = OfGraph()

    def loop() -> None:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(20):
            optimizer.zero_grad()
            net(Graph(torch.randn(16, 8))).square().mean().backward()
            optimizer.step()

    result = try_on(loop, lambda _: [TimeModel(model=0, variant="batched", backward=True, factor=4)])
    assert "cannot be repeated" in result.refused
