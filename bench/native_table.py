"""What bench/native.py found, as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

Record = dict[str, Any]
OURS = "c", "c_loop", "flatout", "flatout_loop"


def table(records: Sequence[Record]) -> str:
    machine = records[0]
    rows = [r for r in records if r["part"] == "models"]
    lines = [
        f"{machine['processor']}, {machine['cores']} cores; one thread; microseconds of an event, median of rounds"
    ]
    lines += [f"{name} {what}" for name, what in machine["versions"].items()]
    if rows:
        names = list(dict.fromkeys(name for row in rows for name in row["peers"]))
        head = [*names, "floor", "x best"]
        lines += ["", *columns("model", head, {r["model"]: times_of(r, names) for r in rows})]
        lines += ["x best: the fastest of the peers that are not written by hand, over flatout"]
        wrong = [(r["model"], name, p["error"]) for r in rows for name, p in r["peers"].items() if p.get("wrong")]
        lines += [f"wrong: {name} of {model}, {error:.2g} of the output's scale away" for model, name, error in wrong]
        for kind, named in (("failed", "failed"), ("not_there", "has none")):
            said = [(r["model"], name, p[kind]) for r in rows for name, p in r["peers"].items() if kind in p]
            lines += [f"{named}: {name} of {model}: {what}" for model, name, what in said if what != "not written"]
        lines += ["", "largest error over 1e-7 of the output's scale, against float64"]
        lines += columns("model", names, {r["model"]: errors_of(r, names) for r in rows})
        lines += ["", "single events: p50 / p99 / p99.9, the clock's readings in them"]
        for row in rows:
            for name, peer in row["peers"].items():
                said = {name: peer.get("event"), f"{name}, in C": peer.get("event_in_c")}
                lines += [f"{row['model']:14} {who:14} {tails(event)}" for who, event in said.items() if event]
                alone = (peer.get("event_in_c") or {}).get("machine")
                lines += [f"{row['model']:14} {'additions alone':14} {tails(alone)}"] if alone else []
    lines += [said for record in records for said in of_part(record)]
    return "\n".join(lines)


def of_part(record: Record) -> Iterator[str]:
    """A record of the other parts, in words."""
    if record["part"] in ("models", "machine"):
        return
    yield ""
    same = f"bit for bit as single steps: {record.get('bitwise_as_single_steps')}"
    if "flatout" in record:
        yield f"{record['part']}: flatout: {record['flatout']}"
    elif "events" in record:
        yield f"{record['events']} events of the GRU through step_many: {record['many_s']:.3g} s; {same}"
    elif "streams" in record:
        rates = ", ".join(f"{name} {1e-6 / peer['s']:.3g}" for name, peer in record["peers"].items())
        yield f"{record['streams']} streams of the GRU beside one, million events a second: {rates}; {same}"
        floors = [record[f"floor_{kind}_s"] * 1e6 for kind in ("bytes", "flop")]
        yield "an event's weights are read in {:.3g} us (one stream's floor), multiplied in {:.3g} us (many's)".format(
            *floors
        )
    else:
        times = ", ".join(f"{name} {peer['s'] * 1e6:.3g} us" for name, peer in record["peers"].items())
        errors = ", ".join(f"{error:.2g}" for error in record["error"].values())
        faster, low, high = record["faster"]
        yield f"{record['model']}: {times}: {faster:.2f}x {low:.2f}..{high:.2f}; errors over the output's scale: {errors}"


def columns(head: str, names: Sequence[str], rows: dict[str, list[str]]) -> list[str]:
    widths = [max(len(name), 7) + 2 for name in names]
    lines = [f"{head:14}" + "".join(f"{name:>{w}}" for name, w in zip(names, widths, strict=True))]
    for name, cells in rows.items():
        lines.append(f"{name:14}" + "".join(f"{cell:>{w}}" for cell, w in zip(cells, widths, strict=True)))
    return lines


def times_of(row: Record, names: Sequence[str]) -> list[str]:
    def cell(peer: Record) -> str:
        if "s" in peer:
            return f"{peer['s'] * 1e6:.3g}"
        return "wrong" if peer.get("wrong") else "failed" if "failed" in peer else "-"

    peers = row["peers"]
    rest = [p["s"] for name, p in peers.items() if "s" in p and name not in OURS]
    ours = peers.get("flatout", {}).get("s")
    best = f"{min(rest) / ours:.3g}" if rest and ours else "-"
    return [*(cell(peers.get(name, {})) for name in names), f"{row['floor_s'] * 1e6:.3g}", best]


def errors_of(row: Record, names: Sequence[str]) -> list[str]:
    found = [row["peers"].get(name, {}).get("error") for name in names]
    return ["-" if error is None else f"{error * 1e7:.2g}" for error in found]


def tails(event: Record) -> str:
    shown = " / ".join(f"{event[key] * 1e6:.3g}" for key in ("p50_s", "p99_s", "p999_s"))
    return f"{shown}, of which the clock {event['clock_s'] * 1e6:.2g}" if "clock_s" in event else shown
