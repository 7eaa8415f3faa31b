"""What lies beside an engine for people who write C++ or Rust: a program in each that makes three steps, how to build it."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Final

from flatout.core.records.native import NativeManifest, Port

_C: Final = {"float32": "float", "int32": "int32_t", "int64": "int64_t", "bool": "uint8_t"}
_RUST: Final = {"float32": "f32", "int32": "i32", "int64": "i64", "bool": "u8"}
_FILL: Final = {"float32": "0.5", "int32": "0", "int64": "0", "bool": "0"}
"""What the examples put into each number of an input: an index of 0 is valid in every embedding."""


def example_files(manifest: NativeManifest, *, state_bytes: int, work_bytes: int) -> dict[str, str]:
    """Texts by name of file. The numbers of bytes are those of model.h, which Rust cannot read."""
    return {
        "example.cpp": example_cpp(manifest),
        "example.rs": example_rs(manifest, state_bytes=state_bytes, work_bytes=work_bytes),
        "README.md": readme(manifest),
    }


def example_cpp(manifest: NativeManifest) -> str:
    """C++17: reads weights.bin, makes three steps with inputs of 0.5 (0 where they are integers), prints every output."""
    inputs, outputs = _named(manifest)
    texts = {
        "NAME": manifest.name,
        "BIG": manifest.name.upper(),
        "BUFFERS": _lines(2, (f"static {_C[p.dtype]} {name}[{_count(p)}];" for name, p in inputs + outputs)),
        "FILLS": _lines(2, (f"for (auto &value : {name}) value = {_FILL[p.dtype]};" for name, p in inputs)),
        "ARGUMENTS": ", ".join(name for name, _ in inputs + outputs),
        "PRINTS": _lines(
            4, (f'for (auto value : {name}) std::printf("{p.name} %.9g\\n", double(value));' for name, p in outputs)
        ),
    }
    return _filled(_CPP, texts)


def example_rs(manifest: NativeManifest, *, state_bytes: int, work_bytes: int) -> str:
    """Rust 2021, no crate: the same as the program in C++."""
    inputs, outputs = _named(manifest)
    pointers = [f"{name}: *const {_RUST[p.dtype]}" for name, p in inputs]
    pointers += [f"{name}: *mut {_RUST[p.dtype]}" for name, p in outputs]
    buffers = [f"let {name} = [{_FILL[p.dtype]}_{_RUST[p.dtype]}; {_count(p)}];" for name, p in inputs]
    buffers += [f"let mut {name} = [0_{_RUST[p.dtype]}; {_count(p)}];" for name, p in outputs]
    texts = {
        "NAME": manifest.name,
        "STATE": str(state_bytes),
        "WORK": str(work_bytes),
        "POINTERS": ", ".join(pointers),
        "BUFFERS": _lines(4, buffers),
        "ARGUMENTS": ", ".join(
            [f"{name}.as_ptr()" for name, _ in inputs] + [f"{name}.as_mut_ptr()" for name, _ in outputs]
        ),
        "PRINTS": _lines(
            8, (f'for value in {name}.iter() {{ println!("{p.name} {{}}", value); }}' for name, p in outputs)
        ),
    }
    return _filled(_RS, texts)


def readme(manifest: NativeManifest) -> str:
    """What the files are, how both programs are built, and what a caller must keep to."""
    signature = [f"const {_C[port.dtype]} {port.name}[{_count(port)}]" for port in manifest.inputs]
    signature += [f"{_C[port.dtype]} {port.name}[{_count(port)}]" for port in manifest.outputs]
    texts = {
        "NAME": manifest.name,
        "BIG": manifest.name.upper(),
        "SIGNATURE": ", ".join(signature),
        "STATE": ", ".join(f"{port.name} {list(port.shape)}" for port in manifest.state) or "nothing",
    }
    return _filled(_README, texts)


def _named(manifest: NativeManifest) -> tuple[list[tuple[str, Port]], list[tuple[str, Port]]]:
    """Inputs and outputs, each with its variable's name, which is no keyword and no other variable of the programs; lower case,
    as rustc wants it."""
    inputs = [(f"in{number}_{port.name}".lower(), port) for number, port in enumerate(manifest.inputs)]
    return inputs, [(f"out{number}_{port.name}".lower(), port) for number, port in enumerate(manifest.outputs)]


def _count(port: Port) -> int:
    return prod(port.shape)


def _lines(indent: int, lines: Iterable[str]) -> str:
    return "\n".join(" " * indent + line for line in lines)


def _filled(template: str, texts: dict[str, str]) -> str:
    """The template with `@KEY@` replaced: the braces of C and Rust stay as they are."""
    for key, text in texts.items():
        template = template.replace(f"@{key}@", text)
    return template


_CPP: Final = """\
// Three steps of the model, state carried from one to the next. README.md says how to build it.
#include <cstdint>
#include <cstdio>
#include "model.h"

