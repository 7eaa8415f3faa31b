"""A search of architectures under a measured limit: cost first, training only of what holds it, and all of it can be killed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from time import monotonic
from typing import Any, Final, NamedTuple

import msgspec
from torch import Tensor, nn

from flatout.blocks.training.snapshot import random_state, set_random_state
from flatout.core.errors import UsageError
from flatout.core.records.architecture_search import ArchitectureTrial, Cost, SearchReport, SpaceValue
from flatout.core.records.record import from_json
from flatout.shrink.score_intervals import mean_interval, paired_difference
from flatout.shrink.search import storage as search_storage
from flatout.shrink.search.costs import Limit, Runner, over
from flatout.shrink.search.slicing import Layout, inherit
from flatout.shrink.search.space import Space, architecture_key, checked_space, distributions, spelled, untried
from flatout.shrink.search.task import Build, Evaluate, SearchTask, Train, pareto_numbers, ranked_trials, scores

_ROW: Final = "row"
_ATTEMPTS: Final = "attempts"
_MOST_ATTEMPTS: Final = 2
_NUM_STARTING: Final = 8
"""Choices drawn at random before the sampler learns."""
_PROOF_TIME_S: Final = 1.0
_MOST_TIMED: Final = 5
"""Of the best trials, until one holds the limit when it is timed longer."""


class SearchResult(NamedTuple):
    """The winner, trained, with its choice; None where no candidate holds the limit. `report` has every trial."""

    module: nn.Module | None
    architecture: dict[str, SpaceValue] | None
    report: SearchReport


def search_architecture(
    build: Build,
    space: Space,
    train: Train,
    evaluate: Evaluate,
    *,
    original: nn.Module,
    inputs: Tensor | tuple[Tensor, ...],
    limit: Limit,
    storage: str | Path,
    budget_s: float,
    seed: int = 0,
    max_trials: int = 1000,
    prove_with: Evaluate | None = None,
    num_seeds: int = 3,
    allowed_loss: float = 0.01,
    layout: Layout | None = None,
    runner: Runner | None = None,
    pruner: Any = None,
) -> SearchResult:
    """The model of the space with the best score that holds the limit, beside the original model, which is trained.

    A candidate is built, its parameters, operations and bytes are counted, and its latency is measured beside the original's in
    interleaved rounds; one that misses the limit is never trained. The others start from the original model's weights, cut to
    size (`slicing.inherit`), and are trained. Optuna proposes (TPE, which gets by how much a limit was missed) and stops those
    that fall behind (`pruner`, by default
    successive halving over what `train` yields). No choice is trained twice. `runner` makes a model
    into the call that is timed, by default eager PyTorch on `inputs`.

    The winner is trained anew with `num_seeds` other seeds and judged with `prove_with`, on samples that the search has not seen
    (without it on the same ones, and the report says so); the one of them with the best score in the search's own samples is
    returned. The difference to the original model is an interval, paired by sample.

    Everything is in `storage` (a journal, or SQLite by its ending) and, of the proof, weights in a folder beside it. Killed at
    any moment and called again with the same arguments it goes on: finished trials stay, the one that was under way is run again
    from its start, and left as failed when it ended its process twice. `budget_s` counts the trials of all calls; it is looked
    at between trials, and a share for the proof is kept. Global random numbers are put back.

    Raises UsageError for arguments that contradict one another, and for a storage of another search.
    """
    own = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    task = SearchTask(build, checked_space(space), train, evaluate, original, own, limit, seed, layout, runner)
    limit.named()
    if not budget_s > 0 or num_seeds < 1 or max_trials < 1:
        raise UsageError(f"budget_s {budget_s:g}, num_seeds {num_seeds}, max_trials {max_trials}: give numbers above 0")
    path, numbers = Path(storage), random_state()
    with search_storage.quiet(), search_storage.locked(path):
        try:
            run = _SearchRun(task, path, pruner, budget_s)
            ended = run.go(max_trials, num_seeds)
            proof = prove_winner(ranked_trials(run.rows()), task, path, prove_with or evaluate, num_seeds=num_seeds)
            return _found(run, proof, ended, allowed_loss=allowed_loss, is_fresh=prove_with is not None)
        finally:
            set_random_state(numbers)


class _SearchRun:
    """One call: the study, and how much of the budget is left."""

    def __init__(self, task: SearchTask, storage: Path, pruner: Any, budget_s: float) -> None:
        optuna = search_storage.optuna()
        self.task, self.budget_s, self._began = task, budget_s, monotonic()
        what = {
            "space": spelled(task.space),
            "limit": task.limit.named(),
            "seed": task.seed,
            "given": search_storage.state_fingerprint(task.original.state_dict()),
        }
        halving = optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=3)
        self.study = search_storage.opened(storage, what, sampler=None, pruner=pruner or halving)
        # Each call draws other numbers than those before it, which would propose again what they did.
        self.study.sampler = optuna.samplers.TPESampler(
            seed=(task.seed + 7919 * len(self.study.trials)) % 2**32,
            n_startup_trials=_NUM_STARTING,
            multivariate=True,
        )
        self._spent_before_s = sum(row.train_s for row in self.rows())
        self.original_cost = task.cost_of(task.original)
        self.original_scores = scores(task.evaluate, task.original)
        self._longest_s = 0.0
        self._put_right()

    @property
    def spent_s(self) -> float:
        return self._spent_before_s + monotonic() - self._began

    def rows(self) -> list[ArchitectureTrial]:
        """Records of all trials that ended, one an architecture."""
        found = [from_json(t.user_attrs[_ROW], ArchitectureTrial) for t in self.study.trials if _ROW in t.user_attrs]
        return sorted(found, key=lambda row: row.number)

    def go(self, max_trials: int, num_seeds: int) -> str:
        """Run trials; why they ended."""
        while True:
            rows = self.rows()
            if len(rows) >= max_trials:
                return f"{max_trials} trials"
            self._longest_s = max((row.train_s for row in rows if row.state == "finished"), default=0.0)
            if rows and self.spent_s + (num_seeds + 1) * self._longest_s > self.budget_s:
                return f"budget of {self.budget_s:g} s"
            if not self._trial():
                return "every choice of the space was tried"

    def _trial(self) -> bool:
        """Run one choice that was not tried; False when there is none."""
        tried = {architecture_key(row.architecture) for row in self.rows()}
        trial = self.study.ask(distributions(self.task.space))
        if architecture_key(trial.params) in tried:
            self.study.tell(trial, state=search_storage.optuna().trial.TrialState.FAIL)
            other = untried(self.task.space, tried, seed=self.task.seed + len(self.study.trials))
            if other is None:
                return False
            self.study.enqueue_trial(other)
            trial = self.study.ask(distributions(self.task.space))
        self._run(trial)
        return True

    def _run(self, trial: Any) -> None:
        began = monotonic()
        trial.set_user_attr("choice", dict(trial.params))
        row = msgspec.structs.replace(self._judged(trial), train_s=monotonic() - began)
        trial.set_user_attr(_ROW, msgspec.json.encode(row).decode())
        self._end(row)

    def _end(self, row: ArchitectureTrial) -> None:
        states = search_storage.optuna().trial.TrialState
        if row.state == "finished":
            self.study.tell(row.number, row.score)
        else:
            self.study.tell(row.number, state=states.FAIL if row.state == "failed" else states.PRUNED)

    def _judged(self, trial: Any) -> ArchitectureTrial:
        """Build, measure, and train what holds the limit."""
        task, architecture = self.task, dict(trial.params)
        model = task.create(architecture, task.seed)
        cost = task.cost_of(model)
        excess = over(cost, task.limit)
        trial.set_constraint("limit", max(excess.values(), default=1.0) - 1)
        plain = ArchitectureTrial(number=trial.number, architecture=architecture, state="over the limit", cost=cost)
        if excess:
            why = ", ".join(f"{name} {ratio:.3g} times the limit" for name, ratio in excess.items())
            return msgspec.structs.replace(plain, why=why)
        fraction = inherit(model, task.original, layout=task.layout).fraction
        state, why, num, mean = "finished", "", 0, math.nan
        for num, _ in enumerate(task.rounds(model, task.seed), start=1):
            mean = fmean(scores(task.evaluate, model))
            trial.report(mean, num)
            if trial.should_prune():
                state, why = "stopped", f"behind others after round {num}"
                break
        return msgspec.structs.replace(
            plain, state=state, why=why, score=mean, num_rounds=num, inherited_fraction=fraction
        )

    def _put_right(self) -> None:
        """Trials that a killed process had under way: ended if they were done, else begun again, or failed after two attempts."""
        states = search_storage.optuna().trial.TrialState
        for trial in self.study.trials:
            if trial.state != states.RUNNING:
                continue
            if _ROW in trial.user_attrs:  # killed between the two writes that end a trial
                self._end(from_json(trial.user_attrs[_ROW], ArchitectureTrial))
                continue
            architecture, attempts = trial.user_attrs.get("choice"), trial.user_attrs.get(_ATTEMPTS, 1)
            if architecture is not None and attempts < _MOST_ATTEMPTS:
                self.study.enqueue_trial(architecture, user_attrs={_ATTEMPTS: attempts + 1})
            elif architecture is not None:
                why = f"its process ended {attempts} times"
                row = ArchitectureTrial(number=trial.number, architecture=architecture, state="failed", why=why)
                live = search_storage.optuna().trial.Trial(self.study, trial._trial_id)
                live.set_user_attr(_ROW, msgspec.json.encode(row).decode())
            self.study.tell(trial.number, state=states.FAIL)


def _found(run: _SearchRun, proof: Proof | None, ended: str, *, allowed_loss: float, is_fresh: bool) -> SearchResult:
    report = SearchReport(
        limit=run.task.limit.named(),
        original=run.original_cost,
        original_score=mean_interval(proof.original_scores if proof is not None else run.original_scores),
        original_search_score=fmean(run.original_scores),
        trials=tuple(run.rows()),
        pareto=pareto_numbers(run.rows()),
        allowed_loss=allowed_loss,
        is_fresh=is_fresh,
        spent_s=run.spent_s,
        ended=ended,
    )
    if proof is None:
        return SearchResult(None, None, report)
    return SearchResult(proof.module, dict(proof.row.architecture), proof.added_to(report))


class Proof(NamedTuple):
    """A candidate that holds the limit, and its scores by seed and sample."""

    row: ArchitectureTrial
    cost: Cost
    module: nn.Module
    scores: list[float]
    seed_scores: list[list[float]]
    original_scores: list[float]

    def added_to(self, report: SearchReport) -> SearchReport:
        """The report with what was proved."""
        mean = [fmean(sample) for sample in zip(*self.seed_scores, strict=True)]
        return msgspec.structs.replace(
            report,
            winner=self.row.number,
            winner_cost=self.cost,
            winner_score=fmean(self.scores),
            seed_scores=tuple(map(fmean, self.seed_scores)),
            difference=paired_difference(self.scores, self.original_scores),
            seed_difference=paired_difference(mean, self.original_scores),
        )


def prove_winner(
    rows: Sequence[ArchitectureTrial], task: SearchTask, storage: Path, prove_with: Evaluate, *, num_seeds: int
) -> Proof | None:
    """Proof of the best of these trials that holds the limit when it is timed again; None when none does.

    A seed that was trained before a kill is read from the weights kept.
    """
    for row in rows[:_MOST_TIMED]:
        cost = task.cost_of(task.create(row.architecture, task.seed), time_s=_PROOF_TIME_S)
        if not over(cost, task.limit):
            return _proved(row, cost, task, storage, prove_with, num_seeds)
    return None


def _proved(
    row: ArchitectureTrial, cost: Cost, task: SearchTask, storage: Path, prove_with: Evaluate, num_seeds: int
) -> Proof:
    models = [_trained(row, task, storage, seed=task.seed + 1 + number) for number in range(num_seeds)]
    best = max(range(num_seeds), key=lambda number: fmean(scores(task.evaluate, models[number])))
    found = [scores(prove_with, model) for model in models]
    return Proof(row, cost, models[best].eval(), found[best], found, scores(prove_with, task.original))


def _trained(row: ArchitectureTrial, task: SearchTask, storage: Path, *, seed: int) -> nn.Module:
    name = f"proof-{row.number}-seed-{seed}"
    model = task.create(row.architecture, seed)
    saved = search_storage.load_weights(storage, name)
    if saved is not None:
        model.load_state_dict(saved)
        return model
    inherit(model, task.original, layout=task.layout)
    for _ in task.rounds(model, seed):
        pass
    search_storage.save_weights(storage, name, model.state_dict())
    return model
