"""A search under a limit: cost first, no choice twice, killed and gone on with, and a winner that is proved."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.shrink.search.searched import build, judged_by, logging_train, original, searched
from torch import nn

from flatout.core.errors import UsageError
from flatout.shrink.search import storage as kept
from flatout.shrink.search.costs import Limit
from flatout.shrink.search.task import pareto_numbers

pytestmark = pytest.mark.slow


def starts(log: Path, *, what: str = "start") -> Counter[str]:
    return Counter(line.split()[1] for line in log.read_text().splitlines() if line.startswith(what))


def test_the_winner_holds_the_limit_and_is_compared_with_the_given_model(tmp_path: Path) -> None:
    found = searched(tmp_path / "search.journal", logging_train(tmp_path / "log"), pruner=_keep_all())
    report = found.report
    assert found.module is not None and report.winner_cost is not None and report.winner_cost.work_flop is not None
    assert report.winner_cost.work_flop <= report.limit["work_flop"]
    assert len(report.trials) == 16 and report.ended == "every choice of the space was tried"
    over = [row for row in report.trials if row.state == "over the limit"]
    assert over and all(row.num_rounds == 0 and "work_flop" in row.why for row in over)
    done = [row for row in report.trials if row.state == "finished"]
    assert max(row.score or 0 for row in done) == next(row.score for row in done if row.number == report.winner)
    assert report.is_fresh and report.difference is not None and len(report.seed_scores) == 2
    with torch.no_grad():
        own = judged_by(2)(found.module).mean().item()
    assert own == pytest.approx(report.winner_score)
    assert report.difference.value == pytest.approx(own - report.original_score.value)


def test_what_misses_the_limit_is_never_trained(tmp_path: Path) -> None:
    found = searched(tmp_path / "search.journal", logging_train(tmp_path / "log"), pruner=_keep_all(), num_seeds=1)
    trained = sum(starts(tmp_path / "log").values()) - 1  # the proof trains one
    assert trained == sum(row.state == "finished" for row in found.report.trials)


def test_candidates_begin_with_the_given_models_weights(tmp_path: Path) -> None:
    found = searched(tmp_path / "search.journal", logging_train(tmp_path / "log"), max_trials=4)
    trained = [row for row in found.report.trials if row.num_rounds]
    assert trained
    assert all(row.inherited_fraction == 1 for row in trained)


def test_a_killed_search_goes_on_without_losing_or_repeating_a_trial(tmp_path: Path) -> None:
    storage, log = tmp_path / "search.journal", tmp_path / "log"
    script = Path(__file__).with_name("searched.py")
    process = subprocess.Popen([sys.executable, str(script), str(storage), str(log), "3"])
    try:
        deadline = time.monotonic() + 90
        while not (log.exists() and log.read_text().count("start") > 3):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    with storage.open("ab") as file:
        file.write(b'{"op_code":9,"half')  # a line that was being written
    Path(f"{storage}.lock").symlink_to(storage)  # and the lock it was written under
    stopped = log.read_text().splitlines()[-1].split()[1]
    found = searched(storage, logging_train(log), num_seeds=1)
    ended, begun = starts(log, what="end"), starts(log)
    winner = _shapes(build(found.architecture or {}))
    begun[winner] -= 1  # by the proof
    ended[winner] -= 1
    assert begun.pop(stopped) == 2 and set(begun.values()) <= {0, 1}
    assert max(ended.values()) == 1
    rows = found.report.trials
    assert len(rows) == 16 == len({str(row.architecture) for row in rows})
    assert sum(row.num_rounds > 0 for row in rows) == len(starts(log))


class _Stopped(BaseException):
    """Stands for the end of the process."""


def stopping_train(log: Path, at: int) -> Any:
    train = logging_train(log)

    def stops(model: nn.Module, seed: int) -> Any:
        yield from train(model, seed)
        if log.read_text().count("end") == at:
            raise _Stopped

    return stops


@pytest.mark.parametrize("name", ["search.journal", "search.sqlite"])
def test_a_choice_that_ends_its_process_twice_is_left(tmp_path: Path, name: str) -> None:
    log = tmp_path / "log"

    def ends(model: nn.Module, seed: int) -> Any:
        if sum(p.numel() for p in model.parameters()) == sum(
            p.numel() for p in build({"width": 4, "deep": True}).parameters()
        ):
            raise _Stopped
        yield from logging_train(log)(model, seed)

    for _ in range(2):
        with pytest.raises(_Stopped):
            searched(tmp_path / name, ends)
    found = searched(tmp_path / name, ends)
    failed = [row for row in found.report.trials if row.state == "failed"]
    assert [row.architecture for row in failed] == [{"width": 4, "deep": True}]
    assert "2 times" in failed[0].why and len(found.report.trials) == 16


def test_a_proof_that_was_stopped_goes_on_with_the_seeds_it_has(tmp_path: Path) -> None:
    log = tmp_path / "log"
    whole = searched(tmp_path / "whole.journal", logging_train(tmp_path / "other"))
    num = (tmp_path / "other").read_text().count("end")
    with pytest.raises(_Stopped):
        searched(tmp_path / "search.journal", stopping_train(log, num))
    before = log.read_text().count("start")
    found = searched(tmp_path / "search.journal", logging_train(log))
    assert log.read_text().count("start") == before + 1
    assert found.architecture == whole.architecture and found.report.seed_scores == whole.report.seed_scores


def test_another_search_in_the_same_storage_is_refused(tmp_path: Path) -> None:
    storage = tmp_path / "search.journal"
    searched(storage, logging_train(tmp_path / "log"), max_trials=1, num_seeds=1)
    with pytest.raises(UsageError, match="another search: limit"):
        searched(storage, logging_train(tmp_path / "log"), limit=Limit(work_flop=1000))
    other = original()
    with torch.no_grad():
        next(other.parameters()).add_(1)
    with pytest.raises(UsageError, match="another search: given"):
        searched(storage, logging_train(tmp_path / "log"), original=other)


def test_two_processes_do_not_search_in_one_storage(tmp_path: Path) -> None:
    with kept.locked(tmp_path / "search.journal"), pytest.raises(UsageError, match="another process"):
        searched(tmp_path / "search.journal", logging_train(tmp_path / "log"))


def test_without_a_candidate_that_holds_the_limit_nothing_is_found(tmp_path: Path) -> None:
    found = searched(tmp_path / "search.journal", logging_train(tmp_path / "log"), limit=Limit(work_flop=10))
    assert found.module is None and found.architecture is None and not found.report.is_no_worse
    assert {row.state for row in found.report.trials} == {"over the limit"}


def test_the_front_has_what_no_other_beats(tmp_path: Path) -> None:
    report = searched(tmp_path / "search.journal", logging_train(tmp_path / "log"), pruner=_keep_all()).report
    done = {row.number: row for row in report.trials if row.state == "finished"}

    def beats(a: Any, b: Any) -> bool:
        return (
            a.score >= b.score
            and a.cost.work_flop <= b.cost.work_flop
            and (a.score, a.cost.work_flop) != (b.score, b.cost.work_flop)
        )

    assert {n for n in done if not any(beats(other, done[n]) for other in done.values())} >= set(report.pareto)
    assert report.winner in report.pareto
    assert report.pareto == pareto_numbers(report.trials)


def test_arguments_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    for options in ({"limit": Limit()}, {"limit": Limit(work_flop=0)}, {"budget_s": 0.0}, {"num_seeds": 0}):
        with pytest.raises(UsageError):
            searched(tmp_path / "search.journal", logging_train(tmp_path / "log"), **options)
    with pytest.raises(UsageError, match="folder that exists"):
        searched(tmp_path / "nothing" / "search.journal", logging_train(tmp_path / "log"))


def test_random_numbers_and_optunas_log_are_left_as_they_were(tmp_path: Path) -> None:
    import optuna

    original()  # seeds the global numbers, as the search below does once more
    before = optuna.logging.get_verbosity(), torch.get_rng_state()
    searched(tmp_path / "search.journal", logging_train(tmp_path / "log"), max_trials=1, num_seeds=1)
    assert optuna.logging.get_verbosity() == before[0] and torch.equal(torch.get_rng_state(), before[1])


def _keep_all() -> Any:
    import optuna

    return optuna.pruners.NopPruner()


def _shapes(model: nn.Module) -> str:
    return "-".join("x".join(map(str, p.shape)) for p in model.parameters())
