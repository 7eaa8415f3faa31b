"""Write docs/reference: the Python interface by topic, the command line by verb, the fields of a report, and the known devices.

python docs/generate_reference.py            writes the pages and removes those that are no longer wanted
python docs/generate_reference.py --check    writes nothing; exits with 1 and names the pages that are out of date

The pages of the Python interface name what is public; mkdocstrings fills in signatures and docstrings when the site is built.
"""

from __future__ import annotations

import inspect
import json
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from generate_rules import plain, written

import flatout
from flatout.app.cli.app import commands
from flatout.app.cli.command import GROUPS, Command
from flatout.app.cli.parameters import HELP_OPTIONS, Parameter, parameters_of, verbs_within
from flatout.core import units
from flatout.core.records.hardware import Figure, HardwareSpec
from flatout.machine.specs.catalog import all_specs

FOLDER = Path(__file__).parent / "reference"

TOPICS: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    "verbs": ("Check, tune, verify", ("flatout.app.", "flatout.tune.", "flatout.machine.")),
    "data": ("Feeding data", ("flatout.blocks.data.",)),
    "training": ("Training loops", ("flatout.blocks.training.", "flatout.blocks.recording.")),
    "kernels": ("Kernels", ("flatout.blocks.kernels.",)),
    "devices": ("Many devices", ("flatout.blocks.parallel.", "flatout.blocks.elastic.", "flatout.core.records.scale")),
    "shrink": ("Smaller models", ("flatout.shrink.",)),
    "records": ("Records and errors", ("flatout.core.",)),
}
"""Pages of the root's names, by where they live."""
PACKAGES: Final = {
    "callbacks": "flatout.callbacks",
    "native": "flatout.blocks.inference.native",
    "quantise": "flatout.shrink.quantise",
    "prune": "flatout.shrink.prune",
    "distil": "flatout.shrink.distil",
    "search": "flatout.shrink.search",
}
"""Packages with public names of their own."""


# -- the Python interface ------------------------------------------------------------------------------------------------------


def topic_of(home: str) -> str:
    """The page of a root name that lives in `module:attribute`."""
    return next(topic for topic, (_, prefixes) in TOPICS.items() if home.startswith(prefixes))


def first_line(thing: object) -> str:
    """The first line of its docstring."""
    text = inspect.getdoc(thing) or ""
    return text.partition("\n")[0]


def api_entry(path: str, shown: str) -> list[str]:
    """A heading and what mkdocstrings replaces by the docstring."""
    return [f"## {shown}", "", f"::: {path}", ""]


def api_pages() -> dict[str, str]:
    """One page a topic, one a package, and an index with a line for each name."""
    by_topic: dict[str, list[tuple[str, str, object]]] = {topic: [] for topic in TOPICS}
    for name in sorted(flatout.__all__, key=str.lower):
        home = flatout._HOMES[name]
        module, attribute = home.split(":")
        by_topic[topic_of(home)].append(
            (f"flatout.{name}", f"{module}.{attribute}", getattr(import_module(module), attribute))
        )
    pages: dict[str, str] = {}
    index = ["# Python", "", "What `import flatout` offers, by topic. All else is internal and may change."]
    for topic, (title, _) in TOPICS.items():
        pages[f"api-{topic}.md"], lines = _api_page(f"{title}", topic, by_topic[topic])
        index += ["", f"## {title}", "", *lines]
    for topic, package in PACKAGES.items():
        module_ = import_module(package)
        names = [(f"{package}.{name}", *_place(module_, name)) for name in sorted(module_.__all__, key=str.lower)]
        pages[f"api-{topic}.md"], lines = _api_page(f"`{package}`", topic, names)
        index += ["", f"## `{package}`", "", *lines]
    pages["api.md"] = "\n".join(index) + "\n"
    return pages


def _place(package: ModuleType, name: str) -> tuple[str, object]:
    """Where a name of a package is defined, which is where mkdocstrings finds it, and what it is."""
    thing = getattr(package, name)
    home = getattr(thing, "__module__", package.__name__)
    return f"{home if home.startswith('flatout.') else package.__name__}.{name}", thing


def _api_page(title: str, topic: str, names: Sequence[tuple[str, str, object]]) -> tuple[str, list[str]]:
    lines, links = [f"# {title}", ""], []
    for shown, path, thing in names:
        lines += api_entry(path, shown)
        anchor = shown.lower().replace(".", "")
        links.append(f"- [`{shown}`](api-{topic}.md#{anchor}): {plain(first_line(thing))}")
    return "\n".join(lines), links


# -- the command line ----------------------------------------------------------------------------------------------------------


def cli_page() -> str:
    """All verbs with their options and examples, by heading."""
    lines = [
        "# The command line, option by option",
        "",
        "As `flatout VERB -h` has it. How options, scripts and files go together is on [a page of its own](../command-line.md),",
        "and so is what [exit codes](../exit-codes.md) mean.",
    ]
    known = list(commands())
    for group, title in GROUPS.items():
        lines += ["", f"## {title}"]
        for name, command in known:
            if command.group == group:
                lines += _verb(name, command)
    return "\n".join(lines) + "\n"


