"""Types commands as a new user would, good and bad, and looks at what comes: `python tests/typed_commands.py [--flatout PATH]`.

It needs nothing but Python, so that it can type the `flatout` of an installed wheel in another environment. The table says for
each command its exit code, words of its output, and files that are there afterwards. `--quick` leaves out what starts training.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

LONGEST_S = 300.0

TRAIN = """\
import argparse
import torch
parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=40)
steps = parser.parse_args().steps
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(32, 64), torch.randint(10, (32,))
for step in range(steps):
    loss = torch.nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("trained", steps)
"""
FILES: dict[str, str] = {
    "train.py": TRAIN,
    "other.py": TRAIN.replace("lr=0.1", "lr=0.2"),
    "package/__init__.py": "",
    "package/train.py": TRAIN,
    "prints.py": "import sys\nprint('arguments', *sys.argv[1:])\n",
    "raises.py": "raise RuntimeError('disk full')\n",
    "early.py": "raise SystemExit(7)\n",
    "wrong.py": "for x in:\n    pass\n",
    "broken.ipynb": "this is not JSON\n",
    "plan.toml": 'version = 1\nscript = "train.py"\n',
    "other-plan.toml": 'version = 1\nscript = "other.py"\nscript_digest = "0123456789abcdef"\n',
    "unknown-lever.toml": 'version = 1\nscript = "train.py"\n[[lever]]\nid = "graph.nonsense"\nguarantee = "bounded"\n',
    "notes.toml": "this is no TOML\n",
    "sizes.toml": "hidden = 1024\nlayers = 8\nheads = 8\nvocab = 32000\nseq = 1024\n",
    "layout.toml": "global_batch = 8\n",
    "wide.toml": "global_batch = 8\ntensor = 16\n",
    "sheet.toml": 'base = "nvidia-h100-sxm"\nspeed = 3\n',
    "folder/file.txt": "",
    "settings/good/pyproject.toml": '[tool.flatout.fit]\nmodel = "../../sizes.toml"\n',
    "settings/unknown/pyproject.toml": "[tool.flatout.tune]\ntime-budgt = 3\n",
    "settings/type/pyproject.toml": '[tool.flatout]\nsteps = "many"\n',
}


class Case(NamedTuple):
    """One command, and what is expected of it."""

    words: str
    """Separated by spaces; what follows `flatout`."""
    code: int = 0
    out: str = ""
    """Words that standard output has, separated by ` | `; white space counts once."""
    err: str = ""
    """The same of standard error."""
    files: str = ""
    """Files that are there and not empty afterwards."""
    folder: str = "."
    """Where it is typed, in the folder with the files."""
    trains: bool = False
    """Whether it starts processes that import torch and run scripts."""


class Typed(NamedTuple):
    """What a command did."""

    code: int
    out: str
    err: str


CASES: tuple[Case, ...] = (
    # the front door
    Case("-h", out="Find what is slow | Fix it | Prove and reproduce | Many devices | Records"),
    Case("--help", out="check | tune | verify"),
    Case("tune -h", out="--time-budget TIME | flatout tune --time-budget 5m train.py"),
    Case("runs diff -h", out="Examples: | flatout runs diff"),
    Case("chekc train.py", 2, err="chekc | check"),
    Case("--nonsense", 2, err="no such option: --nonsense; see `flatout -h`"),
    Case("chek train.py", 2, err="there is no `flatout chek`; did you mean `flatout check`?"),
    Case("simulate --gpus abc", 2, err="`flatout simulate`: invalid value for '--gpus'"),
    Case("rules --nonsense", 2, err="`flatout rules`: no such option: --nonsense"),
    Case("completion bash", out="complete -F _flatout flatout"),
    Case("completion tcsh", 2, err="tcsh is none of bash, zsh, fish"),
    Case("schema", out='"$defs"'),
    # names
    Case("rules", out="overhead.not-compiled"),
    Case("rules not-compiled", out="overhead.not-compiled | Costs"),
    Case("rules overhead.not-compilde", 2, err="no rules are named | did you mean overhead.not-compiled"),
    Case("levers fused-optimizer", out="parallelism.fused-optimizer"),
    Case("levers graph.compil", 2, err="several levers are named | graph.compile"),
    # scripts that are none
    Case("check", 2, err="no script given; call `flatout check train.py"),
    Case("tune", 2, err="no script given"),
    Case("survive", 2, err="no script given"),
    Case("verify train.py", 2, err="no script given; call `flatout verify before.py after.py`"),
    Case("watch missing.py", 2, err="'missing.py' is not a file"),
    Case("tune missing.py", 2, err="'missing.py' is not a file"),
    Case("tune folder", 2, err="'folder' is not a file"),
    Case("tune broken.ipynb", 2, err="is a notebook, which `flatout check` alone runs"),
    Case("edit --plan plan.toml -m package.missing", 2, err="package.missing"),
    Case("run train.py", 2, err="give a plan or a layout"),
    Case("run --plan missing.toml train.py", 2, err="missing.toml", trains=True),
    Case("edit --plan notes.toml train.py", 2, err="notes.toml"),
    Case("edit --plan unknown-lever.toml train.py", 2, err="graph.nonsense"),
    # options and the script
    Case("tune --time-bugdet 5m train.py", 2, err="has no option --time-bugdet; did you mean --time-budget?"),
    Case("check --lr 3 train.py", 2, err="has no option --lr | Options of the script come after it"),
    Case("tune --time-budget soon train.py", 2, err="--time-budget soon is no time above 0"),
    Case("tune --accuracy-loss little train.py", 2, err="--accuracy-loss 'little' cannot be allowed; write '1%'"),
    Case("tune --accuracy-loss -1% train.py", 2, err="0 or more"),
    Case("check --seconds many train.py", 2, err="invalid value for '--seconds'"),
    Case("watch prints.py --folder x -h", out="arguments --folder x -h", err="note: --folder, -h come after prints.py"),
    Case("watch prints.py -- --folder x", out="arguments --folder x"),
    Case("watch early.py", 7),
    Case("tune --budget soon train.py", 2, err="note: --budget is called --time-budget now"),
    # where files go
    Case("check --json nowhere/r.json train.py", 2, err="--json nowhere/r.json: there is no folder"),
    Case("check --html folder train.py", 2, err="--html folder: it is a folder"),
    Case("check --json a.json --html a.json train.py", 2, err="--json goes there, too"),
    Case("edit --plan plan.toml --out - train.py", 2, err="a folder does not go to standard output"),
    Case("report evidence.json", out="a training step"),
    Case("report evidence.json --json -", out='"evidence"', err="a training step"),
    Case("report evidence.json --json /dev/null --markdown r.md", out="a training step", files="r.md"),
    Case("report missing.json", 2, err="missing.json"),
    Case("report train.py", 2, err="train.py"),
    Case("compare evidence.json evidence.json", out="step"),
    Case("compare evidence.json evidence.json --fail-if-slower 5%", out="PASS"),
    Case("compare evidence.json evidence.json --fail-if-slower much", 2, err="is no share of 0 or more"),
    # devices on paper
    Case("fit --model sizes.toml --layout layout.toml --gpus 8xh100-sxm", out="fits"),
    Case("fit --model sizes.toml --html -", out="<!doctype html>", err="it holds:"),
    Case("fit --model sizes.toml --gpus 8xnothing", 2, err="nothing"),
    Case("fit", 2, err="give either module:function or --model FILE"),
    Case("simulate --gpus 1024 --html page.html", out="written to page.html", files="page.html"),
    Case("simulate --gpus 0", 2, err="give positive numbers"),
    Case("scale --model missing.toml --gpus 8xh100-sxm --batch 8", 2, err="missing.toml"),
    Case("scale --gpus 8xh100-sxm", 2, err="give --model, --gpus and --batch"),
    Case("scale pareto --model sizes.toml --gpus 4xh100-sxm --batch 16 --price 2", out="at the limit of power"),
    Case("scale pareto --model sizes.toml --gpus 2xh100-sxm --batch 16 --json -", out='"rows"', err="GPU-hours"),
    Case("scale pareto --model sizes.toml --gpus 4xh100-sxm", 2, err="give --model, --gpus (the most there are) and --batch"),
    Case("scale pareto --model sizes.toml --gpus 4xh100-sxm --batch 16 --top 0", 2, err="--top are positive"),
    Case("scale price --model sizes.toml --layout layout.toml --gpus 1xh100-sxm", out="what this follows from:"),
    Case("scale price --model sizes.toml --layout layout.toml --gpus 1xh200 --json -", out='"assumptions"', err="it fits"),
    Case("scale price --model sizes.toml --layout layout.toml", 2, err="give --model, --layout, and --gpus or --cluster"),
    Case("scale price --model sizes.toml --layout wide.toml --gpus 16xh200", 2, err="the nearest that can has tensor 8"),
    Case("scale price --model sizes.toml --layout layout.toml --gpus 1 --device sheet.toml", 2, err="has 'speed'"),
    Case("scale price --model sizes.toml --layout layout.toml --gpus 1xh100", 2, err="did you mean 'h100-pcie or h100-sxm'"),
    Case("scale price --model sizes.toml --layout layout.toml --gpus 1xh200 --software fsdp", 2, err="did you mean 'fsdp"),
    Case("simulate --gpus 2048 --shape 0.7 --spares 4", out="by kind, in Llama 3's mix"),
    # runs
    Case("runs", out="no run in 'runs'"),
    Case("runs --where lr", 2, err="give KEY=VALUE"),
    Case("replay runs/none", 2, err="give the folder of a run"),
    # a project
    Case("fit", folder="settings/good", out="it holds:", err="note: pyproject.toml sets --model ../../sizes.toml"),
    Case("--isolated fit", 2, folder="settings/good", err="give either module:function or --model FILE"),
    Case("rules", 2, folder="settings/unknown", err="unknown key time-budgt; did you mean time-budget? | pyproject.toml"),
    Case("schema", 2, folder="settings/type", err="steps = 'many' is not what --steps of"),
    Case("tune -h", folder="settings/unknown", out="--time-budget", err="unknown key time-budgt"),
    # what starts training
    Case("--version", out="flatout | torch", trains=True),
    Case("check --no-trials --seconds 3 --json r.json train.py --steps 4000", out="a training step", files="r.json", trains=True),
    Case("check --no-trials --seconds 3 -m package.train --steps 4000", out="a training step", trains=True),
    Case("check raises.py", 1, err="RuntimeError: disk full", trains=True),
    Case("check early.py", 7, out="No step was seen", trains=True),
    Case("check prints.py", 3, out="No step was seen", trains=True),
    Case("check wrong.py", 2, err="does not compile", trains=True),
    Case("check broken.ipynb", 2, err="broken.ipynb", trains=True),
    Case("tune raises.py", 1, err="RuntimeError: disk full", trains=True),
    Case("tune prints.py", 2, err="took no step", trains=True),
    Case("run --plan plan.toml train.py --steps 5", out="trained 5", trains=True),
    Case("run --plan unknown-lever.toml train.py", 2, err="graph.nonsense", trains=True),
    Case("run --plan other-plan.toml train.py", 2, err="script: other.py there, train.py here", trains=True),
    Case("run --plan plan.toml raises.py", 1, err="RuntimeError: disk full", trains=True),
    Case("edit --plan plan.toml train.py", trains=True),
    Case("verify --no-speed --steps 4 train.py train.py", out="PROVED: equal bit for bit", trains=True),
    Case("verify --no-speed --steps 4 --json v.json train.py other.py", 1, out="DIFFERENT", files="v.json", trains=True),
    Case("watch --folder runs train.py --steps 5", out="trained 5", files="runs", trains=True),
    Case("doctor", out="torch", trains=True),
)  # fmt: skip


def write_files(folder: Path, evidence: bytes) -> None:
    """What a new user's folder holds: scripts, plans, settings, and what `flatout check --json` wrote of a run."""
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "evidence.json").write_bytes(evidence)


