"""What functions of torch do: torch's tags and schemas, and the lists for what they do not know."""

from __future__ import annotations

import subprocess
import sys

import pytest

from flatout.core.runtime import torch_functions
from flatout.core.runtime.torch_functions import is_in_place, is_pointwise, is_random, is_view


@pytest.mark.parametrize(
    "name", ["rand", "randint_like", "normal", "dropout", "choice", "alpha_dropout", "exponential_"]
)
def test_what_draws_random_numbers_is_random(name: str) -> None:
    assert is_random(name)


@pytest.mark.parametrize("name", ["relu", "zeros", "scaled_dot_product_attention", "lstm", "", "__class__", "name"])
def test_what_draws_none_unless_asked_for_dropout_is_not_random(name: str) -> None:
    assert not is_random(name)


@pytest.mark.parametrize("name", ["exp", "clamp", "pow", "eq", "isnan", "clone", "to", "logsigmoid", "gelu"])
def test_functions_of_each_element_are_pointwise(name: str) -> None:
    assert is_pointwise(name)


@pytest.mark.parametrize("name", ["sum", "max", "softmax", "add_", "rrelu", "maximum", "equal", "cumsum", "where_to"])
def test_reductions_writes_and_functions_of_two_tensors_are_not_pointwise(name: str) -> None:
    assert not is_pointwise(name)


@pytest.mark.parametrize(("name", "expected"), [("view", True), ("chunk", True), ("ravel", True), ("cat", False)])
def test_views_may_share_memory(name: str, expected: bool) -> None:
    assert is_view(name) is expected


def test_the_underscore_at_the_end_tells_a_write() -> None:
    assert is_in_place("add_") and not is_in_place("__setattr__")


def test_importing_asks_torch_nothing() -> None:
    code = f"import sys; import {torch_functions.__name__}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
