"""Pipeline schedules as tables of what each stage does, one after the other, and when each of it is done.

GPipe (Huang et al., 2019), 1F1B (Narayanan et al., PipeDream-2BW and Megatron-LM, 2021) and its interleaved form, breadth-first
(Lamy-Poirier, 2022), zero bubble and its V (Qi et al., 2023), and DualPipe folded to a V (DeepSeek-V3, 2024; Sea AI Lab's cut in
half). The tables are those that torch.distributed.pipelining runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Literal, NamedTuple

from flatout.core.errors import PlanError
from flatout.core.records.scale import FOLDED, ScheduleKind

# p stages, m micro-batches, v chunks of a stage


class Action(NamedTuple):
    """What a stage does with one micro-batch and one chunk of the model.

    F forward, B backward, which is done as one or as I, gradients of inputs, and W, gradients of weights.
    """

    kind: Literal["F", "B", "I", "W"]
    chunk: int
    micro_batch: int


class Overlapped(NamedTuple):
    """A forward and a backward of two micro-batches that are handed to the device together. What both send leaves at the end."""

    forward: Action
    backward: Action


Entry = Action | Overlapped
Table = tuple[tuple[Entry, ...], ...]
"""By stage, in order."""


class Done(NamedTuple):
    """An action and when it began and ended."""

    action: Action
    begin_s: float
    end_s: float


@lru_cache(maxsize=256)
def schedule_table(kind: ScheduleKind, *, stages: int, micro_batches: int, chunks: int = 1) -> Table:
    """What each stage does, in order.

    Raises PlanError for numbers of micro-batches that the schedule has no order for.

    >>> ["".join(f"{a.kind}{a.micro_batch}" for a in row) for row in schedule_table("1f1b", stages=2, micro_batches=3)]
    ['F0F1B0F2B1B2', 'F0B0F1B1F2B2']
    """
    if kind == "dualpipev" and micro_batches < 2 * stages:
        raise PlanError(f"dualpipev needs two micro-batches a stage, {2 * stages}, and there are {micro_batches}")
    if (kind == "zero-bubble" or (kind == "interleaved" and chunks > 1)) and micro_batches % _rounds(
        stages, micro_batches
    ):
        raise PlanError(
            f"{micro_batches} micro-batches on {stages} stages do not come in {_rounds(stages, micro_batches)} equal rounds: "
            f"'{kind}' needs that; take a multiple of {stages}"
        )
    rows: dict[ScheduleKind, Callable[[int, int, int, int], list[Entry]]] = {
        "gpipe": partial(_plain, warm=micro_batches),
        "1f1b": _plain,
        "interleaved": _interleaved if chunks > 1 else _plain,
        "looped-bfs": _breadth_first,
        "zero-bubble": partial(_interleaved, is_split=True),
        "zbv": _zero_bubble_v,
        "dualpipev": _dual_pipe_v,
    }
    return tuple(tuple(rows[kind](stage, stages, micro_batches, chunks)) for stage in range(stages))


def rank_of(kind: ScheduleKind, chunk: int, *, stages: int) -> int:
    """The stage on which a chunk lies: in rounds, or down and up again where the schedule is folded.

    >>> [rank_of("zbv", chunk, stages=2) for chunk in range(4)]
    [0, 1, 1, 0]
    """
    place = chunk % (2 * stages)
    return 2 * stages - 1 - place if kind in FOLDED and place >= stages else place % stages


@lru_cache(maxsize=512)
def chunks_of_stages(kind: ScheduleKind, *, stages: int, parts: int) -> tuple[tuple[int, ...], ...]:
    """The chunks of each stage, `parts` on each.

    >>> chunks_of_stages("dualpipev", stages=2, parts=2)
    ((0, 3), (1, 2))
    """
    found: list[list[int]] = [[] for _ in range(stages)]
    for chunk in range(stages * parts):
        found[rank_of(kind, chunk, stages=stages)].append(chunk)
    return tuple(map(tuple, found))


@lru_cache(maxsize=1024)
def layers_of_chunks(layers: int, num_chunks: int) -> tuple[int, ...]:
    """Layers of each chunk, as even as can be. What is left goes to those in the middle: the first also has the embedding, the
    last the logits.

    >>> layers_of_chunks(10, 4)
    (2, 3, 3, 2)
    """
    each, left = divmod(layers, num_chunks)
    middle = sorted(range(num_chunks), key=lambda chunk: abs(chunk - (num_chunks - 1) / 2))[:left]
    return tuple(each + (chunk in middle) for chunk in range(num_chunks))


def actions_of(entry: Entry) -> tuple[Action, ...]:
    """The action itself, or the two that are overlapped."""
    return (entry,) if isinstance(entry, Action) else (entry.forward, entry.backward)


# -- rows -----------------------------------------------------------------------------------------------------------------


def _plain(stage: int, p: int, m: int, v: int, *, warm: int | None = None) -> list[Entry]:
    del v
    warm = min(p - stage - 1 if warm is None else warm, m)
    row: list[Entry] = [Action("F", stage, i) for i in range(warm)]
    for i in range(m - warm):
        row += [Action("F", stage, warm + i), Action("B", stage, i)]
    return [*row, *(Action("B", stage, i) for i in range(m - warm, m))]


def _rounds(stages: int, micro_batches: int) -> int:
    """Groups of micro-batches that go through all chunks of a stage together."""
    return max(1, micro_batches // stages)


def _interleaved(stage: int, p: int, m: int, v: int, *, is_split: bool = False) -> list[Entry]:
    """Groups of micro-batches go through all chunks of a stage in turn (Narayanan et al., 2021, figure 4).

    Split backwards leave gradients of weights for later, as many as there are stages before this one (Qi et al., 2023, ZB-H1).
    """
    total, size = m * v, m // _rounds(p, m)

    def at(step: int, kind: Literal["F", "B", "I", "W"]) -> Action:
        group, inside = divmod(step, size * v)
        turn = inside // size if kind == "F" else v - 1 - inside // size
        return Action(kind, turn * p + stage, group * size + inside % size)

    warm = min(total, (p - stage - 1) * (1 if is_split else 2) + (v - 1) * size)
    row: list[Entry] = [at(i, "F") for i in range(warm)]
    for i in range(total):
        if warm + i < total:
            row.append(at(warm + i, "F"))
        row.append(at(i, "I" if is_split else "B"))
        if is_split and i >= stage:
            row.append(at(i - stage, "W"))
    return [*row, *(at(i, "W") for i in range(max(0, total - stage), total) if is_split)]


def _breadth_first(stage: int, p: int, m: int, v: int) -> list[Entry]:
    """All micro-batches through one chunk before the next (Lamy-Poirier, 2022)."""
    chunks = range(stage, p * v, p)
    forward = [Action("F", chunk, i) for chunk in chunks for i in range(m)]
    return [*forward, *(Action("B", chunk, i) for chunk in reversed(chunks) for i in reversed(range(m)))]


class _FoldedRow:
    """A row of a folded schedule under way: `down` is the stage's first chunk, `up` its second; micro-batches in order."""

    def __init__(self, stage: int, p: int) -> None:
        self.down, self.up = stage, 2 * p - 1 - stage
        self.entries: list[Entry] = []
        self._next: dict[tuple[str, int], int] = {}
        self._late: list[Action] = []

    def next_action(self, kind: Literal["F", "B", "I"], chunk: int) -> Action:
        """The action on the next micro-batch; B and I go through the same ones."""
        direction = "F" if kind == "F" else "B"
        micro_batch = self._next.get((direction, chunk), 0)
        self._next[direction, chunk] = micro_batch + 1
        return Action(kind, chunk, micro_batch)

    def add(self, kind: Literal["F", "B", "I"], chunk: int) -> None:
        """Append an action; the W that an I leaves waits for `weights`."""
        action = self.next_action(kind, chunk)
        self.entries.append(action)
        if kind == "I":
            self._late.append(action._replace(kind="W"))

    def weights(self, chunk: int | None = None) -> None:
        """Append the oldest W that waits, of this chunk if one is named; nothing where none does."""
        found = next((a for a in self._late if chunk is None or a.chunk == chunk), None)
        if found is not None:
            self._late.remove(found)
            self.entries.append(found)

    def both(self, forward: int, backward: int) -> None:
        """Append a forward and a backward together."""
        self.entries.append(Overlapped(self.next_action("F", forward), self.next_action("B", backward)))


