"""Outputs of a teacher for every sample, on disk: written once, whole or not there, and read through the page cache.

A folder: `teacher.json` says what it is of, `outputs.bin` holds a row a sample, in the order of the samples' numbers; with the
likeliest classes alone there are `values.bin`, `places.bin` (int32) and `rest.bin` instead. `inputs.bin` holds a CRC-32 of each
sample's inputs, by which an answer to other data, or to an augmented sample, is refused. Numbers are little-endian.
"""

from __future__ import annotations

import os
import shutil
import zlib
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import BinaryIO, Final

import msgspec
import torch
from torch import Tensor, nn

from flatout.blocks.training.checkpoint_files import (
    FileSum,
    check_file,
    check_shape,
    sum_of,
    torch_dtype,
    torch_dtype_name,
)
from flatout.core.errors import CheckpointError, RecordError, UsageError
from flatout.core.files import path_inside, read_regular_file, sync_to_disk
from flatout.core.records.record import decode_json
from flatout.core.tensors.checksum import checksum
from flatout.shrink.distil.losses import top_k, top_k_loss
from flatout.shrink.distil.samples import Batch, Inputs, as_tuple, in_order, num_samples
from flatout.shrink.distil.teachers import DistilObjective, output_of
from flatout.shrink.module_mode import in_mode

_INDEX: Final = "teacher.json"
_VERSION: Final = 1
_CHECKS: Final = "inputs.bin"


class CacheFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of rows: the dtype as torch names it, and the shape of one row."""

    dtype: str
    shape: tuple[int, ...]


class CacheIndex(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`teacher.json`. `temperature` is that of `rest`, None where whole outputs are kept."""

    version: int
    teacher: str
    num_samples: int
    num_classes: int
    temperature: float | None
    parts: dict[str, CacheFile]
    files: dict[str, FileSum]


def teacher_fingerprint(model: nn.Module) -> str:
    """Fingerprint of a model: its class, and names, shapes and bits of its weights and buffers."""
    total = zlib.crc32(type(model).__qualname__.encode())
    for name, value in sorted(model.state_dict().items()):
        if isinstance(value, Tensor):
            text = f"{total},{name},{tuple(value.shape)},{torch_dtype_name(value.dtype)},{checksum(value.cpu())}"
            total = zlib.crc32(text.encode(), total)
    return f"{type(model).__qualname__}-{total:08x}"


def write_teacher_cache(
    folder: str | Path,
    teacher: nn.Module,
    inputs: Inputs,
    *,
    top: int | None = None,
    temperature: float = 2.0,
    dtype: torch.dtype | None = None,
    batch_size: int = 256,
) -> TeacherCache:
    """Ask the teacher about each sample once (evaluation mode, no gradients), and keep the answers.

    With `top` the so many largest logits of each place are kept and the others as one number, for `temperature`; the loss is then
    `top_k_loss`. `dtype` rounds what is kept, say to torch.float16. The folder appears when all of it is on the disk. Raises
    UsageError when there is one already, or it cannot be made.
    """
    target = Path(folder)
    if target.exists():
        raise UsageError(f"'{target}' is there already; open it with TeacherCache, or remove it")
    writing = target.with_name(f".{target.name}.{os.getpid()}.writing")
    try:
        writing.mkdir(parents=True)
        parts, classes = _write_rows(
            writing, teacher, inputs, top=top, temperature=temperature, dtype=dtype, size=batch_size
        )
        index = CacheIndex(
            version=_VERSION,
            teacher=teacher_fingerprint(teacher),
            num_samples=num_samples(inputs),
            num_classes=classes,
            temperature=temperature if top is not None else None,
            parts=parts,
            files={path.name: sum_of(path) for path in sorted(writing.iterdir())},
        )
        (writing / _INDEX).write_bytes(msgspec.json.format(msgspec.json.encode(index), indent=1))
        for path in (*writing.iterdir(), writing):
            sync_to_disk(path)
        writing.rename(target)
        sync_to_disk(target.parent)
    except OSError as e:
        raise UsageError(f"'{target}' cannot be written: {e.strerror or e}; give a folder with room in it") from e
    finally:
        shutil.rmtree(writing, ignore_errors=True)
    return TeacherCache(target, teacher=teacher)


