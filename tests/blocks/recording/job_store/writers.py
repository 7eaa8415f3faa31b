"""Many processes that write to one store at once and are killed: `python writers.py STORE FOLDER WRITERS SECONDS SEED`.

Each writer notes in FOLDER what the store has taken from it. One process tidies and one reads all the while.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import traceback
from pathlib import Path
from time import monotonic, sleep

import msgspec
from tests.fleet_jobs import NOW_S, finding, job

from flatout.blocks.recording.job_store.opening import open_store

PADDING = "x" * 2000


def write(store: Path, notes: Path, number: int, draw: random.Random) -> None:
    """Write one job again and again, as heartbeats do, then its end, and the next job."""
    opened = open_store(store)
    descriptor = os.open(notes / f"writer{number}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for start in range(100_000):
        base = job(number, findings=(finding((1.1, 1.3), because=PADDING),), began_s=NOW_S)
        ends = draw.randrange(2, 8)
        for revision in range(1, ends + 1):
            outcome = "finished" if revision == ends else "running"
            record = msgspec.structs.replace(base, id=f"w{number}-{start}", revision=revision, outcome=outcome)
            opened.write(record)
            os.write(descriptor, f"{record.id} {revision}\n".encode())
            sleep(draw.uniform(0.0, 0.2))


def tidy(store: Path) -> None:
    while True:
        open_store(store).tidy(now_s=NOW_S + 7200.0)
        sleep(0.05)


def read(store: Path, notes: Path) -> None:
    """Read again and again; what was there once has to be there the next time, no older than it was."""
    known: dict[str, int] = {}
    while True:
        found = open_store(store).read()
        assert not found.notes, found.notes
        now = {record.id: record.revision for record in found.jobs}
        lost = [name for name, revision in known.items() if now.get(name, -1) < revision]
        assert not lost, lost[:5]
        known = now
        (notes / "readings").open("a").write("one\n")


def started(action: object, *arguments: object) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        action(*arguments)  # type: ignore[operator]
    except BaseException:  # noqa: BLE001  # its parent prints it
        (Path(sys.argv[2]) / f"failed{os.getpid()}").write_text(traceback.format_exc())
    os._exit(1)


def main() -> int:
    store, notes = Path(sys.argv[1]), Path(sys.argv[2])
    writers, seconds, seed = int(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5])
    draw = random.Random(seed)
    helpers = {started(tidy, store), started(read, store, notes)}
    alive = {started(write, store, notes, number, random.Random(number)): number for number in range(writers)}
    end_s = monotonic() + seconds
    while alive and monotonic() < end_s:
        sleep(seconds / (2 * writers))
        victim = draw.choice([*alive, *helpers] if draw.random() < 0.1 else [*alive])
        os.kill(victim, signal.SIGKILL)
        os.waitpid(victim, 0)
        alive.pop(victim, None)
        if victim in helpers:  # somebody tidies and reads again
            helpers.discard(victim)
            helpers.add(started(tidy, store) if draw.random() < 0.5 else started(read, store, notes))
    for pid in (*alive, *helpers):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
