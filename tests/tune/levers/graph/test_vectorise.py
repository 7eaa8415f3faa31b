from __future__ import annotations

import ast
import math
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
from tests.evidence_builder import EvidenceBuilder
from tests.lever_tools import found

from flatout.core.errors import EditError
from flatout.core.records.lever import Candidate, Parameters, Refusal
from flatout.core.records.workload import Source
from flatout.tune.levers.graph.vectorise import LEVER, edit

_HEAD = "import math\nimport torch\nimport torch.nn.functional as F\n\n\n"
_GENERATOR = torch.Generator().manual_seed(0)


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=_GENERATOR, dtype=torch.float64)


X, Y, W = _random(6, 5), _random(6, 5), _random(5)
LABELS, PREDICTED = torch.tensor([0, 1, 2, 0, 1, 2]), torch.tensor([0, 1, 0, 0, 2, 2])
SERIES, LENGTHS = _random(4, 7, 3), torch.tensor([3, 7, 1, 5])
EDGES = torch.tensor([[0, 1, 2, 2], [1, 0, 5, 1]])

CASES: dict[str, tuple[str, tuple[Any, ...]]] = {
    "rows that are appended and stacked": (
        """
        def f(x):
            out = []
            for row in x:
                out.append((row - row.mean()) / row.std())
            return torch.stack(out)
        """,
        (X,),
    ),
    "two tensors at once, summed in Python": (
        """
        def f(x, y):
            losses = []
            for a, b in zip(x, y):
                d = (a - b).abs()
                losses.append(d.sum())
            return sum(losses) / len(losses)
        """,
        (X, Y),
    ),
    "a counter that picks rows": (
        """
        def f(x, y):
            total = 0.0
            for i in range(x.shape[0]):
                total += F.cosine_similarity(x[i], y[i], dim=0)
            return total / x.shape[0]
        """,
        (X, Y),
    ),
    "a sum onto a tensor": (
        """
        def f(x, y):
            total = torch.ones((), dtype=x.dtype)
            n = x.size(0)
            for i in range(n):
                total = total + (x[i] * y[i]).sum()
            return total / n
        """,
        (X, Y),
    ),
    "every row against all others": (
        """
        def f(x, labels):
            losses = []
            for i in range(len(x)):
                similarity = x @ x[i]
                others = torch.arange(len(labels)) != i
                positives = others & (labels == labels[i])
                largest = torch.logsumexp(similarity[others], dim=0)
                losses.append((largest - similarity[positives]).mean())
            return torch.stack(losses).mean()
        """,
        (X, LABELS),
    ),
    "chosen in two ways": (
        """
        def f(x, labels):
            losses = []
            sim = x @ x.T
            for i in range(len(x)):
                pos = sim[i][labels == labels[i]]
                neg = sim[i][labels != labels[i]]
                losses.append(torch.relu(1.0 - pos.min() + neg.max()))
            return torch.stack(losses).mean()
        """,
        (X, LABELS),
    ),
    "the last step of each series": (
        """
        def f(series, lengths):
            last = []
            for b in range(series.size(0)):
                last.append(series[b, lengths[b] - 1])
            return torch.stack(last, dim=0)
        """,
        (SERIES, LENGTHS),
    ),
    "the mean up to a length": (
        """
        def f(series, lengths):
            pooled = []
            for h, n in zip(series, lengths):
                pooled.append(h[: n.item()].mean(0))
            return torch.stack(pooled)
        """,
        (SERIES, LENGTHS),
    ),
    "the largest up to a length": (
        """
        def f(series, lengths):
            pooled = []
            for i, n in enumerate(lengths.tolist()):
                pooled.append(series[i, :n].max(dim=0).values)
            return torch.stack(pooled)
        """,
        (SERIES, LENGTHS),
    ),
    "a loss up to a length": (
        """
        def f(series, lengths):
            loss = 0
            for b in range(len(lengths)):
                loss = loss + F.mse_loss(series[b, : lengths[b], 0], series[b, : lengths[b], 1])
            return loss / len(lengths)
        """,
        (SERIES, LENGTHS),
    ),
    "the mean where a mask is true": (
        """
        def f(series, mask):
            out = []
            for h, m in zip(series, mask):
                out.append(h[m].mean(dim=0))
            return torch.stack(out)
        """,
        (SERIES, torch.arange(7) < LENGTHS[:, None]),
    ),
    "the mean of each group": (
        """
        def f(x, labels):
            centres = []
            for c in range(3):
                centres.append(x[labels == c].mean(dim=0))
            return torch.stack(centres)
        """,
        (X, LABELS),
    ),
    "the sum of each group, with names": (
        """
        def f(x, labels):
            centres = []
            for c in range(3):
                mask = labels == c
                centre = x[mask].sum(0)
                centres.append(centre)
            return torch.stack(centres)
        """,
        (X, LABELS),
    ),
    "the accuracy of each class that is there": (
        """
        def f(predicted, labels):
            rates = []
            for c in range(4):
                mask = labels == c
                if mask.sum() > 0:
                    rates.append((predicted[mask] == labels[mask]).float().mean().item())
            return sum(rates) / len(rates)
        """,
        (PREDICTED, LABELS),
    ),
    "groups that are skipped": (
        """
        def f(x, labels):
            total = 0
            count = 0
            for c in range(4):
                mask = labels == c
                if not mask.any():
                    continue
                members = x[mask]
                centre = members.mean(dim=0)
                total += ((members - centre) ** 2).sum(dim=0).sum()
                count += 1
            return total / count
        """,
        (X, LABELS),
    ),
    "how many there are of each": (
        """
        def f(x, labels):
            sizes = []
            for c in range(4):
                rows = x[labels == c]
                sizes.append(rows.shape[0] if len(rows) > 1 else 0)
            return torch.tensor(sizes)
        """,
        (X, LABELS),
    ),
    "a confusion matrix": (
        """
        def f(predicted, labels):
            matrix = torch.zeros(3, 3, dtype=torch.long)
            for t, p in zip(labels, predicted):
                matrix[t.item(), p.item()] += 1
            return matrix
        """,
        (PREDICTED, LABELS),
    ),
    "hits that are counted": (
        """
        def f(logits, labels):
            correct = 0
            for i in range(len(labels)):
                if logits[i].argmax().item() == labels[i].item():
                    correct += 1
            return correct / len(labels)
        """,
        (X, LABELS),
    ),
    "hits and how many there were": (
        """
        def f(logits, labels):
            correct, total = 0, 0
            for z, t in zip(logits, labels):
                correct += int(z.argmax() == t)
                total += 1
            return correct / total
        """,
        (X, LABELS),
    ),
    "counts of each class": (
        """
        def f(logits, labels):
            seen, hits, near = [0] * 3, [0] * 3, 0
            for row, label in zip(logits, labels):
                truth = label.item()
                seen[truth] += 1
                if row.argmax().item() == truth:
                    hits[truth] += 1
                near += truth in row.topk(3).indices.tolist()
            return seen, hits, near
        """,
        (X[:, :3], LABELS),
    ),
    "written into a tensor": (
        """
        def f(x, w):
            out = torch.zeros(len(x), dtype=x.dtype)
            for i in range(len(x)):
                out[i] = (x[i] * w).sum()
            return out
        """,
        (X, W),
    ),
    "written into columns": (
        """
        def f(x, w):
            out = torch.zeros_like(x)
            for j in range(x.shape[1]):
                out[:, j] = x[:, j] * w[j]
            return out
        """,
        (X, W),
    ),
    "written into the first rows only": (
        """
        def f(x, w, n):
            out = torch.zeros_like(x)
            for i in range(n):
                out[i] = x[i] * w
            return out
        """,
        (X, W, 4),
    ),
    "windows": (
        """
        def f(x, width):
            windows = []
            for t in range(0, x.shape[0] - width + 1, 2):
                windows.append(x[t : t + width])
            return torch.stack(windows)
        """,
        (X, 3),
    ),
    "messages along edges": (
        """
        def f(x, edges):
            out = torch.zeros_like(x)
            for s, d in zip(*edges):
                out[d] += x[s] * 0.5
            return out
        """,
        (X, EDGES),
    ),
    "the worst of all": (
        """
        def f(x):
            worst = 0.0
            for row in x:
                worst = max(worst, row.abs().max().item())
            return worst
        """,
        (X,),
    ),
    "two branches": (
        """
        def f(x):
            up = 0
            scores = []
            for row in x:
                m = row.mean()
                if m > 0:
                    s = m * 2
                    up += 1
                else:
                    s = -m
                scores.append(s)
            return torch.stack(scores), up
        """,
        (X,),
    ),
    "a list that each branch appends to": (
        """
        def f(x, labels):
            pooled = []
            for g in range(4):
                chosen = x[labels == g]
                if len(chosen) == 0:
                    pooled.append(torch.zeros(5, dtype=x.dtype, device=x.device))
                else:
                    pooled.append(chosen.mean(dim=0))
            return torch.stack(pooled)
        """,
        (X, LABELS),
    ),
    "a list that stays one": (
        """
        def f(x):
            out = []
            for row in x:
                out.append(row.norm().item())
            return sorted(out)
        """,
        (X,),
    ),
    "functions of math": (
        """
        def f(x):
            total = 0.0
            for row in x:
                total += math.sqrt(row.var().item())
            return total
        """,
        (X,),
    ),
    "rows that are unpacked": (
        """
        def f(boxes):
            areas = []
            for left, top, right, bottom, _ in boxes:
                areas.append((right - left) * (bottom - top))
            return torch.stack(areas)
        """,
        (X,),
    ),
    "pieces that are joined": (
        """
        def f(series):
            outs = []
            for h in series:
                outs.append(h - h.mean(dim=0))
            return torch.cat(outs, dim=0)
        """,
        (SERIES,),
    ),
    "a comprehension along another dimension": (
        """
        def f(x, w):
            out = torch.stack([row * w for row in x], dim=1)
            return out
        """,
        (X, W),
    ),
    "a comprehension that is summed": (
        """
        def f(x, y):
            return sum((a * b).sum() for a, b in zip(x, y)) / len(x)
        """,
        (X, Y),
    ),
    "a comprehension that is stacked later": (
        """
        def f(x, w):
            parts = [row @ w for row in x]
            return torch.stack(parts).mean()
        """,
        (X, W),
    ),
}

