"""Rows of Megatron-Bridge's performance summary as CSV.

    python bench/planner/import_bridge.py SUMMARY.md ARCHIVE.md > bridge.csv

The pages are docs/performance-summary.md and docs/performance-summary-archive.md of NVIDIA-NeMo/Megatron-Bridge (Apache License
2.0). A row with a second figure in parentheses is two rows: the second precision, or the second layout.
"""

from __future__ import annotations

import csv
import re
import sys
from pathlib import Path

COLUMNS = {
    "#-GPUs": "devices",
    "Precision": "precision",
    "GBS": "global_batch",
    "MBS": "micro_batch",
    "Sequence Length": "seq",
    "FSDP": "fsdp",
    "TP": "tensor",
    "PP": "pipeline",
    "CP": "context",
    "VP": "chunks",
    "EP": "expert",
    "Tokens / sec / GPU": "tokens_per_s",
    "Model TFLOP / sec / GPU": "tflop_per_s",
}
FIELDS = ["release", "task", "model", "system", *COLUMNS.values()]


def rows(text: str) -> list[dict[str, str]]:
    """All rows of a page."""
    found: list[dict[str, str]] = []
    release = task = heading = ""
    head: list[str] = []
    for line in text.splitlines():
        if line.startswith("## "):
            release = line[3:].split()[0]
        elif line.startswith("### "):
            task = {"SFT": "sft", "LoRA": "lora"}.get(line[4:].split()[0], "pre-training")
        elif line.startswith("#### "):
            heading = line[5:].strip()
        elif line.startswith("|"):
            cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
            if cells[0] in ("System", "Model"):
                head = cells
            elif head and not cells[0].startswith("--"):
                named = dict(zip(head, cells, strict=True))
                base = {"release": release, "task": task}
                value = heading.partition(": ")[2]
                base |= {"model": named.get("Model", value), "system": named.get("System", value)}
                for alternative in range(2):
                    row = {COLUMNS[name]: part(named.get(name, ""), alternative) for name in COLUMNS}
                    if alternative and not re.search(r"\(", named["Tokens / sec / GPU"]):
                        break
                    row["precision"] = row["precision"] or ("FP8-CS", "FP8-SC")[alternative]
                    found.append(base | row)
    return found


def part(cell: str, alternative: int) -> str:
    """What stands outside of parentheses, or in them; the same where there are none."""
    match = re.fullmatch(r"(.*?)\s*\((.*)\)", cell)
    return cell if match is None else match[1 + alternative]


def main() -> int:
    writer = csv.DictWriter(sys.stdout, FIELDS, lineterminator="\n")
    writer.writeheader()
    for path in sys.argv[1:]:
        writer.writerows(rows(Path(path).read_text(encoding="utf-8")))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
