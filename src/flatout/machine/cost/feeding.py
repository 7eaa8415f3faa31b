"""What the loader that feeds the steps costs, and of which kind its cost is: each kind has a cure of its own."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Final, Literal, NamedTuple

import msgspec

from flatout.core.records.evidence import Evidence, LineTime, Loader
from flatout.core.records.trial import TimeDataset, TimeModel, TrialResult
from flatout.core.records.workload import Source
from flatout.machine.cost.accounting import (
    group_by,
    main_model,
    milliseconds,
    model_seconds,
    remaining_fraction,
    result_of,
)
from flatout.machine.cost.module_cures import is_in_library

Kind = Literal["rows", "random", "decoded", "other", "quick"]
"""rows: single rows of tensors in memory, put together again; random: items differ each time they are asked for; decoded: the
same items are read and decoded again; other: Python that prepares items; quick: workers make batches faster than the model takes
them, so that the items are not what is waited for."""

SUSPICIOUS_FRACTION: Final = 0.05
_DECODED_FRACTION: Final = 0.5
_FEWEST_SAMPLES: Final = 10
"""Below, the operators of the data phase and the Python before them tell the line better than samples do."""
_INSIDE_FRACTION: Final = 0.3
_MOST_OF_IT: Final = 0.5
"""Of a user's function: a library's function below it with more is the place to look at."""
_QUICK_FRACTION: Final = 0.5
"""A worker has a core to itself in the trial and shares it in the loop; below this share of the model's time it keeps up."""
_MEMORY_FRACTION: Final = 0.5
"""Prepared items must fit this share of the machine's memory."""
_DECODING: Final = re.compile(
    r"\b(json|orjson|msgpack|gzip|bz2|lzma|zlib\.decompress|pickle|csv|yaml|h5py|imread\w*|imdecode|Image\.open)\b"
    r"|\b(np|numpy|torch)\.(load|loadtxt|genfromtxt|fromfile)\b|\bopen\(|\.read\w*\(|\bread_\w+\(|\bdecode\w*\(|\.loads?\("
)
"""In the text of a user's line."""
_DECODING_LIBRARY: Final = re.compile(
    r"^(orjson|msgpack|yaml|h5py|soundfile|imageio|decord|av)\b|\bPIL/(ImageFile|\w+ImagePlugin)\.py"
    r"|\btorchvision/(io|datasets/folder)|\btorchaudio/(_?backend|_torchcodec|io)|\bpandas/io/"
)
"""In the place of a package's line: modules that do nothing but read and decode."""
_DECODING_FUNCTION: Final = re.compile(
    r"^(open|_?read\w*|imread\w*|imdecode|_?decode|loads?|_?load_\w+|fromfile|genfromtxt)$"
)
"""Names of a package's functions that read and decode."""
_IMAGES_IN_MEMORY: Final = "PIL/Image.py"
"""Its `load` runs for every image, those made of arrays too."""
_ONE_CALL: Final = 1.5
_OWN_LOW: Final = 0.85
"""Loops in plain Python lose nearly all of their time when a batch goes through tensor operators."""
_LIBRARY_LOW: Final = 0.4
_MUCH: Final = 0.02
_PAUSE_LOW: Final = 0.6
_PAUSE_HIGH: Final = 1.0
"""Shares of what the pauses cost the model that are gained with the batch ready; bench/check_examples.py shows what comes."""
_FUNCTIONS_INSIDE: Final = re.compile(r"\.<locals>\.<(listcomp|genexpr|lambda|dictcomp|setcomp)>")


class Hot(NamedTuple):
    """The line to look at, its function's share of the time in the data pipeline, and other lines of it, hottest first."""

    where: Source | None
    share: float
    also: tuple[Source, ...]
    function: str = "this function"


def main_loader(evidence: Evidence) -> int | None:
    """Index of the loader that feeds the steps, if they wait for it."""
    if not evidence.loaders or waiting_s(evidence) < SUSPICIOUS_FRACTION * evidence.steps.step_s:
        return None
    return max(range(len(evidence.loaders)), key=lambda i: evidence.loaders[i].wait_s * evidence.loaders[i].fetches)


class SlowLoader(NamedTuple):
    """The loader that the steps wait for: a trial of fetching, the wait in a step, and what ready tensors would save."""

    loader: Loader
    result: TrialResult | None
    wait_s: float
    gained_s: float


