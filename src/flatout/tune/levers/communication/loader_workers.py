"""Batches are made beside the step: by worker processes, or by threads where making them lets other threads run.

What        `num_workers`, `prefetch_factor`, `persistent_workers` where a DataLoader is made; or, with the parameter `threads`,
            its batches made by threads of the process; or, with `same_draws`, by one process that goes on with the global
            generators of this one (`InWorker`). Workers that live on draw the seed that new ones would have drawn; the
            edited script leaves that out, so that an order that comes from torch's global generator is another from epoch 2 on.
Guarantee   EXACT: the same batches in the same order. Items that hold random numbers are made by one worker with `same_draws`,
            once more where the steps draw from the same generator.
Refuses     Loaders that are not waited for, unless others may make the step so fast that they are; items with random numbers of
            loaders that have workers already; iterable data sets, which each worker would read as a whole; one core.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import libcst as cst

from flatout.core.errors import LeverRefused
from flatout.core.parts import lever
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.core.records.lever import Candidate, Hooks, Parameters, integer
from flatout.core.records.trial import TimeWorkers
from flatout.core.runtime.worker_start import added_workers_start
from flatout.machine.cost.accounting import result_of
from flatout.machine.cost.feeding import fetch_trial, main_loader, waiting_s, watched_loader
from flatout.tune.rewrite.calls import LOADER, LOADER_ORDER, argument, call_in, keyword_argument, with_keywords
from flatout.tune.rewrite.imports import with_import
from flatout.tune.rewrite.source import code_of, editable_place, with_expression

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

_MOST = 8
_CROWDED = 0.4
"""Where compute threads hold all cores already, workers take some away: steps took up to 1.4 times as long (bench/results)."""
_WRAPPED = "_flatout_wrapped"
_CONTEXT = "multiprocessing_context"
_NEARLY = 0.4
"""The share of a step that workers take to make a batch: below it not even steps twice as fast wait for them."""
_FASTEST = 0.25
"""The share of a step that it may take with all that is tried: bfloat16, compiled kernels and their memory format gain 2 to 4."""
_USUAL_FACTOR = 2
"""Batches that a worker has under way, by default (documentation of torch.utils.data)."""


def propose(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Candidate]:
    """Propose the numbers of workers that a trial found best, then others; threads last, as their gain depends on the
    GIL.
    """
    index = main_loader(evidence)
    if index is None:
        yield _beside_others(evidence)
        return
    _check_run(evidence, index)
    loader = evidence.loaders[index]
    place = editable_place(evidence, evidence.source_of(loader.constructed), edit, num_workers=1)
    is_tight = evidence.workload.device == "cpu" and evidence.workload.num_threads >= evidence.workload.num_cores
    waited = f"each step waits {waiting_s(evidence) * 1e3:.2f} ms for a batch of {loader.dataset}"
    tried = max((f.saved_s for f in findings if f.basis == "trial"), default=(0.0, 0.0))
    settings: list[Parameters] = [{"num_workers": number} for number in _counts(evidence, index)]
    if not _is_repeatable(evidence, index):
        settings = [{"same_draws": 1}]
    elif loader.num_workers == 0:
        # On a CPU the model's own threads want the cores as well.
        settings.append(
            {"threads": 1 if evidence.workload.device == "cpu" else min(evidence.workload.num_cores, _MOST)}
        )
    for setting in settings:
        gained_s = _gained_s(evidence, index, integer(setting, next(iter(setting))))
        yield Candidate(
            parameters=place | setting | {"dataset": loader.dataset},
            saved_s=(
                -_CROWDED * evidence.steps.step_s if is_tight else min(0.3 * gained_s, tried[0]),
                max(gained_s, tried[1]),
            ),
            where=evidence.source_of(loader.constructed),
            because=f"{waited}, made by {loader.num_workers} worker process(es)",
        )


def _beside_others(evidence: Evidence) -> Candidate:
    """More workers for what makes the step faster, where those that there are could not keep up with much faster ones."""
    index = watched_loader(evidence)
    result = fetch_trial(evidence, index) if index is not None else None
    if index is None or result is None or result.now_s is None:
        raise LeverRefused("no loader is waited for")
    loader = evidence.loaders[index]
    of_one_s = _of_one_worker_s(evidence, index)
    batch_s = of_one_s / loader.num_workers
    if batch_s < _NEARLY * evidence.steps.step_s:
        raise LeverRefused("no loader is waited for, nor would it be in much faster steps")
    _check_run(evidence, index)
    number = _enough_for_faster_steps(evidence, of_one_s)
    if number <= loader.num_workers:
        raise LeverRefused(
            f"{loader.num_workers} workers have {evidence.workload.num_cores} cores, and no loader is waited for"
        )
    place = editable_place(evidence, evidence.source_of(loader.constructed), edit, num_workers=1)
    return Candidate(
        parameters=place | {"num_workers": number, "dataset": loader.dataset},
        saved_s=(0.0, 0.0),
        is_companion=True,
        where=evidence.source_of(loader.constructed),
        because=f"{loader.num_workers} workers make a batch of {loader.dataset} each {batch_s * 1e3:.0f} ms, hardly sooner than "
        "a step takes: faster steps would wait for them",
    )


def _of_one_worker_s(evidence: Evidence, index: int) -> float:
    """Seconds that one worker takes for the batches of a step, by itself as a trial timed it."""
    result = fetch_trial(evidence, index)
    return (result.now_s or 0.0) * evidence.loaders[index].fetches if result is not None else 0.0


def _enough_for_faster_steps(evidence: Evidence, of_one_s: float) -> int:
    """Workers that keep up with much faster steps, when one takes so long for the batches of a step; a core is the step's own."""
    return min(math.ceil(of_one_s / (_FASTEST * evidence.steps.step_s)), evidence.workload.num_cores - 1)