NEAR_MISSES: dict[str, str] = {
    "'h' goes from one iteration to the next": """
        def f(x):
            h = x[0]
            out = []
            for row in x:
                h = h * 0.5 + row
                out.append(h)
            return torch.stack(out)
        """,
    "'out' goes from one iteration to the next": """
        def f(x):
            out = [x[0]]
            for row in x:
                out.append(out[-1] + row)
            return torch.stack(out)
        """,
    "does more than compute": """
        def f(x):
            out = []
            for row in x:
                print(row)
                out.append(row.sum())
            return torch.stack(out)
        """,
    "'torch.randn' does something of its own": """
        def f(x):
            out = []
            for row in x:
                out.append(row + torch.randn(5))
            return torch.stack(out)
        """,
    "'break' does more": """
        def f(x):
            out = []
            for row in x:
                if row.sum() > 0:
                    break
                out.append(row.sum())
            return torch.stack(out)
        """,
    "'s' is read after the loop": """
        def f(x):
            out = []
            for row in x:
                s = row.sum()
                out.append(s)
            return torch.stack(out), s
        """,
    "'opt.zero_grad": """
        def f(loader, net, opt):
            total = 0.0
            for a, b in loader:
                loss = (net(a) - b).pow(2).mean()
                opt.zero_grad()
                loss.backward()
                opt.step()
                total += loss.item()
            return total
        """,
    "'net' is another function in each iteration": """
        def f(x, nets):
            out = []
            for net in nets:
                out.append(net(x))
            return torch.stack(out)
        """,
    "has as many rows as were selected": """
        def f(x, labels):
            out = []
            for c in range(3):
                out.append(x[labels == c])
            return out
        """,
    "needs values on the host": """
        def f(x):
            out = []
            for row in x:
                out.append(row.tolist())
            return out
        """,
}