def slow_loader(evidence: Evidence, kind: Kind) -> SlowLoader | None:
    """The loader that feeds the steps, if they wait for it and its cost is of this kind."""
    index = main_loader(evidence)
    if index is None or loader_kind(evidence, index) != kind:
        return None
    result = fetch_trial(evidence, index)
    gained = gained_s(evidence, index, result) if result is not None else 0.0
    return SlowLoader(evidence.loaders[index], result, waiting_s(evidence), gained)


def dataset_trials(evidence: Evidence) -> Iterator[TimeDataset]:
    """Yield a trial that fetches a batch by hand, some items twice, when the step waits for its data, or soon may."""
    index = main_loader(evidence)
    index = watched_loader(evidence) if index is None else index
    if index is not None and evidence.loaders[index].is_map_style:
        yield TimeDataset(loader=index)


def watched_loader(evidence: Evidence) -> int | None:
    """Index of the loader whose workers feed a device in time, as its step is now: a faster step may wait for them."""
    if evidence.workload.device == "cpu" or main_loader(evidence) is not None:
        return None
    fed = [i for i, loader in enumerate(evidence.loaders) if loader.num_workers and loader.fetches > 0]
    return max(fed, key=lambda i: evidence.loaders[i].fetches, default=None)


def constructed_at(evidence: Evidence, loader: Loader) -> Source | None:
    """The line that constructs a loader; the line that iterates over it where that is not known."""
    return evidence.source_of(loader.constructed if loader.constructed >= 0 else loader.source)


def waiting_s(evidence: Evidence) -> float:
    """Seconds a step waits for its batch, without what starting an epoch adds."""
    return max(0.0, evidence.steps.phases.get("data", 0.0) - evidence.steps.restart_s)


def fetch_trial(evidence: Evidence, loader: int) -> TrialResult | None:
    """What fetching a batch by hand showed."""
    return result_of(evidence, TimeDataset(loader=loader))


def gained_s(evidence: Evidence, index: int, result: TrialResult) -> float:
    """Seconds of the wait that go when batches are picked out of ready tensors.

    Without workers the wait shrinks as the batch does in the trial: what slows the loop down slows both.
    """
    wait_s, loader = waiting_s(evidence), evidence.loaders[index]
    left_s = (result.cured_s or 0.0) * max(1.0, loader.fetches)
    return max(0.0, wait_s - left_s if loader.num_workers else wait_s * (1.0 - remaining_fraction(result)))


def loader_kind(evidence: Evidence, index: int) -> Kind:
    """What makes this loader's batches slow; 'other' without a trial that tells."""
    result, loader = fetch_trial(evidence, index), evidence.loaders[index]
    if result is None:
        return "other"
    if loader.num_workers and _is_quick(evidence, loader, result):
        return "quick"
    if not loader.num_workers and not result.facts.get("item_by_item", True):
        return "other"
    if (loader.is_in_ram or result.facts.get("views")) and not loader.has_own_collate:
        return "rows"
    if "repeatable" not in result.facts:
        return "other"
    if not result.facts["repeatable"]:
        return "random" if hot_line(evidence, loader).share else "other"
    if loader.num_epochs and fits_memory(evidence, result) and decoded_fraction(evidence, loader) >= _DECODED_FRACTION:
        return "decoded"
    return "other"


def _is_quick(evidence: Evidence, loader: Loader, result: TrialResult) -> bool:
    """Whether the workers make a batch in much less time than the model needs for one."""
    busy_s = max(0.0, evidence.steps.step_s - waiting_s(evidence))
    return (result.now_s or 0.0) * max(1.0, loader.fetches) / loader.num_workers < _QUICK_FRACTION * busy_s


def fits_memory(evidence: Evidence, result: TrialResult) -> bool:
    """Whether all items, prepared, fit half of the memory; yes where nobody measured how much there is."""
    memory = evidence.machine.memory_bytes if evidence.machine is not None else None
    needed = result.parts.get("item_bytes", 0.0) * result.parts.get("num_items", 0.0)
    return memory is None or needed <= _MEMORY_FRACTION * memory


