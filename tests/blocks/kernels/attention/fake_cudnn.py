"""What cuDNN's front end does with documents behind one another, in float64 on any device, for what flatout asks of it.

It reads tensors as cuDNN would: document i begins at the number of the memory that its start names, and a step from one token to
the next is what the tensor's strides say.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


class FakeTensor:
    """A tensor of a graph: what was said of it."""

    def __init__(self, dim: list[int] | None = None, stride: list[int] | None = None, data_type: str = "") -> None:
        self.dim, self.stride, self.data_type = dim, stride, data_type
        self.start: FakeTensor | None = None
        self.is_output = False

    def set_output(self, value: bool) -> FakeTensor:
        self.is_output = value
        return self

    def set_dim(self, dim: list[int]) -> FakeTensor:
        self.dim = dim
        return self

    def set_stride(self, stride: list[int]) -> FakeTensor:
        self.stride = stride
        return self

    def set_data_type(self, data_type: str) -> FakeTensor:
        self.data_type = data_type
        return self

    def set_ragged_offset(self, start: FakeTensor) -> FakeTensor:
        self.start = start
        return self


class FakeGraph:
    """One call of attention, forward or backward."""

    def __init__(self, built: list[str], **_: Any) -> None:
        self._built, self._run = built, None
        self._operands: Any = None

    def tensor(self, *, dim: list[int], stride: list[int], data_type: str) -> FakeTensor:
        return FakeTensor(dim, stride, data_type)

    def sdpa(self, **arguments: Any) -> tuple[FakeTensor, FakeTensor]:
        assert arguments["generate_stats"] and arguments["use_padding_mask"]
        self._operands = arguments | {"out": FakeTensor(), "made_stats": FakeTensor()}
        self._run: Callable[..., None] | None = self._forward
        return self._operands["out"], self._operands["made_stats"]

    def sdpa_backward(self, **arguments: Any) -> tuple[FakeTensor, ...]:
        self._operands = arguments | {"grads": tuple(FakeTensor() for _ in range(3))}
        self._run = self._backward
        return self._operands["grads"]

    def validate(self) -> None:
        for tensor in self._tensors():
            assert tensor.dim is not None and tensor.start is not None
            num, heads, length, width = tensor.dim
            assert tensor.stride == [length * heads * width, width, heads * width, 1]
            assert tensor.start.dim == [num + 1, 1, 1, 1] and tensor.start.data_type == "INT64"

    def _tensors(self) -> list[FakeTensor]:
        found = [self._operands[name] for name in ("q", "k", "v")]
        if self._run == self._forward:
            return [*found, self._operands["out"], self._operands["made_stats"]]
        return [*found, *(self._operands[name] for name in ("o", "dO", "stats")), *self._operands["grads"]]

    def build_operation_graph(self) -> None: ...

    def create_execution_plans(self, modes: list[str]) -> None: ...

    def check_support(self) -> None: ...

    def build_plans(self) -> None:
        assert self._run is not None
        self._built.append(self._run.__name__.removeprefix("_"))

    def get_workspace_size(self) -> int:
        return 16

    def execute(self, operands: dict[FakeTensor, Tensor], workspace: Tensor, *, handle: object) -> None:
        assert workspace.numel() == 16
        assert self._run is not None
        lengths = operands[self._operands["seq_len_q"]].tolist()
        assert self._operands["seq_len_kv"] is self._operands["seq_len_q"]
        for number, length in enumerate(lengths):
            if length:  # an empty document has nothing to read, wherever it would begin
                self._run(operands, number, length)

    def _of_document(self, operands: dict[FakeTensor, Tensor], tensor: FakeTensor, number: int, length: int) -> Tensor:
        """A view (H, S, D) of the document in memory."""
        assert tensor.dim is not None and tensor.stride is not None and tensor.start is not None
        assert length <= tensor.dim[2], "a document is longer than the plan was made for"
        begin = int(operands[tensor.start][number])
        size, stride = (tensor.dim[1], length, tensor.dim[3]), tensor.stride[1:]
        memory = operands[tensor]
        assert begin + (length - 1) * stride[1] + tensor.dim[1] * tensor.dim[3] <= memory.numel()
        return memory.as_strided(size, stride, memory.storage_offset() + begin)

    def _scores(self, q: Tensor, k: Tensor) -> Tensor:
        place = torch.arange(q.size(1))
        far = place[None, :] - place[:, None]
        left, right = (self._operands[f"diagonal_band_{side}_bound"] for side in ("left", "right"))
        seen = torch.ones(far.shape, dtype=torch.bool)
        seen &= True if left is None else far > -left
        seen &= True if right is None else far <= right
        scores: Tensor = (q @ k.transpose(1, 2) * self._operands["attn_scale"]).masked_fill(~seen, -torch.inf)
        return scores

    def _forward(self, operands: dict[FakeTensor, Tensor], number: int, length: int) -> None:
        q, k, v = (self._of_document(operands, self._operands[name], number, length) for name in ("q", "k", "v"))
        k, v = (t.repeat_interleave(q.size(0) // t.size(0), dim=0) for t in (k, v))
        scores = self._scores(q, k)
        self._of_document(operands, self._operands["out"], number, length).copy_(scores.softmax(-1) @ v)
        stats = self._of_document(operands, self._operands["made_stats"], number, length)
        stats.copy_(scores.logsumexp(-1)[..., None])

    def _backward(self, operands: dict[FakeTensor, Tensor], number: int, length: int) -> None:
        names = ("q", "k", "v", "o", "dO", "stats")
        q, k, v, out, grad, stats = (
            self._of_document(operands, self._operands[name], number, length) for name in names
        )
        with torch.enable_grad():
            inputs = [t.detach().clone().requires_grad_() for t in (q, k, v)]
            keys, values = (t.repeat_interleave(q.size(0) // t.size(0), dim=0) for t in inputs[1:])
            weights = (self._scores(inputs[0], keys) - stats.to(q.dtype)).exp()
            again = weights @ values
            torch.testing.assert_close(again, out, rtol=1e-5, atol=1e-5)  # it got the statistics of these scores
            softmax = self._scores(inputs[0], keys).softmax(-1) @ values
            grads = torch.autograd.grad(softmax, inputs, grad)
        for tensor, made in zip(self._operands["grads"], grads, strict=True):
            self._of_document(operands, tensor, number, length).copy_(made)


class FakeCudnn(SimpleNamespace):
    """The module `cudnn`; `built` are the plans that were made."""

    def __init__(self) -> None:
        built: list[str] = []
        names = ("BFLOAT16", "HALF", "FLOAT", "DOUBLE", "INT32", "INT64")
        super().__init__(
            built=built,
            data_type=SimpleNamespace(**{name: name for name in names}),
            heur_mode=SimpleNamespace(A="A", FALLBACK="FALLBACK"),
            diagonal_alignment=SimpleNamespace(TOP_LEFT="TOP_LEFT"),
            create_handle=object,
            set_stream=lambda *, handle, stream: None,
            backend_version=lambda: 91_500,
            pygraph=lambda **arguments: FakeGraph(built, **arguments),
        )
