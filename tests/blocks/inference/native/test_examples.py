"""The programs beside an engine: they are compiled as the README says, and print what the model gives."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from tests.blocks.inference.native import small_model as small

from flatout.blocks.inference.native.examples import example_files
from flatout.core.records.native import NativeManifest, Port

pytestmark = pytest.mark.slow

needs_cpp = pytest.mark.skipif(not (shutil.which("cc") and shutil.which("c++")), reason="no C and C++ compiler")
needs_rust = pytest.mark.skipif(not (shutil.which("cc") and shutil.which("rustc")), reason="no C or Rust compiler")


def written(folder: Path) -> list[str]:
    """An engine's folder of the small model; the lines that its README gives to type."""
    files = example_files(small.manifest(), state_bytes=small.STATE_BYTES, work_bytes=small.WORK_BYTES)
    for name, text in (*files.items(), ("model.c", small.MODEL_C), ("model.h", small.MODEL_H)):
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "weights.bin").write_bytes(small.weights_file())
    return files["README.md"].split("```\n")[1].splitlines()


def typed(line: str, folder: Path) -> str:
    done = subprocess.run(line, shell=True, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{line}\n{done.stderr}"
    assert "warning" not in done.stderr, done.stderr
    return done.stdout


def printed(text: str) -> list[float]:
    assert all(line.startswith("y ") for line in text.splitlines())
    return [float(line.split()[1]) for line in text.splitlines()]


@needs_cpp
def test_the_program_in_cpp_prints_what_the_model_gives(tmp_path: Path) -> None:
    compile_c, cpp, _ = written(tmp_path)

    typed(compile_c + " -Wall -Wextra", tmp_path)

    assert printed(typed(cpp.replace("-O2", "-O2 -Wall -Wextra"), tmp_path)) == small.expected(3, x=0.5, k=0)


@needs_rust
def test_the_program_in_rust_prints_the_same(tmp_path: Path) -> None:
    compile_c, _, rust = written(tmp_path)

    typed(compile_c, tmp_path)

    assert printed(typed(rust, tmp_path)) == small.expected(3, x=0.5, k=0)


@needs_cpp
def test_torn_weights_end_the_program_with_a_message(tmp_path: Path) -> None:
    compile_c, cpp, _ = written(tmp_path)
    (tmp_path / "weights.bin").write_bytes(small.weights_file()[:-1])
    typed(compile_c, tmp_path)

    done = subprocess.run(cpp, shell=True, cwd=tmp_path, capture_output=True, text=True, check=False)

    assert done.returncode == 1
    assert "torn" in done.stderr


def test_ports_may_be_named_like_variables_and_keywords_of_the_programs() -> None:
    ports = [Port(name=name, dtype="bool", shape=(2,)) for name in ("state", "type", "X")]
    manifest = NativeManifest(
        name="tiny",
        inputs=tuple(ports),
        outputs=tuple(ports),
        state=(),
        isas=("plain",),
        weights_bytes=64,
        weights_sum="",
        torch="",
        flatout="",
    )

    files = example_files(manifest, state_bytes=0, work_bytes=64)

    arguments = "in0_state, in1_type, in2_x, out0_state, out1_type, out2_x"
    assert f"tiny_step(weights, state, work, {arguments});" in files["example.cpp"]
    assert "let mut out1_type = [0_u8; 2];" in files["example.rs"]
    assert "Carried here: nothing." in files["README.md"]