def _zero_bubble_v(stage: int, p: int, m: int, v: int) -> list[Entry]:
    """Qi et al., 2023, section 6: no bubble where F, I and W take equally long."""
    del v
    row, most = _FoldedRow(stage, p), max(2 * p - 1, m)
    for _ in range(2 * (p - stage) - 1):
        row.add("F", row.down)
    for _ in range(stage):
        row.add("F", row.up)
        row.add("F", row.down)
    for _ in range(p - stage):
        row.add("F", row.up)
        row.add("I", row.up)
        row.weights(row.up)
    num_begun, num_returned = 2 * p - stage - 1, p
    while num_returned < most:
        if num_begun < most:
            row.add("F", row.down)
        num_begun, num_returned = min(num_begun + 1, most), num_returned + 1
        row.add("I", row.down)
        row.weights(row.down)
        row.add("F", row.up)
        row.add("I", row.up)
        row.weights(row.up)
    for _ in range(stage):
        row.add("I", row.down)
        row.add("I", row.up)
    for _ in range(p - stage):
        row.add("I", row.down)
        row.weights(row.down)
    for chunk in (row.up, row.down):
        for _ in range(stage):
            row.weights(chunk)
    return [a for entry in row.entries for a in actions_of(entry) if a.micro_batch < m]


