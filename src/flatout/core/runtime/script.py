"""Running a user's script or module as python itself would, inside this process, until its end or a signal."""

from __future__ import annotations

import importlib.util
import linecache
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, FrameType, ModuleType, TracebackType
from typing import Final, NamedTuple

from flatout.core.errors import ScriptError
from flatout.core.runtime.end_signals import END_SIGNALS
from flatout.core.runtime.notebook import SUFFIX, read_notebook

_OURS = str(Path(__file__).parents[2])
INTERRUPTED: Final = 128 + signal.SIGINT
"""The shell's exit code for a process that Ctrl-C ended."""


class Outcome(NamedTuple):
    """How a script ended: 'finished', or the line of its exception; and the exit code python would give."""

    exit: str
    exit_code: int


class Enough(SystemExit):
    """Raised in the user's loop at the border of a step when the observation is complete and the user asked to stop then."""


class Script(NamedTuple):
    """Code ready to run as `__main__`. `root` is the folder whose files count as the user's."""

    code: CodeType
    module: ModuleType
    argv: tuple[str, ...]
    search_path: str
    root: str
    file: str
    later: tuple[CodeType, ...] = ()
    """Code that runs after `code`, of a notebook's further cells."""
    notes: tuple[str, ...] = ()
    """What of the file does not run, and why."""

    def with_code(self, code: CodeType | None) -> Script:
        """The same script with other code, if there is any."""
        return self if code is None else self._replace(code=code)


def load_script(path: str, arguments: tuple[str, ...]) -> Script:
    """A file to run like `python path arguments`; the code cells of a notebook, one after the other.

    Raises ScriptError when there is no such file or it does not compile.
    """
    file = Path(path)
    if file.suffix == SUFFIX and file.is_file():
        return _notebook(file, (path, *arguments))
    if file.is_dir() and (file / "__main__.py").is_file():
        return _main_module((file / "__main__.py"), (path, *arguments), search_path=str(file))
    if not file.is_file():
        raise ScriptError(f"'{path}' is not a file; give the script that you would give to python")
    return _main_module(file, (path, *arguments), search_path=str(file.parent.resolve()))


def load_module(name: str, arguments: tuple[str, ...]) -> Script:
    """A module to run like `python -m name arguments`.

    Raises ScriptError when it cannot be found.
    """
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    spec, file = _spec_of(name)
    script = _main_module(file, (str(file), *arguments), search_path=os.getcwd())
    script.module.__spec__ = spec
    script.module.__package__ = spec.parent
    here = Path.cwd().resolve()
    is_own = file.resolve().is_relative_to(here) and "site-packages" not in file.parts
    return script._replace(root=str(here)) if is_own else script


def module_file(name: str) -> Path:
    """The file that `python -m name` runs, started here; nothing of it is imported, nor are the packages that it lies in.

    Raises ScriptError when it cannot be found.
    """
    folders: Sequence[str] | None = [os.getcwd(), *sys.path]
    spec: ModuleSpec | None = None
    parts = name.split(".")
    for number in range(len(parts)):
        spec = _found(".".join(parts[: number + 1]), folders) if parts[number] else None
        folders = spec.submodule_search_locations if spec is not None else None
        if spec is None or (folders is None and number + 1 < len(parts)):
            raise ScriptError(f"module '{name}' cannot be found; run flatout where `python -m {name}` works")
    if folders is not None:
        spec = _found(f"{name}.__main__", folders)
    if spec is None or spec.origin is None or spec.loader is None:
        raise ScriptError(f"module '{name}' cannot be found; run flatout where `python -m {name}` works")
    return Path(spec.origin)


def _found(name: str, folders: Sequence[str] | None) -> ModuleSpec | None:
    """What the interpreter's finders make of a module's whole name in these folders."""
    specs = (finder.find_spec(name, folders) for finder in sys.meta_path if hasattr(finder, "find_spec"))
    return next((spec for spec in specs if spec is not None), None)


