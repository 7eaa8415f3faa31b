"""The model compiled: its operators fused into few kernels, Python out of the way.

What        `model.compile(...)` at its first call, in place; or each of its repeated blocks alone, which compiles one block for
            all (`regions`: the paths of the containers that hold them). `mode` and `dynamic` are those of torch.compile;
            `inductor` names switches of Inductor that are turned on instead of a mode (`coordinate_descent_tuning`),
            `inductor_off` those that are turned off. `skip_padding` names the token that stands for nothing: what is made of
            each token alone is computed of the others, packed and filled up to a `multiple`, and so is attention that padding is
            hidden from (`flatout.skip_padding`); batches are not cut to their longest row beside it. With `short_erf` compiled
            GELU of 16-bit numbers on a GPU takes a shorter formula, 1.5e-7 off at most before rounding. With `grouped_keys`
            attention without a mask reads keys and values once that are repeated for a group of queries (`enable_gqa`). With
            `written_attention` attention without a mask that is written out in products and a softmax, also in a library, is
            one fused kernel. The text of `flatout edit` leaves these three out.
            Shapes that come first after many calls and rarely, as an epoch's smaller last batch, are computed as before (the text
            of `flatout edit` leaves them to torch.compile, which compiles once more), and so are evaluations of a model in
            training (`plain_evaluation`), until they have been many. Where the script retains graphs, buffers of compiled
            graphs are not reused (`torch._functorch.config.donated_buffer`).
Guarantee   BOUNDED: sums in other orders, fused multiply-adds. With `fallback_random` random masks (dropout) are drawn as they
            are without compiling, so that steps can be compared; without it they are other numbers of the same distribution.
Refuses     Scripts that compile already; models whose calls are a small part of the step.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from flatout.core.errors import EditError, LeverRefused, PlanError
from flatout.core.parts import lever
from flatout.core.records.evidence import Evidence, Phase
from flatout.core.records.finding import Finding
from flatout.core.records.lever import Candidate, Hooks, Parameters, integer
from flatout.machine.cost.accounting import host_seconds, model_seconds
from flatout.machine.cost.compiling import block_containers, draws_in_model, has_changing_shapes
from flatout.tune.levers.eager_draws import draw_as_eager
from flatout.tune.levers.grouped_keys import keys_read_once_in_graphs, repeats_keys
from flatout.tune.levers.proposals import reads_padding
from flatout.tune.levers.short_erf import short_gelu_in_graphs
from flatout.tune.levers.usual_shapes import UsualShapes
from flatout.tune.levers.written_attention import writes_attention_out, written_attention_in_graphs
from flatout.tune.rewrite.calls import compiles_models
from flatout.tune.rewrite.evaluations import with_plain_evaluations
from flatout.tune.rewrite.imports import with_import, with_start
from flatout.tune.rewrite.models import behind_model, behind_models
from flatout.tune.rewrite.source import parsed, script_of, text_at

if TYPE_CHECKING:
    from torch import nn

_SMALL_PART: Final = 0.1
_EFFORT: Final = 5.0
"""A trial with compiling took 15 s where others take 5 s (small models, two cores, torch 2.13), and 80 s where others take 10 to
25 s (a ResNet-34 and a BERT on an H200, torch 2.11)."""
_EFFORT_OF_KERNELS: Final = 10.0
"""A ResNet-50 took its first step after some four minutes, beside three others that compiled (H200)."""
_EFFORT_OF_TUNING: Final = 15.0
"""`max-autotune` times kernels while it compiles: a GPT-2 small took no step in 95 s, and by default its first in 25 s (H200)."""
_MAY_COST: Final = 1.3
"""Small models that were compiled took up to 2.3 times as long as before, on two cores and on an H200 (bench/results,
tune_examples)."""
_SMALL_S: Final = 0.01
"""Forward and backward of a model on a device that take longer than this lose little at worst, in our judgement."""
_LITTLE: Final = 0.1
_PACKED: Final = 1.05
"""Of what compiling promises: it comes first, and the other ways are tried in its place."""
_PACKED_IN_GRAPHS: Final = 1.02
_FALLBACK: Final = 0.8
"""The part of what a way to compile promises that is left where kernels take two passes and one would do."""
_MOST_FASTER: Final = 20.0
"""What a plan makes of a step at most, in our judgement: a host that takes less than this part of it is never waited for."""
_MOSTLY_HOST: Final = 1.5
"""Steps that take less than so many times what the host launches them in gain most from graphs: a GPT-2 small whose launches took
two thirds of a step went 1.30 times as fast compiled, and 2.05 times with graphs (H200)."""
_KERNELS_TUNED: Final = "coordinate_descent_tuning"
"""Sizes of the compiled kernels are tried one after the other, and no products and convolutions: a ResNet-50 with CUDA graphs
went 1.04 times as fast as without (H200). Graphs also help where the host is never waited for: LoRA's steps of 179 ms on a
Llama-like model took 178 ms so (bench/results/2026-12-01-h200, by_hand_lora and best_earlier/by_hand_lora_without_graphs)."""
_MIXED_REDUCTIONS: Final = "triton.mix_order_reduction"
"""One kernel for sums over rows and sums over columns. In torch 2.10 to 2.13 it returns gradients of another shape for weights of
shape (1, C, 1, 1) after a norm (issue 178080 of pytorch/pytorch), and wrong ones where modulated norms share weights (193061)."""
_OF_MIXED_REDUCTIONS: Final = ("returned an invalid gradient", "gradient")
"""How that shows."""
_GRAPHS: Final = "triton.cudagraphs"
_OF_GRAPHS: Final = ("CUDAGraphs", "cudagraph", "out of memory", "its memory grows")
"""What goes wrong with graphs: their memory is not shared, and each call writes over what the one before returned."""
_LEAST_PADDING: Final = 0.12
"""Of the tokens: where less is padding, taking rows out and putting them back costs about what it saves, in our judgement."""
_SIZES: Final = 64
"""Numbers of packed rows are multiples of at least this part of all."""
_SIZES_IN_GRAPHS: Final = 32
"""Where each number is a graph with memory of its own: with 32 a BERT-base held 8.3 GiB in place of 3.5 (H200)."""
_LEAST_LEFT: Final = 0.1
"""The share of tokens that are taken to be real at least, when it is asked whether a step without padding waits for its host."""
_CUT_PADDING: Final = ("communication.trim-padding", "communication.bucket-lengths")
"""Levers that leave padding out of batches. Packed rows do without it, and each width of a batch would need graphs of its own:
with both the memory of a BERT-base went on growing, and a step took 2.3 times as long as with cut batches alone (H200)."""
_MODES: Final = ("default", "reduce-overhead", "max-autotune-no-cudagraphs", "max-autotune")
_RETAINS: Final = re.compile(r"\bretain_graph\s*=\s*True\b")
_OPTIONS: Final = ("mode", "dynamic", "backend")
_PLAYED: Final[tuple[Phase, ...]] = ("environment", "rollout")
"""Phases in which a model that is learning is called without gradients all the time."""


def propose(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Candidate]:
    """Propose the ways to compile that suit this run, the most promising first."""
    if evidence.compilation is not None and evidence.compilation.num_graphs:
        raise LeverRefused("the script compiles already")
    busy_s = model_seconds(evidence)
    if busy_s < _SMALL_PART * evidence.steps.whole_s:
        share = busy_s / evidence.steps.whole_s if evidence.steps.whole_s else 0.0
        raise LeverRefused(f"forward and backward are {share:.0%} of a step")
    savings = [f.saved_s for f in findings]
    low, high = max((a for a, _ in savings), default=0.0), max((b for _, b in savings), default=0.0)
    is_busy = evidence.steps.device_s is not None and evidence.steps.is_device_bound
    most_lost_s = (_LITTLE if _is_large(evidence) else _MAY_COST) * busy_s
    low, high = min(low, 0.1 * busy_s) if is_busy else -most_lost_s, min(busy_s, max(high, 0.5 * busy_s))
    usual: Parameters = {"fallback_random": True} if draws_in_model(evidence) else {}
    if _retains_graphs(evidence):
        usual["retained_graphs"] = True
    if evidence.steps.kind == "training" and not any(evidence.steps.phases.get(phase) for phase in _PLAYED):
        usual["plain_evaluation"] = True
    for option in _options(evidence):
        yield Candidate(
            parameters=usual | option.parameters,
            saved_s=(option.share * low if low > 0 else low / option.share, option.share * high),
            first_below_s=option.first_below_s,
            fallback_for=option.fallback_for,
            replaces=option.replaces,
            because=f"forward and backward take {busy_s * 1e3:.2f} ms of a step{option.why}",
        )


def _retains_graphs(evidence: Evidence) -> bool:
    """Whether the script goes backward through a graph more than once: buffers of the graph must not be reused then."""
    script = script_of(evidence)
    try:
        return bool(script and _RETAINS.search(text_at(evidence, {"file": script})))
    except EditError:
        return False


def _is_large(evidence: Evidence) -> bool:
    return evidence.steps.device_s is not None and model_seconds(evidence) > _SMALL_S


class _Option(NamedTuple):
    share: float
    """Of what compiling promises."""
    parameters: Parameters
    why: str
    first_below_s: float = 0.0
    fallback_for: tuple[str, ...] = ()
    replaces: tuple[str, ...] = ()


def _options(evidence: Evidence) -> Iterator[_Option]:
    """The ways to compile, and behind each the same without the reductions that torch gets wrong: in its place where the step has
    weights for which they are known to fail.
    """
    fails = _scales_channels(evidence)
    for option in _usual_options(evidence):
        parameters = _without_mixed_reductions(option.parameters)
        is_other = parameters is not None and evidence.steps.kind == "training" and evidence.steps.device_s is not None
        if not (is_other and fails):
            yield option
        if parameters is not None and is_other and (fails or not option.fallback_for):
            why = f"{option.why}; without reductions of mixed order, which torch gets wrong here"
            yield option._replace(
                share=option.share if fails else _FALLBACK * option.share,
                parameters=parameters,
                why=why,
                fallback_for=option.fallback_for if fails else _OF_MIXED_REDUCTIONS,
            )


def _scales_channels(evidence: Evidence) -> bool:
    """Whether images are multiplied by a weight of shape (1, C, 1, 1), as norms over channels do."""

    def is_weight(shape: tuple[int, ...]) -> bool:
        return len(shape) == 4 and shape[1] > 1 and (shape[0], *shape[2:]) == (1, 1, 1)

    def is_image(shape: tuple[int, ...]) -> bool:
        return len(shape) == 4 and min(shape) > 1

    products = (o for o in evidence.operators if o.op == "aten.mul" and o.phase == "forward")
    shapes = ([tuple(t.shape) for t in o.inputs] for o in products)
    return any(any(map(is_weight, one)) and any(map(is_image, one)) for one in shapes)


def _without_mixed_reductions(parameters: Parameters) -> Parameters | None:
    """The same way to compile without these reductions: a mode as the switches that it stands for. None for what has no such."""
    switches = {"default": (), "reduce-overhead": (_GRAPHS,)}.get(str(parameters.get("mode", "default")))
    if switches is None or not _has_switch(_MIXED_REDUCTIONS):
        return None
    named = parameters.get("inductor", ())
    switches = (*switches, *(named if isinstance(named, tuple) else ()))
    rest = {name: value for name, value in parameters.items() if name not in ("mode", "inductor")}
    return rest | ({"inductor": switches} if switches else {}) | {"inductor_off": (_MIXED_REDUCTIONS,)}


def _usual_options(evidence: Evidence) -> Iterator[_Option]:
    is_device, is_ragged = evidence.steps.device_s is not None, has_changing_shapes(evidence)
    yield from _packed_options(evidence)
    is_waiting = is_device and not is_ragged and not evidence.steps.is_device_bound
    # graphs overwrite what they returned before, which loops of many parts do not bear: the plain way comes first there
    share_of_graphs = 0.0 if not is_waiting else 0.95 if _is_large(evidence) else 1.0
    if is_ragged:
        yield _Option(1.0, {"mode": "default", "dynamic": True}, "; shapes change from step to step")
    elif share_of_graphs == 1:
        yield _Option(1.0, {"mode": "reduce-overhead"}, "; the device waits for its host")
    share = 0.9 if is_ragged or share_of_graphs == 1 else 1.0
    is_busy = is_device and evidence.steps.is_device_bound and not is_ragged
    own: Parameters = {"short_erf": True} if is_busy and _has_exact_gelu(evidence) else {}
    if is_busy and repeats_keys(evidence):
        own = {**own, "grouped_keys": True}
    if is_busy and writes_attention_out(evidence):
        own = {**own, "written_attention": True}
    yield _Option(share, {"mode": "default"} | own, "")
    if 0 < share_of_graphs < 1:
        yield _Option(share_of_graphs, {"mode": "reduce-overhead"}, "; the device waits for its host")
    if is_busy:
        host_s = host_seconds(evidence)
        if host_s > evidence.steps.step_s / _MOST_FASTER:
            why = "; once the device has less to do, it waits for its host"
            # batches that are cut to their longest rows have other shapes each time, and each shape needs graphs of its own
            first_below_s = 0.0 if _is_padded(evidence) else _MOSTLY_HOST * host_s
            yield _Option(0.95, {"mode": "reduce-overhead"} | own, why, first_below_s)
        busy = "; the device is busy all the time"
        tuned = _Option(0.92, {"inductor": (_KERNELS_TUNED,)} | own, busy)
        if not _is_padded(evidence):
            why = f"{busy}, and between the kernels of a graph it pauses less"
            yield tuned._replace(parameters={"inductor": (_KERNELS_TUNED, _GRAPHS)} | own, why=why)
            tuned = tuned._replace(fallback_for=_OF_GRAPHS)
        yield tuned
        yield _Option(0.9, {"mode": "max-autotune-no-cudagraphs"} | own, busy)
    regions = block_containers(evidence)
    if regions:
        places = ", ".join(f"'{r}'" if r else "the model" for r in regions)
        yield _Option(0.85 * share, {"mode": "default", "regions": regions}, f"; the blocks of {places} are alike")


def _is_padded(evidence: Evidence) -> bool:
    """Whether much of a batch's tokens is padding, so that batches may be cut; rows of any text end alike at times."""
    return any(p.signs and p.padding_fraction >= _LEAST_PADDING for p in evidence.paddings)


