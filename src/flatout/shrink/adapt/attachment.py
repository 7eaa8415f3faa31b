"""Where a method goes in a model, and putting it there under a name, and taking everything off again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import accumulate
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from flatout.core.errors import UsageError
from flatout.core.records.adapt import BitFit, Bottleneck, Freeze, Lora, Method, Prefix, Prompt, Trained
from flatout.shrink.adapt import side_modules as added
from flatout.shrink.adapt.low_rank import ADAPTED, BESIDE, LOW_RANK_CHILD, AdapterParts, LowRank
from flatout.shrink.adapt.targets import check_used, matches, select_targets
from flatout.shrink.adapt.widths import Width, channels_before, width_after

_STD: Final = 0.02
"""Of drawn vectors: what transformers' embeddings are commonly drawn with (GPT-2's initializer_range)."""


def resolve_method(model: nn.Module, method: Method) -> Trained:
    """Make the choices that a method leaves open, for this model; what it trains is not counted yet. Changes nothing.

    Raises UsageError for what the model does not have or cannot take.
    """
    rank, why = None, dict[str, str]()
    match method:
        case Lora():
            rank, targets, why = select_targets(model, method)
            hosts = [f"{t.path}/{t.name}" for t in targets]
        case Bottleneck():
            hosts = _bottlenecks(model, method)
        case Prompt():
            hosts = _prompt_place(model, method)
        case Prefix():
            hosts = _attentions(model, method)
        case BitFit():
            hosts = _biases(model, method)
        case Freeze():
            hosts = _unfrozen(model, method)
    return Trained(method=method, parameters=0, of_parameters=0, hosts=tuple(hosts), rank=rank, why=why)


def attach(model: nn.Module, trained: Trained, *, name: str, generator: torch.Generator) -> None:
    """Add the parameters of a method, not yet in use. Numbers are drawn on the CPU, so that a seed means the same anywhere."""
    match trained.method:
        case Lora() as method:
            for host in trained.hosts:
                _attach_pair(model, host, method, cast(int, trained.rank), name, generator)
        case Bottleneck(width=inner):
            for path in trained.hosts:
                behind = model.get_submodule(path)
                like, width = _some_weight(model, behind), _width_of(model, path)
                part = added.BottleneckLayer(like, width, inner, generator=generator)
                _parts_at(behind, "bottleneck", added.OutputParts)[name] = part
        case Prompt() as method:
            _attach_prompt(model, method, trained.hosts, name, generator)
        case Prefix(num_vectors=num):
            for path in trained.hosts:
                attention = cast(nn.MultiheadAttention, model.get_submodule(path))
                like, sizes = _some_weight(model, attention), (attention.kdim, attention.vdim)
                vectors = [_drawn((num, size), like, generator) for size in sizes]
                _parts_at(attention, "prefix", added.PrefixParts)[name] = added.PrefixVectors(*vectors)
        case BitFit() | Freeze():
            pass  # parameters of the model's own


def adapter_parts(model: nn.Module) -> Iterator[tuple[str, AdapterParts]]:
    """Everything that was added, with its path."""
    for path, module in model.named_modules():
        if isinstance(module, AdapterParts):
            yield path, module


def plain_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The model's own modules, in its order."""
    away = tuple(f"{path}." for path, _ in adapter_parts(model))
    for path, module in model.named_modules():
        if not isinstance(module, AdapterParts) and not f"{path}.".startswith(away or "\0"):
            yield path, module


def plain_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The model's own parameters; each once."""
    visited = set()
    for path, module in plain_modules(model):
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in visited:
                visited.add(id(parameter))
                yield f"{path}.{name}".lstrip("."), parameter


def detach(model: nn.Module) -> None:
    """Take off all that was added, and give each layer its own class back."""
    for path, parts in list(adapter_parts(model)):
        owner, _, name = path.rpartition(".")
        host = model.get_submodule(owner)
        for hooks in (host._forward_hooks, host._forward_pre_hooks):
            for key in [k for k, hook in hooks.items() if getattr(hook, "__self__", None) is parts]:
                del hooks[key]
                host._forward_pre_hooks_with_kwargs.pop(key, None)
        if name == LOW_RANK_CHILD:
            host.__class__ = parts.plain_class
        del host._modules[name]


