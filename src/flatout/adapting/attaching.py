"""Where a method goes in a model, and putting it there under a name, and taking everything off again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

from flatout.adapting import added
from flatout.adapting.low_rank import ADAPTED, BESIDE, SLOTS, LowRank, Slots
from flatout.adapting.targets import check_used, choose, matches
from flatout.adapting.widths import Width, channels_before, width_after
from flatout.errors import UsageError
from flatout.records.adapting import BitFit, Bottleneck, Freeze, Lora, Method, Prefix, Prompt

_STD: Final = 0.02
"""Of drawn vectors: what transformers' embeddings are commonly drawn with (GPT-2's initializer_range)."""
S = TypeVar("S", bound=Slots)


class Placed(NamedTuple):
    """A method with all choices made."""

    method: Method
    hosts: tuple[str, ...]
    """As in records.adapting.Trained."""
    rank: int | None = None
    why: dict[str, str] = {}


def place(model: nn.Module, method: Method) -> Placed:
    """Make the choices that a method leaves open, for this model. Changes nothing.

    Raises UsageError for what the model does not have or cannot take.
    """
    match method:
        case Lora():
            choice = choose(model, method)
            return Placed(method, tuple(f"{t.path}/{t.name}" for t in choice.targets), choice.rank, choice.why)
        case Bottleneck():
            return Placed(method, tuple(_bottlenecks(model, method)))
        case Prompt():
            return Placed(method, _prompt_place(model, method))
        case Prefix():
            return Placed(method, tuple(_attentions(model, method)))
        case BitFit():
            return Placed(method, tuple(_biases(model, method)))
        case Freeze():
            return Placed(method, tuple(_kept(model, method)))


def attach(model: nn.Module, placed: Placed, *, name: str, generator: torch.Generator) -> None:
    """Add the parameters of a method, not yet in use. Numbers are drawn on the CPU, so that a seed means the same anywhere."""
    method = placed.method
    if isinstance(method, Lora):
        for host in placed.hosts:
            path, _, weight = host.partition("/")
            _attach_pair(model.get_submodule(path), weight, placed, name, generator)
    elif isinstance(method, Bottleneck):
        for path in placed.hosts:
            behind = model.get_submodule(path)
            like, width = _some_weight(model, behind), _width_of(model, path)
            _slots(behind, "bottleneck", added.Bottlenecks)[name] = added.Bottleneck(
                like, width, method.width, generator=generator
            )
    elif isinstance(method, Prompt):
        _attach_prompt(model, method, placed.hosts, name, generator)
    elif isinstance(method, Prefix):
        for path in placed.hosts:
            attention = cast(nn.MultiheadAttention, model.get_submodule(path))
            like, num = _some_weight(model, attention), method.num_vectors
            keys, values = (_drawn((num, size), like, generator) for size in (attention.kdim, attention.vdim))
            _slots(attention, "prefix", added.Prefixes)[name] = added.Prefix(keys, values)


def slots_of(model: nn.Module) -> Iterator[tuple[str, Slots]]:
    """Everything that was added, with its path."""
    for path, module in model.named_modules():
        if isinstance(module, Slots):
            yield path, module


def plain_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The model's own modules, in its order."""
    away = tuple(f"{path}." for path, _ in slots_of(model))
    for path, module in model.named_modules():
        if not isinstance(module, Slots) and not f"{path}.".startswith(away or "\0"):
            yield path, module


def plain_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The model's own parameters; each once."""
    seen = set()
    for path, module in plain_modules(model):
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                yield f"{path}.{name}".lstrip("."), parameter


def detach(model: nn.Module) -> None:
    """Take off all that was added, and give each layer its own class back."""
    for path, slots in list(slots_of(model)):
        owner, _, name = path.rpartition(".")
        host = model.get_submodule(owner)
        for hooks in (host._forward_hooks, host._forward_pre_hooks):
            for key in [k for k, hook in hooks.items() if getattr(hook, "__self__", None) is slots]:
                del hooks[key]
                host._forward_pre_hooks_with_kwargs.pop(key, None)
        if name == SLOTS:
            host.__class__ = slots.plain_class
        del host._modules[name]