def _packed_options(evidence: Evidence) -> Iterator[_Option]:
    """Compiling without the padding of tokens."""
    found = [p for p in evidence.paddings if p.dtype in ("int64", "int32") and p.signs and len(p.shape) == 2]
    padding = max(found, key=lambda p: p.padding_fraction, default=None)
    if padding is None or padding.padding_fraction < _LEAST_PADDING or reads_padding(evidence):
        return
    rows = padding.shape[0] * padding.shape[1]

    def packed(num_sizes: int) -> Parameters:
        return {"skip_padding": int(padding.pad_value), "multiple": 1 << max(3, int(math.log2(rows / num_sizes)))}

    why = f"; {padding.padding_fraction:.0%} of '{padding.name}' are padding, which linear layers and norms then leave out"
    yield _Option(_PACKED, packed(_SIZES), why, replaces=_CUT_PADDING)
    if evidence.steps.device_s is not None:
        parameters = packed(_SIZES_IN_GRAPHS) | {"inductor": (_GRAPHS,)}
        left = max(_LEAST_LEFT, 1.0 - padding.padding_fraction)
        first_below_s = _MOSTLY_HOST * host_seconds(evidence) / left
        why = f"{why}, in graphs for each number of rows"
        yield _Option(_PACKED_IN_GRAPHS, parameters, why, first_below_s, replaces=_CUT_PADDING)