def _parts_at(host: nn.Module, name: str, kind: type[AdapterParts]) -> AdapterParts:
    """The host's child of that name, made and hooked at the first time."""
    found = host._modules.get(name)
    if isinstance(found, kind):
        return found
    if hasattr(host, name):
        raise UsageError(f"{type(host).__name__} has an attribute '{name}' of its own; an adapter needs that name")
    parts = kind()
    host.add_module(name, parts)
    parts.hook(host)
    return parts


def _width_of(model: nn.Module, path: str) -> Width:
    """Width of a layer's output; the container's for a layer without weights that ends one."""
    module = model.get_submodule(path)
    while not any(True for _ in module.parameters()) and path:
        path = path.rpartition(".")[0]
        module = model.get_submodule(path)
    return width_after(path, module)


def _attach_pair(model: nn.Module, place: str, method: Lora, rank: int, name: str, generator: torch.Generator) -> None:
    path, _, weight = place.partition("/")
    host = model.get_submodule(path)
    raw = cast(Tensor, host._parameters[weight]).detach()
    scale = (rank if method.alpha is None else method.alpha) / rank
    dropout = method.dropout if isinstance(host, BESIDE) else 0.0
    pair = LowRank(raw, rank, scale=scale, dropout=dropout, generator=generator)
    if method.is_dora:
        pair.give_length(raw)
    parts = _parts_at(host, LOW_RANK_CHILD, AdapterParts)
    if type(host) in ADAPTED:
        parts.plain_class = type(host)
        host.__class__ = ADAPTED[type(host)]
    if name not in parts:
        parts[name] = nn.ModuleDict()
    cast(nn.ModuleDict, parts[name])[weight] = pair


def _attach_prompt(
    model: nn.Module, method: Prompt, hosts: tuple[str, ...], name: str, generator: torch.Generator
) -> None:
    host = model.get_submodule(hosts[0])
    child, kind = ("prompt", added.InputParts) if method.after is None else ("prompt_after", added.OutputParts)
    prompt = added.PromptVectors(_first_vectors(model, host, method, generator))
    _parts_at(host, child, kind)[name] = prompt
    if method.is_cut:
        cut = added.PromptCut(hosts[1], prompt)
        _parts_at(model.get_submodule(hosts[1]), "prompt_cut", added.OutputParts)[name] = cut


def _first_vectors(model: nn.Module, host: nn.Module, method: Prompt, generator: torch.Generator) -> Tensor:
    """Rows of the embedding where there is one (Lester et al. start from words), else drawn."""
    num = method.num_vectors
    if method.after is not None and isinstance(host, nn.Embedding):
        rows = torch.randint(host.num_embeddings, (num,), generator=generator)
        return host.weight.detach()[rows.to(host.weight.device)].clone()
    path = cast(str, method.before or method.after)
    named = model.get_submodule(path)
    channels = channels_before(path, named) if method.after is None else width_after(path, named).channels
    return _drawn((num, channels), _some_weight(model, host), generator)


def _drawn(shape: tuple[int, int], like: Tensor, generator: torch.Generator) -> Tensor:
    return (torch.randn(shape, generator=generator) * _STD).to(like)


def _some_weight(model: nn.Module, host: nn.Module) -> Tensor:
    """A floating-point parameter of the host, else of the model: dtype and device of what is added."""
    for module in (host, model):
        for parameter in module.parameters():
            if parameter.is_floating_point():
                return parameter.detach()
    raise UsageError(f"{type(model).__name__} has no floating-point parameter to take the dtype from")


# -- where ------------------------------------------------------------------------------------------------------------------


def _bottlenecks(model: nn.Module, method: Bottleneck) -> list[str]:
    if method.width < 1:
        raise UsageError(f"width {method.width} is below 1; a bottleneck needs a number")
    own = dict(plain_modules(model))
    inside = {f"{path}.out_proj".lstrip(".") for path, m in own.items() if isinstance(m, nn.MultiheadAttention)}
    if method.after is None:
        kinds: Any = (*ADAPTED, nn.modules.conv._ConvNd)
        found = [path for path, module in own.items() if isinstance(module, kinds) and path not in inside][:-1]
        if not found:
            raise UsageError("the model has no layer before its last one; name modules in `after`")
        return found
    check_used(method.after, list(own), of="module")
    named = [path for path in own if matches(path, method.after)]
    for path in named:
        if path in inside:
            raise UsageError(f"'{path}' is never called, attention reads its weight; put it after the attention")
        width_after(path, own[path])  # raises where it cannot be known
    return [_inside(model, path, -1) for path in named]