def _slots(host: nn.Module, name: str, kind: type[S]) -> S:
    """The host's child of that name, made and hooked at the first time."""
    if name in host._modules and isinstance(host._modules[name], kind):
        return cast(S, host._modules[name])
    if hasattr(host, name):
        raise UsageError(f"{type(host).__name__} has an attribute '{name}' of its own; an adapter needs that name")
    slots = kind()
    host.add_module(name, slots)
    if isinstance(slots, added.Prefixes):
        host.register_forward_pre_hook(slots.before, with_kwargs=True)
    elif isinstance(slots, (added.Bottlenecks, added.Cuts)):
        host.register_forward_hook(slots.after)
    return slots


def _width_of(model: nn.Module, path: str) -> Width:
    """Of the output of a layer; of one without weights that ends a container, the container's."""
    module = model.get_submodule(path)
    while not any(True for _ in module.parameters()) and path:
        path = path.rpartition(".")[0]
        module = model.get_submodule(path)
    return width_after(path, module)


def _attach_pair(host: nn.Module, weight: str, placed: Placed, name: str, generator: torch.Generator) -> None:
    method = cast(Lora, placed.method)
    assert placed.rank is not None
    raw = cast(Tensor, host._parameters[weight]).detach()
    scale = (placed.rank if method.alpha is None else method.alpha) / placed.rank
    dropout = method.dropout if isinstance(host, BESIDE) else 0.0
    pair = LowRank(raw, placed.rank, scale=scale, dropout=dropout, generator=generator)
    if method.is_dora:
        pair.give_length(raw)
    slots = _slots(host, SLOTS, Slots)
    if type(host) in ADAPTED:
        slots.plain_class = type(host)
        host.__class__ = ADAPTED[type(host)]
    if name not in slots:
        slots[name] = nn.ModuleDict()
    cast(nn.ModuleDict, slots[name])[weight] = pair


def _attach_prompt(
    model: nn.Module, method: Prompt, hosts: tuple[str, ...], name: str, generator: torch.Generator
) -> None:
    host = model.get_submodule(hosts[0])
    slots = _slots(host, "prompt" if method.after is None else "prompt_after", added.Prompts)
    if method.after is None and slots.before not in host._forward_pre_hooks.values():
        host.register_forward_pre_hook(slots.before)
    if method.after is not None and slots.after not in host._forward_hooks.values():
        host.register_forward_hook(slots.after)
    prompt = added.Prompt(_first_vectors(model, hosts[0], host, method, generator))
    slots[name] = prompt
    if method.is_cut:
        _slots(model.get_submodule(hosts[1]), "prompt_cut", added.Cuts)[name] = added.Cut(hosts[1], prompt)


def _first_vectors(model: nn.Module, path: str, host: nn.Module, method: Prompt, generator: torch.Generator) -> Tensor:
    """Rows of the embedding where there is one (Lester et al. start from words), else drawn."""
    num = method.num_vectors
    if method.after is not None and isinstance(host, nn.Embedding):
        rows = torch.randint(host.num_embeddings, (num,), generator=generator)
        return host.weight.detach()[rows.to(host.weight.device)].clone()
    named = model.get_submodule(cast(str, method.before or method.after))
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


def _bottlenecks(model: nn.Module, method: Bottleneck) -> Iterator[str]:
    if method.width < 1:
        raise UsageError(f"width {method.width} is below 1; a bottleneck needs a number")
    own = dict(plain_modules(model))
    inside = {f"{path}.out_proj".lstrip(".") for path, m in own.items() if isinstance(m, nn.MultiheadAttention)}
    if method.after is None:
        kinds: Any = (*ADAPTED, nn.modules.conv._ConvNd)
        found = [path for path, module in own.items() if isinstance(module, kinds) and path not in inside][:-1]
        if not found:
            raise UsageError("the model has no layer before its last one; name modules in `after`")
        yield from found
        return
    check_used(method.after, list(own), of="module")
    for path, module in own.items():
        if matches(path, method.after):
            if path in inside:
                raise UsageError(f"'{path}' is never called, attention reads its weight; put it after the attention")
            width_after(path, module)  # raises where it cannot be known
            yield _inside(model, path, -1)