def is_passed_once(evidence: Evidence, loader: Loader, result: TrialResult) -> bool:
    """Whether the script has ended and had asked for no item twice: what is prepared for later is then prepared for nobody."""
    num_fetched = evidence.steps.num_observed * loader.fetches * loader.batch_size
    has_ended = evidence.exit == "finished" and not loader.num_epochs
    return has_ended and num_fetched < result.parts.get("num_items", 0.0) + loader.batch_size


def pipeline_lines(evidence: Evidence, loader: Loader) -> list[LineTime]:
    """What was sampled in the data pipeline, on the user's lines inside it.

    In the main process the loader's own line stands for torch's share (collation, fetching); in a worker for waiting for work.
    """
    process = "worker" if loader.num_workers else "main"
    rows = [r for r in evidence.lines if r.phase == "data" and r.process == process]
    return [r for r in rows if r.source >= 0 and r.source != loader.source]


def decoded_fraction(evidence: Evidence, loader: Loader) -> float:
    """Share of the sampled pipeline on lines that read or decode."""
    return _fraction_on(evidence, loader, _is_decoding)


def _is_decoding(line: Source) -> bool:
    """Whether the line reads or decodes a file or a text, by itself or in the package's line below it."""
    if _DECODING.search(line.text) or _DECODING_LIBRARY.search(line.library):
        return True
    if not line.via or not _DECODING_FUNCTION.match(line.via[-1].function):
        return False
    return line.via[-1].file != _IMAGES_IN_MEMORY or line.via[-1].function == "open"


def in_library_fraction(evidence: Evidence, loader: Loader) -> float:
    """Share of the sampled pipeline that ran inside other packages, whose own code is seldom plain Python."""
    return _fraction_on(evidence, loader, lambda source: bool(source.library))


def python_fraction_low(evidence: Evidence, loader: Loader) -> float:
    """Share of the items' time that whole-array operations save at least: nearly all of the user's plain Python."""
    library = in_library_fraction(evidence, loader)
    return library * _LIBRARY_LOW + (1 - library) * _OWN_LOW


def _fraction_on(evidence: Evidence, loader: Loader, is_counted: Callable[[Source], bool]) -> float:
    rows = pipeline_lines(evidence, loader)
    total_s = sum(r.seconds for r in rows)
    counted_s = sum(r.seconds for r in rows if (s := evidence.source_of(r.source)) is not None and is_counted(s))
    return counted_s / total_s if total_s else 0.0


def hot_line(evidence: Evidence, loader: Loader) -> Hot:
    """The hottest line of the function that takes most of the pipeline's time: a function spread over ten lines is one place."""
    process = "worker" if loader.num_workers else "main"
    inside = pipeline_lines(evidence, loader)
    rows = [r for r in evidence.lines if r.phase == "data" and r.process == process]
    total_s = sum(r.seconds for r in (inside if process == "worker" else rows))
    if sum(r.num_samples for r in rows) < _FEWEST_SAMPLES and process == "main":
        return Hot(_line_by_operators(evidence, loader), 0.0, ())
    if not inside or sum(r.seconds for r in inside) < _INSIDE_FRACTION * total_s:
        return Hot(_where_to_change(evidence, loader), 0.0, ())
    hot = hottest(evidence, inside, total_s)
    is_loop = hot.where is not None and len(hot.where.via) == 1 and is_in_library(hot.where)
    return Hot(_where_to_change(evidence, loader), 0.0, ()) if is_loop else hot


def _line_by_operators(evidence: Evidence, loader: Loader) -> Source | None:
    """The line whose operators, and the Python before them, took most of the data phase: for when no sample fell there."""
    seconds: dict[int, float] = defaultdict(float)
    for operator in evidence.operators:
        if operator.phase == "data":
            seconds[operator.source] += operator.total_s
    best = max(seconds, key=lambda source: seconds[source], default=-1)
    line = evidence.source_of(best)
    return _where_to_change(evidence, loader) if line is None or is_in_library(line) else line


def _where_to_change(evidence: Evidence, loader: Loader) -> Source | None:
    """The line of the loop over batches; where a library runs that loop (`trainer.fit`), where the loader is constructed."""
    line = evidence.source_of(loader.source)
    if not is_in_library(line):
        return line
    constructor = constructed_at(evidence, loader)
    return msgspec.structs.replace(constructor, via=(), library="") if constructor is not None else line


