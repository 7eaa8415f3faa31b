from __future__ import annotations

import re
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from time import sleep
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from tests.command_line import flatout
from tests.fleet_jobs import NOW_S, WEEK_S, finding, fleet, job

from flatout.app.fleet.server import FleetApplication
from flatout.blocks.recording.job_store.opening import open_store
from flatout.check.fleet.summary import summary_of
from flatout.core.errors import RecordError
from flatout.core.records.fleet import FleetSummary
from flatout.core.records.record import from_json

TOKEN = "a-token-of-many-letters"
RECORDS = [
    *fleet(40),
    job(10**6, name="worst.py", findings=(finding((3.0, 4.0)),), saved_fraction=0.75, seconds=72_000.0),
]


def summarise(days: float) -> FleetSummary:
    return summary_of(RECORDS, since_s=NOW_S - days * 86400.0, until_s=NOW_S)


class Client:
    """Calls an application as a server would."""

    def __init__(self, application: FleetApplication) -> None:
        self.application = application

    def get(
        self, path: str = "/", *, method: str = "GET", query: str = "", **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        found: dict[str, Any] = {}

        def start_response(status: str, headers: list[tuple[str, str]]) -> None:
            found.update(status=int(status.split(maxsplit=1)[0]), headers=dict(headers))

        environ = {"REQUEST_METHOD": method, "PATH_INFO": path, "QUERY_STRING": query}
        environ |= {f"HTTP_{name.upper()}": value for name, value in headers.items()}
        body = b"".join(self.application(environ, start_response))  # type: ignore[arg-type]
        return found["status"], found["headers"], body


@pytest.fixture
def client() -> Client:
    return Client(FleetApplication(summarise, token=TOKEN, days=7.0))


BEARER = f"Bearer {TOKEN}"


@pytest.mark.parametrize("path", ["/", "/metrics", "/fleet.json", "/digest.md", "/etc/passwd", "/../secret", ""])
@pytest.mark.parametrize("header", ["", "Bearer wrong", "Bearer ", f"Basic {TOKEN}", "Bearer \xff\xfe"])
def test_nothing_is_served_without_the_token(client: Client, path: str, header: str) -> None:
    status, headers, body = client.get(path, authorization=header)

    assert status == 401
    assert headers["WWW-Authenticate"] == "Bearer"
    assert b"train" not in body
    assert TOKEN.encode() not in body


@settings(max_examples=300, deadline=None)
@given(
    path=st.text(max_size=30),
    query=st.text(max_size=60),
    authorization=st.text(max_size=40),
    cookie=st.text(max_size=60),
    method=st.sampled_from(["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "TRACE", "X"]),
)
def test_no_request_without_the_token_gets_more_than_a_refusal(
    path: str, query: str, authorization: str, cookie: str, method: str
) -> None:
    client = Client(FleetApplication(summarise, token=TOKEN, days=7.0))

    status, _, body = client.get(path, method=method, query=query, authorization=authorization, cookie=cookie)

    assert status in (401, 405) or path == "/healthz"
    assert len(body) < 200


def test_every_page_is_served_with_the_token(client: Client) -> None:
    status, headers, page = client.get("/", authorization=BEARER)
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert b"worst.py" in page
    assert "default-src 'none'" in headers["Content-Security-Policy"]

    _, _, text = client.get("/fleet.json", authorization=BEARER)
    assert from_json(text, FleetSummary) == summarise(7.0)
    assert b"worst.py" in client.get("/digest.md", authorization=BEARER)[2]
    assert client.get("/healthz")[0] == 200
    assert client.get("/other", authorization=BEARER)[0] == 404
    assert client.get("/", method="HEAD", authorization=BEARER)[::2] == (200, b"")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_nothing_can_be_written(client: Client, method: str) -> None:
    assert client.get("/", method=method, authorization=BEARER)[0] == 405


def test_a_browser_gets_a_cookie_for_the_token_in_the_address(client: Client) -> None:
    status, headers, body = client.get("/", query=f"token={TOKEN}&days=30")

    assert (status, headers["Location"], body) == (303, "/?days=30", b"")
    assert "HttpOnly" in headers["Set-Cookie"]
    assert "SameSite=Strict" in headers["Set-Cookie"]
    cookie = headers["Set-Cookie"].partition(";")[0]
    assert client.get("/", cookie=cookie)[0] == 200
    assert client.get("/", query="token=wrong")[0] == 401
    assert client.get("//evil.example/", query=f"token={TOKEN}")[1]["Location"] == "/"


def test_another_time_can_be_asked_for(client: Client) -> None:
    def num_jobs(query: str) -> int:
        return from_json(client.get("/fleet.json", query=query, authorization=BEARER)[2], FleetSummary).num_jobs

    assert num_jobs("days=14") > num_jobs("")
    assert client.get("/", query="&".join(f"a{i}=1" for i in range(20)), authorization=BEARER)[0] == 400
    for query in ("days=0", "days=-1", "days=x", "days=1e9", "days=nan"):
        assert client.get("/", query=query, authorization=BEARER)[0] == 400, query


def test_the_scrape_is_what_the_official_client_reads() -> None:
    running = job(7, outcome="running", began_s=NOW_S - 3600.0, name='a "b"\\c\n.py', node="n,{}=1")
    summary = summary_of([*RECORDS, running], since_s=NOW_S - WEEK_S, until_s=NOW_S)
    client = Client(FleetApplication(lambda days: summary, token=TOKEN, days=7.0))

    _, headers, text = client.get("/metrics", authorization=BEARER)
    families = {family.name: family for family in text_string_to_metric_families(text.decode())}

    assert headers["Content-Type"].startswith("text/plain")
    teams = {s.labels["team"]: s.value for s in families["flatout_team_gpu_hours"].samples}
    assert teams == pytest.approx({g.name: g.hours.gpu for g in summary.groups["team"]})
    (step,) = families["flatout_job_step_seconds"].samples
    assert (step.labels["name"], step.value) == ('a "b"\\c\n.py', 0.1)
    assert "n,{}=1" in {s.labels["node"] for s in families["flatout_node_sick"].samples}
    assert all(family.type == "gauge" and family.documentation for family in families.values())
    high = {
        s.labels["rule"]: s.value
        for s in families["flatout_cause_wasted_gpu_hours"].samples
        if s.labels["bound"] == "high"
    }
    assert high == pytest.approx({c.rule: c.high.gpu for c in summary.causes})


def test_a_store_that_cannot_be_read_is_an_error_of_the_service() -> None:
    def fail(days: float) -> FleetSummary:
        raise RecordError("'x' cannot be read")

    client = Client(FleetApplication(fail, token=TOKEN, days=7.0))
    assert client.get("/", authorization=BEARER)[0] == 503


def test_many_requests_at_once_read_the_store_once() -> None:
    readings: list[float] = []

    def slow(days: float) -> FleetSummary:
        readings.append(days)
        sleep(0.05)
        return summarise(days)

    client = Client(FleetApplication(slow, token=TOKEN, days=7.0))
    threads = [threading.Thread(target=lambda: client.get("/fleet.json", authorization=BEARER)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert readings == [7.0]


# -- the server ---------------------------------------------------------------------------------------------------------------

Serve = Callable[..., str]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Starts `flatout fleet serve` on a free port; returns the address that it prints."""
    store = open_store(tmp_path / "fleet")
    for record in RECORDS[-5:]:
        store.write(record)
    processes: list[subprocess.Popen[str]] = []

    def start(*options: object) -> str:
        command = [
            sys.executable,
            "-m",
            "flatout.app.cli",
            "fleet",
            "serve",
            "--store",
            tmp_path / "fleet",
            "--port",
            "0",
        ]
        process = subprocess.Popen([*command, *map(str, options)], stderr=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stderr is not None
        found = re.search(r"http://\S+", process.stderr.readline())
        assert found is not None
        return found[0]

    yield start
    for process in processes:
        process.terminate()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


def fetched(address: str, token: str = "") -> tuple[int, bytes]:
    request = urllib.request.Request(address, headers={"Authorization": f"Bearer {token}"} if token else {})
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as e:
        with e:
            return e.code, e.read()


@pytest.mark.slow
def test_the_served_page_listens_at_this_machine_alone_and_asks_for_its_token(serve: Serve) -> None:
    address = serve("--days", "3660")
    base, _, token = address.partition("?token=")

    assert base.startswith("http://127.0.0.1:")
    assert fetched(base)[0] == 401
    status, page = fetched(base, token)
    assert status == 200
    assert b"worst.py" in page
    assert fetched(f"{base}metrics", token)[0] == 200
    port = int(base.rpartition(":")[2].strip("/"))
    sockets = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    listening = [s[1] for s in sockets if s[3] == "0A" and s[1].endswith(f":{port:04X}")]
    assert listening == [f"0100007F:{port:04X}"]


@pytest.mark.slow
def test_a_token_of_ones_own_comes_from_a_file_that_nobody_else_reads(serve: Serve, tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    path.chmod(0o600)

    address = serve("--token-file", path, "--days", "3660")

    assert "token" not in address
    assert fetched(address, TOKEN)[0] == 200
    assert fetched(address, "other")[0] == 401


def test_a_token_that_others_can_read_or_guess_is_refused(tmp_path: Path) -> None:
    open_store(tmp_path / "fleet").write(job())
    path = tmp_path / "token"
    for text, mode, message in (
        (TOKEN, 0o644, "can be read by others"),
        ("short", 0o600, "16 or more"),
        (f"{TOKEN}; x=1", 0o600, "16 or more"),
    ):
        path.write_text(text)
        path.chmod(mode)
        ended = flatout("fleet", "serve", "--store", tmp_path / "fleet", "--token-file", path)
        assert ended.code == 2
        assert message in ended.err
