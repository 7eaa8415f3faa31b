"""An engine: a small model as native code, its weights, and the state of one stream."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.blocks.inference.native.examples import example_files
from flatout.blocks.inference.native.folder import Parts, SavedProgram, read_folder, sha256_of, write_folder
from flatout.blocks.inference.native.library import (
    CompiledLibrary,
    Extension,
    FunctionTable,
    Generated,
    ModelCaller,
    ModelStreams,
    PackedWeights,
    compile_library,
    find_extension,
    open_library,
)
from flatout.core.errors import CheckpointError, NativeError, UsageError
from flatout.core.records.native import NativeManifest, NativeReport
from flatout.core.runtime.cache_folder import create_code_folder, default_cache_folder

if TYPE_CHECKING:
    from torch import Tensor


class Engine:
    """Steps a model by one event at a time; inputs and outputs are NumPy arrays, tensors on the CPU, or buffers of bytes.

    `step`, `step_many`, `reset`, `snapshot` and `restore` are functions of the extension themselves: no Python lies between.
    They raise CallError (a UsageError and ValueError) for buffers that do not fit, BusyError (a UsageError and RuntimeError)
    while another thread is in `step_many` of this engine. Buffers are told by their bytes: [1, 32] does for [32].
    """

    step: Callable[..., Any]
    """`step(*inputs, out=None)`: one event. Outputs are written into `out` (a tuple where there are several) or into buffers that
    follow the inputs by position, and returned; without either they are new NumPy arrays, which costs 0.2 us each."""
    step_many: Callable[..., Any]
    """`step_many(*inputs, out=None)`: inputs are [T, ...]; one event after the other. Python's lock is let go of."""
    reset: Callable[[], None]
    """The state as it was at first."""
    snapshot: Callable[[], bytes]
    """The state as bytes: the ports of `manifest.state`, each beginning at a multiple of 8 bytes."""
    restore: Callable[[bytes], None]
    """The state of a snapshot, bit for bit."""

    def __init__(
        self,
        parts: Parts,
        *,
        library: FunctionTable,
        extension: Extension,
        weights: PackedWeights,
        caller: ModelCaller | None = None,
    ) -> None:
        """From what `compiled` and `load` found; not called by users."""
        self._parts, self._library, self._extension, self._weights = parts, library, extension, weights
        try:
            self._caller = caller or extension.caller(
                library.address, weights, parts.manifest.inputs, parts.manifest.outputs
            )
        except ValueError as e:
            raise CheckpointError(
                f"library, weights and description of '{parts.manifest.name}' disagree: {e}; build it anew"
            ) from e
        self.step, self.step_many = self._caller.step, self._caller.step_many
        self.reset, self.snapshot, self.restore = self._caller.reset, self._caller.snapshot, self._caller.restore

    @classmethod
    def compiled(
        cls,
        generated: Generated,
        *,
        program: SavedProgram | None,
        versions: tuple[str, str],
        precision: Mapping[str, str] | None = None,
        isas: Sequence[str] | None = None,
        compiler: str | None = None,
        cache: Path | None = None,
    ) -> tuple[Engine, CompiledLibrary]:
        """Compile a generated model and load it. `versions` are those of torch and flatout, for the manifest.

        `cache` holds the extension and, while it is compiled, the model; None: the user's cache folder. Raises NativeError
        when there is no compiler or it refuses.
        """
        where = cache or default_cache_folder()
        create_code_folder(where)
        with tempfile.TemporaryDirectory(dir=where, prefix=f"{generated.name}-") as name:
            folder = Path(name)
            (folder / "model.c").write_text(generated.source)
            (folder / "model.h").write_text(generated.header)
            file = folder / f"lib{generated.name}.so"
            compiled = compile_library(folder / "model.c", file, compiler=compiler, isas=isas)
            library, data = open_library(file), file.read_bytes()
        manifest = _manifest(generated, compiled, versions=versions, precision=precision or {})
        parts = Parts(manifest, generated.source, generated.header, data, program)
        extension = find_extension(cache=where, compiler=compiler)
        return cls(parts, library=library, extension=extension, weights=extension.weights(generated.weights)), compiled

    @classmethod
    def load(cls, folder: str | Path, *, cache: Path | None = None, compiler: str | None = None) -> Engine:
        """An engine that was saved. Needs no torch, and a compiler only under another Python or flatout than saved it.

        Raises CheckpointError when a file is missing, torn or damaged, NativeError when it was built for another architecture.
        """
        parts, packed, library = read_folder(Path(folder))
        extension = find_extension(cache=cache or default_cache_folder(), compiler=compiler, saved=Path(folder))
        return cls(parts, library=library, extension=extension, weights=extension.weights(packed))

    def save(self, folder: str | Path) -> None:
        """Write the engine with its present weights, whole or not at all; an engine that is there is replaced in one step.

        Raises UsageError when `folder` holds anything else, CheckpointError when it cannot be written.
        """
        texts = example_files(self.manifest, state_bytes=self._library.state_bytes, work_bytes=self._library.work_bytes)
        others = {name: text.encode() for name, text in texts.items()}
        libraries = {self._extension.name: self._extension.data}
        write_folder(Path(folder), self._parts, packed=self._weights.packed(), libraries=libraries, others=others)

    def streams(self, n: int) -> ModelStreams:
        """`n` streams of their own, as at first, with this engine's weights: `step` takes [n, ...], `step_many` [T, n, ...]."""
        return self._caller.streams(n)

    def copy(self) -> Engine:
        """Another stream with this state, for another thread. PackedWeights are shared: `load_weights` of either is for both."""
        shared = {"library": self._library, "extension": self._extension, "weights": self._weights}
        return Engine(self._parts, caller=self._caller.copy(), **shared)  # type: ignore[arg-type]

    def load_weights(self, state_dict: Mapping[str, Tensor]) -> None:
        """Other weights for the same model, for this engine, its copies and its streams, from the next call of each on.

        A call that is under way in another thread ends with the weights that it began with. States stay as they are. Raises
        UsageError when names, shapes or types are not the model's; needs torch.
        """
        if self._parts.program is None:
            raise UsageError(
                "this engine was saved without program.pt2, which tells how weights are packed; build it anew"
            )
        packed = self._parts.program.packed(state_dict, precision=self.manifest.precision)
        try:
            self._weights.set(packed)
        except ValueError as e:
            raise NativeError(
                f"the program packs other weights than the library reads: {e}; build the engine anew"
            ) from e

    def attach(self, report: NativeReport) -> None:
        """What was measured of this engine; saved with it."""
        self._parts = self._parts._replace(report=report)

    @property
    def manifest(self) -> NativeManifest:
        """What goes in and out, what is carried, what the library holds."""
        return self._parts.manifest

    @property
    def report(self) -> NativeReport | None:
        """What was measured where the engine was built, if anything was."""
        return self._parts.report

    @property
    def isa(self) -> str:
        """The instruction set that was chosen for this CPU: "avx512vnni", "avx512", "avx2", "neon" or "plain"."""
        isa: bytes = self._library.isa
        return isa.decode()

    @property
    def source(self) -> str:
        """The C code of the engine, model.c."""
        return self._parts.source


def _manifest(
    generated: Generated, compiled: CompiledLibrary, *, versions: tuple[str, str], precision: Mapping[str, str]
) -> NativeManifest:
    return NativeManifest(
        name=generated.name,
        inputs=generated.inputs,
        outputs=generated.outputs,
        state=generated.state,
        isas=compiled.isas,
        weights_bytes=len(generated.weights),
        weights_sum=sha256_of(generated.weights),
        torch=str(versions[0]),  # torch.__version__ is of a class of its own
        flatout=str(versions[1]),
        precision=dict(precision),
    )