def hottest(evidence: Evidence, rows: list[LineTime], total_s: float) -> Hot:
    """The function that takes most of the time sampled on these lines, at its hottest line; shares are of `total_s`.

    A function of the user's, or, where most of its time passes in one of a library below it, the innermost such.
    """
    by_function: dict[tuple[str, str], list[LineTime]] = defaultdict(list)
    for row in rows:
        source = evidence.sources[row.source]
        by_function[source.file, function_name_of(source)].append(row)
    mine = max(by_function.values(), key=_seconds)
    frame = _innermost_of_most(evidence, mine)
    if frame is not None:
        inside = [row for row in mine if frame in _functions_below(evidence.sources[row.source])]
        # One line of it may lead to many functions below.
        by_end = group_by(inside, lambda row: _ended_at(evidence.sources[row.source], frame))
        hot = max(by_end, key=lambda source: _seconds(by_end[source]))
        return Hot(hot, _seconds(inside) / total_s, (), frame[1])
    by_line: dict[tuple[str, int], float] = defaultdict(float)
    for row in mine:
        source = evidence.sources[row.source]
        by_line[source.file, source.line] += row.seconds
    places = {(s.file, s.line): s for s in (evidence.sources[row.source] for row in mine)}
    ordered = sorted(by_line, key=lambda place: -by_line[place])
    lines = [msgspec.structs.replace(places[place], via=(), library="") for place in ordered[:4]]
    return Hot(lines[0], _seconds(mine) / total_s, tuple(lines[1:]))


def _seconds(rows: Iterable[LineTime]) -> float:
    return sum(row.seconds for row in rows)


def _functions_below(source: Source) -> list[tuple[str, str]]:
    """File and name of the library functions that ran below this line, outermost first."""
    return [(frame.file, frame.function) for frame in source.via]


def _innermost_of_most(evidence: Evidence, rows: list[LineTime]) -> tuple[str, str] | None:
    """The innermost library function in which most of these samples lie; None where the user's own lines take most."""
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    depth: dict[tuple[str, str], int] = {}
    for row in rows:
        functions = _functions_below(evidence.sources[row.source])
        for level, function in enumerate(functions):
            depth[function] = max(level, depth.get(function, 0))
        for function in set(functions):
            seconds[function] += row.seconds
    most = [f for f in seconds if seconds[f] > _MOST_OF_IT * _seconds(rows)]
    return max(most, key=lambda f: (depth[f], -seconds[f]), default=None)


def _ended_at(source: Source, function: tuple[str, str]) -> Source:
    """The line with the chain below it as far as this function."""
    end = max(i for i, f in enumerate(_functions_below(source)) if f == function)
    frame = source.via[end]
    return msgspec.structs.replace(source, via=source.via[: end + 1], library=f"{frame.file}:{frame.line}")


def function_name_of(source: Source) -> str:
    """The function a line belongs to; a comprehension belongs to the function around it."""
    return _FUNCTIONS_INSIDE.sub("", source.function)


def steady_trial(evidence: Evidence) -> TimeModel | None:
    """The model called without a pause: while Python makes a batch, the threads that compute go to sleep, and caches empty."""
    model = main_model(evidence)
    if model is None or evidence.steps.device_s is not None or evidence.models[model].calls > _ONE_CALL:
        return None
    return TimeModel(model=model, variant="steady", backward=evidence.models[model].num_graphs_used > 0)


def pause_s(evidence: Evidence) -> float:
    """Seconds by which forward and backward take longer in the step than without a pause; 0 where that was not tried."""
    trial = steady_trial(evidence)
    result = result_of(evidence, trial) if trial is not None else None
    if result is None or result.now_s is None:
        return 0.0
    return max(0.0, model_seconds(evidence) - result.now_s)


def with_pause(evidence: Evidence, saved_s: tuple[float, float]) -> tuple[float, float]:
    """A saving of Python before the forward pass, with what the model gains by it; the trial leaves out the loss."""
    pause = pause_s(evidence)
    return saved_s[0] + _PAUSE_LOW * pause, saved_s[1] + _PAUSE_HIGH * pause


def of_pause(evidence: Evidence) -> str:
    """What a finding says of the pause, which is a part of its cost; '' where it is little."""
    pause = pause_s(evidence)
    is_much = pause > _MUCH * evidence.steps.step_s
    return f"; after such a pause the model takes {milliseconds(pause)} longer (tried)" if is_much else ""
