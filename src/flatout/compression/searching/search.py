"""A search of architectures under a measured limit: cost first, training only of what holds it, and all of it can be killed."""

from __future__ import annotations

from pathlib import Path
from time import monotonic
from typing import Any, Final, NamedTuple

import msgspec
from torch import Tensor, nn

from flatout.compression.searching import kept
from flatout.compression.searching.costs import Limit, Runner, over
from flatout.compression.searching.intervals import mean_interval
from flatout.compression.searching.judging import front, judged_mean, ranked, rounds, scores
from flatout.compression.searching.proof import Proof, prove
from flatout.compression.searching.slicing import Layout, inherit
from flatout.compression.searching.space import Space, checked, distributions, key_of, spelled, untried
from flatout.compression.searching.task import Build, Evaluate, Task, Train
from flatout.errors import UsageError
from flatout.records.searching import Candidate, Choice, SearchReport
from flatout.training.random_state import random_state, set_random_state

_ROW: Final = "row"
_ATTEMPTS: Final = "attempts"
_MOST_ATTEMPTS: Final = 2
_NUM_STARTING: Final = 8
"""Choices drawn at random before the sampler learns."""


class Found(NamedTuple):
    """The winner, trained, with its choice; None where no candidate holds the limit. `report` has every trial."""

    module: nn.Module | None
    choice: dict[str, Choice] | None
    report: SearchReport


def search(
    build: Build,
    space: Space,
    train: Train,
    evaluate: Evaluate,
    *,
    given: nn.Module,
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
) -> Found:
    """The model of the space with the best score that holds the limit, beside the given model, which is trained.

    A candidate is built, its parameters, operations and bytes are counted, and its latency is measured beside the given model's
    in interleaved rounds; one that misses the limit is never trained. The others start from the given model's weights, cut to
    size (`slicing.inherit`), and are trained. Optuna proposes (TPE, told how far a limit was missed) and stops those that fall
    behind (`pruner`, by default successive halving over what `train` yields). No choice is trained twice. `runner` makes a model
    into the call that is timed, by default eager PyTorch on `inputs`.

    The winner is trained anew with `num_seeds` other seeds and judged with `prove_with`, on samples that the search has not seen
    (without it on the same ones, and the report says so); the one of them with the best score in the search's own samples is
    returned. The difference to the given model is an interval, paired by sample.

    Everything is in `storage` (a journal, or SQLite by its ending) and the folder of weights beside it. Killed at any moment and
    called again with the same arguments it goes on: finished trials stay, the one that was under way is run again from its start,
    and left as failed when it ended its process twice. `budget_s` counts the trials of all calls; it is looked at between trials,
    and a share for the proof is kept. Global random numbers are put back.

    Raises UsageError for arguments that contradict one another, and for a storage of another search.
    """
    own = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    task = Task(build, checked(space), train, evaluate, given, own, limit, seed, layout, runner)
    limit.named()
    if not budget_s > 0 or num_seeds < 1 or max_trials < 1:
        raise UsageError(f"budget_s {budget_s:g}, num_seeds {num_seeds}, max_trials {max_trials}: give numbers above 0")
    path, numbers = Path(storage), random_state()
    with kept.quiet(), kept.locked(path):
        try:
            run = _Search(task, path, pruner, budget_s)
            ended = run.go(max_trials, num_seeds)
            proof = prove(ranked(run.rows()), task, run.weights, prove_with or evaluate, num_seeds=num_seeds)
            return _found(run, proof, ended, allowed_loss=allowed_loss, is_fresh=prove_with is not None)
        finally:
            set_random_state(numbers)


