"""A C file of this package as a shared library: compiled once for this machine, into the user's cache folder, and loaded."""

from __future__ import annotations

import ctypes
import hashlib
import platform
from pathlib import Path

from flatout.core.errors import NativeError
from flatout.core.runtime.c_compiler import CompilerRun, build_shared_library, cpu_features, find_compiler
from flatout.core.runtime.cache_folder import create_code_folder, default_cache_folder, require_trusted_library


def load_source(source: Path, *, flags: tuple[str, ...], link_flags: tuple[str, ...] = ("-lm",)) -> ctypes.CDLL:
    """Load the library of one C file; compiles where this file, these flags or this CPU are new.

    Raises NativeError when there is no compiler, when it refuses, and when the library cannot be loaded or is not safe to load.
    """
    # The CPU's features are in the name: a home folder may be shared by machines.
    features = " ".join(sorted(cpu_features() or {platform.processor()}))
    parts = (source.read_bytes(), repr((flags, link_flags)).encode(), features.encode())
    key = hashlib.sha256(b"\n".join(parts)).hexdigest()[:16]
    file = default_cache_folder() / f"{source.parent.name}-{source.stem}-{key}.so"
    if not file.exists():
        create_code_folder(file.parent)
        run = CompilerRun(source.stem, flags)
        build_shared_library(source, file, [run], compiler=find_compiler(), link_flags=link_flags)
    require_trusted_library(file)
    try:
        return ctypes.CDLL(str(file))
    except OSError as e:
        raise NativeError(f"the library of {source.name} cannot be loaded: {e}") from e
