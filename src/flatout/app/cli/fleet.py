"""`flatout fleet`: which jobs waste most and why, who became slower, which nodes are sick."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from flatout.app.cli.command import Command, help_epilog
from flatout.app.cli.options import require_writable
from flatout.app.cli.terminal import print_lines, print_report, print_written
from flatout.core.errors import UsageError
from flatout.core.files import STANDARD_OUTPUT

if TYPE_CHECKING:
    from flatout.app.fleet.overview import FleetQuery, TimeSpan

_LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")

fleet = typer.Typer(
    invoke_without_command=True, help="Look at all watched jobs together: waste, regressions, sick nodes."
)

Store = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="The store: a folder, or a file called .sqlite. [default: FLATOUT_STORE, else the user's own]",
    ),
]
Days = Annotated[float, typer.Option(help="The last so many days.")]
Where = Annotated[
    list[str] | None,
    typer.Option(
        metavar="FIELD=VALUE", help="Only jobs of this team, user, project, name, model, node, device, partition."
    ),
]
Price = Annotated[float | None, typer.Option(help="What a GPU-hour costs. [default: the store's policy]")]
CorePrice = Annotated[float | None, typer.Option(help="What a core-hour costs. [default: the store's policy]")]
Top = Annotated[int, typer.Option(metavar="N", help="Rows of each table.")]
Markdown = Annotated[Path | None, typer.Option("--markdown", metavar="FILE", help="Write it as Markdown to this file.")]


@fleet.callback()
def _shown(
    context: typer.Context,
    store: Store = None,
    days: Days = 7.0,
    week: Annotated[str, typer.Option(help="A whole week instead, such as 2026-W47.")] = "",
    where: Where = None,
    price: Price = None,
    core_price: CorePrice = None,
    top: Top = 10,
    json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all of it to this file.")] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write one HTML page to this file.")
    ] = None,
    markdown: Markdown = None,
    prometheus: Annotated[
        Path | None,
        typer.Option(
            "--prometheus", metavar="FILE", help="Write metrics for Prometheus to this file (textfile collector)."
        ),
    ] = None,
) -> None:
    """Show which jobs waste most and why, what became slower, and which nodes are sick."""
    if context.invoked_subcommand is not None:
        return
    require_writable(json=json, html=html, markdown=markdown, prometheus=prometheus)
    if top < 1:
        raise UsageError(f"--top {top} must be at least 1")
    from flatout.app.fleet.overview import summarise
    from flatout.core.files import write_all_files
    from flatout.report.parts.fleet import fleet_blocks

    summary = summarise(_query(store, where, price, core_price), _window(days, week))

    def as_json() -> bytes:
        from flatout.core.records.record import to_json

        return to_json(summary)

    def as_html() -> bytes:
        from flatout.report.html.fleet import fleet_page

        return fleet_page(summary)

    def as_markdown() -> bytes:
        from flatout.report.markdown import markdown_report

        return markdown_report(block for block in fleet_blocks(summary, top=top) if block != "").encode()

    def as_metrics() -> bytes:
        from flatout.report.prometheus import prometheus_text

        return prometheus_text(summary)

    files = ((json, as_json), (html, as_html), (markdown, as_markdown), (prometheus, as_metrics))
    write_all_files((path, content) for path, content in files if path is not None)
    print_report(
        fleet_blocks(summary, top=top),
        width=140,
        stderr=STANDARD_OUTPUT in (json, html, markdown, prometheus),
    )


@fleet.command(
    epilog=help_epilog("flatout fleet show 3f2a91c0", "flatout fleet show --days 30 --store /shared/fleet 3f2a")
)
def show(
    job: Annotated[
        str,
        typer.Argument(
            metavar="[JOB]", help="The beginning of the job's id, as `flatout fleet` lists it. [default: the worst]"
        ),
    ] = "",
    store: Store = None,
    days: Days = 7.0,
    price: Price = None,
    core_price: CorePrice = None,
) -> None:
    """Show one job: what ran where, how fast, and each cause with its line and its edit."""
    from flatout.app.fleet.overview import job_named, summarise
    from flatout.report.parts.fleet import job_blocks

    summary = summarise(_query(store, None, price, core_price), _window(days, ""))
    print_report(job_blocks(job_named(summary, job), summary.currency))


@fleet.command(
    epilog=help_epilog(
        "flatout fleet digest --out week.md", "flatout fleet digest --week 2026-W47 --store /shared/fleet"
    )
)
def digest(
    week: Annotated[str, typer.Option(help="The week, such as 2026-W47. [default: the last one that is over]")] = "",
    store: Store = None,
    where: Where = None,
    price: Price = None,
    core_price: CorePrice = None,
    top: Top = 5,
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="FILE", help="Write it to this file.")] = None,
) -> None:
    """Print a week's digest in Markdown: for a mail, an issue, or a chat."""
    require_writable(out=out)
    from flatout.app.fleet.overview import last_week, summarise, week_of
    from flatout.core.files import write_whole_file
    from flatout.report.markdown import markdown_report
    from flatout.report.parts.fleet import digest_blocks

    named = week or last_week()
    summary = summarise(_query(store, where, price, core_price), week_of(named))
    text = markdown_report(digest_blocks(summary, title=f"The fleet in {named}", top=top))
    if out is None:
        print(text, end="")
    else:
        write_whole_file(out, text.encode())
        print_written(out, stderr=True)


