from __future__ import annotations

from itertools import product
from math import exp
from random import Random

import pytest
from msgspec import structs

from flatout.core.errors import PlanError
from flatout.core.records.scale import Cluster, Constants, Layout, ModelShape, Software, Tier
from flatout.scale.calibration import Calibrated, TimedLayout
from flatout.scale.calibration_steps import calibration_steps
from flatout.scale.executor import EXECUTOR
from flatout.scale.inputs import cluster_of
from flatout.scale.step import step_time

pytestmark = pytest.mark.slow

NODE = Cluster(
    device="nvidia-a100-80gb",
    num_devices=8,
    tiers=(Tier(name="nvswitch", reach=8, bytes_per_s=3e11, latency_s=5e-6),),
)
SOFTWARE = Software()
TRUE = Constants(product_share=0.65, operator_s=4e-5, link_share=0.5, step_s=5e-3, kernel_s=6e-6)


def model(layers: int, hidden: int) -> ModelShape:
    return ModelShape(hidden=hidden, layers=layers, heads=16, vocab=50304, seq=1024)


def cases() -> list[tuple[ModelShape, Layout]]:
    found = []
    for hidden, layers, tensor, pipeline, data, samples in product(
        (1024, 2048), (12, 24), (1, 2, 4, 8), (1, 2, 4), (1, 2, 4, 8), (1, 2, 4)
    ):
        if tensor * pipeline * data == 8:
            layout = Layout(tensor=tensor, pipeline=pipeline, data=data, micro_batch=samples, global_batch=64)
            found.append((model(layers, hidden), layout))
    return found


def measured(
    constants: Constants, noise: float, quirks: dict[tuple[int, int, int], float] | None = None
) -> list[TimedLayout]:
    rng = Random(0)
    runs = []
    for shape, layout in cases():
        seconds = step_time(shape, layout, NODE, SOFTWARE, constants).total_s
        quirk = (quirks or {}).get((shape.hidden, layout.tensor, layout.micro_batch), 0.0)
        runs.append(TimedLayout(shape, layout, seconds * exp(rng.gauss(0, noise) + quirk)))
    return runs


@pytest.mark.long
def test_constants_come_back_from_few_noisy_steps() -> None:
    runs = measured(TRUE, noise=0.02)
    some = Random(1).sample(runs, 30)
    found = Calibrated(some, NODE, SOFTWARE)
    assert found.constants.product_share == pytest.approx(TRUE.product_share, rel=0.15)
    assert found.constants.operator_s == pytest.approx(TRUE.operator_s, rel=0.15)
    others = [run for run in runs if run not in some]
    predicted = [found.predict(run.model, run.layout) for run in others]
    errors = [abs(p.seconds / run.seconds - 1) for p, run in zip(predicted, others, strict=True)]
    assert sum(errors) / len(errors) < 0.04
    assert sum(p.low_s <= run.seconds <= p.high_s for p, run in zip(predicted, others, strict=True)) >= 0.9 * len(
        others
    )


@pytest.mark.long
def test_what_formulas_miss_for_a_shape_is_learnt_where_it_was_measured_and_widens_the_interval_elsewhere() -> None:
    quirks = {(2048, 4, 1): 0.25, (1024, 2, 2): -0.2, (2048, 2, 4): 0.2, (1024, 8, 1): 0.3}
    runs = measured(TRUE, noise=0.005, quirks=quirks)
    odd = [r for r in runs if (r.model.hidden, r.layout.tensor, r.layout.micro_batch) == (2048, 4, 1)]
    like, judged = odd[:1], odd[1:]
    rest = Random(2).sample([r for r in runs if r not in odd], 40)
    seen, unseen = Calibrated([*rest, *like], NODE, SOFTWARE), Calibrated(rest, NODE, SOFTWARE)
    for run in judged:
        with_it, without = seen.predict(run.model, run.layout), unseen.predict(run.model, run.layout)
        assert abs(with_it.seconds / run.seconds - 1) < 0.5 * abs(without.seconds / run.seconds - 1)
        assert without.high_s / without.low_s > with_it.high_s / with_it.low_s


def test_shares_stay_below_one_and_nothing_measured_is_refused() -> None:
    runs = measured(structs.replace(TRUE, product_share=0.99, memory_share=0.99), noise=0.0)
    fast = [run._replace(seconds=0.7 * run.seconds) for run in Random(3).sample(runs, 12)]
    found = Calibrated(fast, NODE, SOFTWARE).constants
    assert 0 < found.product_share < 1
    assert 0 < found.memory_share < 1
    with pytest.raises(PlanError, match="no measured step"):
        Calibrated([], NODE, SOFTWARE)


