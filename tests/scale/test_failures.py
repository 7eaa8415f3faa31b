from __future__ import annotations

from math import sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from flatout.core.errors import PlanError
from flatout.core.records.failure import Failures, Goodput, Recovery
from flatout.scale.failures import best_interval_s, expected_goodput, interruptions, simulated_goodput

META = Failures(num_nodes=16384, per_thousand_node_days=6.5)
SHARES = ("goodput", "saving", "lost", "down")


def test_published_rates_come_out() -> None:
    """Llama 3: 419 interruptions in 54 days on 16 k GPUs (Grattafiori et al., 2024); Meta's research clusters: 1.8 h at 16 k
    GPUs, 13.5 minutes at 131 k (Kokolis et al., 2024)."""
    mean, twice_deviation = interruptions(Failures(num_nodes=2048, per_thousand_node_days=3.8), 54)
    assert abs(mean - 419) < 2
    assert twice_deviation == pytest.approx(41, abs=0.5)
    assert Failures(num_nodes=2048, per_thousand_node_days=6.5).mtbf_s == pytest.approx(1.8 * 3600, rel=0.01)
    assert META.mtbf_s == pytest.approx(13.5 * 60, rel=0.01)


CASES = {
    "a minute to save, ten to restart": Recovery(stall_s=60, restart_s=600),
    "five seconds and a minute": Recovery(stall_s=5, restart_s=60),
    "half a second and ten": Recovery(stall_s=0.5, restart_s=10, detect_s=2),
    "saved in the background": Recovery(stall_s=1, restart_s=60, write_s=30, detect_s=5),
    "far too often": Recovery(stall_s=5, restart_s=60, interval_s=10),
    "far too seldom": Recovery(stall_s=5, restart_s=60, interval_s=600),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_what_is_played_is_what_is_expected(name: str) -> None:
    recovery = CASES[name]
    closed, by_chance = expected_goodput(META, recovery), simulated_goodput(META, recovery, num_interruptions=200_000)
    assert by_chance.goodput == pytest.approx(closed.goodput, rel=0.01)
    for share in SHARES:
        assert getattr(by_chance, share) == pytest.approx(getattr(closed, share), abs=0.01)


@given(
    nodes=st.integers(1, 50_000),
    stall_s=st.floats(0.01, 60),
    restart_s=st.floats(0, 600),
    write_s=st.floats(0, 20),
)
def test_shares_add_up_and_the_interval_is_the_best(
    nodes: int, stall_s: float, restart_s: float, write_s: float
) -> None:
    failures = Failures(num_nodes=nodes, per_thousand_node_days=6.5)
    recovery = Recovery(stall_s=stall_s, restart_s=restart_s, write_s=write_s)
    best = expected_goodput(failures, recovery)
    assert sum(getattr(best, share) for share in SHARES) == pytest.approx(1)
    assert min(getattr(best, share) for share in SHARES) >= 0
    for factor in (0.7, 1.5):
        other = structs.replace(recovery, interval_s=max(write_s, factor * best.interval_s))
        assert expected_goodput(failures, other).goodput <= best.goodput * (1 + 1e-6)


def test_for_short_stalls_it_is_youngs_interval() -> None:
    failures = Failures(num_nodes=16, per_thousand_node_days=6.5)
    assert best_interval_s(failures, Recovery(stall_s=1, restart_s=60)) == pytest.approx(
        sqrt(2 * failures.mtbf_s), rel=0.01
    )


@given(field=st.sampled_from(["stall_s", "restart_s", "detect_s", "write_s"]), factor=st.floats(1, 5))
def test_slower_measures_never_leave_more(field: str, factor: float) -> None:
    recovery = Recovery(stall_s=2, restart_s=30, detect_s=5, write_s=10)
    slower = structs.replace(recovery, **{field: factor * getattr(recovery, field)})

    def goodput(given_recovery: Recovery) -> float:
        found: Goodput = expected_goodput(META, given_recovery)
        return found.goodput

    assert goodput(slower) <= goodput(recovery) * (1 + 1e-9)


def test_nonsense_is_refused() -> None:
    with pytest.raises(PlanError, match="give positive numbers"):
        Failures(num_nodes=0, per_thousand_node_days=6.5)
    with pytest.raises(PlanError, match="stall_s is -1"):
        Recovery(stall_s=-1, restart_s=0)
    with pytest.raises(PlanError, match="save less often"):
        expected_goodput(META, Recovery(stall_s=1, restart_s=1, write_s=100, interval_s=50))