@fleet.command(
    epilog=help_epilog(
        "flatout fleet serve --store /shared/fleet",
        "flatout fleet serve --store /shared/fleet --host 0.0.0.0 --token-file /etc/flatout/token",
    )
)
def serve(
    store: Store = None,
    days: Days = 7.0,
    where: Where = None,
    price: Price = None,
    core_price: CorePrice = None,
    host: Annotated[str, typer.Option(help="The address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port; 0 takes a free one.")] = 8300,
    token_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="A file with the token, for its owner alone. [default: a new token, printed]"
        ),
    ] = None,
) -> None:
    """Serve the page, and /metrics for Prometheus: read-only, on this machine alone unless told otherwise, with a token."""
    from waitress.server import create_server

    from flatout.app.fleet.overview import last_days, summarise
    from flatout.app.fleet.server import FleetApplication

    query, _ = _query(store, where, price, core_price), _window(days, "")
    summarise(query, last_days(days))  # what is wrong with the store is said now
    token = _token(token_file)
    application = FleetApplication(lambda d: summarise(query, last_days(d)), token=token, days=days)
    try:
        server = create_server(application, host=host, port=port, threads=4, ident=None, channel_timeout=30)
    except OSError as e:
        raise UsageError(f"cannot listen at {host}:{port}: {e.strerror or e}; give another --host or --port") from e
    address = f"http://{f'[{host}]' if ':' in host else host}:{server.effective_port}/"
    shown = address if token_file is not None else f"{address}?token={token}"
    print_lines(f"the fleet's page is at {shown}", stderr=True)
    if host not in _LOOPBACK:
        print_lines("other machines reach it without encryption; put a proxy with TLS before it", stderr=True)
    try:
        server.run()
    finally:
        server.close()


@fleet.command(epilog=help_epilog("flatout fleet tidy --store /shared/fleet", "flatout fleet tidy --remove-after 90"))
def tidy(
    store: Store = None,
    remove_after: Annotated[
        float | None, typer.Option(metavar="DAYS", help="Remove jobs that are older. [default: the store's policy]")
    ] = None,
) -> None:
    """Gather the records of ended jobs, and remove those that are older than the policy's retention; for cron."""
    from datetime import UTC, datetime

    from flatout.app.fleet.overview import store_path
    from flatout.blocks.recording.job_store.opening import open_store, policy_of

    path = store_path(store)
    if not path.exists():
        raise UsageError(f"there is no store '{path}'; give one with --store")
    days = policy_of(path).retention.days if remove_after is None else remove_after
    if days is not None and days <= 0:
        raise UsageError(f"--remove-after {days} must be above 0")
    now_s = datetime.now(UTC).timestamp()
    done = open_store(path).tidy(now_s=now_s, remove_before_s=None if days is None else now_s - days * 86400)
    print_lines(f"{done.num_gathered:,} rows gathered, {done.num_removed:,} removed")
    print_lines(*(f"note: {note}" for note in done.notes), stderr=True)


@fleet.command(epilog=help_epilog("flatout fleet hook", "flatout fleet hook --remove"))
def hook(
    remove: Annotated[bool, typer.Option("--remove", help="Take the hook away again.")] = False,
) -> None:
    """Install a hook in this Python environment: with FLATOUT_WATCH=1, each training in it is watched."""
    from flatout.app.fleet.installing import install_hook, remove_hook

    path = remove_hook() if remove else install_hook()
    print_lines(f"{'removed' if remove else 'written to'} {path}")


@fleet.command(
    epilog=help_epilog(
        "flatout fleet prolog --store /shared/fleet --out /etc/slurm/task_prolog.sh",
        "flatout fleet prolog --store /shared/fleet",
    )
)
def prolog(
    store: Store = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="FILE", help="Write it to this file.")] = None,
) -> None:
    """Print a TaskProlog for Slurm, by which every task of the cluster watches its training."""
    require_writable(out=out)
    from flatout.app.fleet.installing import task_prolog
    from flatout.app.fleet.overview import store_path
    from flatout.core.files import write_whole_file

    text = task_prolog(store_path(store))
    if out is None:
        print(text, end="")
        return
    write_whole_file(out, text.encode())
    out.chmod(0o755)
    print_written(out, stderr=True)


def _query(store: Path | None, where: list[str] | None, price: float | None, core_price: float | None) -> FleetQuery:
    from flatout.app.fleet.overview import FleetQuery, conditions, store_path

    for name, value in (("--price", price), ("--core-price", core_price)):
        if value is not None and not value >= 0:
            raise UsageError(f"{name} {value} must be at least 0")
    return FleetQuery(store_path(store), conditions(where or []), price, core_price)


def _window(days: float, week: str) -> TimeSpan:
    from flatout.app.fleet.overview import last_days, week_of

    if not 0 < days <= 3660:
        raise UsageError(f"--days {days:g} must be above 0, up to 3660")
    return week_of(week) if week else last_days(days)


def _token(path: Path | None) -> str:
    """The token in a file that its owner alone can read, or a new one. Raises UsageError where the file will not do."""
    import secrets
    import stat

    if path is None:
        return secrets.token_urlsafe(32)
    try:
        mode, token = path.stat().st_mode, path.read_text().strip()
    except (OSError, UnicodeDecodeError) as e:
        raise UsageError(f"--token-file {path} cannot be read: {e}") from e
    if stat.S_IMODE(mode) & 0o077 and os.name == "posix":
        raise UsageError(f"--token-file {path} can be read by others; run `chmod 600 {path}`")
    if len(token) < 16 or not token.isascii() or not token.isprintable() or " " in token or ";" in token:
        raise UsageError(
            f"--token-file {path} has to hold 16 or more letters and digits, as `openssl rand -hex 32` gives"
        )
    return token


COMMAND = Command(
    fleet,
    order=28,
    group="find",
    examples=("flatout fleet --store /shared/fleet --price 2.5", "flatout fleet --where team=vision --html fleet.html"),
)