def _write_rows(
    folder: Path,
    teacher: nn.Module,
    inputs: Inputs,
    *,
    top: int | None,
    temperature: float,
    dtype: torch.dtype | None,
    size: int,
) -> tuple[dict[str, CacheFile], int]:
    device = next((p.device for p in teacher.parameters()), torch.device("cpu"))
    parts, classes, files = dict[str, CacheFile](), 0, dict[str, BinaryIO]()
    with in_mode(teacher, is_training=False), torch.no_grad(), ExitStack() as stack:
        for batch in in_order(inputs, batch_size=size):
            logits = output_of(teacher(*(x.to(device) for x in as_tuple(batch.inputs))))
            classes = logits.shape[-1]
            answers = _answer_rows(logits, top, temperature, dtype)
            for name, rows in {_CHECKS: _checks(batch.inputs), **answers}.items():
                if name not in files:
                    files[name] = stack.enter_context((folder / name).open("wb"))
                    parts[name] = CacheFile(torch_dtype_name(rows.dtype), tuple(rows.shape[1:]))
                files[name].write(rows.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    del parts[_CHECKS]
    return parts, classes


def _answer_rows(logits: Tensor, top: int | None, temperature: float, dtype: torch.dtype | None) -> dict[str, Tensor]:
    kind = dtype or logits.dtype
    if top is None:
        return {"outputs.bin": logits.to(kind)}
    values, places, rest = top_k(logits, num=top, temperature=temperature)
    return {"values.bin": values.to(kind), "places.bin": places.to(torch.int32), "rest.bin": rest.to(torch.float32)}


class TeacherCache:
    """A teacher that only reads: for `distil`, or `loss` in a loop of your own; batches must carry the samples' `ids`.

    Files are checked against their CRC-32 when it is opened, which reads them once. With `teacher` it refuses a cache that
    another model, or other weights, have written. Each batch's inputs are compared with those that the teacher was asked about.
    Raises CheckpointError for a cache that is damaged, UsageError for one of another teacher or of other data.
    """

    def __init__(self, folder: str | Path, *, teacher: nn.Module | None = None) -> None:
        self._folder = Path(folder)
        self.index = _read_index(self._folder)
        if teacher is not None and (own := teacher_fingerprint(teacher)) != self.index.teacher:
            raise UsageError(
                f"'{folder}' was written by teacher {self.index.teacher}, and this is {own}; write another cache"
            )
        for name, wanted in self.index.files.items():
            check_file(self._folder, name, wanted)
        self._parts = {name: self._mapped(name, part) for name, part in self.index.parts.items()}
        self._known = self._mapped(_CHECKS, CacheFile("int32", ()))

    def __len__(self) -> int:
        return self.index.num_samples

    def loss(self, outputs: Tensor, batch: Batch, objective: DistilObjective) -> Tensor:
        """Loss of a student's outputs for a batch against the cached ones."""
        found = self.rows(batch, outputs.device)
        if "outputs.bin" in found:
            return objective.of_outputs(outputs, found["outputs.bin"], batch.targets)
        if objective.soft is not None or objective.temperature != self.index.temperature:
            raise UsageError(
                f"'{self._folder}' holds the likeliest classes for temperature {self.index.temperature}; the objective has "
                f"{objective.temperature:g}{' and a loss of its own' if objective.soft is not None else ''}; write another cache"
            )
        values, places, rest = (found[f"{name}.bin"] for name in ("values", "places", "rest"))
        counted = objective.counted(outputs, batch.targets)
        return top_k_loss(outputs, values, places, rest, temperature=objective.temperature, counted=counted)

    def rows(self, batch: Batch, device: torch.device) -> dict[str, Tensor]:
        """What was kept of these samples, by name of file, after a look at their inputs."""
        if batch.ids is None:
            raise UsageError(
                "the batch has no ids; give batches (inputs, targets, ids), the samples' numbers in the cache"
            )
        ids = batch.ids.cpu()
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < len(self):
            raise UsageError(f"ids go from {int(ids.min())} to {int(ids.max())}, and the cache has {len(self)} samples")
        for number, was, now in zip(
            ids.tolist(), self._known[ids].tolist(), _checks(batch.inputs).tolist(), strict=True
        ):
            if was != now:
                raise UsageError(
                    f"sample {number} is not the one that the teacher was asked about; a cache is for the same data in the same "
                    "order of ids, without augmentation"
                )
        return {name: rows[ids].to(device) for name, rows in self._parts.items()}

    def _mapped(self, name: str, part: CacheFile) -> Tensor:
        """Rows in the file's own memory; a page is read when it is asked for."""
        dtype, num = torch_dtype(part.dtype), self.index.num_samples * prod(part.shape)
        check_shape((self.index.num_samples, *part.shape))
        try:
            path = path_inside(self._folder, name)
            num_bytes = path.stat().st_size
        except OSError as e:
            raise CheckpointError(f"'{self._folder / name}' cannot be read: {e.strerror or e}; write it again") from e
        if num * dtype.itemsize != num_bytes:
            raise CheckpointError(
                f"'{path}' has {num_bytes} bytes, and {_INDEX} describes {num * dtype.itemsize}; write it again"
            )
        if not num:
            return torch.empty(self.index.num_samples, *part.shape, dtype=dtype)
        flat = torch.from_file(str(path), shared=False, size=num, dtype=dtype)
        return flat.view(len(self), *part.shape)


def _read_index(folder: Path) -> CacheIndex:
    try:
        index = decode_json(read_regular_file(folder / _INDEX), CacheIndex)
    except OSError as e:
        raise CheckpointError(f"'{folder}' has no {_INDEX}: {e.strerror or e}; write_teacher_cache makes one") from e
    except RecordError as e:
        raise CheckpointError(f"'{folder / _INDEX}' is damaged: {e}; remove the folder and write it again") from e
    if index.version != _VERSION:
        raise CheckpointError(
            f"'{folder}' is of version {index.version}, and this flatout reads {_VERSION}; write it again"
        )
    return index


def _checks(inputs: Inputs) -> Tensor:
    """A CRC-32 of each sample, of all its inputs, as a signed number of 32 bits."""
    flat = [x.detach().cpu().contiguous().reshape(len(x), -1).view(torch.uint8).numpy() for x in as_tuple(inputs)]
    sums = [zlib.crc32(b"".join(row.data for row in rows)) for rows in zip(*flat, strict=True)]
    return torch.tensor(sums, dtype=torch.int64).to(torch.int32)
