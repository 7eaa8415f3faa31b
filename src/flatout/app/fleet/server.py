"""The fleet's page, served: read-only, with a token for every request."""

from __future__ import annotations

import hmac
import threading
from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from time import monotonic
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import parse_qs, urlencode

from flatout.core.errors import FlatoutError
from flatout.core.records.fleet import FleetSummary

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIEnvironment

_COOKIE: Final = "flatout_fleet"
_FRESH_S: Final = 15.0
"""How long a summary is shown before the store is read again: pages and scrapes of a minute cost one reading."""
_MOST_DAYS: Final = 366.0
_MOST_FIELDS: Final = 10
_METHODS: Final = ("GET", "HEAD")
_HEADERS: Final = (
    ("Cache-Control", "no-store"),
    (
        "Content-Security-Policy",
        "default-src 'none'; style-src 'unsafe-inline'; img-src data:; frame-ancestors 'none'",
    ),
    ("Referrer-Policy", "no-referrer"),
    ("X-Content-Type-Options", "nosniff"),
)


class Answer(NamedTuple):
    """The response that one request gets."""

    status: HTTPStatus
    body: bytes = b""
    kind: str = "text/plain; charset=utf-8"
    headers: tuple[tuple[str, str], ...] = ()


class FleetApplication:
    """A WSGI application: `/` the page, `/metrics` for Prometheus, `/fleet.json`, `/digest.md`, `/healthz` without a token.

    A request has the token as `Authorization: Bearer TOKEN`, or once as `/?token=TOKEN`, which a browser keeps as a cookie.
    `?days=30` asks for another time than the usual one.
    """

    def __init__(self, summarise: Callable[[float], FleetSummary], *, token: str, days: float) -> None:
        """`summarise` reads the last so many days."""
        self._summarise, self._token, self._days = summarise, token, days
        self._summaries: dict[float, tuple[float, FleetSummary]] = {}
        self._lock = threading.Lock()

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        answer = self._answer(environ)
        headers = [
            ("Content-Type", answer.kind),
            ("Content-Length", str(len(answer.body))),
            *_HEADERS,
            *answer.headers,
        ]
        start_response(f"{answer.status.value} {answer.status.phrase}", headers)
        return [answer.body] if environ.get("REQUEST_METHOD") != "HEAD" else [b""]

    def _answer(self, environ: WSGIEnvironment) -> Answer:
        if environ.get("REQUEST_METHOD") not in _METHODS:
            return Answer(HTTPStatus.METHOD_NOT_ALLOWED, b"read-only\n", headers=(("Allow", ", ".join(_METHODS)),))
        path = str(environ.get("PATH_INFO", "/"))
        if path == "/healthz":
            return Answer(HTTPStatus.OK, b"ok\n")
        try:
            query = parse_qs(str(environ.get("QUERY_STRING", "")), max_num_fields=_MOST_FIELDS)
        except ValueError:
            return Answer(HTTPStatus.BAD_REQUEST, b"too many fields\n")
        if (asked := query.pop("token", None)) is not None:
            return self._with_cookie(asked[0], path, query)
        if not self._is_known(environ):
            advice = b"open the address that `flatout fleet serve` printed, or send its token as a bearer token\n"
            return Answer(HTTPStatus.UNAUTHORIZED, advice, headers=(("WWW-Authenticate", "Bearer"),))
        make = _PAGES.get(path)
        if make is None:
            return Answer(HTTPStatus.NOT_FOUND, b"there are /, /metrics, /fleet.json and /digest.md\n")
        days = _days_of(query, self._days)
        if days is None:
            return Answer(HTTPStatus.BAD_REQUEST, f"days has to be above 0, up to {_MOST_DAYS:.0f}\n".encode())
        try:
            return make(self._summary(days))
        except FlatoutError as e:
            return Answer(HTTPStatus.SERVICE_UNAVAILABLE, f"{e}\n".encode())

    def _with_cookie(self, token: str, path: str, query: Mapping[str, list[str]]) -> Answer:
        """Have the browser keep the token as a cookie, out of its address line and its history."""
        if not self._is_token(token):
            return Answer(HTTPStatus.UNAUTHORIZED, b"the token is not right\n")
        rest = f"?{urlencode(query, doseq=True)}" if query else ""
        cookie = f"{_COOKIE}={self._token}; HttpOnly; SameSite=Strict; Path=/"
        place = f"{path if path in _PAGES else '/'}{rest}"
        return Answer(HTTPStatus.SEE_OTHER, headers=(("Location", place), ("Set-Cookie", cookie)))

    def _is_known(self, environ: WSGIEnvironment) -> bool:
        scheme, _, token = str(environ.get("HTTP_AUTHORIZATION", "")).partition(" ")
        if scheme.lower() == "bearer" and self._is_token(token.strip()):
            return True
        try:
            cookie = SimpleCookie(str(environ.get("HTTP_COOKIE", ""))).get(_COOKIE)
        except CookieError:
            return False
        return cookie is not None and self._is_token(cookie.value)

    def _is_token(self, token: str) -> bool:
        return hmac.compare_digest(token.encode(), self._token.encode())

    def _summary(self, days: float) -> FleetSummary:
        with self._lock:
            read_s, summary = self._summaries.get(days, (0.0, None))
            if summary is None or monotonic() - read_s > _FRESH_S:
                summary = self._summarise(days)
                self._summaries = {d: one for d, one in self._summaries.items() if monotonic() - one[0] <= _FRESH_S} | {
                    days: (monotonic(), summary)
                }
            return summary


def _days_of(query: Mapping[str, list[str]], usual: float) -> float | None:
    """The days that a query asks for; None where it makes no sense."""
    if "days" not in query:
        return usual
    try:
        days = float(query["days"][0])
    except ValueError:
        return None
    return days if 0.0 < days <= _MOST_DAYS else None


def _page(summary: FleetSummary) -> Answer:
    from flatout.report.html.fleet import fleet_page

    return Answer(HTTPStatus.OK, fleet_page(summary), "text/html; charset=utf-8")


def _metrics(summary: FleetSummary) -> Answer:
    from prometheus_client import CONTENT_TYPE_LATEST

    from flatout.report.prometheus import prometheus_text

    return Answer(HTTPStatus.OK, prometheus_text(summary), CONTENT_TYPE_LATEST)


def _json(summary: FleetSummary) -> Answer:
    from flatout.core.records.record import to_json

    return Answer(HTTPStatus.OK, to_json(summary), "application/json")


def _digest(summary: FleetSummary) -> Answer:
    from flatout.report.markdown import markdown_report
    from flatout.report.parts.fleet import digest_blocks

    text = markdown_report(digest_blocks(summary, title="The fleet", top=10))
    return Answer(HTTPStatus.OK, text.encode(), "text/markdown; charset=utf-8")


_PAGES: Final[dict[str, Callable[[FleetSummary], Answer]]] = {
    "/": _page,
    "/metrics": _metrics,
    "/fleet.json": _json,
    "/digest.md": _digest,
}
