"""What a shell proposes at a TAB, by the scripts that `flatout completion` prints."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
from pathlib import Path
from time import monotonic

import pytest
from tests.command_line import flatout

from flatout.app.cli.app import commands
from flatout.app.cli.completion_scripts import SHELLS, completed_verbs
from flatout.app.cli.parameters import parameters_of
from flatout.core.registry import ids_of_own, levers, rules

COMMANDS = dict(commands())
ASK = """
source "$1"; shift
[[ "$(complete -p flatout)" == "complete -F _flatout flatout" ]] || exit 9
COMP_WORDS=(flatout "$@"); COMP_CWORD=$#
_flatout flatout
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Some files beside the script, which lies outside."""
    (tmp_path / "here" / "runs").mkdir(parents=True)
    (tmp_path / "here" / "train.py").touch()
    (tmp_path / "here" / "a plan.toml").touch()
    (tmp_path / "script").write_text(flatout("completion", "bash").out)
    return tmp_path / "here"


def proposed(folder: Path, words: str) -> set[str]:
    """What bash proposes in place of the last word."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash")
    asked = [bash, "--norc", "-c", ASK, "bash", str(folder.parent / "script"), *words.split(" ")]
    done = subprocess.run(asked, cwd=folder, capture_output=True, text=True, timeout=30, check=True)
    assert done.stderr == ""
    return set(done.stdout.splitlines()) - {""}


FILES = {"train.py", "a plan.toml", "runs"}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", set(COMMANDS)),
        ("re", {"report", "replay"}),
        ("--v", {"--version"}),
        ("--isolated do", {"doctor"}),
        ("check --j", {"--json"}),
        ("check --json ", FILES),
        ("check --json = a", {"a plan.toml"}),
        ("check --json =", FILES),
        ("check --seconds ", set()),
        ("check tr", {"train.py"}),
        ("check train.py --js", set()),
        ("check --json r.json train.py ru", {"runs"}),
        ("check -m package.train --js", set()),
        ("check -- --js", set()),
        ("verify train.py --se", {"--seed", "--seconds"}),
        ("verify train.py train.py --se", set()),
        ("watch --folder ", {"runs"}),
        ("tune --objective ", {"time", "memory"}),
        ("tune --allow = b", {"bounded"}),
        ("verify --at b", {"bfloat16"}),
        ("rules overhead.not-c", {"overhead.not-compiled"}),
        ("levers graph.comp", {"graph.compile", "graph.compile-loop", "graph.compile-method"}),
        ("runs d", {"diff"}),
        ("runs diff -", {"-h", "--help"}),
        ("runs diff ", FILES),
        ("completion ", set(SHELLS)),
        ("nothing ", set()),
    ],
)
@pytest.mark.slow
def test_bash_proposes_what_may_be_typed(words: str, expected: set[str], folder: Path) -> None:
    assert proposed(folder, words) == expected


@pytest.mark.parametrize("verb", COMMANDS)
@pytest.mark.slow
def test_bash_proposes_every_option_of_a_verb(verb: str, folder: Path) -> None:
    options = {option for one in parameters_of(COMMANDS[verb]) if not one.is_hidden for option in one.options}
    assert proposed(folder, f"{verb} -") == options | {"-h", "--help"}


@pytest.mark.parametrize("shell", SHELLS)
def test_every_verb_and_option_is_in_the_script_of_each_shell_which_the_shell_can_read(
    shell: str, tmp_path: Path
) -> None:
    script = flatout("completion", shell).out
    for verb in completed_verbs(COMMANDS):
        assert verb.name.split()[-1] in script
        for option in (option for one in verb.options for option in one.options):
            assert (f"-l {option[2:]}" if shell == "fish" and option.startswith("--") else option[1:]) in script
    if (program := shutil.which(shell)) is not None:
        (tmp_path / "script").write_text(script)
        subprocess.run([program, "-n", str(tmp_path / "script")], check=True, timeout=30)


def program_of(shell: str) -> str:
    """Where the shell is; skips the test where it is not installed."""
    found = shutil.which(shell)
    if found is None:
        pytest.skip(f"there is no {shell}")
    return found


ONE_EACH = {
    "flatout ch": "check",
    "flatout tune --obj": "--objective",
    "flatout rules overhead.not-c": "overhead.not-compiled",
    "flatout runs d": "diff",
    "flatout verify --at b": "bfloat16",
    "flatout tune tr": "train.py",
    "flatout watch --folder ru": "runs/",
    "flatout completion f": "fish",
}
"""What stands before the TAB, and the one thing that its last word can become."""


@pytest.mark.parametrize(("words", "expected"), ONE_EACH.items())
@pytest.mark.slow
def test_fish_proposes_what_may_be_typed(words: str, expected: str, folder: Path) -> None:
    script = folder.parent / "script.fish"
    script.write_text(flatout("completion", "fish").out)
    asked = [program_of("fish"), "--no-config", "-c", 'source $argv[1]; complete -C "$argv[2]"', str(script), words]
    home = {**os.environ, "HOME": str(folder.parent)}

    done = subprocess.run(asked, cwd=folder, env=home, capture_output=True, text=True, timeout=30, check=True)

    assert [line.partition("\t")[0] for line in done.stdout.splitlines()] == [expected]


@pytest.mark.slow
def test_zsh_proposes_what_may_be_typed(folder: Path) -> None:
    script = folder.parent / "script.zsh"
    script.write_text(flatout("completion", "zsh").out)
    zsh = program_of("zsh")
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(folder)
        os.execve(zsh, [zsh, "-f", "-i"], {"PATH": os.environ["PATH"], "TERM": "dumb", "COLUMNS": "200", "PS1": "> "})
    try:
        os.write(terminal, f"autoload -Uz compinit && compinit -u -D && source '{script}' && echo re''ady\n".encode())
        read_until(terminal, "ready")
        for words, expected in ONE_EACH.items():
            os.write(terminal, f"{words}\t".encode())
            read_until(terminal, f"{words.rpartition(' ')[0]} {expected}")
            os.write(terminal, b"\x15")  # Ctrl-U: an empty line again
    finally:
        os.close(terminal)
        os.waitpid(process, 0)


def read_until(terminal: int, text: str, longest_s: float = 30.0) -> None:
    """Read what comes from a terminal until the text has come; fails where it does not."""
    came, end_s = "", monotonic() + longest_s
    while text not in came:
        is_there = select.select([terminal], [], [], max(0.0, end_s - monotonic()))[0]
        assert is_there, f"'{text}' did not come, but {came!r}"
        came += os.read(terminal, 65536).decode(errors="replace")


def test_the_script_is_printed_without_torch() -> None:
    program = (
        "import sys; sys.argv[1:] = ['completion', 'bash']\n"
        "from flatout.app.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'numpy', 'rich'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, timeout=60)


def test_names_of_rules_and_levers_are_found_without_importing_them() -> None:
    assert list(ids_of_own("rule")) == [rule.id for rule in rules() if rule.module.startswith("flatout.")]
    assert list(ids_of_own("lever")) == [lever.id for lever in levers() if lever.module.startswith("flatout.")]


def test_another_shell_is_refused() -> None:
    ended = flatout("completion", "tcsh")
    assert ended.code == 2
    assert "the shell tcsh is none of bash, zsh, fish" in ended.err
