from __future__ import annotations

import msgspec
import pytest
import torch
from tests.evidence_builder import EvidenceBuilder
from tests.lever_tools import edited, pulled

from flatout.core.errors import EditError, PlanError
from flatout.core.records.lever import Candidate, Refusal, integer
from flatout.tune.levers.parallelism.thread_count import LEVER


def numbers(*, calls: float, threads: int = 2) -> list[int]:
    """What is offered to a run of operators that take 10 ms in so many calls."""
    run = EvidenceBuilder()
    run.operator("aten.mm", run.line("train.py", 9, "x @ w"), op_s=0.01, calls=calls)
    evidence = run.build()
    workload = msgspec.structs.replace(evidence.workload, num_threads=threads, num_cores=2)
    said = LEVER.propose(msgspec.structs.replace(evidence, workload=workload), ())
    return [integer(c.parameters, "num_threads") for c in said if isinstance(c, Candidate)]


def test_one_thread_is_offered_to_small_operators_and_all_cores_where_some_idle() -> None:
    assert numbers(calls=1000) == [1]
    assert numbers(calls=2) == []
    assert numbers(calls=2, threads=1) == [2]


def test_work_on_a_device_is_refused() -> None:
    [refusal] = LEVER.propose(EvidenceBuilder(device_s=0.05).build(), ())
    assert isinstance(refusal, Refusal)


def test_the_number_is_set_and_stays_until_the_end() -> None:
    before = torch.get_num_threads()
    with pulled(LEVER, num_threads=before + 1) as hooks:
        torch.set_num_threads(before + 3)  # the script's own wish
        assert torch.get_num_threads() == before + 1
        assert hooks.done == [LEVER.id]
    assert torch.get_num_threads() == before


def test_a_number_that_is_none_is_refused() -> None:
    with pytest.raises(PlanError, match="num_threads"), pulled(LEVER, num_threads="many"):
        pass


def test_edited_the_number_is_set_where_the_script_starts() -> None:
    plain = "import torch\nfrom torch import nn\nnet = nn.Linear(2, 2)\n"
    assert edited(LEVER, plain, num_threads=3) == (
        "import torch\nfrom torch import nn\n\ntorch.set_num_threads(3)\n\nnet = nn.Linear(2, 2)\n"
    )
    guarded = """
        import torch as th


        def main():
            \"\"\"Train.\"\"\"
            th.manual_seed(0)


        if __name__ == "__main__":
            main()
    """
    assert '"""Train."""\n    th.set_num_threads(3)\n    th.manual_seed(0)' in edited(LEVER, guarded, num_threads=3)


def test_edited_a_number_that_is_set_is_another() -> None:
    text = "import torch\n\ntorch.set_num_threads(8)  # all of them\n"
    assert edited(LEVER, text, num_threads=1) == "import torch\n\ntorch.set_num_threads(1)  # all of them\n"
    with pytest.raises(EditError, match="2 places"):
        edited(LEVER, text + "torch.set_num_threads(2)\n", num_threads=1)