def _has_exact_gelu(evidence: Evidence) -> bool:
    """Whether GELU by the error function is computed: nothing beside float32 products, and some per cent of a compiled step."""
    return any(o.op == "aten.gelu" and "tanh" not in o.scalars for o in evidence.operators)


def _effort(parameters: Parameters) -> float:
    if str(parameters.get("mode", "")).startswith("max-autotune"):
        return _EFFORT_OF_TUNING
    return _EFFORT_OF_KERNELS if _KERNELS_TUNED in _names(parameters, "inductor") else _EFFORT


def apply(hooks: Hooks, parameters: Parameters) -> None:
    """Compile each root module, or its blocks, at its first call."""
    from flatout.blocks.kernels.packed.skip_padding import packed_call

    options: dict[str, Any] = {k: v for k, v in parameters.items() if k in _OPTIONS}
    mode, switches = options.get("mode"), _switches(parameters)
    if mode is not None and mode not in _MODES:
        raise PlanError(f"mode {mode!r} is none of {', '.join(_MODES)}; see torch.compile")
    if mode == "default" or "backend" in options:
        options.pop("mode", None)
    if switches:
        _check_switches(switches)
        options["options"] = switches
    if parameters.get("fallback_random"):
        hooks.at_start(draw_as_eager)
    if parameters.get("retained_graphs"):
        hooks.at_start(_keep_buffers)
    if parameters.get("short_erf"):
        hooks.at_start(short_gelu_in_graphs)
    if parameters.get("grouped_keys"):
        hooks.at_start(keys_read_once_in_graphs)
    if parameters.get("written_attention"):
        hooks.at_start(written_attention_in_graphs)
    is_plain = bool(parameters.get("plain_evaluation"))
    packing = _packing(parameters)

    def compile_it(module: nn.Module) -> Callable[[], None] | None:
        if module._compiled_call_impl is not None:
            return None  # the script has done it
        modules = [module] if "regions" not in parameters else _blocks(module, _paths(parameters))
        before = [(one, one._compiled_call_impl) for one in modules]
        for one in modules:
            if packing is None:
                one.compile(**options)
            else:
                one._compiled_call_impl = packed_call(one, pad=packing[0], multiple=packing[1], options=switches)
            compiled, is_ragged = one._compiled_call_impl, "dynamic" in options
            if compiled is not None and (is_plain or not is_ragged):
                one._compiled_call_impl = UsualShapes(
                    compiled, one._call_impl, evaluated=one if is_plain else None, is_ragged=is_ragged
                )
        if modules:
            hooks.note(LEVER.id)

        def undo() -> None:
            for one, call in before:
                one._compiled_call_impl = call

        return undo

    hooks.at_first_call(compile_it)