def _dual_pipe_v(stage: int, p: int, m: int, v: int) -> list[Entry]:
    """The eight steps of DualPipe's published code (DeepSeek, 2025), folded."""
    del v
    row, later = _FoldedRow(stage, p), p - stage - 1
    for _ in range(2 * later):
        row.add("F", row.down)
    for _ in range(stage + 1):
        row.add("F", row.down)
        row.add("F", row.up)
    for _ in range(later):
        row.add("I", row.up)
        row.weights()
        row.add("F", row.up)
    for i in range(m - 2 * p + stage + 1):
        if i == 0 and later == 0:  # apart, which lets the last stage begin its backward earlier
            row.add("F", row.down)
            row.add("B", row.up)
        else:
            row.both(row.down, row.up)
        row.both(row.up, row.down)
    for _ in range(later):
        row.add("B", row.up)
        row.both(row.up, row.down)
    for i in range(2 * (stage + 1)):  # the second half leaves its gradients of weights for the end
        row.add("I" if i > stage else "B", row.down if i % 2 else row.up)
    for _ in range(later):
        row.weights()
        row.add("I", row.down)
    for _ in range(stage + 1):
        row.weights()
    return row.entries


# -- playing --------------------------------------------------------------------------------------------------------------


def simulated_schedule(
    table: Table, *, seconds: Callable[[Action], float], send_s: float = 0.0, chunks: int = 1
) -> tuple[tuple[Done, ...], ...]:
    """When each action of each stage begins and ends: it waits for its stage, and for what the neighbouring chunk sends.

    `chunks` lie on a stage. What lies on the same stage is not sent. Overlapped actions begin when both can, and take their
    seconds one after the other, as torch's runtime does unless it is given a function that does better.

    Raises PlanError for a table in which stages wait for each other for ever.
    """
    last = len(table) * chunks - 1
    home = {action.chunk: stage for stage, row in enumerate(table) for entry in row for action in actions_of(entry)}
    ended: dict[Action, float] = {}
    rows: list[list[Done]] = [[] for _ in table]
    at, clock = [0] * len(table), [0.0] * len(table)
    left = sum(map(len, table))
    while left:
        before = left
        for stage, row in enumerate(table):
            while at[stage] < len(row):
                actions = actions_of(row[at[stage]])
                begin = _ready_s(actions, ended, home, last, send_s)
                if begin is None:
                    break
                begin = max(clock[stage], begin)
                for action in actions:
                    end = begin + seconds(action)
                    rows[stage].append(Done(action, begin, end))
                    begin = end
                clock[stage] = begin
                for action in actions:
                    ended[ended_action(action)] = begin
                at[stage] += 1
                left -= 1
        if left == before:
            raise PlanError("the stages of this schedule wait for each other for ever")
    return tuple(map(tuple, rows))


def _ready_s(
    actions: Sequence[Action], ended: dict[Action, float], home: dict[int, int], last: int, send_s: float
) -> float | None:
    """When what they need has arrived; None while it has not ended."""
    ready = 0.0
    for action in actions:
        needed = needed_action(action, last)
        if needed is None:
            continue
        end = ended.get(needed)
        if end is None:
            return None
        ready = max(ready, end + (send_s if home[needed.chunk] != home[action.chunk] else 0.0))
    return ready


def ended_action(action: Action) -> Action:
    """What has ended with an action: a split backward counts as B when its I has."""
    return action._replace(kind="B") if action.kind == "I" else action


def needed_action(action: Action, last: int) -> Action | None:
    """What must have ended before an action begins, by `ended_action`; None where nothing must. `last` is the last chunk."""
    kind, chunk, micro_batch = action
    if kind == "F":
        return Action("F", chunk - 1, micro_batch) if chunk else None
    if kind == "W":
        return Action("B", chunk, micro_batch)
    return Action("F", chunk, micro_batch) if chunk == last else Action("B", chunk + 1, micro_batch)


def span_s(rows: Sequence[Sequence[Done]]) -> float:
    """Seconds from the first beginning to the last end."""
    return max(row[-1].end_s for row in rows)