def complaints(case: Case, typed: Typed, folder: Path) -> list[str]:
    """What is not as expected."""
    found = [] if typed.code == case.code else [f"exit code {typed.code}, not {case.code}"]
    for name, wanted, text in (("output", case.out, typed.out), ("standard error", case.err, typed.err)):
        flat = " ".join(text.split())
        found += [f"{name} lacks '{words}'" for words in wanted.split(" | ") if words and words not in flat]
    found += ["a traceback"] * ("Traceback" in typed.out + typed.err and "disk full" not in case.err)
    for name in case.files.split():
        path = folder / case.folder / name
        found += [] if path.exists() and (path.is_dir() or path.stat().st_size) else [f"no file {name}"]
    if (folder / case.folder / "-").exists():
        found.append("a file named -")
    return found


def types(program: Sequence[str]) -> Callable[[Case, Path], Typed]:
    """Types commands in processes of their own."""

    def run(case: Case, folder: Path) -> Typed:
        environment = {**os.environ, "COLUMNS": "120", "OMP_NUM_THREADS": "1"}
        try:
            done = subprocess.run(
                [*program, *case.words.split()],
                cwd=folder / case.folder,
                env=environment,
                capture_output=True,
                text=True,
                timeout=LONGEST_S,
                check=False,
                stdin=subprocess.DEVNULL,
            )
        except subprocess.TimeoutExpired:
            return Typed(-1, "", f"no end after {LONGEST_S:g} s")
        return Typed(done.returncode, done.stdout, done.stderr)

    return run


