"""Do the named parts of a step's memory add up to what the machine itself says?

    python bench/memory_accounting.py --out FILE [--model NAME] [--device cpu|cuda]

For five models: the sum of the parts that flatout names at the peak, the peak it measured in the same step, and the peak of
the same step of the same script in a process without flatout (the kernel's high-water mark VmHWM, reset before the step, or
torch.cuda.max_memory_allocated). The claim is that the first is within 5 % of both others. Each run has its own process, and the
medians of RUNS runs are compared: what malloc keeps differs from process to process by some 3 % of the whole.
Where the peak lies inside an operator, its workspace is bounded by the measured resident size (an LSTM on a CPU): there the first
comparison is no test, and the second is.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatout.check.capture import Capture
from flatout.check.observe.steps.schedule import Schedule

LIMIT = 0.05
RUNS = 3
STEPS = 12
SCHEDULE = Schedule(num_warm_up=2, num_light_before=1, num_light_on_device=1, num_deep=0, trials_budget_s=0.0)
WATCHED = 4
"""Whole steps before the one that the schedule watches on a CPU: two of warm-up, a light one, one for reads."""


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape))
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    def __init__(self, vocabulary: int, width: int, depth: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(*[Block(width, 4) for _ in range(depth)])
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.token(tokens)))


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(64, 256, num_layers=2, batch_first=True)
        self.head = nn.Linear(256, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0])


def mlp(device: str) -> Callable[[], Tensor]:
    net = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10)).to(
        device
    )
    return trained(net, lambda: F.cross_entropy(net(torch.randn(12000, 512, device=device)), labels(12000, 10, device)))


def cnn(device: str) -> Callable[[], Tensor]:
    layers: list[nn.Module] = []
    for before, after in ((3, 32), (32, 32), (32, 64)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)).to(device)
    return trained(net, lambda: F.cross_entropy(net(torch.randn(96, 3, 64, 64, device=device)), labels(96, 10, device)))


def gpt(device: str) -> Callable[[], Tensor]:
    net = Gpt(8000, 256, 4).to(device)

    def loss() -> Tensor:
        tokens = torch.randint(8000, (16, 257), device=device)
        return F.cross_entropy(net(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    return trained(net, loss)


def lstm(device: str) -> Callable[[], Tensor]:
    net = Tagger().to(device)

    def loss() -> Tensor:
        return F.cross_entropy(net(torch.randn(192, 64, 64, device=device)).flatten(0, 1), labels(192 * 64, 32, device))

    return trained(net, loss)


def autoencoder(device: str) -> Callable[[], Tensor]:
    down = [nn.Conv2d(1, 32, 4, 2, 1), nn.GELU(), nn.Conv2d(32, 64, 4, 2, 1), nn.GELU()]
    up = [nn.ConvTranspose2d(64, 32, 4, 2, 1), nn.GELU(), nn.ConvTranspose2d(32, 1, 4, 2, 1)]
    net = nn.Sequential(*down, *up).to(device)

    def loss() -> Tensor:
        images = torch.rand(256, 1, 64, 64, device=device)
        return F.mse_loss(net(images), images)

    return trained(net, loss)


MODELS = {"mlp": mlp, "cnn": cnn, "gpt": gpt, "lstm": lstm, "autoencoder": autoencoder}


def labels(num: int, classes: int, device: str) -> Tensor:
    return torch.randint(classes, (num,), device=device)


def trained(net: nn.Module, loss_of: Callable[[], Tensor]) -> Callable[[], Tensor]:
    optimizer = torch.optim.AdamW(net.parameters())

    def step() -> Tensor:
        loss = loss_of()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def observed(name: str, device: str) -> dict[str, Any]:
    """The parts that flatout names."""
    capture = Capture(command=(name,), cwd=".", schedule=SCHEDULE, machine=None, propose=lambda _: ())
    torch.manual_seed(0)
    capture.start()
    step = MODELS[name](device)
    for _ in range(STEPS):
        step()
    evidence = capture.finish(exit="finished", exit_code=0)
    memory = next(m for m in evidence.memory if m.device.partition(":")[0] == device)
    kinds: dict[str, int] = defaultdict(int)
    for part in memory.at_peak:
        kinds[part.kind] += part.bytes
    watched = [s for s in capture.observation.timeline.steps if s.mode == "memory"]
    light = [s for s in capture.observation.timeline.steps if s.mode == "light"]
    return {
        "named": memory.peak_bytes,
        "measured": memory.measured_peak_bytes,
        "kinds": dict(kinds),
        "phase": memory.peak_phase,
        "watched_step_s": watched[0].duration_s,
        "light_step_s": min(s.duration_s for s in light),
    }


def plain(name: str, device: str) -> dict[str, Any]:
    """The machine's own accounting of the same step without flatout."""
    torch.manual_seed(0)
    step = MODELS[name](device)
    for _ in range(WATCHED + 1):
        step()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        step()
        return {"peak": torch.cuda.max_memory_allocated()}
    Path("/proc/self/clear_refs").write_text("5")
    step()
    return {"peak": next(high_water_marks())}


def high_water_marks() -> Iterator[int]:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            yield int(line.split()[1]) * 1024


def in_a_process(kind: str, name: str, device: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--out", "-", "--run", kind, "--model", name, "--device", device]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True)
    parser.add_argument("--model", choices=MODELS)
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--run", choices=("observed", "plain"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        print(json.dumps((observed if args.run == "observed" else plain)(args.model, args.device)))
        return 0
    rows = []
    devices = [args.device] if args.device else ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    for device in devices:
        for name in [args.model] if args.model else MODELS:
            seen = sorted(
                (in_a_process("observed", name, device) for _ in range(RUNS)), key=lambda run: int(run["named"])
            )
            alone = sorted(in_a_process("plain", name, device)["peak"] for _ in range(RUNS))
            row = {"model": name, "device": device, **seen[RUNS // 2], "unobserved": alone[RUNS // 2]}
            row["named_runs"], row["unobserved_runs"] = [run["named"] for run in seen], alone
            for other in ("measured", "unobserved"):
                row[f"error_to_{other}"] = row["named"] / row[other] - 1
            rows.append(row)
            print(
                f"{name:12} {device:5} named {row['named'] / 2**20:8.1f} MiB  measured {row['error_to_measured']:+.1%}  "
                f"unobserved {row['error_to_unobserved']:+.1%}",
                flush=True,
            )
    worst = max(abs(r[f"error_to_{o}"]) for r in rows for o in ("measured", "unobserved"))
    result = {
        "torch": torch.__version__,
        "machine": platform.processor() or platform.machine(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "limit": LIMIT,
        "worst": worst,
        "rows": rows,
    }
    Path(args.out).write_text(json.dumps(result, indent=1) + "\n")
    print(f"worst {worst:.1%}, limit {LIMIT:.0%}")
    return 0 if worst <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