def _packing(parameters: Parameters) -> tuple[int, int] | None:
    """How tokens are packed: what stands for nothing, and the multiple; None where they are not.

    Raises PlanError where a mode is named beside it, or the multiple is no whole number above zero.
    """
    if "skip_padding" not in parameters:
        return None
    if parameters.get("mode", "default") != "default" or any(
        k in parameters for k in ("dynamic", "backend", "regions")
    ):
        raise PlanError(
            "'skip_padding' excludes 'mode', 'dynamic', 'backend' and 'regions'; name switches as 'inductor'"
        )
    if (multiple := integer(parameters, "multiple")) < 1:
        raise PlanError(f"parameter 'multiple' is {multiple} and must be at least 1")
    return integer(parameters, "skip_padding"), multiple


def _switches(parameters: Parameters) -> dict[str, bool]:
    """Inductor's switches that are turned on and off; PlanError where they cannot be."""
    on, off = _names(parameters, "inductor"), _names(parameters, "inductor_off")
    if (on or off) and parameters.get("mode", "default") != "default":
        raise PlanError(
            f"mode {parameters['mode']!r} and 'inductor' exclude one another: torch.compile takes one of them"
        )
    return dict.fromkeys(on, True) | dict.fromkeys(off, False)


def _names(parameters: Parameters, key: str) -> tuple[str, ...]:
    names = parameters.get(key, ())
    if isinstance(names, str) or not isinstance(names, tuple):
        raise PlanError(f"parameter '{key}' is {names!r} and must be a list of names, as ['coordinate_descent_tuning']")
    return tuple(map(str, names))


