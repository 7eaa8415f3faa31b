from __future__ import annotations

import platform
import shutil
from pathlib import Path

import pytest
from tests.blocks.inference.native import hand_made

from flatout.blocks.inference.native.library import compile_library, open_library
from flatout.core.errors import NativeError, UsageError
from flatout.core.runtime.c_compiler import instruction_sets


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "model.c"
    path.write_text(hand_made.SOURCE)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("compiler", [None, "gcc", "clang-14"])
def test_the_library_holds_every_instruction_set_and_chooses_one_of_them(
    source: Path, tmp_path: Path, compiler: str | None
) -> None:
    if compiler and not shutil.which(compiler):
        pytest.skip(f"{compiler} is not installed")
    out = tmp_path / "libmodel.so"

    compiled = compile_library(source, out, compiler=compiler)

    assert compiled.isas == tuple(instruction_sets(platform.machine()))
    assert open_library(out).isa.decode() in compiled.isas
    assert compiled.warnings == ""
    assert compiled.compiler
    assert sorted(path.name for path in tmp_path.iterdir()) == ["libmodel.so", "model.c"]


def test_a_library_of_plain_code_alone_runs_plain_code(source: Path, tmp_path: Path) -> None:
    compiled = compile_library(source, tmp_path / "libmodel.so", isas=())

    assert compiled.isas == ("plain",)
    assert open_library(tmp_path / "libmodel.so").isa == b"plain"


def test_plain_is_compiled_whatever_is_asked_for(source: Path, tmp_path: Path) -> None:
    best = next(iter(instruction_sets(platform.machine())))

    assert compile_library(source, tmp_path / "libmodel.so", isas=(best,)).isas[-1] == "plain"


def test_an_instruction_set_of_another_architecture_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"isas has \['sve9'\]; .* plain"):
        compile_library(source, tmp_path / "libmodel.so", isas=("sve9",))


@pytest.mark.slow
def test_no_flag_lets_the_compiler_change_sums(source: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    compiler = tmp_path / "logging-cc"
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {log}\nexec cc "$@"\n')
    compiler.chmod(0o755)

    compile_library(source, tmp_path / "libmodel.so", compiler=str(compiler))

    lines = [line for line in log.read_text().splitlines() if "-c " in line]
    assert len(lines) == len(instruction_sets(platform.machine())) + 1
    for line in lines:
        assert "-ffp-contract=off" in line and "fast-math" not in line and "-Ofast" not in line


def test_what_the_compiler_refuses_is_told_in_its_words_and_leaves_what_was_there(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "libmodel.so"
    out.write_text("before")
    source.write_text("int f(void) { return missing_thing; }")

    with pytest.raises(NativeError, match=r"compiling model.c for .* failed(.|\n)*missing_thing"):
        compile_library(source, out)

    assert out.read_text() == "before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["libmodel.so", "model.c"]


def test_a_function_that_is_nowhere_is_found_when_linking(source: Path, tmp_path: Path) -> None:
    source.write_text(
        hand_made.SOURCE + "\nvoid nowhere(void);\nstatic void (*there)(void) __attribute__((used)) = nowhere;\n"
    )

    with pytest.raises(NativeError, match=r"linking libmodel.so failed(.|\n)*nowhere"):
        compile_library(source, tmp_path / "libmodel.so", isas=())


def test_warnings_are_handed_on(source: Path, tmp_path: Path) -> None:
    source.write_text(hand_made.SOURCE + "\nstatic int unused_thing(void) { return 1; }\n")

    assert "unused_thing" in compile_library(source, tmp_path / "libmodel.so", isas=()).warnings


def test_without_a_compiler_the_error_lists_the_alternatives(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flatout.core.runtime.c_compiler.shutil.which", lambda name: None)

    with pytest.raises(NativeError, match=r"no C compiler.*copy the engine's folder.*aoti.*needs a C\+\+ compiler"):
        compile_library(source, tmp_path / "libmodel.so")


def test_a_library_that_took_the_place_of_another_is_the_one_that_is_loaded(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "libmodel.so"
    compile_library(source, out, isas=())
    first = open_library(out)
    source.write_text("#define PAIR\n" + hand_made.SOURCE)
    compile_library(source, out, isas=())

    second = open_library(out)

    num_inputs = [library.num_inputs for library in (first, second)]
    assert num_inputs == [1, 3]


def test_what_is_no_model_is_refused(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "libmodel.so"
    out.write_bytes(b"nothing of the kind")
    with pytest.raises(NativeError, match="cannot load"):
        open_library(out)

    source.write_text(hand_made.SOURCE.replace("TABLE = {1,", "TABLE = {7,"))
    compile_library(source, out, isas=())
    with pytest.raises(NativeError, match="has interface 7, 1 is known"):
        open_library(out)
