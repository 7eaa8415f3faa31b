"""What happens to a score before the softmax: `flatout.scores.softcap(30) >> flatout.scores.alibi(slopes)`.

A score is (query . key) * scale. Functions are of (score, batch, head, query, key), index tensors that broadcast, and of tensors
of their own, whose gradients they pass on.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cache
from typing import Any, Final, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from flatout.core.errors import UsageError

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

Form = Literal["exact", "sigmoid", "hardware"]
_CAPPED: Final = "flatout::capped_approx"
"""The soft cap cap * tanh(x) by the instruction `tanh.approx.f32` of NVIDIA GPUs (compute capability 7.5 and later), in
FlexAttention's kernels. Its largest relative error is 2^-11 (PTX ISA, tanh). Elsewhere, and in eager code, it is torch's tanh.
The lowering is an interface of Inductor that torch does not promise to keep; it is registered at the form's first use."""


class Scaled(NamedTuple):
    """The same as a function of `share` times the score, where that spares a multiplication for each pair."""

    share: float
    function: Callable[..., Tensor]


class Score(NamedTuple):
    """A function of scores, with the tensors that it holds.

    `function` is (score, b, h, q, kv, *tensors) -> score. `is_additive` if it adds what does not depend on the score. Equal
    `signature`s mean functions that differ in nothing but tensors. `scaled` is for kernels, which scale products anyway.
    """

    function: Callable[..., Tensor]
    tensors: tuple[Tensor, ...]
    name: str
    signature: Hashable
    is_additive: bool = False
    scaled: Scaled | None = None

    def __rshift__(self, then: Score) -> Score:
        num, first, second = len(self.tensors), self.function, then.function

        def then_second(first: Callable[..., Tensor]) -> Callable[..., Tensor]:
            def both(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *tensors: Tensor) -> Tensor:
                return second(first(score, b, h, q, kv, *tensors[:num]), b, h, q, kv, *tensors[num:])

            return both

        return Score(
            then_second(first),
            self.tensors + then.tensors,
            f"{self.name} >> {then.name}",
            (self.signature, then.signature),
            self.is_additive and then.is_additive,
            None if self.scaled is None else Scaled(self.scaled.share, then_second(self.scaled.function)),
        )

    def mod(self, *, is_scaled: bool = False) -> ScoreMod:
        """What FlexAttention calls a score_mod; of scores times `scaled.share` if `is_scaled`."""
        function, tensors = self.function, self.tensors
        if is_scaled and self.scaled is not None:
            function = self.scaled.function
        return lambda score, b, h, q, kv: function(score, b, h, q, kv, *tensors)

    def __repr__(self) -> str:
        return self.name