def _check_run(evidence: Evidence, index: int) -> None:
    """Raise LeverRefused where workers gain nothing, or read something else."""
    loader = evidence.loaders[index]
    if not loader.is_map_style:
        raise LeverRefused("each worker would read the whole of an iterable data set")
    if evidence.workload.num_cores < 2:
        raise LeverRefused("there is one core, and the step needs it")
    if loader.is_in_ram and not loader.has_own_collate:
        raise LeverRefused(
            f"the items of {loader.dataset} lie in memory already, and workers would only send them to and fro"
        )
    if loader.num_workers and not _is_repeatable(evidence, index):
        raise LeverRefused(f"the items of {loader.dataset} hold random numbers, and more workers draw others")


def _is_repeatable(evidence: Evidence, index: int) -> bool:
    """Whether items hold no random numbers, as far as a trial could tell."""
    result = fetch_trial(evidence, index)
    return result is None or bool(result.facts.get("repeatable"))


def _counts(evidence: Evidence, index: int) -> list[int]:
    """Numbers of workers worth trying, two at most.

    Beside a device first as many as much faster steps would want: all those that are there have no rest, or the step would not
    wait for them.
    """
    loader = evidence.loaders[index]
    counts = _plain_counts(evidence, index)
    if evidence.workload.device == "cpu" or not loader.num_workers:
        return counts
    of_one_s = max(_of_one_worker_s(evidence, index), loader.num_workers * evidence.steps.step_s)
    number = _enough_for_faster_steps(evidence, of_one_s)
    return list(dict.fromkeys((number, *counts)))[:2] if number > loader.num_workers else counts


