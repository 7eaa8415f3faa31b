"""Products of rows with packed columns, in C: accumulators that stay in registers, of which there are 32 wide or 16 narrow ones.

Every output is summed in one order, whatever the tile: `parts` stretches of the depth, each from its beginning to its end, and
then the stretches. Tiles differ in what is done side by side, so that they differ in speed, never in a bit.

Weights lie in groups of 8 blocks of 16 columns (the last group may have fewer), one row of a group after the other: a tile reads
them from the first byte to the last.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product
from typing import Final

from flatout.blocks.inference.native.packing import DEEP

_WIDE: Final = {
    1: ((4, (4, 2, 1)), (1, (8, 4, 2, 1))),
    2: ((4, (2, 1)), (1, (4, 2, 1))),
    4: ((4, (1,)), (1, (2, 1))),
}
_NARROW: Final = {1: ((2, (2, 1)), (1, (4, 2, 1))), 2: ((2, (1,)), (1, (2, 1))), 4: ((1, (1,)),)}
"""By number of parts: (rows, columns' blocks that are tried, widest first); these divide a group."""
_ARGS: Final = "const float *x, long ldx, const float *w, long row, long k, const float *bias, float *y, long ldy"


_ROW: Final = "#define FO_ROW_OF(c) (row ? row : 16 * (blocks - (c) / 8 * 8 < 8 ? blocks - (c) / 8 * 8 : 8))"


def tile_functions(parts: set[int]) -> str:
    """The functions that products with these numbers of parts call."""
    tiles = {
        (rows, columns, p) for p in parts for rows, widths in (*_WIDE[p], *_NARROW[p], (1, (1,))) for columns in widths
    }
    return "\n".join((_ROW, *(_tile(*tile) for tile in sorted(tiles)), *(_product(p) for p in sorted(parts))))


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
            yield f"    const f16 w{c}_{p} = f16_load(w + {16 * c} + {at} * row);"
        for r in range(rows):
            yield f"    const f16 x{r}_{p} = f16_all(x[{r} * ldx + {at}]);"
            yield "   " + "".join(f" a{r}_{c}_{p} = f16_fma(x{r}_{p}, w{c}_{p}, a{r}_{c}_{p});" for c in range(columns))


def _added(names: list[str]) -> str:
    while len(names) > 1:
        names = [f"f16_add({a}, {b})" for a, b in zip(names[::2], names[1::2], strict=True)]
    return names[0]


def _product(parts: int) -> str:
    head = _ARGS.replace("long k,", "long group, long blocks, long k,")
    lines = [
        "/* y (rows, 16 blocks) = bias + x (rows, k) times w: groups of 8 blocks of 16 columns, `group` apart,",
        "   and rows of them `row` apart; one after the other where `row` is 0. */",
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
        for columns, loop in _column_loops(widths):
            yield loop
            yield (
                f"      fo_tile_{rows}x{columns}x{parts}(x + r * ldx, ldx, w + c / 8 * group + c % 8 * 16, FO_ROW_OF(c), k,"
                " bias ? bias + 16 * c : 0, y + r * ldy + 16 * c, ldy);"
            )
        yield "  }"
        done = f"r{rows}"


def _column_loops(widths: tuple[int, ...]) -> Iterator[tuple[int, str]]:
    """For each width the head of the loop over blocks `c` that are left: as many as the width goes into."""
    at = "0"
    for columns in widths:
        end = f"    const long c{columns} = {at} + (blocks - {at}) / {columns} * {columns};"
        yield columns, f"{end}\n    for (long c = {at}; c < c{columns}; c += {columns})"
        at = f"c{columns}"


# --------------------------------------------------------------------------------------------------------------- 8 bits

_INT8_WIDE: Final = (8, 4, 2, 1)
_INT8_NARROW: Final = (2, 1)
"""Columns' blocks that are tried, widest first."""
_INT8_ARGS: Final = (
    "const float *x, long ldx, const int8_t *w, long blocks, long k, const float *scale, const int32_t *sums,"
    " const float *bias, float *y, long ldy"
)


def int8_sizes(deepest: int) -> str:
    """What int8.h wants to know beforehand; `deepest` are the most inputs of a product."""
    return f"#define FO_MOST_INT8 {-(-deepest // 64) * 64}\n#define FO_DEEP {DEEP}"


def int8_text() -> str:
    """The functions of products in 8 bits. Weights lie as above, four rows of them interleaved."""
    wide, narrow = (
        "\n".join((*(_int8_tile(columns) for columns in widths), _int8_product(widths)))
        for widths in (_INT8_WIDE, _INT8_NARROW)
    )
    return f"#if defined(FO_INT8_WIDE)\n{wide}\n#else\n{narrow}\n#endif"


def _int8_tile(columns: int) -> str:
    each = range(columns)
    lines = [
        f"static FO_HOT void fo_int8_tile_{columns}(const fo_row *q, long from, long to, const int8_t *w, long row,"
        " float step, const float *scale, const int32_t *sums, const float *bias, float *y) {",
        f"  i16 {', '.join(f's{c} = i16_start(sums + {16 * c})' for c in each)};",
        "  for (long i = from; i < to; i++) {",
        "    const fo_four x = fo_four_load(q, i);",
        *(f"    const b64 w{c} = b64_load(w + i * row + {64 * c});" for c in each),
        f"    {' '.join(f's{c} = i16_dot(s{c}, x, w{c});' for c in each)}",
        "  }",
        *(f"  i16_out(y + {16 * c}, s{c}, step, scale + {16 * c}, bias ? bias + {16 * c} : 0);" for c in each),
        "}",
    ]
    return "\n".join(lines)


def _int8_product(widths: tuple[int, ...]) -> str:
    lines = [
        "/* y (rows, 16 blocks) = bias + x (rows, k) times w; sums (stretches of FO_DEEP inputs, 16 blocks). */",
        f"static FO_HOT void fo_product_int8(long rows, {_INT8_ARGS}) {{",
        "  const long quads = (k + 3) / 4, deep = FO_DEEP / 4;",
        "  fo_row q;",
        "  for (long r = 0; r < rows; r++) {",
        "    const float step = fo_quantise(&q, x + r * ldx, k, quads);",
    ]
    for columns, loop in _column_loops(widths):
        lines += [
            f"{loop} {{",
            "      const long row = 64 * (blocks - c / 8 * 8 < 8 ? blocks - c / 8 * 8 : 8);",
            "      float *to = y + r * ldy + 16 * c;",
            "      for (long from = 0; from < quads; from += deep)",
            f"        fo_int8_tile_{columns}(&q, from, quads - from < deep ? quads : from + deep,"
            " w + c / 8 * quads * 512 + c % 8 * 64, row, step, scale + 16 * c, sums + (from / deep * blocks + c) * 16,"
            " from ? to : bias ? bias + 16 * c : 0, to);",
            "    }",
        ]
    return "\n".join([*lines, "  }", "}"])
