"""Deferred imports, in processes of their own."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

BEGIN = """
import sys
from flatout.core.runtime.deferred_imports import defer_imports
defer_imports("xml", "dom")
import xml
from xml import dom as d
"""


def printed(text: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + textwrap.dedent(text)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_nothing_is_imported_until_it_is_used() -> None:
    text = """
        before = "xml.dom.domreg" in sys.modules
        found = d.Node.ELEMENT_NODE
        print(before, found, "xml.dom.domreg" in sys.modules, type(sys.modules["xml.dom"]).__name__)
    """
    assert printed(text) == "False 1 True module"


def test_looking_at_all_modules_imports_nothing() -> None:
    text = """
        import inspect
        [getattr(m, "__file__", None) for m in list(sys.modules.values())]
        inspect.getmodule(lambda: 0)
        print("xml.dom.domreg" in sys.modules)
    """
    assert printed(text) == "False"


def test_both_names_are_the_module_afterwards() -> None:
    assert printed("xml.dom.Node; print(d.Node is sys.modules['xml.dom'].Node, xml.dom.Node is d.Node)") == "True True"


def test_what_does_not_exist_is_an_error_as_ever() -> None:
    text = """
        try:
            d.nothing
        except AttributeError as e:
            print("nothing" in str(e))
    """
    assert printed(text) == "True"


@pytest.mark.parametrize("name", ["NOTHING", "getDOMImplementation"])
def test_names_are_imported_from_it(name: str) -> None:
    text = f"""
        try:
            from xml.dom import {name}
            print("there")
        except ImportError:
            print("not there")
    """
    assert printed(text) == ("not there" if name == "NOTHING" else "there")
