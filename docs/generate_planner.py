"""Write docs/planner.md: how far the planner is off on published steps, from the newest result of bench/planner.py.

python docs/generate_planner.py            writes the page
python docs/generate_planner.py --check    writes nothing; exits with 1 when the page is out of date
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

from generate_results import write_or_check

ROOT: Final = Path(__file__).parents[1]
PAGE: Final = ROOT / "docs" / "planner.md"
HEAD: Final = """\
# How far to trust the planner

`flatout scale` and `flatout scale price` predict the seconds of a step and its memory from data sheets, with shares of their
rates that programs were measured to reach. This page compares predictions with steps that others published.

**Which rows are a test.** Many numbers were set with some of these tables in sight, so each row says what it is a test of:

- **numbers set**: rows with which numbers were set. Those of A100 and H100 in bfloat16 were fitted on mpt-fsdp. Those of products
  in 8 and 4 bits are the shares at which Megatron-Bridge's dense rows are right in the median. Blackwell's share in bfloat16 is
  that in 8 bits, since dgxc's rows on GB200 were seen. Those of PyTorch without `torch.compile` come from torchtitan, and those
  of experts from Megatron-Bridge.
- **mended**: rows with which no number was set, but after whose errors the planner was taught to count something more. Among
  that are weights that are cast once a step, gathers beside the forward, and recomputing that stops before the last product.
  Hybrid models (Nemotron 3) and DeepSeek-V4 count as such: they could not be described before. What their recipes keep in half
  precision was read from these after the first look. That look already had what recipes recompute, capture and divide. Without
  any recipe errors were 20.4 % (H100), 52.7 % (B200), 30.3 % (GB200), 21.9 % (B300) and 20.3 % (GB300).
- **mended, too**: dgxc's rows in 8 bits on H100. After their errors the time to fill a tile was made one of memory, not of
arithmetic.
  Its rows on GB200 were not looked at for that. Their error fell from 8.1 to 6.2 %, with shares set anew on Megatron-Bridge's
  rows.
- **first look**: the error when a table was predicted for the first time, before anything was changed for it. The rows of dgxc,
  torchtitan-2024 and of all *mended* tables were collected on 28 November 2026, when most numbers had been set.

The other columns:

- **error**: how far predictions are from the measured seconds, in the mean.
- **bias**: the same with its sign, below zero where predictions are too fast.
- **worst**: the largest error of a row.
- **unseen**: error and bias of the rows with which no number was set, and that are not mended.
- **held**: rows inside an interval that is made of the errors of all other rows of the same device, software and kind of model.
  Where these are fewer than ten, other software on the device counts, too. Printed intervals are made in the same way; where
  nothing was compared they are wide and say so. How far they are widened was set with all tables in sight.
- **not to fit**: rows that ran, and are said not to fit the memory. That counts may be 5 % too high was set with these rows in
  sight, too.
"""
LEFT_OUT: Final = """\
## Chosen on other rows

Three numbers of Megatron-Core's layers with experts were chosen on its published rows. They are the memory traffic of operators
that are not fused, the operators that the host starts where no graphs are captured, and those of each expert by itself.

Here they are chosen anew, as the best of 48 combinations, on the rows without one model, without one system, or before the
releases of 26.04. Then they are tried on the rows that were left out. All else is as above."""
FOOT: Final = """
## What the planner does not know

- A published step is one number: its software's version, the clocks and the network behind it are what the page says, or a guess.
- Shares of attention follow figures of the papers that data sheets name, read roughly; those for Blackwell are assumed.
- When Megatron-Bridge's releases began to start experts together was chosen with its rows in sight. What a recipe of a release
  overlaps, sends once, captures and computes again is read from the recipe (`bench/planner/bridge_recipes.csv`); for 20 rows no
  recipe has the published layout, and the preset's usual counts.
- Software of 2024 was slower in 8 bits than that of 2025 and 2026 on which the shares were set: NeMo 24.12 by a tenth on H100.
- How many operators a layer of plain PyTorch has differs: those of fms-fsdp's models of February 2024 take 1.5 times as long as
  torchtitan's, by their code on an H200 (`bench/llama_layers_device.py`). Yours may differ as much: calibrate.
