"""Changes of files as damage or malice would make them: bits, lengths, fields, nesting, names of other files."""

from __future__ import annotations

import json
import random
import re
import struct
from collections.abc import Callable
from typing import Any, Final

_SCALAR: Final = re.compile(rb'"(?:[^"\\]|\\.){0,200}"|-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?|true|false|null')
_NUMBER: Final = re.compile(rb"(?<=[:\[,= ])-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?(?=[\s,\]}])")
HUGE: Final = (10_000_000_000_000, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**64 - 1, 10**30, -1, 0, -(2**63))
FAR_NAMES: Final = (
    "../outside/secret",
    "../../outside/secret",
    "/dev/zero",
    "/etc/passwd",
    "a\0b",
    "..",
    ".",
    "",
    "x" * 5000,
)


def odd_values(outside: str) -> tuple[Any, ...]:
    """Values that no writer writes, paths into the folder `outside` among them."""
    deep: Any = 0
    for _ in range(400):
        deep = [deep]
    return (
        *HUGE, *FAR_NAMES, f"{outside}/secret", 1e308, -1e308, 5e-324, 0.5, None, True, [], {}, [[]], {"": {}}, [1e308] * 3,
        "\ud7ff", "os.system", "__import__", "nan", "load", "nn", "float64", "int8", deep, [10**13],
        [2**40, 2**40], [-1], "a" * 100_000,
    )  # fmt: skip


def mutated(data: bytes, rng: random.Random, outside: str) -> bytes:
    """The bytes, changed in one way or a few."""
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        data = rng.choice(_ALL)(data, rng, outside) if data else bytes([rng.randrange(256)])
    return data


def _flip(data: bytes, rng: random.Random, outside: str) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _cut(data: bytes, rng: random.Random, outside: str) -> bytes:
    return data[: rng.randrange(len(data))]


def _without(data: bytes, rng: random.Random, outside: str) -> bytes:
    a, b = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    return data[:a] + data[b:]


def _doubled(data: bytes, rng: random.Random, outside: str) -> bytes:
    a, b = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    return data[:b] + data[a:]


def _swapped(data: bytes, rng: random.Random, outside: str) -> bytes:
    a, b, c = sorted(rng.randrange(len(data) + 1) for _ in range(3))
    return data[:a] + data[b:c] + data[a:b] + data[c:]


def _length(data: bytes, rng: random.Random, outside: str) -> bytes:
    """A huge number where a length may stand, mostly near the begin."""
    value = rng.choice(HUGE) % 2**64
    packed = rng.choice((struct.pack("<Q", value), struct.pack(">Q", value), struct.pack("<I", value % 2**32)))
    at = rng.randrange(min(len(data), rng.choice((16, 128, len(data)))))
    return data[:at] + packed + data[at + rng.choice((0, len(packed))) :]


def _token(data: bytes, rng: random.Random, outside: str) -> bytes:
    """Another value in the place of a number or a text."""
    found = list(_SCALAR.finditer(data))
    if not found:
        return _flip(data, rng, outside)
    one = rng.choice(found)
    value = rng.choice(
        (*(json.dumps(v).encode() for v in odd_values(outside)), b"1e999", b"9" * 5000, b"\xff", b"[" * 50_000)
    )
    return data[: one.start()] + value + data[one.end() :]


def _number(data: bytes, rng: random.Random, outside: str) -> bytes:
    """Another number of the same kind in the place of one: what still fits its field."""
    found = list(_NUMBER.finditer(data))
    if not found:
        return _flip(data, rng, outside)
    one = rng.choice(found)
    whole = rng.choice((*HUGE, 1, 2, 3, 7, 1000, rng.randrange(10**6)))
    value = (
        f"{whole}"
        if b"." not in one[0]
        else rng.choice(("1e308", "-1e308", "5e-324", "-1.5", "0.0", "1e18", f"{rng.random()}"))
    )
    return data[: one.start()] + value.encode() + data[one.end() :]


def _two_tokens(data: bytes, rng: random.Random, outside: str) -> bytes:
    found = list(_SCALAR.finditer(data))
    if len(found) < 2:
        return _flip(data, rng, outside)
    a, b = sorted(rng.sample(found, 2), key=lambda m: m.start())
    return data[: a.start()] + b[0] + data[a.end() : b.start()] + a[0] + data[b.end() :]


def _field(data: bytes, rng: random.Random, outside: str) -> bytes:
    """JSON with a node replaced, removed, moved or nested; other bytes with the JSON that stands in them changed so."""
    start, end = data.find(b"{"), data.rfind(b"}") + 1
    try:
        tree = json.loads(data[start:end])
    except (ValueError, RecursionError):
        return _token(data, rng, outside)
    places: list[tuple[Any, Any]] = []
    walk: list[Any] = [tree]
    while walk:
        node = walk.pop()
        for key in node if isinstance(node, dict) else range(len(node)):
            places.append((node, key))
            if isinstance(node[key], (dict, list)):
                walk.append(node[key])
    if not places:
        return _token(data, rng, outside)
    node, key = rng.choice(places)
    other, at = rng.choice(places)
    match rng.randrange(5):
        case 0:
            del node[key]
        case 1:
            node[key] = json.loads(json.dumps(other[at]))
        case 2 if isinstance(node, dict):
            node[rng.choice(odd_values(outside)[11:20])] = node.pop(key)
        case 3 if isinstance(node, list):
            node.extend(node * rng.choice((1, 10, 100)))
        case _:
            node[key] = rng.choice(odd_values(outside))
    try:
        text = json.dumps(tree).encode()
    except ValueError:  # a node within itself
        return _token(data, rng, outside)
    if start >= 8 and struct.unpack_from("<Q", data, start - 8)[0] == end - start:  # the header of safetensors
        return data[: start - 8] + struct.pack("<Q", len(text)) + text + data[end:]
    return data[:start] + text + data[end:]


_ALL: Final[tuple[Callable[[bytes, random.Random, str], bytes], ...]] = (
    _flip, _cut, _without, _doubled, _swapped, _length,
    _token, _token, _number, _number, _number, _two_tokens, _field, _field, _field,
)  # fmt: skip