def _place(text: str) -> Parameters:
    """The first loop or comprehension of the function f."""
    [function] = [n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef)]
    loops: list[ast.stmt] = [n for n in ast.walk(function) if isinstance(n, ast.For)]
    inside = (ast.ListComp, ast.GeneratorExp)
    loops += [s for s in function.body if any(isinstance(n, inside) for n in ast.walk(s))]
    return {"file": "a.py", "function": "f", "code": text.splitlines()[loops[0].lineno - 1].strip()}


def _function(text: str) -> Callable[..., Any]:
    space: dict[str, Any] = {"torch": torch, "F": F, "math": math}
    exec(text, space)
    made: Callable[..., Any] = space["f"]
    return made


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_all_at_once_is_the_same_as_one_by_one(name: str) -> None:
    body, args = CASES[name]
    text = _HEAD + dedent(body).strip() + "\n"
    changed = edit(text, _place(text))
    assert changed != text
    torch.testing.assert_close(_function(changed)(*args), _function(text)(*args))


@pytest.mark.parametrize("why", NEAR_MISSES)
def test_what_is_not_certain_is_refused(why: str) -> None:
    text = _HEAD + dedent(NEAR_MISSES[why]).strip() + "\n"
    with pytest.raises(EditError) as refusal:
        edit(text, _place(text))
    assert why in str(refusal.value)


