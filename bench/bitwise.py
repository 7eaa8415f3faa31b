"""Do checked runs end with the weights of plain runs? `python bench/bitwise.py` runs three examples both ways and compares.

The weights of the largest module and the next random number are hashed when the script ends.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ("slow/digit_vae.py", "slow/paragraph_topics.py", "controls/char_transformer.py")
AT_END = """

import atexit as _atexit, hashlib as _hashlib, torch as _torch
_made = []
_init = _torch.optim.Optimizer.__init__
def _remember(self, *args, **kwargs):
    _init(self, *args, **kwargs)
    _made.append([p for g in self.param_groups for p in g["params"]])
_torch.optim.Optimizer.__init__ = _remember
def _tell():
    data = b"".join(p.detach().contiguous().numpy().tobytes() for group in _made for p in group)
    print("weights", _hashlib.sha256(data).hexdigest(), _torch.rand(1).item(), flush=True)
_atexit.register(_tell)
"""


def main() -> int:
    equal = True
    for script in SCRIPTS:
        source = (ROOT / "examples" / script).read_text()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / Path(script).name
            path.write_text(AT_END.lstrip() + source if "from __future__" not in source else source + AT_END)
            plain = weights([sys.executable, str(path)])
            checked = weights([sys.executable, "-c", "from flatout.app.cli import main; main()", "check", str(path)])
        equal &= plain == checked
        print(f"{script:36} {'bitwise equal' if plain == checked else 'DIFFERENT'}  {plain[8:24]} {checked[8:24]}")
    return 0 if equal else 1


def weights(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return next(line for line in done.stdout.splitlines() if line.startswith("weights"))


if __name__ == "__main__":
    sys.exit(main())