def judged(case: Case, run: Callable[[Case, Path], Typed], evidence: bytes = b"") -> tuple[list[str], Typed]:
    """Type one command in a fresh folder; what is not as expected, and what it did."""
    with tempfile.TemporaryDirectory(prefix="typed-") as name:
        folder = Path(name)
        write_files(folder, evidence)
        typed = run(case, folder)
        return complaints(case, typed, folder), typed


def evidence_by(run: Callable[[Case, Path], Typed]) -> bytes:
    """What `flatout check --json` writes of a run."""
    with tempfile.TemporaryDirectory(prefix="typed-") as name:
        folder = Path(name)
        write_files(folder, b"")
        typed = run(Case("check --no-trials --seconds 3 --json found.json train.py --steps 4000"), folder)
        if typed.code or not (folder / "found.json").exists():
            sys.exit(f"`flatout check` itself does not work: {typed.out}{typed.err}")
        return (folder / "found.json").read_bytes()


def main() -> int:
    """Type the whole table; 1 where something is not as expected."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--flatout", type=Path, help="the program to type; without it that of this Python")
    parser.add_argument("--quick", action="store_true", help="leave out what starts training")
    parser.add_argument("--jobs", type=int, default=2, help="commands at a time")
    options = parser.parse_args()
    program = [sys.executable, "-m", "flatout"] if options.flatout is None else [str(options.flatout.absolute())]
    cases = [case for case in CASES if not (options.quick and case.trains)]
    num_wrong, run = 0, types(program)
    evidence = evidence_by(run)
    with ThreadPoolExecutor(options.jobs) as pool:
        results = pool.map(lambda case: judged(case, run, evidence), cases)
        for case, (found, typed) in zip(cases, results, strict=True):
            print(f"{'WRONG' if found else 'ok':5}  {typed.code:3}  flatout {case.words}", flush=True)
            if found:
                num_wrong += 1
                print(*(f"       {text}" for text in found), typed.out[-1500:], typed.err[-1500:], sep="\n", flush=True)
    print(f"{len(cases) - num_wrong} of {len(cases)} commands did what is expected of them")
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
