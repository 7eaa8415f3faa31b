"""A loader run for some batches with other numbers of worker processes, with the model's work between the batches."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import fmean
from time import perf_counter, sleep
from typing import Any, Final

import torch
from torch.utils.data import DataLoader

from flatout.check.observe.collectors.loaders import LoaderUse, ObservedWorker
from flatout.check.trials.context import Refused, Scene, TrialEntry, require_time
from flatout.check.trials.module_call import call_of, copied_module, usual_call_s
from flatout.core.records.trial import TimeWorkers, TrialResult
from flatout.core.runtime.worker_start import added_workers_start
from flatout.machine.measure.timer import time_call

_SEED: Final = 20_611
_FEWEST_ROUNDS: Final = 3
_WORK_CALLS: Final = 3
"""Of the model alone: one to try it, one to warm up, one that is timed."""
_LONGEST_S: Final = 1.5
"""For one number of workers; a sweep must leave time for other trials."""


def run(trial: TimeWorkers, scene: Scene) -> TrialResult:
    """`now_s`: the work between two batches with its batch at hand. `cured_s`: batch and work with the best number of workers.

    Parts: seconds of batch and work by number of workers ('1', '2'); for the largest number 'start' (creating the iterator, its
    first batch, ending it) and 'again' (the first batch of a second epoch of persistent workers).
    """
    use = scene.loaders[trial.loader]
    if not use.is_map_style:
        raise Refused("an iterable data set deals its items out to workers by itself")
    if trial.model >= 0 and scene.device == "cpu":
        work_s = usual_call_s(scene.roots[trial.model], backward=trial.backward)
        require_time(scene, num_calls=_WORK_CALLS + _FEWEST_ROUNDS * sum(trial.counts), call_s=work_s)
    work = _work(trial, scene)
    alone_s = time_call(work, min_time_s=0.1, max_time_s=0.5).call_s.value
    parts: dict[str, float] = {}
    with _unwatched():
        for count in trial.counts:
            limit_s = min(_LONGEST_S, scene.limit_s / len(trial.counts))  # twice that where there are many workers
            try:
                found = _with_workers(use, count, work, limit_s)
            except Exception as e:  # the user's own data set may raise anything in another process
                raise Refused(f"the loader does not run with {count} worker(s) ({type(e).__name__})") from e
            parts[str(count)] = found.pop("step")
            if count == max(trial.counts):
                parts.update(found)
    best = min(trial.counts, key=lambda c: parts[str(c)])
    return TrialResult(trial=trial, now_s=alone_s, cured_s=parts[str(best)], variant=str(best), parts=parts)


def _work(trial: TimeWorkers, scene: Scene) -> Callable[[], object]:
    """What the step does between batches: the model's own work on a CPU, on a device the same time of waiting for it."""
    if trial.model < 0 or scene.device != "cpu":
        return lambda: sleep(trial.work_s)
    root = scene.roots[trial.model]
    module = root.alive
    if module is None or root.captured is None:
        return lambda: sleep(trial.work_s)
    return call_of(
        copied_module(module), root.captured, root.captured.args, root.captured.kwargs, backward=trial.backward
    )


def _with_workers(use: LoaderUse, count: int, work: Callable[[], object], limit_s: float) -> dict[str, float]:
    batch = max(1, use.batch_size)
    generator = torch.Generator().manual_seed(_SEED)
    num = len(use.dataset)
    # Drawn with replacement, so that a small data set does not end before the time is over.
    wanted = torch.randint(num, (100_000,), generator=generator).tolist()
    loader: DataLoader[Any] = DataLoader(
        use.dataset,
        batch_size=batch if use.collates else None,
        sampler=wanted if use.collates else [wanted[i : i + batch] for i in range(0, len(wanted), batch)],
        collate_fn=use.collate,
        num_workers=count,
        persistent_workers=True,
        prefetch_factor=use.prefetch_factor or 2,
        multiprocessing_context=use.context or added_workers_start(),
        timeout=max(1.0, 3 * limit_s),
        generator=generator,
    )
    began = perf_counter()
    iterator: Any = iter(loader)
    next(iterator)
    start_s = perf_counter() - began
    try:
        ahead = count * (use.prefetch_factor or 2)
        step_s: list[float] = []
        while len(step_s) < _FEWEST_ROUNDS * count + ahead or perf_counter() - began < limit_s:
            before = perf_counter()
            next(iterator)
            work()
            step_s.append(perf_counter() - before)
            if perf_counter() - began > 2 * limit_s and len(step_s) > ahead:
                break
        again = perf_counter()
        next(iter(loader))
        again_s = perf_counter() - again
    finally:
        ending = perf_counter()
        iterator._shutdown_workers()
        end_s = perf_counter() - ending
    # Batches built while the pipeline filled came for nothing; what follows is the pace that lasts.
    return {"step": fmean(step_s[ahead:] or step_s), "start": start_s + end_s, "again": again_s}


@contextmanager
def _unwatched() -> Iterator[None]:
    """Workers that start here are no part of what is observed."""
    folder = os.environ.pop(ObservedWorker.FOLDER, None)
    try:
        with warnings.catch_warnings(
            action="ignore"
        ):  # torch's advice on the number of workers is not for the user here
            yield
    finally:
        if folder is not None:
            os.environ[ObservedWorker.FOLDER] = folder


TRIAL: Final = TrialEntry(TimeWorkers, run)
