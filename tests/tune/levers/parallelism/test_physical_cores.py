from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from tests.evidence_builder import EvidenceBuilder
from tests.lever_tools import pulled

from flatout.core.errors import PlanError
from flatout.core.records.lever import Refusal
from flatout.tune.levers.parallelism.physical_cores import LEVER, core_sets


def machine(folder: Path, siblings: list[str], nodes: list[list[int]]) -> Path:
    """A kernel's description of a machine: each processor's hyper-threads, each node's processors."""
    for cpu, text in enumerate(siblings):
        place = folder / f"cpu/cpu{cpu}/topology"
        place.mkdir(parents=True)
        (place / "thread_siblings_list").write_text(text + "\n")
    for number, cpus in enumerate(nodes):
        for cpu in cpus:
            (folder / f"node/node{number}/cpu{cpu}").mkdir(parents=True)
    return folder


def test_one_of_each_cores_threads_is_chosen(tmp_path: Path) -> None:
    place = machine(tmp_path, ["0,2", "1,3", "0,2", "1,3"], [[0, 1, 2, 3]])
    assert [cpus for cpus, _ in core_sets(range(4), place)] == [(0, 1)]
    assert [cpus for cpus, _ in core_sets([1, 2, 3], place)] == [(1, 2)]


def test_the_cores_of_one_node_are_chosen(tmp_path: Path) -> None:
    place = machine(tmp_path, ["0", "1", "2"], [[0, 1], [2]])
    assert [cpus for cpus, _ in core_sets(range(3), place)] == [(0, 1)]


def test_an_ordinary_machine_leaves_nothing_to_choose(tmp_path: Path) -> None:
    assert core_sets(range(2), machine(tmp_path, ["0", "1"], [[0, 1]])) == []
    assert core_sets(range(2), tmp_path / "nowhere") == []


def test_another_machines_evidence_is_refused() -> None:
    run = EvidenceBuilder().build()
    if run.workload.num_cores == len(os.sched_getaffinity(0)):
        pytest.skip("this machine has as many processors as the one that tests are written for")
    [refusal] = LEVER.propose(run, ())
    assert isinstance(refusal, Refusal)


def test_the_process_is_bound_until_the_end() -> None:
    before, threads = os.sched_getaffinity(0), torch.get_num_threads()
    first = min(before)
    with pulled(LEVER, cpus=str(first)) as hooks:
        assert os.sched_getaffinity(0) == {first}
        torch.set_num_threads(threads + 1)
        assert torch.get_num_threads() == 1
        assert hooks.done == [LEVER.id]
    assert os.sched_getaffinity(0) == before
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("cpus", ["all", "100000"])
def test_processors_that_are_not_there_are_refused(cpus: str) -> None:
    before = os.sched_getaffinity(0)
    with pytest.raises(PlanError, match="cpus"), pulled(LEVER, cpus=cpus):
        pass
    assert os.sched_getaffinity(0) == before
