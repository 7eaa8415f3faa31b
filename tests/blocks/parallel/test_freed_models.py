"""A model that is laid out goes when nobody holds it any more."""

from __future__ import annotations

import pytest
from tests.blocks.parallel.forked import lines_of

pytestmark = pytest.mark.slow

FREED = """
    import gc, weakref
    import flatout
    import flatout.blocks.parallel.layouts  # here, and not in each rank
    from flatout.blocks.parallel.layout_measurement import ReferenceTransformer, token_loss
    from flatout.core.records.scale import ModelShape

    SHAPE = ModelShape(hidden=32, layers=2, heads=4, kv_heads=2, vocab=64, seq=16, is_gated=True)

    def freed():
        with flatout.World("cpu") as world:
            for recompute in ("none", "full", "selective"):
                layout = flatout.Layout(tensor=2, is_sequence_parallel=True, recompute=recompute)
                ids, positions = torch.zeros(1, 16, dtype=torch.int64), torch.arange(16)[None]
                model = ReferenceTransformer(SHAPE)
                parallel = flatout.parallelize(model, layout, world, example=(ids, positions), mixed=torch.bfloat16)
                parallel.step(ids, positions, target=ids, loss=token_loss)
                parameters = [weakref.ref(p) for p in parallel.parameters()]
                del model, parallel
                gc.collect()
                assert not any(one() is not None for one in parameters), recompute
        report("gone")

    as_ranks(2, freed)
"""


@pytest.mark.multi
@pytest.mark.long
def test_a_model_whose_layers_share_an_input_is_freed() -> None:
    assert lines_of(FREED) == ["gone"] * 2
