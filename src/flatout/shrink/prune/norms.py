"""Rules of norms, softmax and reductions, where a unit that is removed is not the same as one that is zero."""

from __future__ import annotations

from flatout.shrink.prune.operator_rules import AtenCall, Shape, Value, operator_rule, pinned

# What sums to the same, or is averaged over the units that stay (the proof knows how).
SUMS = frozenset({"sum", "mean"})


@operator_rule(
    "batch_norm",
    "instance_norm",
    "_native_batch_norm_legit",
    "_native_batch_norm_legit_no_training",
    "native_batch_norm",
)
def _batch_norm(call: AtenCall) -> Value:
    x = call.shape("input")
    call.tie_vectors(x.dims[1], "weight", "bias", "running_mean", "running_var")
    if call.name == "instance_norm":
        call.pin(x.dims[2:], "the norm runs over it")
    return x if call.name in ("batch_norm", "instance_norm") else call.pin_all()


@operator_rule("layer_norm", "rms_norm")
def _layer_norm(call: AtenCall) -> Value:
    x, num = call.shape("input"), len(call.args["normalized_shape"])
    if num > 1:
        call.pin(x.dims[-num:], "a norm over several dimensions")
    for name in ("weight", "bias"):
        if shape := call.maybe(name):
            for own, dim in zip(shape.dims, x.dims[-num:], strict=True):
                call.terms.tie(dim, own)
    if num == 1 and call.maybe("weight") is None:  # the module's own number is all that knows the size
        call.sizes.append((call.node, "normalized_shape", x.dims[-1]))
    return x


@operator_rule("group_norm")
def _group_norm(call: AtenCall) -> Value:
    """The groups stay, and each loses the units at the same places, so that each is as wide as the others."""
    x, num_groups = call.shape("input"), int(call.args["num_groups"])
    channels = x.dims[1]
    groups, _ = call.terms.split(channels, (num_groups, len(channels) // num_groups))
    call.terms.pin(groups, "each group of a group norm keeps a unit")
    call.tie_vectors(channels, "weight", "bias")
    call.pin(x.dims[2:], "the norm runs over it")
    return x


@operator_rule("softmax", "log_softmax", "_softmax", "_log_softmax", "cumsum", "cumprod", "flip", "roll")
def _runs_over(call: AtenCall) -> Value:
    x = call.shape("self", "input")
    dims = call.args["dim" if "dim" in call.args else "dims"]
    over = dims if isinstance(dims, list) else [dims]
    call.pin((x.dims[dim] for dim in over), f"{call.name} runs over it")
    return x


@operator_rule(
    "sum",
    "mean",
    "amax",
    "amin",
    "max",
    "min",
    "argmax",
    "argmin",
    "var",
    "std",
    "prod",
    "any",
    "all",
    "logsumexp",
    "norm",
)
def _reduce(call: AtenCall) -> Value:
    x = call.shape("self", "input")
    if call.maybe("other") is not None:  # max and min of two tensors
        return call.pin_all()
    dim, keeps_dims = call.args.get("dim"), bool(call.args.get("keepdim", False))
    over = range(len(x.dims)) if dim is None or dim == [] else dim if isinstance(dim, list) else [dim]
    reduced = {d % len(x.dims) for d in over} if x.dims else set()
    if call.name not in SUMS:
        call.pin((x.dims[d] for d in reduced), f"{call.name} runs over it")
    dims = [pinned(1) if d in reduced else dim for d, dim in enumerate(x.dims) if d not in reduced or keeps_dims]
    out = Shape(tuple(dims))
    return [out] * len(call.node.meta["val"]) if isinstance(call.node.meta["val"], (tuple, list)) else out