def _verb(name: str, command: Command) -> Iterator[str]:
    yield from ("", f"### flatout {name}", "")
    text = inspect.getdoc(_callback(command)) or ""
    yield plain(text)
    yield from _options(parameters_of(command))
    for inner, parameters in verbs_within(command).items():
        yield from ("", f"#### flatout {name} {inner}")
        yield from _options(parameters)
    yield from ("", "```sh", *command.examples, "```")


def _callback(command: Command) -> object:
    run = command.run
    found = getattr(run, "registered_callback", None)
    return found.callback if found is not None else run


def _options(parameters: Sequence[Parameter]) -> Iterator[str]:
    shown = [one for one in parameters if not one.is_hidden]
    if not shown:
        return
    yield from ("", "| option | value | meaning |", "|---|---|---|")
    for one in shown:
        names = ", ".join(f"`{option}`" for option in one.options) or f"`{one.metavar or one.name.upper()}`"
        value = "" if one.is_flag else one.metavar or one.kind
        yield f"| {names} | {_cell(value)} | {_cell(one.help)} |"
    yield f"| {', '.join(f'`{option}`' for option in reversed(HELP_OPTIONS))} | | Show the help, with defaults, and end. |"


def _cell(text: str) -> str:
    return plain(" ".join(text.split()).replace("\\[", "[")).replace("|", "\\|")


# -- records and devices -------------------------------------------------------------------------------------------------------


def records_page() -> str:
    """The records of a report as tables of fields, from its JSON Schema."""
    schema = json.loads((FOLDER.parent / "schema.json").read_text(encoding="utf-8"))
    lines = [
        "# The fields of a report",
        "",
        "What `flatout check --json` writes; `flatout schema` prints the same as JSON Schema. Seconds are of one step, sizes are",
        "bytes, fractions go from 0 to 1.",
    ]
    for name, record in sorted(schema["$defs"].items(), key=lambda pair: (pair[0] != "JsonReport", pair[0])):
        lines += [
            "",
            f"## {name}",
            "",
            plain(str(record.get("description", "")).partition("\n\n")[0].replace("\n", " ")),
        ]
        lines += ["", "| field | type |", "|---|---|"]
        lines += [f"| `{field}` | {_type(kind)} |" for field, kind in record.get("properties", {}).items()]
    return "\n".join(lines) + "\n"


def _type(kind: Mapping[str, Any]) -> str:
    if "$ref" in kind:
        name = kind["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in kind:
        return " or ".join(_type(one) for one in kind["anyOf"])
    if "enum" in kind:
        return " or ".join(f"`{one}`" for one in kind["enum"])
    if kind.get("type") == "array":
        inner = kind.get("items") or {}
        return (
            f"list of {_type(inner)}"
            if inner
            else "list of " + ", ".join(_type(one) for one in kind.get("prefixItems", []))
        )
    if kind.get("type") == "object":
        return f"mapping to {_type(kind.get('additionalProperties') or {})}"
    return str(kind.get("type", "anything"))


def hardware_page() -> str:
    """The devices whose data sheets are known, with the source of each figure."""
    lines = [
        "# Known devices",
        "",
        "Data sheets that `flatout fit`, `scale` and `simulate` predict with. Where the machine is there, `flatout machine`",
        "measures instead. Rates are dense, without sparsity.",
    ]
    for spec in all_specs():
        lines += [
            "",
            f"## {plain(spec.name)}",
            "",
            f"`{spec.id}`",
            "",
            "| figure | value | condition | source |",
            "|---|---|---|---|",
        ]
        for what, one in _figures(spec):
            lines.append(f"| {_cell(what)} | {_figure(one)} | {_cell(one.condition)} | {_cell(one.source)} |")
    return "\n".join(lines) + "\n"


def _figures(spec: HardwareSpec) -> Iterator[tuple[str, Figure]]:
    """The figures of a data sheet with what each is."""
    for field in spec.__struct_fields__:
        value = getattr(spec, field)
        if isinstance(value, Figure):
            yield field.replace("_", " "), value
    for rate in spec.rates:
        yield f"{rate.dtype}, {rate.engine}", rate.flop_per_s
    for link in spec.links:
        yield f"{link.name}, one direction", link.bytes_per_s


def _figure(one: Figure) -> str:
    match one.unit:
        case "B":
            return units.size(int(one.value))
        case "B/s":
            return units.size_rate(one.value)
        case "FLOP/s":
            return units.work_rate(one.value)
    return f"{one.value:,g} {'' if one.unit == '1' else one.unit}".strip()


def main() -> int:
    logging.disable(logging.WARNING)  # what libraries note while they are imported
    wanted = {**api_pages(), "cli.md": cli_page(), "records.md": records_page(), "hardware.md": hardware_page()}
    return written(FOLDER, wanted, description="Write docs/reference/*.md from the code.")


if __name__ == "__main__":
    sys.exit(main())