def test_gradients_are_the_same_where_rows_are_masked_out() -> None:
    body, args = CASES["every row against all others"]
    text = _HEAD + dedent(body).strip() + "\n"
    grads = []
    for one in (text, edit(text, _place(text))):
        x = args[0].clone().requires_grad_()
        _function(one)(x, args[1]).backward()
        grads.append(x.grad)
    torch.testing.assert_close(grads[1], grads[0])


def test_the_edit_reads_as_a_person_would_write_it() -> None:
    text = _HEAD + dedent(CASES["hits that are counted"][0]).strip() + "\n"
    assert (
        edit(text, _place(text))
        == _HEAD
        + dedent(
            """
        def f(logits, labels):
            correct = torch.vmap(lambda logits_i, labels_i: logits_i.argmax() == labels_i)(logits, labels).sum().item()
            return correct / len(labels)
        """
        ).lstrip()
    )


def test_means_of_groups_are_sums_at_an_index() -> None:
    text = _HEAD + dedent(CASES["the mean of each group"][0]).strip() + "\n"
    changed = edit(text, _place(text))
    assert "index_add(0, labels, x)" in changed
    assert "vmap" not in changed


def test_a_loop_that_a_rule_found_is_offered_also_from_the_function_that_it_calls(tmp_path: Path) -> None:
    text = _HEAD + dedent(CASES["two tensors at once, summed in Python"][0]).strip() + "\n"
    (tmp_path / "train.py").write_text(text)
    run = EvidenceBuilder().build()
    command = ("python", "train.py")
    workload = msgspec.structs.replace(run.workload, cwd=str(tmp_path), command=command)
    line = text.splitlines().index("        losses.append(d.sum())") + 1
    called = Source(file=str(tmp_path / "pairs.py"), line=1, function="distance", text="return a - b")
    inside = Source(file=str(tmp_path / "train.py"), line=line, function="f", text="", loops=(line - 2,))
    evidence = msgspec.structs.replace(run, workload=workload, sources=(called, inside), callers={0: (1,)})
    finding = msgspec.structs.replace(found(0.02), where=called)
    [candidate] = LEVER.propose(evidence, [finding])
    assert isinstance(candidate, Candidate)
    assert candidate.parameters == {"file": "train.py", "function": "f", "code": "for a, b in zip(x, y):"}
    [refusal] = LEVER.propose(evidence, [])
    assert isinstance(refusal, Refusal)