def _prompt_place(model: nn.Module, method: Prompt) -> list[str]:
    if method.num_vectors < 1:
        raise UsageError(f"num_vectors {method.num_vectors} is below 1; a prompt needs a vector")
    if (method.after is None) == (method.before is None):
        raise UsageError("a prompt needs one place: `after` a module such as the embedding, or `before` one")
    at = cast(str, method.before if method.after is None else method.after)
    own = dict(plain_modules(model))
    cut = method.cut if method.cut is not None else method.before or ""
    for path in (at, cut):
        if path not in own:
            raise UsageError(f"'{path}' names no module; there are {', '.join(list(own)[1:13])}")
    (channels_before if method.after is None else width_after)(at, own[at])  # raises where it cannot be known
    host = _inside(model, at, 0 if method.after is None else -1)
    return [host, _inside(model, cut, -1)] if method.is_cut else [host]


def _inside(model: nn.Module, path: str, end: int) -> str:
    """The first or last layer of a container that counts its children: one more of them would change what it runs."""
    module = model.get_submodule(path)
    while isinstance(module, (nn.Sequential, nn.ModuleList)):
        names = [name for name, child in module._modules.items() if not isinstance(child, AdapterParts)]
        if not names:
            raise UsageError(f"'{path}' is an empty {type(module).__name__}; name a module that is called")
        path = f"{path}.{names[end]}".lstrip(".")
        module = model.get_submodule(path)
    return path


def _attentions(model: nn.Module, method: Prefix) -> list[str]:
    if method.num_vectors < 1:
        raise UsageError(f"num_vectors {method.num_vectors} is below 1; a prefix needs a vector")
    own = dict(plain_modules(model))
    patterns = method.targets or ("*",)
    check_used(patterns, list(own), of="module")
    found = [path for path, module in own.items() if matches(path, patterns)]
    fitting = [path for path in found if isinstance(own[path], nn.MultiheadAttention)]
    if not fitting or (method.targets is not None and "*" not in "".join(patterns) and len(fitting) < len(found)):
        raise UsageError(
            "a prefix needs nn.MultiheadAttention, whose masks are known; where a model writes its attention itself, a causal "
            "mask would count the prefix as tokens: give it a prompt `before` its blocks instead"
        )
    return fitting


def _biases(model: nn.Module, method: BitFit) -> list[str]:
    own = [path for path, _ in plain_parameters(model)]
    found = [path for path in own if path.rpartition(".")[2].startswith("bias") or path.endswith("_bias")]
    if not found:
        raise UsageError(f"{type(model).__name__} has no biases; use another method")
    also = _named_parameters(model, method.also)
    return [path for path in own if path in found or path in also]


def _unfrozen(model: nn.Module, method: Freeze) -> list[str]:
    if sum((bool(method.keep), method.last is not None, method.budget is not None)) != 1:
        raise UsageError("freezing needs one of: keep (patterns), last (modules), budget (parameters)")
    if not method.keep:
        last = _last_modules(model, method)
        return [path for path, _ in plain_parameters(model) if path.rpartition(".")[0] in last]
    selected = _named_parameters(model, method.keep)
    if not selected:
        raise UsageError(f"{', '.join(method.keep)} has no parameters; name what is to be trained")
    return selected


def _last_modules(model: nn.Module, method: Freeze) -> list[str]:
    sizes = Counter[str]()
    for path, parameter in plain_parameters(model):
        sizes[path.rpartition(".")[0]] += parameter.numel()
    names = list(sizes)
    if method.last is not None:
        if not 1 <= method.last <= len(names):
            raise UsageError(f"last {method.last} is outside 1..{len(names)}, the modules with parameters")
        return names[-method.last :]
    budget = cast(int, method.budget)
    num = sum(total <= budget for total in accumulate(sizes[name] for name in reversed(names)))
    if not num:
        raise UsageError(f"budget {budget} is below the last module's {sizes[names[-1]]} parameters; raise it")
    return names[-num:]


def _named_parameters(model: nn.Module, patterns: tuple[str, ...]) -> list[str]:
    """Parameters that a pattern names, or a module around them.

    Raises UsageError for a pattern that names neither a parameter nor a module.
    """
    own = [path for path, _ in plain_parameters(model)]
    check_used(patterns, [*own, *(path for path, _ in plain_modules(model))], of="module or parameter")
    around = {path: list(accumulate(path.split("."), "{}.{}".format)) for path in own}
    return [path for path in own if any(matches(part, patterns) for part in around[path])]
