"""What is to be proved of two scripts, and how hard to try."""

from __future__ import annotations

import math
from typing import Literal

from flatout.core.records.allowance import Allowance
from flatout.core.records.record import Record
from flatout.core.records.verdict import Guarantee
from flatout.tune.verify.quality import NUM_RUNS, Metric


class ProofTerms(Record, frozen=True, kw_only=True):
    """What is to be proved, and how hard to try."""

    guarantee: Guarantee = "bounded"
    num_steps: int = 8
    """Steps that are compared."""
    budget_s: float = 15.0
    """For racing, both sides together."""
    num_processes: int = 2
    """Pairs of processes that race, one after the other: two processes of one script differ by more than their own steps do."""
    timeout_s: float = 300.0
    """For one answer of a process: start, recording, or a stretch of steps."""
    seed: int = 0
    at: str = ""
    """The precision whose rounding counts: with 'bfloat16' the steps before the change are judged under autocast to that. ''
    is as the script has it."""
    is_timed: bool = True
    is_compared: bool = True
    """Whether what is computed is looked at; if not, nothing is proved, and only speed is told."""
    objective: Literal["time", "memory"] = "time"
    """What the change is for: 'memory' is proved by a smaller peak, whatever it costs in time."""
    metric: Metric | None = None
    """What QUALITY is judged by; whole runs are compared then, `num_runs` of each side. None: by the first `num_losses`, on
    `num_seeds`, which may be `allowed_loss` higher."""
    num_runs: int = NUM_RUNS
    num_losses: int = 100
    num_seeds: int = 3
    allowed_loss: Allowance = Allowance()
    warm_up_steps: int = 0
    """Steps of the changed side before the race: until a cache is filled it gains nothing, and what it takes is no leak."""
    run_steps: int = 0
    """Steps of the runs that the change is for: what pays within few of them, all that it compiled included, is not started once
    more to see how soon it pays with that in a cache; 0: not known."""
    cycle: int = 0
    """Steps of a stretch, or a multiple: those between two rollouts, in reinforcement learning; 0: as the scripts show."""
    decisive: float = math.inf
    """A ratio so far from 1 in the first pair of processes (or its inverse) needs no further pair."""
