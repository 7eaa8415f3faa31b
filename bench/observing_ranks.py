"""What `flatout check` costs where many ranks train: its share of the timed steps, by number of ranks on this machine (gloo).

    python bench/observing_ranks.py [--ranks 4 16 64] [--seconds 20] [--out FILE]

Each rank trains a small model replicated over all; rank 0 reports them. The share is what the observer measures of itself on rank
0."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from time import monotonic

import torch

from flatout.core.files import write_whole_file
from flatout.report.json_report import read_evidence

TRAIN = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(100_000):
    model(torch.randn(16, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def main() -> None:
    """Check the same script on more and more ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="*", default=(4, 16, 64))
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    found = []
    for ranks in asked.ranks:
        with tempfile.TemporaryDirectory() as temporary:
            (Path(temporary) / "train.py").write_text(TRAIN)
            words = [sys.executable, "-m", "flatout.app.cli", "check", "--no-trials", "--seconds", f"{asked.seconds}"]
            words += ["--nproc", f"{ranks}", "--json", "report.json", "train.py"]
            environment = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": temporary}
            began_s = monotonic()
            ended = subprocess.run(words, cwd=temporary, env=environment, capture_output=True, text=True, check=False)
            if ended.returncode:
                raise SystemExit(ended.stderr[-3000:])
            evidence = read_evidence((Path(temporary) / "report.json").read_bytes())
            assert evidence.distributed is not None
            found.append(
                {
                    "ranks": ranks,
                    "ranks_reported": len(evidence.distributed.ranks),
                    "step_ms": 1e3 * evidence.steps.step_s,
                    "timed_steps": evidence.steps.num_timed,
                    "observing_share": evidence.observing.light_fraction,
                    "whole_s": monotonic() - began_s,
                }
            )
            print(found[-1], flush=True)
    result = {
        "device": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "torch": str(torch.__version__),
        "by_ranks": found,
    }
    if asked.out:
        write_whole_file(asked.out, json.dumps(result, indent=1).encode())


if __name__ == "__main__":
    main()