def _has_switch(name: str) -> bool:
    """Whether Inductor of this torch has it."""
    try:
        return isinstance(attrgetter(name)(import_module("torch._inductor.config")), bool)
    except (AttributeError, ImportError):
        return False


def _check_switches(names: Iterable[str]) -> None:
    """Raise PlanError for a name that is no switch of Inductor."""
    from torch._inductor import list_options

    known = list_options()
    for name in names:
        if name not in known or not _has_switch(name):
            raise PlanError(
                f"'{name}' is no switch of torch._inductor.config; give the names of such that are True or False"
            )


def _keep_buffers() -> Callable[[], None]:
    """Have backwards of compiled code leave buffers of their graph as they are; returns how to undo it."""
    from torch._functorch import config

    from flatout.core.runtime.patches import set_attributes

    return set_attributes(config, donated_buffer=False)


def _paths(parameters: Parameters) -> tuple[str, ...]:
    regions = parameters["regions"]
    if isinstance(regions, str) or not isinstance(regions, tuple):
        raise PlanError(f"parameter 'regions' is {regions!r} and must be a list of paths, as ['blocks']")
    return regions


def _blocks(root: nn.Module, paths: Sequence[str]) -> list[nn.Module]:
    """The modules in these containers whose class comes there more than once; a root module without the container has none."""
    found = []
    for path in paths:
        try:
            container = root.get_submodule(path)
        except AttributeError:
            continue
        children = list(container.children())
        classes = Counter(type(child) for child in children)
        found += [child for child in children if classes[type(child)] > 1 and next(child.children(), None) is not None]
    return found


