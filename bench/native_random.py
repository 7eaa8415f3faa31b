"""Random small models through the native engine against eager: how many were equal, refused, wrong.

    python bench/native_random.py --models 500 [--first 0] [--batch 10]

Each number is a model (tests/inference/native/random_models.py); a batch shares one export and one file of C.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path
from time import perf_counter

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.blocks.inference.native.compared import judged


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=500)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--batch", type=int, default=10)
    args = parser.parse_args()
    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    began = perf_counter()
    end = args.first + args.models
    for at in range(args.first, end, args.batch):
        with tempfile.TemporaryDirectory() as folder:
            for verdict in judged(range(at, min(at + args.batch, end)), Path(folder)):
                counts[verdict.kind] += 1
                if verdict.kind != "equal":
                    print(f"{verdict.kind}: {verdict.model}\n    {verdict.why[:400]}", flush=True)
        print(f"{at + args.batch}: {dict(counts)}, {perf_counter() - began:.0f} s", flush=True)
    return 1 if counts["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
