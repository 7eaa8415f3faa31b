"""Products of rows with packed columns, in C: accumulators that stay in registers, for 32 wide registers and for 16 narrower ones.

Every output is summed in one order, whatever the tile: `parts` stretches of the depth, each from its beginning to its end, and then
the stretches. Tiles differ in what is done side by side, so that they differ in speed, never in a bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product
from typing import Final

_WIDE: Final = {
    1: ((8, (3, 1)), (4, (4, 1)), (1, (8, 4, 1))),
    2: ((4, (3, 1)), (1, (6, 4, 3, 1))),
    4: ((4, (1,)), (1, (2, 1))),
}
_NARROW: Final = {1: ((6, (1,)), (2, (2, 1)), (1, (6, 3, 1))), 2: ((3, (1,)), (1, (3, 1))), 4: ((1, (1,)),)}
"""By number of parts: (rows, columns' blocks that are tried, widest first)."""
_ARGS: Final = (
    "const float *x, long ldx, const float *w, long row, long block, long k, const float *bias, float *y, long ldy"
)


def text(parts: set[int]) -> str:
    """The functions that products with these numbers of parts call."""
    tiles = {
        (rows, columns, p) for p in parts for rows, widths in (*_WIDE[p], *_NARROW[p], (1, (1,))) for columns in widths
    }
    return "\n".join((*(_tile(*tile) for tile in sorted(tiles)), *(_product(p) for p in sorted(parts))))


def _tile(rows: int, columns: int, parts: int) -> str:
    cells = list(product(range(rows), range(columns), range(parts)))
    how = "FO_HOT" if rows == 1 else "FO_COLD"  # one row is over before a call has paid; many rows are compiled once
    lines = [f"static {how} void fo_tile_{rows}x{columns}x{parts}({_ARGS}) {{"]
    starts = (
        f"a{r}_{c}_{p} = {'bias ? f16_load(bias + ' + str(16 * c) + ') : ' if not p else ''}f16_zero()"
        for r, c, p in cells
    )
    lines += [f"  f16 {', '.join(starts)};", f"  const long part = k / {parts};"]
    lines += ["  for (long i = 0; i < part; i++) {", *_accumulated(rows, columns, range(parts)), "  }"]
    if parts > 1:
        lines += [
            f"  for (long i = part; {parts - 1} * part + i < k; i++) {{",
            *_accumulated(rows, columns, [parts - 1]),
            "  }",
        ]
    for r, c in product(range(rows), range(columns)):
        lines.append(f"  f16_store(y + {r} * ldy + {16 * c}, {_added([f'a{r}_{c}_{p}' for p in range(parts)])});")
    return "\n".join([*lines, "}"])


def _accumulated(rows: int, columns: int, parts: Iterable[int]) -> Iterator[str]:
    """Columns stay in registers, rows pass one by one: rows * columns + columns + 1 registers are in use."""
    for p in parts:
        at = f"({p} * part + i)"
        for c in range(columns):
            yield f"    const f16 w{c}_{p} = f16_load(w + {c} * block + {at} * row);"
        for r in range(rows):
            yield f"    const f16 x{r}_{p} = f16_all(x[{r} * ldx + {at}]);"
            yield "   " + "".join(f" a{r}_{c}_{p} = f16_fma(x{r}_{p}, w{c}_{p}, a{r}_{c}_{p});" for c in range(columns))


def _added(names: list[str]) -> str:
    while len(names) > 1:
        names = [f"f16_add({a}, {b})" for a, b in zip(names[::2], names[1::2], strict=True)]
    return names[0]


def _product(parts: int) -> str:
    head = _ARGS.replace("long k,", "long blocks, long k,")
    lines = [
        "/* y (rows, 16 blocks) = bias + x (rows, k) times w: blocks of 16 columns, `block` apart, rows of them `row` apart. */",
        f"static FO_HOT void fo_product_{parts}(long rows, {head}) {{",
        "#if FO_WIDE",
        *_loops(_WIDE[parts], parts),
        "#elif defined(FO_PLAIN)",
        *_loops(((1, (1,)),), parts),
        "#else",
        *_loops(_NARROW[parts], parts),
        "#endif",
        "}",
    ]
    return "\n".join(lines)


def _loops(tiles: tuple[tuple[int, tuple[int, ...]], ...], parts: int) -> Iterator[str]:
    done = "0"
    for rows, widths in tiles:
        yield f"  const long r{rows} = {done} + (rows - {done}) / {rows} * {rows};"
        yield f"  for (long r = {done}; r < r{rows}; r += {rows}) {{"
        at = "0"
        for columns in widths:
            yield f"    const long c{columns} = {at} + (blocks - {at}) / {columns} * {columns};"
            yield f"    for (long c = {at}; c < c{columns}; c += {columns})"
            yield f"      fo_tile_{rows}x{columns}x{parts}(x + r * ldx, ldx, w + c * block, row, block, k, bias ? bias + 16 * c : 0, y + r * ldy + 16 * c, ldy);"
            at = f"c{columns}"
        yield "  }"
        done = f"r{rows}"