def _spec_of(name: str) -> tuple[ModuleSpec, Path]:
    """A module, or the `__main__` of a package, with its file. Raises ScriptError when it cannot be found."""
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except (ImportError, ValueError) as e:
        raise ScriptError(f"module '{name}' cannot be found: {e}; run flatout where `python -m {name}` works") from e
    if spec is None or spec.origin is None or spec.loader is None:
        raise ScriptError(f"module '{name}' cannot be found; run flatout where `python -m {name}` works")
    return spec, Path(spec.origin)


def run_script(script: Script) -> Outcome:
    """Run to the end. What the script raises is printed as python would, without our frames, and becomes the outcome."""
    before_main, before_argv, before_path = sys.modules["__main__"], sys.argv, sys.path[:]
    sys.modules["__main__"] = script.module
    sys.argv = list(script.argv)
    if script.search_path not in sys.path[:1]:
        sys.path.insert(0, script.search_path)
    try:
        for part in (script.code, *script.later):
            exec(part, script.module.__dict__)
        return Outcome("finished", 0)
    except Enough:
        return Outcome("stopped", 0)
    except SystemExit as e:
        return Outcome("finished" if e.code in (None, 0) else f"SystemExit: {e.code}", _exit_code(e))
    except BaseException as e:  # noqa: BLE001  # the script's own, whatever it is: python would print it and exit with 1
        e.__traceback__ = _without_ours(e.__traceback__)
        sys.excepthook(type(e), e, e.__traceback__)
        code = INTERRUPTED if isinstance(e, KeyboardInterrupt) else 1
        return Outcome(error_line(e), code)
    finally:
        sys.argv, sys.path[:] = before_argv, before_path
        sys.modules["__main__"] = before_main


def _main_module(file: Path, argv: tuple[str, ...], *, search_path: str) -> Script:
    try:
        code = compile(file.read_bytes(), str(file), "exec", dont_inherit=True)
    except SyntaxError as e:
        raise ScriptError(f"'{file}' does not compile: {e}; mend it until `python {file}` starts") from e
    module = ModuleType("__main__")
    module.__file__ = str(file.absolute())  # as python has it since 3.9, also after a change of folder
    module.__dict__.update(__builtins__=__builtins__, __cached__=None, __spec__=None, __loader__=None, __package__=None)
    return Script(
        code=code, module=module, argv=argv, search_path=search_path, root=str(file.parent.resolve()), file=str(file)
    )


def _notebook(file: Path, argv: tuple[str, ...]) -> Script:
    """A notebook to run as a script: each cell is a file of its own, 'train.ipynb/cell 3', with the names of all."""
    codes: list[CodeType] = []
    cells = read_notebook(file)
    for cell in cells:
        name = str(file.resolve() / cell.name)
        lines = [f"{line}\n" for line in cell.text.split("\n")]
        linecache.cache[name] = (
            len(cell.text),
            None,
            lines,
            name,
        )  # for tracebacks and reports; None: never read again
        try:
            codes.append(compile(cell.text, name, "exec", dont_inherit=True))
        except SyntaxError as e:
            raise ScriptError(
                f"{cell.name} of '{file}' does not compile: {e.msg} (line {e.lineno}); mend it until all cells run"
            ) from e
    module = ModuleType("__main__")  # without a file, as in Jupyter: processes that it spawns would run that
    module.__dict__.update(
        {"__builtins__": __builtins__, "__loader__": None, "__package__": None, "display": _print_values}
    )
    folder = str(file.parent.resolve())
    return Script(
        code=codes[0],
        module=module,
        argv=argv,
        search_path=folder,
        root=folder,
        file=str(file),
        later=tuple(codes[1:]),
        notes=tuple(note for cell in cells for note in cell.left_out),
    )


def _print_values(*values: object, **options: object) -> None:
    """Print what a notebook would draw: IPython's `display` for a script."""
    for value in values:
        sys.stdout.write(f"{value}\n")


