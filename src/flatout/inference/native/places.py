"""Where in the user's model a node comes from, and what is said when it cannot be done."""

from __future__ import annotations

from typing import Any

import torch

from flatout.inference.native import pointwise


def note_of(node: Any) -> str:
    """What of the model a statement computes: its place in the tree of modules, and the operator."""
    stack = node.meta.get("nn_module_stack") or {}
    path = next((p for p, _ in reversed(list(stack.values())) if p), "")
    name = pointwise.name_of(node.target) or getattr(node.target, "__name__", str(node.target))
    return f"{path}: {name}" if path else name


def told_at(node: Any) -> str:
    """Where in the user's code a node comes from."""
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines() if line.strip()]
    places = [i for i, line in enumerate(lines) if line.startswith("File ")]
    own = [i for i in places if "/torch/" not in lines[i]] or places
    if not own:
        return ""
    at = own[-1]
    file = lines[at].removeprefix("File ").split(", in ")[0].replace('"', "").replace(", line ", ":")
    code = lines[at + 1] if at + 1 < len(lines) and not lines[at + 1].startswith("File ") else ""
    return f" ({file}: {code})" if code else f" ({file})"


ADVICE = 'change the model there, or take build(..., backend="aoti")'


def dtype_name(dtype: torch.dtype) -> str:
    """As records name it. Raises NotImplementedError for one that native code has not."""
    name = str(dtype).removeprefix("torch.")
    if name not in ("float32", "int64", "int32", "bool"):
        raise NotImplementedError(f"numbers of {dtype} (native code computes in float32, and indexes by int64)")
    return name