- GPT-OSS is predicted 20 to 50 % too fast before its operators were fused, and nobody knows why yet.
- Mixtures of experts depend on how evenly tokens spread and on what is captured in graphs. Where recipes force an even spread,
  predictions are of an even spread, too.
- State-space layers are priced by bytes, at the share of the memory's rate that their kernels reach on an H200
  (`bench/state_space_device.py`). Other devices are taken to reach the same share. With two tensor ranks Nemotron 3 Super takes a
  fifth longer than predicted, and nobody knows why yet.
- DeepSeek-V4's layers are predicted a third too fast. The loss of its indexers and norms within attention are not counted.
- Adapters (LoRA) lie beside queries, keys and values in Megatron-Bridge's recipes. NeMo's before them are taken to have the same.
- Measure a few steps of your own with `flatout calibrate`, and give them with `--measured`: constants are then fitted on them.
"""


def newest() -> Path:
    """The newest stored result."""
    found = sorted((ROOT / "bench" / "results").glob("*/planner.json"))
    if not found:
        raise SystemExit(
            "bench/results has no planner.json; run python bench/planner.py --out bench/results/.../planner.json"
        )
    return found[-1]


def percent(value: float | None, *, sign: bool = False) -> str:
    if value is None:
        return "-"
    return f"{100 * value:+.1f} %" if sign else f"{100 * value:.1f} %"


def both(error: float | None, bias: float | None) -> str:
    return "-" if error is None else f"{percent(error)}, {percent(bias, sign=True)}"


def first_looks() -> dict[str, float]:
    """Errors of tables as they were predicted for the first time."""
    found: dict[str, float] = {}
    for path in sorted((ROOT / "bench" / "results").glob("*-unseen/planner_*.json")):
        for name, table in json.loads(path.read_text(encoding="utf-8")).items():
            found.setdefault(name, table["error"])
    return found


def page() -> str:
    """The page as Markdown."""
    path = newest()
    tables: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    left_out: dict[str, dict[str, Any]] = tables.pop("left out", {})
    lines = [HEAD, f"From `{path.relative_to(ROOT)}`, written by `python bench/planner.py --out FILE`.", ""]
    head = (
        *("table", "rows", "numbers set", "mended", "first look", "error", "bias", "worst", "unseen", "held"),
        "not to fit",
    )
    first = first_looks()
    rows = [
        (
            name,
            str(found["rows"]),
            str(found["in sight"]),
            str(found["mended"]),
            percent(first.get(name)),
            percent(found["error"]),
            percent(found["bias"], sign=True),
            percent(found["worst"], sign=True),
            both(found["error of unseen rows"], found["bias of unseen rows"]),
            percent(found["inside"]),
            f"{found['said not to fit']} of {found['rows'] - found['not priced'] - found['ran out of memory']}",
        )
        for name, found in tables.items()
        if found["rows"]
    ]
    lines += [f"| {' | '.join(row)} |" for row in (head, ("---",) * len(head), *rows)]
    if left_out:
        lines += ["", LEFT_OUT, "", "| without the | | rows | error |", "|---|---|---|---|"]
        lines += [
            f"| {kind} | {name} | {one['rows']} | {percent(one['error'])} |"
            for kind, of_kind in left_out.items()
            for name, one in of_kind.items()
        ]
    out = [(name, found) for name, found in tables.items() if found.get("ran out of memory")]
    lines += [
        f"\nOf {found['ran out of memory']} further layouts of {name} that ran out of memory, "
        f"{found['said to fit']} are said to fit."
        for name, found in out
    ]
    lines += ["", "## The tables", ""]
    by_source: dict[str, list[str]] = {}
    for name, found in tables.items():
        by_source.setdefault(found["about"], []).append(name)
    lines += [
        f"- **{names[0] if len(names) == 1 else names[0].partition('-')[0] + '-...'}**: {about}"
        for about, names in by_source.items()
    ]
    return "\n".join(lines) + "\n" + FOOT


if __name__ == "__main__":
    sys.exit(write_or_check(PAGE, page()))
