"""One place patches: nobody else assigns a module's forward, an attribute of torch's, or a function of Python's own modules."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SOURCE = Path(__file__).parents[2] / "src" / "flatout"
PATCHING = SOURCE / "core" / "runtime" / "patches.py"
OTHERS = {"F", "Tensor", "builtins", "dist", "nn", "optim", "os", "threading", "torch"}
"""Names under which modules and classes of others are imported."""


def assigned(tree: ast.AST) -> Iterator[ast.Attribute]:
    for node in ast.walk(tree):
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign) else []
        )
        yield from (target for target in targets if isinstance(target, ast.Attribute))


def test_nobody_else_replaces_a_forward_or_an_attribute_of_torch() -> None:
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        for target in assigned(ast.parse(path.read_text(encoding="utf-8"))):
            text = ast.unparse(target)
            is_flag = text.startswith(
                ("torch.backends.", "torch._inductor.config.")
            )  # a switch, which its owner puts back
            if path != PATCHING and (target.attr == "forward" or text.partition(".")[0] in OTHERS) and not is_flag:
                found.append(f"{path.relative_to(SOURCE)}:{target.lineno} {text}")

    assert not found, "use flatout.core.runtime.patches, which undoes: " + ", ".join(found)
