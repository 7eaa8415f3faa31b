"""What comes over a link is a message, or closes it: nothing else happens, whatever the other end sends."""

from __future__ import annotations

import random
import socket

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.blocks.elastic.messages import (
    FinishRanks,
    ForkBegun,
    ForkEnded,
    ForkScript,
    KillRanks,
    NodeIdle,
    NodeLink,
    NodeReady,
    OpenStore,
    ProcessEnded,
    RankPlacement,
    StartRanks,
    StoreOpened,
)

MESSAGES = (
    OpenStore(restart=1),
    StartRanks(job="j", restart=1, placements=(RankPlacement(0, 0, 0),), port=29400, restart_s=1.0),
    KillRanks(restart=3),
    FinishRanks(grace_s=2.0),
    ForkScript(number=1, target="train.py", arguments=("--a", "b"), is_module=False, environment={"A": "b"}),
    NodeReady(num_wanted=2, num_device_slots=3),
    StoreOpened(restart=1, port=1),
    ProcessEnded(restart=1, rank=0, code=-9),
    NodeIdle(restart=1),
    ForkBegun(number=1, pid=2),
    ForkEnded(number=1, code=0),
)


def received(*sent: bytes) -> tuple[list[object], bool]:
    """What a link makes of that, until it is closed or the other end is; and whether it was closed before that."""
    ours, theirs = socket.socketpair()
    link = NodeLink(ours)
    found: list[object] = []
    with theirs:
        for data in sent:
            theirs.sendall(data)
            found += link.received()
            if not link.is_open:
                break
        was_closed = not link.is_open
    link.close()
    return found, was_closed


@given(st.lists(st.sampled_from(MESSAGES), min_size=1), st.integers(1, 50))
def test_messages_arrive_as_they_were_sent_however_they_are_cut(messages: list[msgspec.Struct], size: int) -> None:
    data = b"".join(msgspec.json.encode(one) + b"\n" for one in messages)
    found, was_closed = received(*(data[i : i + size] for i in range(0, len(data), size)))
    assert (found, was_closed) == (messages, False)


def test_ten_thousand_wrong_messages_change_nothing_and_crash_nothing() -> None:
    chance = random.Random(0)
    known = set(map(type, MESSAGES))
    closed = 0
    for _ in range(10_000):
        data = bytearray(msgspec.json.encode(chance.choice(MESSAGES)) + b"\n")
        for _ in range(chance.randint(1, 6)):
            match chance.randrange(4):
                case 0:
                    data[chance.randrange(len(data))] = chance.randrange(256)
                case 1:
                    del data[chance.randrange(len(data)) :]
                case 2:
                    data[chance.randrange(len(data) + 1) : 0] = chance.randbytes(chance.randint(1, 20))
                case _:
                    data += bytes(data[chance.randrange(len(data) + 1) :])
            data = data or bytearray(b"x")
        found, was_closed = received(bytes(data), b"\n")
        assert set(map(type, found)) <= known  # what was not changed, or is still a message
        closed += was_closed
    assert closed > 5_000, "most were none, and ended the connection"


@pytest.mark.parametrize("data", [b"\x80\x04cos\nsystem\n(S'true'\ntR.", b"[" * 100_000 + b"\n", b"x" * (9 << 20)])
def test_pickles_depth_and_lines_without_an_end_close_the_link(data: bytes) -> None:
    ours, theirs = socket.socketpair()
    link = NodeLink(ours)
    theirs.setblocking(False)
    rest = memoryview(data)
    with theirs:
        while link.is_open and rest:
            rest = rest[theirs.send(rest[: 1 << 16]) :]
            assert link.received() == []
    assert not link.is_open