def _prompt_place(model: nn.Module, method: Prompt) -> tuple[str, ...]:
    if method.num_vectors < 1:
        raise UsageError(f"num_vectors {method.num_vectors} is below 1; a prompt needs a vector")
    if (method.after is None) == (method.before is None):
        raise UsageError("a prompt needs one place: `after` a module such as the embedding, or `before` one")
    at = method.before if method.after is None else method.after
    own = dict(plain_modules(model))
    cut = method.cut if method.cut is not None else method.before or ""
    for path in (cast(str, at), cut):
        if path not in own:
            raise UsageError(f"'{path}' names no module; there are {', '.join(list(own)[1:13])}")
    if method.before is not None:
        channels_before(method.before, own[method.before])
    else:
        width_after(cast(str, at), own[cast(str, at)])
    host = _inside(model, cast(str, at), -1 if method.before is None else 0)
    return (host, _inside(model, cut, -1)) if method.is_cut else (host,)


def _inside(model: nn.Module, path: str, end: int) -> str:
    """The first or last layer of a container that counts its children: one more of them would change what it runs."""
    module = model.get_submodule(path)
    while isinstance(module, (nn.Sequential, nn.ModuleList)):
        names = [name for name, child in module._modules.items() if not isinstance(child, Slots)]
        if not names:
            raise UsageError(f"'{path}' is an empty {type(module).__name__}; name a module that is called")
        path = f"{path}.{names[end]}".lstrip(".")
        module = model.get_submodule(path)
    return path


def _attentions(model: nn.Module, method: Prefix) -> Iterator[str]:
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
    yield from fitting


def _biases(model: nn.Module, method: BitFit) -> Iterator[str]:
    own = [path for path, _ in plain_parameters(model)]
    found = [path for path in own if path.rpartition(".")[2].startswith("bias") or path.endswith("_bias")]
    if not found:
        raise UsageError(f"{type(model).__name__} has no biases; use another method")
    check_used(method.also, [*own, *(path for path, _ in plain_modules(model))], of="module or parameter")
    yield from (path for path in own if path in found or _is_under(path, method.also))


def _kept(model: nn.Module, method: Freeze) -> Iterator[str]:
    if sum((bool(method.keep), method.last is not None, method.budget is not None)) != 1:
        raise UsageError("freezing needs one of: keep (patterns), last (modules), budget (parameters)")
    own = dict(plain_parameters(model))
    if method.keep:
        check_used(method.keep, [*own, *(path for path, _ in plain_modules(model))], of="module or parameter")
        kept = [path for path in own if _is_under(path, method.keep)]
        if not kept:
            raise UsageError(f"{', '.join(method.keep)} has no parameters; name what is to be trained")
        yield from kept
        return
    chosen = _last_modules(own, method)
    yield from (path for path in own if path.rpartition(".")[0] in chosen)


def _last_modules(own: dict[str, nn.Parameter], method: Freeze) -> set[str]:
    sizes: dict[str, int] = {}
    for path, parameter in own.items():
        owner = path.rpartition(".")[0]
        sizes[owner] = sizes.get(owner, 0) + parameter.numel()
    names = list(sizes)
    if method.last is not None:
        if not 1 <= method.last <= len(names):
            raise UsageError(f"last {method.last} is outside 1..{len(names)}, the modules with parameters")
        return set(names[-method.last :])
    chosen: set[str] = set()
    left = cast(int, method.budget)
    for name in reversed(names):
        if sizes[name] > left:
            break
        chosen.add(name)
        left -= sizes[name]
    if not chosen:
        raise UsageError(f"budget {method.budget} is below the last module's {sizes[names[-1]]} parameters; raise it")
    return chosen


def _is_under(path: str, patterns: tuple[str, ...]) -> bool:
    """Is the parameter, or a module around it, one of those?"""
    parts = path.split(".")
    return any(matches(".".join(parts[:n]), patterns) for n in range(1, len(parts) + 1))