def edit(text: str, parameters: Parameters) -> str:
    """Write `model.compile(...)` after the statement that constructs a model, or a loop over the blocks of the one model."""
    if compiles_models(parsed(text)):
        raise EditError("the file compiles something already")
    if parameters.get("retained_graphs"):
        module = with_import(parsed(text), "torch._functorch.config")
        text = with_start(module, "torch._functorch.config.donated_buffer = False\n").code
    options: dict[str, Any] = {k: v for k, v in parameters.items() if k in _OPTIONS and v != "default"}
    if switches := _switches(parameters):
        options["options"] = switches
    arguments = ", ".join(f'{k}="{v}"' if isinstance(v, str) else f"{k}={v}" for k, v in options.items())
    if parameters.get("plain_evaluation"):
        text = with_plain_evaluations(parsed(text)).code
    if (packing := _packing(parameters)) is not None:
        named = [f"pad={packing[0]}", f"multiple={packing[1]}", *([f"options={switches}"] if switches else [])]
        text = behind_models(text, f"skip_padding(model, {', '.join(named)})\n")
        return with_import(parsed(text), "flatout", "skip_padding").code
    if "regions" not in parameters:
        return behind_models(text, f"model.compile({arguments})\n")
    paths = _paths(parameters)
    if "" in paths:
        raise EditError("the blocks are the model's own children, among others")
    return behind_model(text, "".join(f"for block in model.{p}:\n    block.compile({arguments})\n" for p in paths))


LEVER = lever(
    __name__,
    propose,
    apply=apply,
    effort=_effort,
    edit=edit,
    title="Compiled model",
    errors=("torch._dynamo", "torch._inductor", "donated buffers"),
)
