"""Two nodes in network namespaces of their own: the link between them is cut, and joined again."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from time import monotonic, sleep

import pytest
from tests.blocks.elastic.two_nodes import TRAIN, tree

NODES = (("flatout-a", "flatout-va", "10.77.0.1"), ("flatout-b", "flatout-vb", "10.77.0.2"))


def _has_namespaces() -> bool:
    if os.geteuid() or shutil.which("ip") is None:
        return False
    made = subprocess.run(["ip", "netns", "add", "flatout-try"], capture_output=True, check=False)
    subprocess.run(["ip", "netns", "del", "flatout-try"], capture_output=True, check=False)
    return made.returncode == 0


pytestmark = [
    pytest.mark.slow,
    pytest.mark.multi,
    pytest.mark.long,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not _has_namespaces(), reason="network namespaces need root and iproute2"),
]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def network() -> Iterator[None]:
    for name, _, _ in NODES:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    try:
        for name, _, _ in NODES:
            ip("netns", "add", name)
        ip("link", "add", NODES[0][1], "type", "veth", "peer", "name", NODES[1][1])
        for name, device, address in NODES:
            ip("link", "set", device, "netns", name)
            ip("-n", name, "addr", "add", f"{address}/24", "dev", device)
            ip("-n", name, "link", "set", device, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield
    finally:
        for name, _, _ in NODES:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _started(folder: Path, node: int) -> subprocess.Popen[bytes]:
    name, device, address = NODES[node]
    given = {"disk_every": 10_000, "pace_s": 0.02, "memory": f"{folder}/memory-{{node}}"}
    (folder / f"memory-{node}").mkdir()
    words = [sys.executable, "-m", "flatout.blocks.elastic.torchrun", "--nnodes", "2", "--nproc-per-node", "2"]
    words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{NODES[0][2]}:29400", "--rdzv-id", folder.name]
    words += ["--rdzv-conf", f"is_host={1 - node},read_timeout=5", "--local-addr", address, "--monitor-interval", "0.1"]
    words += [
        "--max-restarts",
        "100",
        "--agent-restarts",
        "100",
        str(TRAIN),
        str(folder),
        "100000",
        "[]",
        json.dumps(given),
    ]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "FLATOUT_NODE": f"{node}",
        "GLOO_SOCKET_IFNAME": device,
        "NODE": f"{node}",
    }
    with (folder / f"output-{node}").open("wb") as output:
        return subprocess.Popen(["ip", "netns", "exec", name, *words], env=environment, stdout=output, stderr=output)


def _wait_for_step(folder: Path, step: int) -> None:
    deadline = monotonic() + 120
    while True:
        logs = [folder / f"log-{rank}" for rank in range(4)]
        done = [
            int(log.read_text().splitlines()[-1].split()[1]) if log.exists() and log.stat().st_size else 0
            for log in logs
        ]
        if min(done) >= step:
            return
        assert monotonic() < deadline, "\n".join((folder / f"output-{node}").read_text()[-3000:] for node in range(2))
        sleep(0.1)


@pytest.mark.parametrize(("cut_s", "has_lost"), [(3, False), (20, True)])
def test_a_job_goes_on_when_the_network_is_there_again(
    network: None, tmp_path: Path, cut_s: float, has_lost: bool
) -> None:
    processes = [_started(tmp_path, node) for node in range(2)]
    try:
        _wait_for_step(tmp_path, 20)
        ip("-n", NODES[0][0], "link", "set", NODES[0][1], "down")
        sleep(cut_s)
        before = max(int((tmp_path / f"log-{rank}").read_text().splitlines()[-1].split()[1]) for rank in range(4))
        ip("-n", NODES[0][0], "link", "set", NODES[0][1], "up")
        _wait_for_step(tmp_path, before + 20)
    finally:
        for process in processes:
            for pid in (process.pid, *tree(process.pid)):
                subprocess.run(["kill", "-9", f"{pid}"], capture_output=True, check=False)
            process.wait()
    losses = {}
    for rank in range(4):
        for line in (tmp_path / f"log-{rank}").read_text().splitlines():
            _, step, _, loss = line.split()
            assert losses.setdefault((rank, step), loss) == loss, "a step done twice comes out the same"
    said = (tmp_path / "output-1").read_text()
    assert ("the agent has lost its rendezvous; another one starts" in said) is has_lost
