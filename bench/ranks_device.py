"""Exposed communication as flatout tells it, against an independently exported torch.profiler trace of the same program.

    python bench/ranks_device.py OUT [--nproc 2] [--tiny]

For DistributedDataParallel and for FSDP2: `flatout check --nproc N` on this file as a training script; then the same script plain
under torchrun, with torch.profiler around five steps in the middle. From each rank's trace: the union of its NCCL kernels less
what compute kernels (all others) cover, per step. Writes OUT/ranks.json and the reports as text. Without a GPU, or with
`--tiny`, everything runs on gloo at toy sizes: that checks this script, and its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

SIZES = {
    # GPT-2 small: 12 layers, 768 wide, 12 heads; batch 8 of 512 keeps two profiled runs within a minute.
    "full": {"layers": 12, "width": 768, "heads": 12, "context": 512, "batch": 8, "vocabulary": 50304, "steps": 60},
    "tiny": {"layers": 2, "width": 64, "heads": 4, "context": 32, "batch": 4, "vocabulary": 128, "steps": 40},
}
PROFILED = range(30, 35)
TIMED_FROM = 10
LIMIT_S = 240


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--only", choices=("ddp", "fsdp2"), default=None)
    parser.add_argument("--train", choices=("ddp", "fsdp2"), default=None, help=argparse.SUPPRESS)
    parser.add_argument("--size", choices=tuple(SIZES), default="full", help=argparse.SUPPRESS)
    parser.add_argument("--trace", type=Path, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options.train, SIZES[options.size], options.trace)
        return 0
    if options.out is None:
        parser.error("OUT is needed")
    import torch

    options.out.mkdir(parents=True, exist_ok=True)
    is_tiny = options.tiny or torch.cuda.device_count() < options.nproc
    summary: dict[str, Any] = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "nproc": options.nproc,
        "size": "tiny" if is_tiny else "full",
    }
    for kind in ("ddp", "fsdp2") if options.only is None else (options.only,):
        try:
            summary[kind] = judge(kind, summary["size"], options.nproc, options.out)
        except (subprocess.SubprocessError, OSError, KeyError, ValueError) as e:  # the other kind may still run
            summary[kind] = {"failed": f"{type(e).__name__}: {e}"}
        # Written after each kind: what was measured is not lost when a later one takes too long.
        (options.out / "ranks.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(json.dumps(summary, indent=1))
    return 0


def judge(kind: str, size: str, nproc: int, out: Path) -> dict[str, Any]:
    script = [str(Path(__file__).resolve()), "--train", kind, "--size", size]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        check = [sys.executable, "-m", "flatout.app.cli", "check", "--nproc", str(nproc), "--json", str(report)]
        text = run([*check, script[0], "--", *script[1:]])
        (out / f"{kind}.txt").write_text(text)
        seen = json.loads(report.read_text())
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)]
        run([*launch, *script, "--trace", folder])
        traces = [exposed(json.loads((Path(folder) / f"trace{r}.json").read_text())) for r in range(nproc)]
        plain = [json.loads((Path(folder) / f"times{r}.json").read_text()) for r in range(nproc)]
    evidence = seen["evidence"]
    distributed = evidence["distributed"]
    rows = [
        {k: c[k] for k in ("op", "phase", "num", "bytes", "seconds", "exposed_s", "wait_s")}
        for c in distributed["collectives"]
    ]
    told_s = sum(c["exposed_s"] for c in distributed["collectives"])
    trace_s = traces[0]["exposed_s"]
    return {
        "exposed_by_flatout_s": told_s,
        "exposed_in_trace_s": trace_s,
        "ratio": told_s / trace_s if trace_s else None,
        "traces": traces,
        "step_by_flatout_s": evidence["steps"]["step_s"],
        "step_plain_s": [statistics.median(p) for p in plain],
        "collectives": rows,
        "replications": distributed["replications"],
        "ranks": [
            {k: v for k, v in r.items() if k not in ("lines", "step_numbers", "work_by_step", "batch_elements")}
            for r in distributed["ranks"]
        ],
        "findings": [(f["rule"], f["line"], f["gain"], f["because"]) for f in seen["findings"]],
        "notes": [n["text"] for n in seen["diagnosis"]["notes"]] + evidence["notes"],
        "observing": evidence["observing"],
    }


def run(command: list[str]) -> str:
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        env={**os.environ, "COLUMNS": "100", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},
    )
    if done.returncode:
        print(done.stdout[-2000:], done.stderr[-4000:], file=sys.stderr)
        raise subprocess.CalledProcessError(done.returncode, command[:6])
    return done.stdout


def exposed(trace: dict[str, Any]) -> dict[str, float]:
    """Per profiled step: NCCL kernels' union, and the part of it that no other kernel covers, in seconds."""
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X" and e.get("cat") == "kernel"]
    nccl = [(e["ts"], e["ts"] + e["dur"]) for e in events if "nccl" in e["name"].lower()]
    compute = [(e["ts"], e["ts"] + e["dur"]) for e in events if "nccl" not in e["name"].lower()]
    both = length(nccl + compute)
    n = len(PROFILED)
    return {
        "nccl_s": length(nccl) * 1e-6 / n,
        "compute_s": length(compute) * 1e-6 / n,
        "exposed_s": (both - length(compute)) * 1e-6 / n,
        "num_nccl": len(nccl) / n,
    }


def length(spans: list[tuple[float, float]]) -> float:
    """Length of a union of intervals."""
    total, end = 0.0, float("-inf")
    for a, b in sorted(spans):
        total += max(0.0, b - max(a, end))
        end = max(end, b)
    return total


def train(kind: str, size: dict[str, int], trace: Path | None) -> None:
    """The program: a GPT that learns random tokens in bf16 autocast. With `trace`, a folder, profiled and timed."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    is_device = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    rank = int(os.environ["RANK"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if is_device else torch.device("cpu")
    if is_device:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if is_device else "gloo")
    torch.manual_seed(0)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            width = size["width"]
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            b, t, c = x.shape
            q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, size["heads"], -1).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c)
            x = x + self.out(y)
            return x + self.mlp(self.norm2(x))

    class GPT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(size["vocabulary"], size["width"])
            self.blocks = nn.ModuleList(Block() for _ in range(size["layers"]))
            self.head = nn.Linear(size["width"], size["vocabulary"], bias=False)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    net = GPT().to(device)
    model: nn.Module
    if kind == "ddp":
        model = DistributedDataParallel(net, device_ids=[device.index] if is_device else None)
    else:
        from torch.distributed.fsdp import fully_shard

        for block in net.blocks:
            fully_shard(block)
        model = fully_shard(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    profiler = torch.profiler.profile() if trace is not None else None
    torch.manual_seed(rank)
    times: list[float] = []
    for step in range(size["steps"]):
        if profiler is not None and step in (PROFILED.start, PROFILED.stop):
            if is_device:
                torch.cuda.synchronize()  # noqa: TID251  # the profiled steps must lie whole between start and stop
            dist.barrier()
            profiler.start() if step == PROFILED.start else profiler.stop()
        began = perf_counter()
        tokens = torch.randint(size["vocabulary"], (size["batch"], size["context"] + 1), device=device)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=is_device):
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if trace is not None and step < PROFILED.start:
            if is_device:
                torch.cuda.synchronize()  # noqa: TID251  # a plain wall-clock step, independent of flatout's timers
            if step >= TIMED_FROM:
                times.append(perf_counter() - began)
    if profiler is not None and trace is not None:
        profiler.export_chrome_trace(str(trace / f"trace{rank}.json"))
        (trace / f"times{rank}.json").write_text(json.dumps(times))
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
