"""What compiled code keeps for the backward, and its time, with the lever `memory.recompute-in-graphs` and without.

    python bench/recompute_in_graphs.py OUT.json [--seconds 20] [--only llama,lora,resnet,vit,bert]

Models of examples/gpu and of transformers under autocast to bfloat16, forward and backward of one batch of random numbers, raced
in turn: `again` is the lever's way, `without chains` that with `"chains": false`. `saved` are bytes of what the forward leaves
for the backward, without weights, buffers and inputs; `peak` is the device's in a step, on a GPU. Ratios are of a way with the
lever over the one without: of bytes, and of speed (above 1: faster), with 95 % intervals. `error` is that of all gradients
together against the model that is not compiled, in float64, over their norm; BERT has dropout, whose masks differ, and so none.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatout.blocks.training.recompute_in_graphs import recompute_cheap_operators
from flatout.core.files import write_whole_file
from flatout.machine.measure.probe import cpu_model
from flatout.machine.measure.timer import compare_times

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "gpu"))

import llama_naive
import lora_naive
import resnet_images

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
CLASSES = 16


class Task(nn.Module):
    """A classifier with its loss."""

    def __init__(self, classifier: nn.Module) -> None:
        super().__init__()
        self.classifier = classifier

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        y = self.classifier(x)
        return F.cross_entropy((y if isinstance(y, Tensor) else y.logits).float(), labels)


def llama(*, adapters: bool = False) -> tuple[nn.Module, tuple[Tensor, ...]]:
    sizes, batch = ((2048, 32, 8, 8192, 8, 4096), 2) if ON_GPU else ((256, 4, 2, 1024, 4, 256), 4)
    tokens = torch.randint(4096, (batch, sizes[-1] + 1))
    model = llama_naive.Llama(4096, *sizes)
    if adapters:
        lora_naive.add_adapters(model, 16, 2.0)
    return model, (tokens[:, :-1], tokens[:, 1:])


def resnet() -> tuple[nn.Module, tuple[Tensor, ...]]:
    width, depths, size, batch = (64, (3, 4, 6, 3), 224, 128) if ON_GPU else (16, (2, 2), 64, 32)
    model = resnet_images.ResNet(width, depths, CLASSES, resnet_images.Bottleneck)
    images = torch.randn(batch, 3, size, size).to(memory_format=torch.channels_last)
    return Task(model.to(memory_format=torch.channels_last)), (images, torch.randint(CLASSES, (batch,)))


def vit() -> tuple[nn.Module, tuple[Tensor, ...]]:
    from transformers import ViTConfig, ViTForImageClassification

    width, layers, size, batch = (768, 12, 224, 64) if ON_GPU else (192, 4, 112, 8)
    config = ViTConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        intermediate_size=4 * width,
        image_size=size,
        num_labels=CLASSES,
    )
    return Task(ViTForImageClassification(config)), (
        torch.randn(batch, 3, size, size),
        torch.randint(CLASSES, (batch,)),
    )


def bert() -> tuple[nn.Module, tuple[Tensor, ...]]:
    from transformers import BertConfig, BertForSequenceClassification

    width, layers, length, batch = (768, 12, 512, 32) if ON_GPU else (192, 4, 128, 8)
    config = BertConfig(
        vocab_size=4096,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        intermediate_size=4 * width,
        num_labels=CLASSES,
    )
    return Task(BertForSequenceClassification(config)), (
        torch.randint(4096, (batch, length)),
        torch.randint(CLASSES, (batch,)),
    )


CASES: dict[str, Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]] = {
    "llama": llama,
    "lora": partial(llama, adapters=True),
    "resnet": resnet,
    "vit": vit,
    "bert": bert,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--only", default=",".join(CASES))
    args = parser.parse_args()
    name = torch.cuda.get_device_name() if ON_GPU else cpu_model()
    found: dict[str, Any] = {
        "device": name,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "models": {},
    }
    for case in args.only.split(","):
        found["models"][case] = raced(case, seconds=args.seconds)
        print(case, json.dumps(found["models"][case]), flush=True)
        write_whole_file(args.out, json.dumps(found, indent=1).encode() + b"\n")


def raced(case: str, *, seconds: float) -> dict[str, Any]:
    """All ways for one model."""
    torch.manual_seed(0)
    torch.compiler.reset()
    model, inputs = CASES[case]()
    model, inputs = model.to(DEVICE).train(), tuple(t.to(DEVICE) for t in inputs)
    # options have their usual values: with them, a model does not get the code that was compiled for another
    own: dict[str, dict[str, bool]] = {
        "kept": {},
        "again": {"epilogue_fusion": True},
        "without chains": {"epilogue_fusion": True, "pattern_matcher": True},
    }
    models = {way: copy.deepcopy(model) for way in own}
    exact = None if case == "bert" else gradients(copy.deepcopy(model).double(), wide(inputs), is_wide=True)
    lines: dict[str, dict[str, Any]] = {}
    for way, one in models.items():
        undo = recompute_cheap_operators(chains=way == "again") if way != "kept" else lambda: None
        one.compile(dynamic=False, options=own[way])
        saved = saved_bytes(one, inputs)
        undo()
        lines[way] = {"saved": saved, "error": None if exact is None else error(gradients(one, inputs), exact)}
        if ON_GPU:
            one.zero_grad()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            gradients(one, inputs)
            lines[way]["peak"] = torch.cuda.max_memory_allocated() - before
    times = compare_times(
        {way: partial(gradients, one, inputs) for way, one in models.items()},
        device=DEVICE,
        min_time_s=seconds,
        max_time_s=3 * seconds,
    )
    ratios = {way: t.ratio for way, t in times.items() if t.ratio is not None and way != "kept"}
    return {
        **lines,
        "seconds": {way: t.call_s.value for way, t in times.items()},
        "saved_ratio": {way: lines[way]["saved"] / lines["kept"]["saved"] for way in ratios},
        "times_as_fast": {way: [1 / r.value, 1 / r.high, 1 / r.low] for way, r in ratios.items()},
    }


def wide(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(t.double() if t.is_floating_point() else t for t in inputs)


def gradients(model: nn.Module, inputs: tuple[Tensor, ...], *, is_wide: bool = False) -> list[Tensor]:
    with torch.autocast(DEVICE, torch.bfloat16, enabled=not is_wide):
        loss = model(*inputs)
    return list(torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad]))


def saved_bytes(model: nn.Module, inputs: tuple[Tensor, ...]) -> int:
    """Of the storages that the forward leaves for the backward, those of weights, buffers and inputs aside."""
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers(), *inputs)}
    sizes: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        if (at := t.untyped_storage().data_ptr()) not in own:
            sizes[at] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        gradients(model, inputs)
    return sum(sizes.values())


def error(got: list[Tensor], exact: list[Tensor]) -> float:
    off = sum(float((a.double() - b).square().sum()) for a, b in zip(got, exact, strict=True))
    return (off / sum(float(b.square().sum()) for b in exact)) ** 0.5


if __name__ == "__main__":
    main()
