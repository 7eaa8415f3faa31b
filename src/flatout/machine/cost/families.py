"""Families of kernels (matrix products, convolutions, copies, ...) and which of them an operator belongs to, by its name."""

from __future__ import annotations

import re
from typing import Final

from flatout.machine.cost.flops import short_name

OTHER_FAMILY: Final = "other operators"
COMPILED_GRAPH: Final = "inductor.graph"
"""The name of an operator that is a compiled graph."""
BARE_KERNEL: Final = "kernel."
"""Begins the names of rows whose kernels no operator launched: those of CUDA graphs, and of code that launches its own."""
_PATTERNS: Final = (
    ("optimizer's multi-tensor kernels", r"_foreach_|_fused_(?!dropout|moving|sdp|rms|layer)"),
    ("attention", r"scaled_dot_product|_flash_attention|_efficient_attention|flex_attention|_cudnn_attention"),
    ("recurrent layers", r"lstm|gru|rnn"),
    ("convolutions", r"conv"),
    ("collectives", r"all_?reduce|all_?gather|reduce_scatter|all_?to_?all|broadcast_$|wait_tensor|barrier"),
    (
        "matrix products",
        r"_?(add|b|badd|sparse_|scaled_|grouped_|int_|weight_int\w*_)*mm(_(?!ul)\w*)?$|matmul|linear(_backward)?$|^(add)?mv$|^dot$"
        r"|^vdot$|^addr$|^addbmm$|^einsum$|bilinear$|^_?cdist|_trilinear",
    ),
    (
        "decompositions and solvers",
        r"^_?linalg_(?!vector_norm)|cholesky|^svd|^qr$|inverse|^lu_|triangular_solve|^det$|eigh?$",
    ),
    ("Fourier transforms", r"^_?fft_|stft"),
    ("normalisation", r"(batch|layer|group|instance|rms)_?norm|^_weight_norm|renorm"),
    ("softmax and losses", r"softmax|_loss|cross_entropy|kl_div|_ctc|log_sigmoid"),
    ("pooling and resampling", r"pool|upsample|grid_sampler|interpolate|im2col|col2im|pixel_(un)?shuffle"),
    ("sorting", r"sort|topk|unique|kthvalue|^(nan)?median|^mode$|searchsorted|bucketize|histc|bincount"),
    (
        "random numbers",
        r"^(rand|normal|bernoulli|multinomial|uniform|exponential|poisson|cauchy|geometric|log_normal|random)|dropout"
        r"|binomial|_gamma|dirichlet",
    ),
    (
        "gathers and scatters",
        r"embedding|^index|^_?index_put|_unsafe_(masked_)?index|gather|scatter|^take|masked_(select|scatter)|^put_|nonzero|one_hot",
    ),
    (
        "copies and casts",
        r"copy|^clone|^cat$|^stack$|_cat$|contiguous|^_?to(_|$)|^repeat|^roll|^flip|^fill|^zero|^ones|^full|^new_(zeros|ones|full)"
        r"|_like$|_pad$|_pad\dd|^pad|^tril|^triu|^arange|^linspace|^eye|^scalar_tensor|slice_backward|select_backward|_pack_padded"
        r"|_pad_packed|_local_scalar_dense|unfold_backward|split_copy|pin_memory|constant_pad|resize",
    ),
    (
        "reductions",
        r"^(nan)?(sum|mean|prod|amax|amin|aminmax|argmax|argmin|norm|std|var|var_mean|std_mean|any|all|logsumexp|cumsum|cumprod"
        r"|count_nonzero|_is_all_true|_is_any_true|linalg_vector_norm|max|min|trace|equal|cummax|cummin|logcumsumexp|is_nonzero)(_out)?$|reduce$",
    ),
)
_FAMILIES: Final = tuple((name, re.compile(pattern)) for name, pattern in _PATTERNS)
_NAMES_OF_POINTWISE: Final = """
abs acos add addcdiv addcmul asin atan atan2 bitwise_and bitwise_not bitwise_or bitwise_xor ceil celu clamp clamp_max clamp_min
clip complex copysign cos cosh deg2rad digamma div elu elu_backward eq erf erfc erfinv exp exp2 expm1 floor floor_divide fmax fmin
fmod frac gcd ge gelu gelu_backward glu glu_backward gt hardshrink hardsigmoid hardsigmoid_backward hardswish hardswish_backward
hardtanh hardtanh_backward heaviside hypot isfinite isinf isnan lcm le leaky_relu leaky_relu_backward lerp lgamma log log10 log1p
log2 logaddexp logical_and logical_not logical_or logical_xor logit lt masked_fill maximum minimum mish mish_backward mul
nan_to_num ne neg polar pow prelu _prelu_kernel _prelu_kernel_backward reciprocal relu relu6 remainder round rrelu rsqrt rsub selu
sgn sigmoid sigmoid_backward sign silu silu_backward sin sinc sinh softplus softplus_backward softshrink sqrt square sub tan tanh
tanh_backward threshold threshold_backward trunc where xlogy _conj _neg_view angle real imag
"""
_POINTWISE: Final = frozenset(_NAMES_OF_POINTWISE.split())


def family_of(op: str) -> str:
    """What the operator's kernels do, in the field's words; OTHER_FAMILY for one that no pattern knows.

    >>> family_of("aten.addmm"), family_of("aten.mul_"), family_of("aten.native_layer_norm_backward")
    ('matrix products', 'pointwise operators', 'normalisation')
    >>> family_of("mine.thing"), family_of("inductor.graph"), family_of("inductor.triton_poi_fused_gelu_3")
    ('other operators', 'compiled graphs', 'compiled kernels')
    """
    if op == COMPILED_GRAPH:
        return "compiled graphs"
    if op.startswith("inductor."):
        return "compiled kernels"
    short = short_name(op)
    if short.removesuffix("_") in _POINTWISE:
        return "pointwise operators"
    return next((name for name, pattern in _FAMILIES if pattern.search(short.removesuffix("_"))), OTHER_FAMILY)
