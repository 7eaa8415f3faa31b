from __future__ import annotations

import ctypes
import os
import shutil
from pathlib import Path

import pytest

from flatout.core.errors import NativeError
from flatout.core.runtime.c_compiler import (
    BASE_FLAGS,
    STRICT_FLAGS,
    CompilerRun,
    build_shared_library,
    compiler_version,
    cpu_instruction_set,
    find_compiler,
    instruction_sets,
)

needs_compiler = pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler")
ADD = '__attribute__((visibility("default"))) int add(int a, int b) { return a + b; }\n'
PLAIN = [CompilerRun("plain", BASE_FLAGS)]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "add.c"
    path.write_text(ADD)
    return path


@needs_compiler
def test_a_library_is_compiled_and_runs(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "libadd.so"

    warnings = build_shared_library(source, out, PLAIN, compiler=find_compiler())

    assert (warnings, ctypes.CDLL(str(out)).add(2, 3)) == ("", 5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["add.c", "libadd.so"]


@needs_compiler
def test_others_cannot_write_to_a_library_whatever_the_umask(source: Path, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        build_shared_library(source, tmp_path / "libadd.so", PLAIN, compiler=find_compiler())
    finally:
        os.umask(before)

    assert (tmp_path / "libadd.so").stat().st_mode & 0o022 == 0


@needs_compiler
def test_code_that_does_not_compile_leaves_the_earlier_library(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "libadd.so"
    out.write_text("before")
    source.write_text("int f(void) { return missing_thing; }")

    with pytest.raises(NativeError, match=r"compiling add.c for plain failed(.|\n)*missing_thing"):
        build_shared_library(source, out, PLAIN, compiler=find_compiler())

    assert out.read_text() == "before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["add.c", "libadd.so"]


@needs_compiler
def test_an_undefined_function_is_an_error_of_linking(source: Path, tmp_path: Path) -> None:
    source.write_text(ADD + "void nowhere(void);\nstatic void (*p)(void) __attribute__((used)) = nowhere;\n")

    with pytest.raises(NativeError, match=r"linking libadd.so failed(.|\n)*nowhere"):
        build_shared_library(
            source, tmp_path / "libadd.so", PLAIN, compiler=find_compiler(), link_flags=("-Wl,-z,defs",)
        )


@needs_compiler
def test_warnings_are_returned(source: Path, tmp_path: Path) -> None:
    source.write_text(ADD + "static int unused_thing(void) { return 1; }\n")

    assert "unused_thing" in build_shared_library(source, tmp_path / "a.so", PLAIN, compiler=find_compiler())
    assert compiler_version(find_compiler())


def test_without_a_compiler_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flatout.core.runtime.c_compiler.shutil.which", lambda name: None)

    with pytest.raises(NativeError, match="none of cc, gcc, clang was found on PATH; install gcc >= 11"):
        find_compiler()
    with pytest.raises(NativeError, match="'tcc' was not found"):
        find_compiler("tcc")


def test_a_compiler_that_cannot_be_started_is_an_error(tmp_path: Path) -> None:
    broken = tmp_path / "cc"
    broken.write_bytes(b"\x00")
    broken.chmod(0o755)

    with pytest.raises(NativeError, match="cannot start"):
        compiler_version(str(broken))


def test_long_messages_are_shortened(tmp_path: Path) -> None:
    verbose = tmp_path / "cc"
    verbose.write_text("#!/bin/sh\nseq 25\nexit 1\n")
    verbose.chmod(0o755)

    with pytest.raises(NativeError, match=r"\.\.\. and 5 lines more"):
        compiler_version(str(verbose))


def test_each_architecture_has_plain_code_last() -> None:
    for machine in ("x86_64", "aarch64", "riscv64"):
        assert list(instruction_sets(machine))[-1] == "plain"
    assert cpu_instruction_set() is None or cpu_instruction_set() in {"avx512vnni", "avx512", "avx2", "neon", "plain"}


def test_no_flag_lets_the_compiler_reorder_sums() -> None:
    assert "-ffp-contract=off" in STRICT_FLAGS
    assert not any("fast" in flag for flag in STRICT_FLAGS)
