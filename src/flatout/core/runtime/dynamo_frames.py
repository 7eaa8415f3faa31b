"""What watches a script stays out of what `torch.compile` compiles.

Where a graph ends in compiled code, as at `loss.backward()`, Python goes on with Dynamo looking at every function that is called,
those of ours that stand in for torch's among them. It would compile them, and take what they do to be the script's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])


def outside_dynamo(function: _Function) -> _Function:
    """The function itself, which Dynamo does not look at when it is called, nor at what it calls."""
    return _marked(function, is_recursive=True)


def frame_outside_dynamo(function: _Function) -> _Function:
    """The function itself, which Dynamo does not look at when it is called; what it calls is looked at as ever.

    For what stands in for a function of torch's and calls that, which may call the script's own code.
    """
    return _marked(function, is_recursive=False)


def is_in_compiled_call() -> bool:
    """Whether what runs now was called by compiled code, after a graph's end; asked outside of what Dynamo does not look at.

    When a compiled call returns, it puts back which dispatch keys were on when it began: a TorchDispatchMode that was left inside
    of it would be on again, without being there (torch 2.11 to 2.13, eval_frame.compile_wrapper).
    """
    return torch._C._dynamo.eval_frame.get_eval_frame_callback() is not None


@contextmanager
def dynamo_paused() -> Iterator[None]:
    """Dynamo looks at no function that is called inside, other than through what `torch.compile` returned."""
    before = torch._C._dynamo.eval_frame.set_eval_frame(None)
    try:
        yield
    finally:
        torch._C._dynamo.eval_frame.set_eval_frame(before)


def _marked(function: _Function, *, is_recursive: bool) -> _Function:
    frames = torch._C._dynamo.eval_frame
    skip, default = frames._FrameAction.SKIP, frames._FrameAction.DEFAULT
    strategy = frames._FrameExecStrategy(skip, skip if is_recursive else default)
    frames.set_code_exec_strategy(function.__code__, strategy)
    return function