alignas(64) static unsigned char state[@BIG@_STATE_BYTES + 64], work[@BIG@_WORK_BYTES + 64];

int main(int argc, char **argv) {
  std::FILE *file = std::fopen(argc > 1 ? argv[1] : "weights.bin", "rb");
  alignas(64) static unsigned char memory[@BIG@_WEIGHTS_BYTES + 64];  // the file's head has 64 bytes
  const uint64_t bytes = file ? std::fread(memory, 1, sizeof memory, file) : 0;
  const void *weights = bytes ? @NAME@_weights(memory, bytes) : nullptr;
  if (!weights) return std::fprintf(stderr, "weights.bin is not there, torn, or of another model\\n"), 1;
@BUFFERS@
@FILLS@
  @NAME@_reset(state);
  for (int event = 0; event < 3; event++) {
    @NAME@_step(weights, state, work, @ARGUMENTS@);
@PRINTS@
  }
}
"""

_RS: Final = """\
// Three steps of the model, state carried from one to the next. README.md says how to build it.
use std::ffi::c_void;

#[rustfmt::skip]
extern "C" {
    fn @NAME@_weights(file: *const c_void, bytes: u64) -> *const c_void;
    fn @NAME@_reset(state: *mut c_void);
    fn @NAME@_step(weights: *const c_void, state: *mut c_void, work: *mut c_void, @POINTERS@);
}

const STATE_BYTES: usize = @STATE@; // as model.h has them
const WORK_BYTES: usize = @WORK@;

#[repr(C, align(64))]
#[derive(Clone, Copy)]
struct Line([u8; 64]);

/// Memory that begins at a multiple of 64.
fn lines(bytes: usize) -> Vec<Line> {
    vec![Line([0; 64]); bytes / 64 + 1]
}

fn main() {
    let path = std::env::args().nth(1).unwrap_or("weights.bin".to_string());
    let file = std::fs::read(path).expect("weights.bin");
    let mut memory = lines(file.len());
    for (line, chunk) in memory.iter_mut().zip(file.chunks(64)) {
        line.0[..chunk.len()].copy_from_slice(chunk);
    }
    let (mut state, mut work) = (lines(STATE_BYTES), lines(WORK_BYTES));
    let (state, work) = (state.as_mut_ptr() as *mut c_void, work.as_mut_ptr() as *mut c_void);
    let weights = unsafe { @NAME@_weights(memory.as_ptr() as *const c_void, file.len() as u64) };
    assert!(!weights.is_null(), "weights.bin is torn or of another model");
@BUFFERS@
    unsafe { @NAME@_reset(state) };
    for _ in 0..3 {
        unsafe { @NAME@_step(weights, state, work, @ARGUMENTS@) };
@PRINTS@
    }
}
"""

_README: Final = """\
# @NAME@: a model as one C file

```
cc -std=gnu11 -O3 -march=native -fno-math-errno -fno-trapping-math -ffp-contract=off -c model.c -o model.o
c++ -std=c++17 -O2 example.cpp model.o -o example && ./example
rustc --edition 2021 -O example.rs -C link-arg=model.o -o example_rs && ./example_rs
```

The first line, then the one of your language, in a copy of this folder: an engine is not saved over files that are not its own.
Both programs read `weights.bin` in the current folder, make three steps and print the outputs. `-march=native` is for the
machine that compiles; leave it out for code that runs anywhere.
Do not add `-ffast-math`: the order of summation is part of what was checked.

| file | what it is |
|---|---|
| model.c, model.h | the model; needs nothing else |
| weights.bin | its weights, packed as model.c reads them, with their SHA-256 |
| lib@NAME@.so | the same code for several kinds of processor; what Python loads |
| flatout_caller-*.so | what calls it, for the Python that saved it; any other compiles its own |
| engine.json | inputs, outputs, carried state |
| report.json | what was measured where it was built |
| program.pt2 | the exported model, to build from again |

One event is one call:

```c
@NAME@_step(weights, state, work, @SIGNATURE@);
```

- `weights` is what `@NAME@_weights` returns for `weights.bin` in memory, which must begin at a multiple of 64 bytes. Any
  number of threads may share it.
- `state` has @BIG@_STATE_BYTES, `work` @BIG@_WORK_BYTES, both at a multiple of 64. A thread needs a work of its own, a stream
  of events a state of its own, which `@NAME@_reset` makes as new. Carried here: @STATE@.
- Inputs and outputs may begin anywhere. No call allocates memory, takes a lock or enters the system.
- An index that is outside its table is an error of the caller's: check it before.
"""
