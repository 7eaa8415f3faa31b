from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.command_line import QUICK

_MEASURE = """
import msgspec
from flatout.core.runtime.cache_folder import default_cache_folder
from flatout.machine.measure import cache, probe
cache.write_machine(default_cache_folder(), msgspec.structs.replace(probe.quick_probe(), processor_share=1.0, spread={}))
"""


@pytest.fixture(scope="session")
def cache_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder in which this machine was measured once for all tests of a process.

    As if undisturbed: `check` would measure it again in each test, since tests run beside each other.
    """
    folder = tmp_path_factory.mktemp("cache")
    environment = {**os.environ, **QUICK, "XDG_CACHE_HOME": str(folder)}
    subprocess.run([sys.executable, "-c", _MEASURE], env=environment, check=True, timeout=100)
    return folder


@pytest.fixture(scope="session")
def cache_of_this_process(cache_home: Path) -> Path:
    """The cache folder for what runs in this process, whose number of threads makes it another machine."""
    import msgspec

    from flatout.machine.measure import cache, probe

    cache.write_machine(
        cache_home / "flatout", msgspec.structs.replace(probe.quick_probe(), processor_share=1.0, spread={})
    )
    return cache_home