def test_steps_of_one_node_leave_the_network_between_nodes_as_it_was_and_widen_the_interval_there() -> None:
    shape, cluster, software = model(12, 2048), cluster_of("64xh100-sxm"), Software()
    slow = Constants(link_share=0.4, product_share=0.5)
    layouts = [
        Layout(tensor=t, data=d, micro_batch=m, global_batch=8 * m * d, shard=s, is_sequence_parallel=t > 1)
        for t, d, m, s in ((1, 8, 1, 3), (2, 4, 2, 1), (4, 2, 1, 1), (8, 1, 2, 0), (2, 4, 1, 3), (1, 8, 2, 2))
    ]
    runs = [TimedLayout(shape, one, step_time(shape, one, cluster, software, slow).total_s) for one in layouts]
    found = Calibrated(runs, cluster, software)
    assert found.constants.fabric_share == Constants().fabric_share
    assert found.constants.link_share < 0.6
    inside = Layout(data=8, global_batch=64, shard=3)
    beyond = Layout(data=64, global_batch=512, shard=3)
    near, far = found.predict(shape, inside), found.predict(shape, beyond)
    assert far.high_s / far.seconds > 1.15 * near.high_s / near.seconds


def test_steps_of_a_host_that_was_slower_then_do_not_mislead() -> None:
    """A step is predicted on a host as fast as is said, and the constants are those of the median speed. What is
    measured of the host varies more than a step does."""
    shape = ModelShape(hidden=256, layers=24, heads=4, vocab=1024, seq=128)  # so small that the host is all that counts
    cluster, software = cluster_of("8xa100-80gb"), Software()
    layouts = [Layout(tensor=t, data=8 // t, micro_batch=m, global_batch=64) for t in (1, 2, 4) for m in (1, 2, 4)]
    usual = Constants(operator_s=2e-5)

    def taken(layout: Layout, slower: float) -> float:
        names = ("operator_s", "divided_operator_s", "collective_s")
        slow = structs.replace(usual, **{name: slower * getattr(usual, name) for name in names})
        return step_time(shape, layout, cluster, software, slow).total_s

    def probe_s(slower: float) -> float:
        return 1e-3 * slower ** (1 / 0.6)

    speeds = [(1.0, 1.0, 2.0)[n % 3] for n in range(len(layouts))]
    runs = [
        TimedLayout(shape, one, taken(one, slower), host_layer_s=probe_s(slower))
        for one, slower in zip(layouts, speeds, strict=True)
    ]
    calibrated = Calibrated(runs, cluster, software)
    other = Layout(tensor=2, data=4, micro_batch=8, global_batch=64)
    assert calibrated.predict(shape, other).seconds == pytest.approx(taken(other, 1.0), rel=0.05)
    assert calibrated.predict(shape, other, host_layer_s=probe_s(2.0)).seconds == pytest.approx(
        taken(other, 2.0), rel=0.05
    )
    known, unknown = calibrated.predict(shape, other, host_layer_s=probe_s(1.0)), calibrated.predict(shape, other)
    assert unknown.high_s / unknown.seconds > 1.2 * known.high_s / known.seconds  # the host was up to twice as slow
    blind = Calibrated([run._replace(host_layer_s=None) for run in runs], cluster, software)
    assert blind.predict(shape, other).seconds > 1.1 * taken(other, 1.0)


def test_steps_of_few_layers_predict_those_of_many_where_the_host_is_all_that_counts() -> None:
    shape, cluster = ModelShape(hidden=256, layers=24, heads=4, vocab=1024, seq=128), cluster_of("2xh200")
    true, rng = Constants(operator_s=6e-5, divided_operator_s=5e-4, step_s=2e-3), Random(0)

    def timed(one: ModelShape, layout: Layout) -> TimedLayout:
        seconds = step_time(one, layout, cluster, EXECUTOR, true).total_s
        return TimedLayout(one, layout, seconds * exp(rng.gauss(0, 0.03)))

    steps = calibration_steps(shape, 2, EXECUTOR, None)
    calibrated = Calibrated([timed(*step) for step in steps], cluster, EXECUTOR)
    judged = [timed(shape, layout) for one, layout in steps if one.layers == 4]
    errors = [abs(calibrated.predict(run.model, run.layout).seconds / run.seconds - 1) for run in judged]
    assert sum(errors) / len(errors) < 0.05
