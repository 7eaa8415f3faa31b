from __future__ import annotations

import pytest
import torch

from flatout.blocks.kernels.matmul.problem import MatmulProblem, plain_problem
from flatout.blocks.kernels.matmul.tiles import Device, predicted_s, propose_tiles, tile_shared_bytes

H200 = Device(num_sms=132, shared_bytes=232_448)
SHAPES = [
    (3620, 3620, 3620),
    (4096, 50257, 768),
    (17, 5000, 3001),
    (64, 64, 65536),
    (1, 4096, 4096),
    (5, 3, 7),
    (1, 1, 1),
]


def _problem(m: int, n: int, k: int) -> MatmulProblem:
    return plain_problem(m, n, k, dtype=torch.bfloat16, device="cpu")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape_has_tiles_and_all_fit_the_shared_memory(shape: tuple[int, int, int]) -> None:
    tiles = propose_tiles(_problem(*shape), H200)
    assert tiles
    assert len(set(tiles)) == len(tiles) <= 12
    for tile in tiles:
        assert tile_shared_bytes(tile, torch.bfloat16) < H200.shared_bytes
        assert tile.splits & (tile.splits - 1) == 0


def test_a_deep_product_of_few_tiles_is_split_over_the_device() -> None:
    tile = propose_tiles(_problem(64, 64, 65536), H200)[0]
    assert tile.splits > 1
    assert 66 <= -(-64 // tile.m) * -(-64 // tile.n) * tile.splits <= 264


def test_a_product_that_fills_the_device_is_not_split() -> None:
    assert {tile.splits for tile in propose_tiles(_problem(4096, 50257, 768), H200)} == {1}


def test_programs_that_wait_for_each_other_all_fit_the_device() -> None:
    for shape in SHAPES:
        for tile in propose_tiles(_problem(*shape), H200, most=100):
            if tile.is_single:
                programs = -(-shape[0] // tile.m) * -(-shape[1] // tile.n) * tile.splits
                assert programs * tile_shared_bytes(tile, torch.bfloat16) <= H200.num_sms * H200.shared_bytes


def test_the_model_grows_with_the_work() -> None:
    tile = propose_tiles(_problem(1024, 1024, 1024), H200)[0]
    assert predicted_s(_problem(2048, 1024, 1024), tile, H200) >= predicted_s(_problem(1024, 1024, 1024), tile, H200)


def test_a_smaller_shared_memory_takes_smaller_tiles() -> None:
    small = Device(num_sms=20, shared_bytes=64 * 1024)
    for tile in propose_tiles(_problem(2048, 2048, 2048), small):
        assert tile_shared_bytes(tile, torch.bfloat16) < small.shared_bytes