class _Search:
    """One call: the study, and how much of the budget is left."""

    def __init__(self, task: Task, storage: Path, pruner: Any, budget_s: float) -> None:
        optuna = kept.optuna()
        self.task, self.budget_s, self._began = task, budget_s, monotonic()
        what = {
            "space": spelled(task.space),
            "limit": task.limit.named(),
            "seed": task.seed,
            "given": kept.fingerprint(task.given.state_dict()),
        }
        halving = optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=3)
        self.study = kept.opened(storage, what, sampler=None, pruner=pruner or halving)
        # Each call draws other numbers than those before it, which would propose again what they did.
        self.study.sampler = optuna.samplers.TPESampler(
            seed=(task.seed + 7919 * len(self.study.trials)) % 2**32,
            n_startup_trials=_NUM_STARTING,
            multivariate=True,
        )
        self.weights = kept.Weights(storage)
        self._spent_before_s = sum(row.train_s for row in self.rows())
        self.given_cost = task.cost_of(task.given)
        self.given_scores = scores(task.evaluate, task.given)
        self._longest_s = 0.0
        self._put_right()

    @property
    def spent_s(self) -> float:
        return self._spent_before_s + monotonic() - self._began

    def rows(self) -> list[Candidate]:
        """Of all trials that ended, one a choice."""
        found = [
            msgspec.json.decode(t.user_attrs[_ROW], type=Candidate) for t in self.study.trials if _ROW in t.user_attrs
        ]
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
        tried = {key_of(row.choice) for row in self.rows()}
        trial = self.study.ask(distributions(self.task.space))
        if key_of(trial.params) in tried:
            self.study.tell(trial, state=kept.optuna().trial.TrialState.FAIL)
            other = untried(self.task.space, tried, seed=self.task.seed + len(self.study.trials))
            if other is None:
                return False
            self.study.enqueue_trial(other)
            trial = self.study.ask(distributions(self.task.space))
        self._run(trial)
        return True

    def _run(self, trial: Any) -> None:
        states, began = kept.optuna().trial.TrialState, monotonic()
        trial.set_user_attr("choice", dict(trial.params))
        row, scored = self._judged(trial)
        row = msgspec.structs.replace(row, train_s=monotonic() - began)
        if row.state == "finished":
            assert scored is not None
            self.weights.save(f"trial-{row.number}", scored[0].state_dict(), scored[1])
        trial.set_user_attr(_ROW, msgspec.json.encode(row).decode())
        self._end(trial.number, row, states)
        self.weights.keep_only({f"trial-{number}" for number in front(self.rows())})

    def _end(self, number: int, row: Candidate, states: Any) -> None:
        if row.state == "finished":
            self.study.tell(number, row.score)
        else:
            self.study.tell(number, state=states.FAIL if row.state == "failed" else states.PRUNED)

    def _judged(self, trial: Any) -> tuple[Candidate, tuple[nn.Module, list[float]] | None]:
        """Build, measure, and train what holds the limit."""
        task, choice = self.task, dict(trial.params)
        model = task.made(choice, task.seed)
        cost = task.cost_of(model)
        excess = over(cost, task.limit)
        trial.set_constraint("limit", max(excess.values(), default=1.0) - 1)
        plain = Candidate(number=trial.number, choice=choice, state="over the limit", cost=cost)
        if excess:
            why = ", ".join(f"{name} {ratio:.3g} times the limit" for name, ratio in excess.items())
            return msgspec.structs.replace(plain, why=why), None
        fraction = inherit(model, task.given, layout=task.layout).fraction
        num, found = 0, list[float]()
        for num, _ in enumerate(rounds(task.train, model, task.seed), start=1):
            found = scores(task.evaluate, model)
            trial.report(judged_mean(found), num)
            if trial.should_prune():
                break
        else:
            done = msgspec.structs.replace(
                plain, state="finished", score=judged_mean(found), num_rounds=num, inherited_fraction=fraction
            )
            return done, (model, found)
        why = f"behind others after round {num}"
        return (
            msgspec.structs.replace(
                plain, state="stopped", why=why, score=judged_mean(found), num_rounds=num, inherited_fraction=fraction
            ),
            None,
        )

    def _put_right(self) -> None:
        """Trials that a killed process had under way: ended if they were done, else begun again, or failed after two attempts."""
        states = kept.optuna().trial.TrialState
        for trial in self.study.trials:
            if trial.state != states.RUNNING:
                continue
            if _ROW in trial.user_attrs:  # killed between the two writes that end a trial
                self._end(trial.number, msgspec.json.decode(trial.user_attrs[_ROW], type=Candidate), states)
                continue
            choice, attempts = trial.user_attrs.get("choice"), trial.user_attrs.get(_ATTEMPTS, 1)
            if choice is not None and attempts < _MOST_ATTEMPTS:
                self.study.enqueue_trial(choice, user_attrs={_ATTEMPTS: attempts + 1})
            elif choice is not None:
                why = f"its process ended {attempts} times"
                row = Candidate(number=trial.number, choice=choice, state="failed", why=why)
                live = kept.optuna().trial.Trial(self.study, trial._trial_id)
                live.set_user_attr(_ROW, msgspec.json.encode(row).decode())
            self.study.tell(trial.number, state=states.FAIL)


def _found(run: _Search, proof: Proof | None, ended: str, *, allowed_loss: float, is_fresh: bool) -> Found:
    report = SearchReport(
        limit=run.task.limit.named(),
        given=run.given_cost,
        given_score=mean_interval(proof.given_scores if proof is not None else run.given_scores),
        given_judged=judged_mean(run.given_scores),
        trials=tuple(run.rows()),
        front=front(run.rows()),
        allowed_loss=allowed_loss,
        is_fresh=is_fresh,
        spent_s=run.spent_s,
        ended=ended,
    )
    if proof is None:
        return Found(None, None, report)
    return Found(proof.module, dict(proof.row.choice), proof.told(report))