def _plain_counts(evidence: Evidence, index: int) -> list[int]:
    """Numbers of workers that a trial found best for the steps as they are, or of cores, two at most."""
    loader = evidence.loaders[index]
    trials = [t.trial for t in evidence.trials if isinstance(t.trial, TimeWorkers) and t.trial.loader == index]
    for trial in trials:
        result = result_of(evidence, trial)
        if result is not None and result.parts:
            ranked = sorted(trial.counts, key=lambda c: result.parts.get(str(c), 0.0))
            return [c for c in ranked if c != loader.num_workers][:2]
    cores = min(evidence.workload.num_cores, _MOST)
    return [c for c in dict.fromkeys((cores, cores // 2)) if c > 0 and c != loader.num_workers]


def _gained_s(evidence: Evidence, index: int, number: int) -> float:
    """What of the wait goes when so many make batches beside the step; they cannot make them faster than one core each can."""
    loader, result, wait_s = evidence.loaders[index], fetch_trial(evidence, index), waiting_s(evidence)
    busy_s = max(0.0, evidence.steps.step_s - wait_s)
    batch_s = (result.now_s or 0.0) * max(1.0, loader.fetches) if result is not None and loader.num_workers else wait_s
    return max(0.0, wait_s - max(0.0, batch_s / number - busy_s))


def apply(hooks: Hooks, parameters: Parameters) -> None:
    """Have loaders of this data set constructed with workers, or read by threads or one worker with the same draws."""
    if "threads" in parameters or "same_draws" in parameters:
        _wrap(hooks, parameters)
    else:
        _make_with_workers(hooks, parameters)


def _make_with_workers(hooks: Hooks, parameters: Parameters) -> None:
    import torch
    from torch.utils.data import DataLoader, IterableDataset

    number = integer(parameters, "num_workers")
    factor = integer(parameters, "prefetch_factor") if "prefetch_factor" in parameters else _USUAL_FACTOR
    begin = DataLoader.__iter__
    lasting: set[int] = set()

    def hire(kind: type, arguments: dict[str, Any]) -> None:
        if isinstance(arguments["dataset"], IterableDataset) or not _is_wanted(arguments["dataset"], parameters):
            return
        if arguments.get("persistent_workers"):
            lasting.add(id(arguments["dataset"]))
        had = arguments.get("num_workers")
        arguments |= {
            "num_workers": number,
            "persistent_workers": number > 0,
            "prefetch_factor": factor if number else None,
        }
        if number and not (had or arguments.get(_CONTEXT)):
            arguments[_CONTEXT] = added_workers_start()
        hooks.note(LEVER.id)

    def __iter__(self: DataLoader[Any]) -> Iterator[Any]:
        is_ours = _is_wanted(self.dataset, parameters) and id(self.dataset) not in lasting
        if is_ours and self.persistent_workers and self._iterator is not None:
            torch.empty((), dtype=torch.int64).random_(generator=self.generator)  # the seed of workers that start anew
        return begin(self)

    hooks.at_construction(DataLoader, hire)
    hooks.replace(DataLoader, "__iter__", __iter__)


def _wrap(hooks: Hooks, parameters: Parameters) -> None:
    from torch.utils.data import DataLoader, IterableDataset

    from flatout.blocks.data.in_worker import InWorker
    from flatout.blocks.data.prefetch import Threads

    begin = DataLoader.__iter__

    def __iter__(self: DataLoader[Any]) -> Iterator[Any]:
        is_able = (
            not self.num_workers and self.batch_sampler is not None and not isinstance(self.dataset, IterableDataset)
        )
        if not is_able or not _is_wanted(self.dataset, parameters):
            return begin(self)
        if _WRAPPED not in vars(self):  # which goes with the loader, and its process with it
            is_threads = "threads" in parameters
            wrapped = Threads(self, integer(parameters, "threads")) if is_threads else InWorker(self)
            setattr(self, _WRAPPED, wrapped)
            hooks.note(LEVER.id)
        return iter(getattr(self, _WRAPPED))

    hooks.replace(DataLoader, "__iter__", __iter__)


def _is_wanted(dataset: object, parameters: Parameters) -> bool:
    return parameters.get("dataset", type(dataset).__name__) == type(dataset).__name__


def edit(text: str, parameters: Parameters) -> str:
    """Write the keywords into the call of the loader, or put the call in `Threads(...)` or `InWorker(...)`."""
    module, call = call_in(text, parameters, LOADER)
    if "threads" in parameters:
        new = cst.parse_expression(f"Threads({code_of(call)}, {integer(parameters, 'threads')})")
        return with_import(with_expression(module, call, new), "flatout", "Threads").code
    if "same_draws" in parameters:
        new = cst.parse_expression(f"InWorker({code_of(call)})")
        return with_import(with_expression(module, call, new), "flatout", "InWorker").code
    number = integer(parameters, "num_workers")
    values: dict[str, str | None] = {
        "num_workers": str(number) if number else None,
        "persistent_workers": "True" if number else None,
    }
    if "prefetch_factor" in parameters:
        values["prefetch_factor"] = str(integer(parameters, "prefetch_factor"))
    has_own = argument(call, "num_workers", LOADER_ORDER.index("num_workers")) or keyword_argument(call, _CONTEXT)
    if number and not has_own and "set_start_method" not in text and (start := added_workers_start()):
        values[_CONTEXT] = f'"{start}"'
    return with_keywords(module, call, values, LOADER_ORDER).code


LEVER = lever(
    __name__,
    propose,
    apply=apply,
    edit=edit,
    conflicts=("communication.persistent-workers", "communication.prepare-in-memory"),
    title="Batches made beside the step",
    errors=("DataLoader worker", "pickle"),
)
