"""Every outermost module compiled at its first call, in the mode of WORLD_COMPILE_MODE."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from outermost import around_outermost


def cure() -> None:
    done = set()

    def compiled(module, call, args, kwargs):
        if id(module) not in done:
            done.add(id(module))
            module.compile(mode=os.environ.get("WORLD_COMPILE_MODE"))
        return call(*args, **kwargs)

    around_outermost(compiled)
