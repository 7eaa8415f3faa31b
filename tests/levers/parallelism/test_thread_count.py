from __future__ import annotations

import pytest
import torch
from tests.evidence_builder import EvidenceBuilder
from tests.lever_tools import edited, pulled

from flatout.errors import EditError, PlanError
from flatout.levers.parallelism.thread_count import LEVER
from flatout.records.lever import Candidate, Refusal


def test_other_numbers_of_threads_are_offered() -> None:
    found = list(LEVER.propose(EvidenceBuilder().build(), ()))
    assert found
    assert all(isinstance(c, Candidate) and c.parameters["num_threads"] for c in found)


def test_work_on_a_device_is_refused() -> None:
    [refusal] = LEVER.propose(EvidenceBuilder(device_s=0.05).build(), ())
    assert isinstance(refusal, Refusal)


def test_the_number_is_set_and_stays_until_the_end() -> None:
    before = torch.get_num_threads()
    with pulled(LEVER, num_threads=before + 1) as seams:
        torch.set_num_threads(before + 3)  # the script's own wish
        assert torch.get_num_threads() == before + 1
        assert seams.done == [LEVER.id]
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