def softcap(cap: float, *, form: Form = "exact") -> Score:
    """The soft cap, cap * tanh(score / cap), as in Gemma 2: no score lies beyond the cap.

    `form` "sigmoid" writes tanh(x) as 2 sigmoid(2 x) - 1, the same function, which GPUs compute from one exponential; in float32
    the score is then off by at most cap * 2^-21, since both terms are at most 2 and rounded to 2^-23 of themselves. "hardware"
    takes the instruction of NVIDIA GPUs, which is off by at most 2^-11 of its value, cap * 2^-11; elsewhere it is exact.
    """
    if not cap > 0:
        raise UsageError(f"cap is {cap}; give a positive number")
    if form not in get_args(Form):
        raise UsageError(f"form is {form!r}; give one of {', '.join(get_args(Form))}")
    if form == "hardware":
        _register()
    share = 1 / cap

    def scaled(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        if form == "hardware":
            return _capped(score, cap)
        return cap * (torch.tanh(score) if form == "exact" else 2 * torch.sigmoid(2 * score) - 1)

    def capped(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return scaled(score * share, b, h, q, kv)

    name = f"softcap({cap:g}{'' if form == 'exact' else ', ' + form})"
    return Score(capped, (), name, ("softcap", cap, form), scaled=Scaled(share, scaled))


def alibi(slopes: Tensor) -> Score:
    """Score - slope * |query - key|, with a slope for each head, (H,) (Press, Smith and Lewis, Train short, test long, 2022)."""
    if slopes.dim() != 1 or not slopes.is_floating_point():
        raise UsageError(
            f"slopes are {slopes.dtype} of shape {tuple(slopes.shape)}; give one floating-point number a head"
        )

    def sloped(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor, slopes: Tensor) -> Tensor:
        return score - slopes[h] * (q - kv).abs()

    return Score(sloped, (slopes,), "alibi", "alibi", is_additive=True)


def alibi_slopes(heads: int) -> Tensor:
    """(H,): the slopes of the paper, 2^(-8 (i + 1) / H) for head i; for H no power of two as its authors' code interpolates.

    >>> alibi_slopes(2).tolist()
    [0.0625, 0.00390625]
    """
    whole = 1 << (heads.bit_length() - 1)
    slopes = [2 ** (-8 * (i + 1) / whole) for i in range(whole)]
    slopes += [2 ** (-8 * (i + 0.5) / whole) for i in range(heads - whole)]
    return torch.tensor(slopes[:heads])


def relative_bias(table: Tensor) -> Score:
    """The score + table[head, distance]: a learned number for each head and distance, (H, 2 D + 1), of query - key from -D to D.

    Distances beyond D count as D. The table gets its gradient.
    """
    if table.dim() != 2 or table.size(1) % 2 == 0:
        raise UsageError(f"a table of shape {tuple(table.shape)} must be (heads, 2 D + 1), for distances from -D to D")
    furthest = table.size(1) // 2

    def biased(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor, table: Tensor) -> Tensor:
        return score + table[h, (q - kv).clamp(-furthest, furthest) + furthest]

    return Score(biased, (table,), "relative_bias", ("relative_bias", furthest), is_additive=True)


def custom(function: Callable[..., Tensor], *tensors: Tensor) -> Score:
    """Any function of (score, batch, head, query, key, *tensors), elementwise in torch; the tensors get their gradients.

    On a GPU it becomes part of FlexAttention's kernels, whose backward pass (torch 2.11) does not compile where a tensor that
    needs its gradient is indexed by sample or head alone, without query or key.
    """
    signature: Any = getattr(function, "__code__", function)
    return Score(function, tensors, f"custom({getattr(function, '__name__', '...')})", ("custom", signature))


def _capped(share: Tensor, cap: float) -> Tensor:
    """The soft cap, cap * tanh(share), elementwise; `_register` comes first."""
    out: Tensor = torch.ops.flatout.capped_approx(share, cap)
    return out


@cache
def _register() -> None:
    """Make the operator known to torch, once."""
    torch.library.define(_CAPPED, "(Tensor share, float cap) -> Tensor")
    torch.library.impl(_CAPPED, "CompositeExplicitAutograd", lambda share, cap: cap * torch.tanh(share))
    torch.library.register_fake(_CAPPED, lambda share, cap: torch.empty_like(share))
    torch.library.register_autograd(_CAPPED, _backward, setup_context=_save)
    torch.library.register_vmap(_CAPPED, lambda info, in_dims, share, cap: (_capped(share, cap), in_dims[0]))
    _lowered()


def _lowered() -> None:
    from torch._inductor.lowering import make_pointwise, register_lowering
    from torch._inductor.virtualized import ops

    def lowered(share: Any, cap: float) -> Any:
        def whole(x: Any) -> Any:
            tanh = ops.inline_asm_elementwise(x, asm="tanh.approx.f32 $0, $1;")
            return ops.mul(tanh, ops.constant(cap, torch.float32))

        return make_pointwise(whole)(share)

    register_lowering(torch.ops.flatout.capped_approx)(lowered)


def _save(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
    # the tanh itself, as a second result of the operator, made the backward kernel 1.7 times slower
    ctx.save_for_backward(output)
    ctx.cap = inputs[1]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    """The derivative of cap * tanh(x) is cap * (1 - tanh^2) = cap - out^2 / cap."""
    (out,) = ctx.saved_tensors
    return grad * (ctx.cap - out * out * (1 / ctx.cap)), None