def error_line(error: BaseException) -> str:
    """The line of python's message that names the exception; messages of CUDA and others go on for many more."""
    lines = [line for line in "".join(traceback.format_exception_only(error)).splitlines() if line.strip()]
    name = type(error).__name__
    return next((line for line in lines if line.partition(":")[0].rpartition(".")[2] == name), lines[-1]).strip()


def _exit_code(e: SystemExit) -> int:
    if e.code is None:
        return 0
    if isinstance(e.code, int):
        return e.code & 0xFF
    print_to_stderr(str(e.code))
    return 1


def _without_ours(tb: TracebackType | None) -> TracebackType | None:
    """The traceback less the frames of this package."""
    if tb is None:
        return None
    rest = _without_ours(tb.tb_next)
    if tb.tb_frame.f_code.co_filename.startswith(_OURS + os.sep):
        return rest
    line: int | None = tb.tb_lineno  # None while a frame is between two lines
    return TracebackType(rest, tb.tb_frame, tb.tb_lasti, tb.tb_frame.f_code.co_firstlineno if line is None else line)


def print_to_stderr(text: str) -> None:
    """What python prints for `sys.exit("text")`."""
    sys.stderr.write(text + "\n")


def end_script() -> None:
    """End the running script between two steps, politely: as `sys.exit(0)` there would."""
    raise Enough(0)


def mute() -> None:
    """Show nothing any more of what this process prints: what a script prints while it is ended is no result of it."""
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        with suppress(AttributeError, OSError, ValueError):  # a script may have closed or replaced them
            stream.flush()  # type: ignore[union-attr]
    empty = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(empty, descriptor)
    os.close(empty)


WRITE_NOW: Final = signal.SIGRTMIN + 8 if hasattr(signal, "SIGRTMIN") else getattr(signal, "SIGUSR2", signal.SIGTERM)
"""Asks an observed process to write what there is and to end, where the script has SIGTERM and SIGINT for itself.

The sampler of lines uses SIGRTMIN + 9; few programs use any beyond the first ones.
"""


class Ending:
    """Whether the script is over, and its Evidence is being written anyway."""

    def __init__(self, hurry: Callable[[], None]) -> None:
        self.has_begun = False
        self.hurry = hurry
        self.own = os.getpid()

    def begin(self) -> None:
        """The script is over. Ctrl-C and signals to end make haste from now on, and stop nothing that is being written."""
        self.has_begun = True
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, lambda *_: self.hurry())


@contextmanager
def writing_when_terminated(write: Callable[[int], None], *, hurry: Callable[[], None]) -> Iterator[Ending]:
    """Call `write(signal)` when SIGTERM, SIGHUP or WRITE_NOW comes, then end the process as the shell has it.

    After `Ending.begin` a signal calls `hurry` instead. A launcher ends all ranks with SIGTERM when one has failed, and waits
    half a minute before it kills. A script that handles a signal itself keeps its own handler, and one that is ignored (nohup)
    stays so. Outside the main thread nothing is watched.
    """
    ending = Ending(hurry)
    if threading.current_thread() is not threading.main_thread():
        yield ending
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if os.getpid() != ending.own:  # a forked child inherited this handler
            os._exit(128 + number)
        if ending.has_begun:
            ending.hurry()
            return
        ending.has_begun = True
        try:
            write(number)
        finally:
            mute()  # which flushes
            os._exit(128 + number)

    watched = [number for number in (*END_SIGNALS, WRITE_NOW) if signal.getsignal(number) == signal.SIG_DFL]
    interrupt = signal.getsignal(signal.SIGINT)
    for number in watched:
        signal.signal(number, handle)
    try:
        yield ending
    finally:
        for number in watched:
            if signal.getsignal(number) is handle:
                signal.signal(number, signal.SIG_DFL)
        if ending.has_begun:
            signal.signal(signal.SIGINT, interrupt)
