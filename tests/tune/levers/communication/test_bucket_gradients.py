from __future__ import annotations

from typing import Any

import pytest
from tests.evidence_builder import EvidenceBuilder
from tests.lever_tools import found

from flatout.core.errors import EditError
from flatout.core.records.distributed import Collective, Replication
from flatout.core.records.evidence import Evidence
from flatout.core.records.lever import Candidate, Refusal
from flatout.tune.levers.communication import bucket_gradients, no_sync, no_unused_search


def run(**replication: Any) -> Evidence:
    builder = EvidenceBuilder()
    builder.collectives.append(
        Collective(
            op="ddp.gradients",
            source=-1,
            phase="backward",
            backend="gloo",
            group_size=2,
            num=10,
            bytes=10 << 20,
            seconds=0.03,
            exposed_s=0.02,
        )
    )
    known: dict[str, Any] = {
        "source": -1,
        "bucket_bytes": (1 << 20,) * 10,
        "find_unused_parameters": False,
        "has_unused_parameters": False,
        "static_graph": False,
        "gradient_as_bucket_view": False,
        "syncs_per_step": 1.0,
        "bucket_cap_bytes": 1 << 20,
    }
    builder.replications.append(Replication(**known | replication))
    return builder.build()


def ways(evidence: Evidence) -> list[dict[str, object]]:
    return [dict(c.parameters) for c in bucket_gradients.LEVER.propose(evidence, ()) if isinstance(c, Candidate)]


def test_many_small_buckets_are_to_be_larger_and_views() -> None:
    view = {"gradient_as_bucket_view": True}
    assert ways(run()) == [{"bucket_cap_mb": 25} | view, view, {"static_graph": True} | view]


def test_a_changing_graph_is_not_called_static_and_few_buckets_stay() -> None:
    assert ways(run(syncs_per_step=4.0, bucket_bytes=(1 << 20,))) == [{"gradient_as_bucket_view": True}]
    assert not ways(run(bucket_bytes=(1,), gradient_as_bucket_view=True, static_graph=True))


@pytest.mark.parametrize("evidence", [run(has_unused_parameters=True), EvidenceBuilder().build()])
def test_what_cannot_be_is_refused(evidence: Evidence) -> None:
    [refusal] = bucket_gradients.LEVER.propose(evidence, ())
    assert isinstance(refusal, Refusal)


def test_accumulation_offers_as_many_forwards_as_there_were() -> None:
    [candidate] = no_sync.LEVER.propose(run(syncs_per_step=4.0), [found(0.02)])
    assert isinstance(candidate, Candidate)
    assert candidate.parameters == {"every": 4}
    [static] = no_sync.LEVER.propose(run(syncs_per_step=4.0, static_graph=True), [found(0.02)])
    [once] = no_sync.LEVER.propose(run(), [])
    assert isinstance(static, Refusal)
    assert isinstance(once, Refusal)


def test_a_search_in_vain_is_to_go() -> None:
    [candidate] = no_unused_search.LEVER.propose(run(find_unused_parameters=True), [found(0.02)])
    [refusal] = no_unused_search.LEVER.propose(run(), [])
    assert isinstance(candidate, Candidate)
    assert isinstance(refusal, Refusal)


IMPORT = "from torch.nn.parallel import DistributedDataParallel as DDP\n"


def test_the_call_is_edited() -> None:
    text = f"{IMPORT}model = DDP(net, device_ids=[0], find_unused_parameters=True)\n"
    wanted = {"gradient_as_bucket_view": True, "bucket_cap_mb": 100}
    changed = bucket_gradients.edit(text, wanted)  # type: ignore[arg-type]
    assert "find_unused_parameters=True, gradient_as_bucket_view=True, bucket_cap_mb=100)\n" in changed
    assert no_unused_search.edit(text, {}) == f"{IMPORT}model = DDP(net, device_ids=[0])\n"
    with pytest.raises(EditError, match="has no find_unused"):
        no_unused_search.edit(f"{IMPORT}model = DDP(net)\n", {})


LOOP = """
for step in range(100):
    for {name} in range({count}):
        loss = model(batch()) / {count}
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("name", "count", "head"),
    [
        (
            "_",
            "args.micro",
            "for micro in range(args.micro):\n        with model.no_sync() if micro < args.micro - 1 else nullcontext():",
        ),
        ("i", "4", "for i in range(4):\n        with model.no_sync() if i < 3 else nullcontext():"),
    ],
)
def test_the_accumulating_loop_is_edited(name: str, count: str, head: str) -> None:
    text = f"{IMPORT}model = DDP(net)" + LOOP.format(name=name, count=count)
    changed = no_sync.edit(text, {})
    assert head in changed
    assert f"            loss = model(batch()) / {count}\n            loss.backward()\n    optimizer.step()" in changed
    assert "from contextlib import nullcontext" in changed
    compile(changed, "edited", "exec")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("loss.backward()", "loss.backward()\n        optimizer.step()"),
        ("range(4)", "batches"),
        ("loss.backward()", "loss.backward()\n        break"),
    ],
)
def test_other_loops_are_left(old: str, new: str) -> None:
    text = f"{IMPORT}model = DDP(net)" + LOOP.format(name="i", count="4")
    with pytest.raises(EditError):
        no_sync.edit(text.replace(old, new), {})
