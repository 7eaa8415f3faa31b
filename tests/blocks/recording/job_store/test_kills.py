"""Two hundred writers at once, killed at random: what the store has taken is there, whole."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.blocks.recording.job_store.writers import PADDING

from flatout.blocks.recording.job_store.opening import open_store

ROOT = Path(__file__).parents[4]
WRITERS = 200


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fleet.sqlite", "fleet"])
def test_no_row_is_lost_or_torn_when_writers_are_killed(tmp_path: Path, name: str) -> None:
    store, notes = tmp_path / name, tmp_path / "notes"
    notes.mkdir()

    subprocess.run(
        [sys.executable, "-m", "tests.blocks.recording.job_store.writers", store, notes, str(WRITERS), "8", "5"],
        check=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=100,
    )

    assert not [path.read_text() for path in notes.glob("failed*")]
    taken = dict(
        line.rsplit(" ", 1)
        for path in notes.glob("writer*")
        for line in path.read_text().splitlines()  # later lines of one row replace earlier ones
    )
    assert len(list(notes.glob("writer*"))) == WRITERS
    assert len(taken) >= WRITERS
    assert (notes / "readings").read_text().count("one") >= 2
    for _ in range(2):  # as it was left, and after tidying
        found = open_store(store).read()
        assert not found.notes
        stored = {record.id: record for record in found.jobs}
        lost = [name for name, revision in taken.items() if name not in stored or stored[name].revision < int(revision)]
        assert not lost
        assert all(record.findings[0].because == PADDING for record in stored.values())
        open_store(store).tidy(now_s=2e9)
