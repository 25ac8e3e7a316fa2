"""Contractions as kernels: matrix products, convolutions, their gradients, and what follows them.

A schedule has one of three kinds. "panel", for a processor with caches: blocks are copied in the order of the
registers, then multiplied. "local", for a GPU: blocks of both operands pass through local memory into tiles
in registers. "register", for a GPU with little or slow local memory: from memory or textures straight into
registers. What each of them decides is in `lowering.kernels.tilings`; here it is written down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod

from torchedge.expressions.dialect import COMPUTE, TYPE_BYTES, WIDE
from torchedge.expressions.indices import Axis
from torchedge.expressions.rendering import Renderer
from torchedge.expressions.scalars import Guarded, Scalar, constant
from torchedge.expressions.sizes import argument, digits, quotient
from torchedge.lowering.fusion import FusionGroup
from torchedge.lowering.kernels.loading import TURN
from torchedge.lowering.kernels.loops import work_of, write_all
from torchedge.lowering.kernels.products import Product, last_of, places, size
from torchedge.lowering.kernels.sources import Arguments, Body, KernelSource, declared
from torchedge.lowering.kernels.tilings import Operand, Tiling, tiling_of
from torchedge.lowering.nodes import Contraction
from torchedge.lowering.schedules import ContractionSchedule
from torchedge.lowering.targets import Kind, Target
from torchedge.textures.layouts import LANES

LOCAL_WORDS = 1 << 13
"""Smallest local memory of a "panel", in elements; larger ones have four times as many, and so on.

A device with less has panels of all its local memory."""
MOST_LOCAL_WORDS = 1 << 18
"""Largest local memory of a "panel" that is rounded up."""
SHORT_INNER = 8
"""Extent of the innermost loop below which a "panel" has a loop for each of the outer ones: to divide a flat
position would take longer than to copy so few elements."""
REGISTERS = 16
"""Vector registers of 32 bytes of processors without wider ones."""
UNROLL = "#pragma unroll"


def write_contraction(
    group: FusionGroup, product: Product, arguments: Arguments, schedule: ContractionSchedule, target: Target
) -> KernelSource:
    """Return the kernel that multiplies."""
    host, tiling = group.host, tiling_of(product, schedule)
    assert isinstance(host, Contraction)
    text = _ProductText(tiling, arguments, host.dtype, target.local_bytes // product.itemsize)
    _WRITERS[schedule.kind](text)
    batch, rows, cols, inner = product.sizes
    group_size = tuple(map(int, tiling.group))
    fixed = f"__attribute__((reqd_work_group_size({', '.join(map(str, group_size))}))) "
    return arguments.launch(
        text.body,
        f"contraction_{schedule.kind}",
        host.name,
        (tuple(map(int, tiling.global_size)), group_size),
        host.flops + work_of([item.value for _, item in product.stores]) * host.numel,
        f"{host.name} as {batch} x [{rows}, {inner}] @ [{inner}, {cols}]",
        group.scope,
        sum(TYPE_BYTES[kind] * count for kind, count in text.local.values()),
        "reusable",
        fixed if text.local else "",
    )


@dataclass(frozen=True, slots=True)
class _Value:
    """A value as text: statements, then `value` of type `type`."""

    lines: Sequence[str]
    value: str
    type: str


class _ProductText:
    """The statements of one contraction, and the local arrays that it declares: (type, elements) by name.

    dtype: of the sum. words: elements of local memory that there are.
    """

    def __init__(self, tiling: Tiling, arguments: Arguments, dtype: str, words: int) -> None:
        self.tiling, self.product, self.schedule = tiling, tiling.product, tiling.schedule
        self.words, self.body = words, Body()
        self.local: dict[str, tuple[str, int]] = {}
        self.type = COMPUTE[dtype]
        self.width = int(tiling.width)
        self._arguments, self._dtype, self._scopes = arguments, dtype, 0

    def read(self, operand: Operand) -> _Value:
        """Return an operand's value at `width` neighbours along its lane."""
        return self._value(operand.value, operand.lane, int(operand.width))

    def meets(self) -> _Value | None:
        """Return a test for work of a block of columns at a point of the outer inner loops; None: always."""
        if not self.product.skips or self.product.run % self.schedule.block_cols:
            return None
        return self._value(Guarded(self.product.skips, constant(1, "int32"), constant(0, "int32")), None, 1)

    def results(self) -> _Value:
        """Return the statements that store everything made of the local `acc`, `width` neighbours at once."""
        renderer = self._renderer(last_of(self.product.cols), self.width)
        write_all(renderer, self.product.stores, self._arguments)
        return _Value(renderer.lines, "", renderer.type_of(self._dtype))

    def _value(self, scalar: Scalar, lane: Axis | None, width: int) -> _Value:
        renderer = self._renderer(lane, width)
        value = renderer.value(scalar, wide=True)
        return _Value(renderer.lines, value, renderer.type_of(self._dtype))

    def _renderer(self, lane: Axis | None, width: int) -> Renderer:
        self._scopes += 1
        site_of, lines, helpers = self._arguments.site_of, list[str](), self.body.helpers
        return Renderer(site_of, lane if width > 1 else None, width, lines, helpers, f"v{self._scopes}_")

    def declare(self, **arrays: int) -> None:
        """Declare local arrays of sums, by their numbers of elements, aligned to whole vectors."""
        for name, count in arrays.items():
            self.local[name] = self.type, int(count)
            within = 128 if self.schedule.kind == "panel" else 32
            self.body.add(f"__local {self.type} {name}[{count}] __attribute__((aligned({within})));")

    def at_column(self, column: str) -> list[str]:
        """Return the statements that find the loop variables of the columns that are written at once."""
        return places(self.product.cols, column, last_of(self.product.cols), self.width)

    @contextmanager
    def rounds(self, head: str) -> Iterator[None]:
        """Open a loop that is unrolled."""
        self.body.add(UNROLL)
        with self.body.block(head):
            yield


# "panel" ------------------------------------------------------------------------------------------------


def _panel(text: _ProductText) -> None:
    """Write a "panel": guards, strides and conversions are met while copying, once an element."""
    body, product, schedule, kind = text.body, text.product, text.schedule, text.type
    cut = {name: int(number) for name, number in text.tiling.cut.items()}
    results, meets = text.results(), text.meets()
    a, b = text.read(text.tiling.a), text.read(text.tiling.b)
    local = {name: int(count) for name, count in text.tiling.local.items()}
    block = sum(local.values())
    # With few sizes of local memory, contractions of many shapes share a kernel.
    words = LOCAL_WORDS * 4 ** max(0, -(-((block - 1) // LOCAL_WORDS).bit_length() // 2))
    text.declare(words=block if words > MOST_LOCAL_WORDS else min(words, text.words))
    named = {name: argument(number, name) for name, number in cut.items()}
    _, rows, cols, _ = product.sizes
    block_rows = argument(schedule.block_rows, "block rows")
    block_cols = argument(schedule.block_cols, "block cols")
    body.add(
        f"__local {kind}* const a_block = words;",
        f"__local {kind}* const b_block = a_block + {argument(local['a'], 'a block')};",
        f"__local {kind}* const tile = b_block + {argument(local['b'], 'b block')};",
        f"const int block_rows = {block_rows}, block_cols = {block_cols}, "
        f"slices = {argument(schedule.slices, 'slices')};",
    )
    first = argument(int(schedule.rows_first), "rows first")
    body.add(
        f"const int row0 = ({first} ? get_group_id(0) : get_group_id(1)) * block_rows;",
        f"const int col0 = ({first} ? get_group_id(1) : get_group_id(0)) * block_cols;",
        f"const int rows = min(block_rows, {argument(rows, 'rows')} - row0), "
        f"cols = min(block_cols, {argument(cols, 'cols')} - col0);",
        "const int batch = (int)get_group_id(2) / slices, part = get_group_id(2) - batch * slices;",
        *places(product.batch, "batch"),
        f"const int first = part * {named['chunks_a_slice']}, "
        f"last = min(first + {named['chunks_a_slice']}, {named['chunks']});",
    )
    with body.block("for (int chunk = first; chunk < last; ++chunk)"):
        body.add(
            f"const int outer = chunk / {named['pieces']} * {named['outers']}, "
            f"outer_end = min(outer + {named['outers']}, {named['outer_size']});",
            f"const int inner = chunk % {named['pieces']} * {named['piece']}, "
            f"inner_end = min(inner + {named['piece']}, {named['inner_size']});",
        )
        if meets is None:
            body.add("const int depth = (outer_end - outer) * (inner_end - inner);")
        else:
            body.add(*places(product.cols, "col0"), "int depth = 0;")
            with _points(text, cut, meets):
                body.add("depth += inner_end - inner;")
        _copy_rows(text, cut, meets, a)
        _copy_cols(text, cut, meets, b)
        _multiply(text, cut["depth"])
    with body.block("for (int r = 0; r < rows; ++r)"):
        body.add(*places(product.rows, "row0 + r"))
        with body.block(f"for (int c = 0; c < cols; c += {text.width})"):
            body.add(
                *text.at_column("col0 + c"),
                f"const {results.type} acc = *(__local {results.type}*)(tile + r * block_cols + c);",
                *results.lines,
            )


@contextmanager
def _points(text: _ProductText, cut: Mapping[str, int], meets: _Value | None) -> Iterator[None]:
    """Open the loops over a chunk's points of the outer inner loops, those without work left out."""
    outer, body = text.product.inner[:-1], text.body
    if cut["chunks"] == 1 and cut["inner_size"] < SHORT_INNER and outer:
        *heads, last = [
            f"for (int {a.name} = 0; {a.name} < {argument(a.extent, a.name)}; ++{a.name})" for a in outer
        ]
        body.add(*heads)
        statements = []
    else:
        last, statements = "for (int o = outer; o < outer_end; ++o)", places(outer, "o")
    with body.block(last):
        body.add(*statements)
        if meets is not None:
            body.add(*meets.lines, f"if (!{meets.value}) continue;")
        yield


def _copy_rows(text: _ProductText, cut: Mapping[str, int], meets: _Value | None, value: _Value) -> None:
    """Copy rows of the first operand into local memory: whole ones, or tiles of them."""
    a, body, tile, deep = text.tiling.a, text.body, text.schedule.tile_rows, cut["depth"]
    step = a.width if a.along_inner else tile
    with body.block(f"for (int r = 0; r < rows; r += {a.across})"):
        last = None if a.along_inner else last_of(a.loops)
        to = f"r * {deep}" if a.along_inner else f"r / {tile} * {tile * deep} + r % {tile}"
        body.add(*places(a.loops, "row0 + r", last, a.width), f"__local {text.type}* to = a_block + {to};")
        next_point = f"q += {a.width}" if a.along_inner else "++q"
        with (
            _points(text, cut, meets),
            body.block(f"for (int q = inner; q < inner_end; {next_point}, to += {step})"),
        ):
            body.add(*_at_depth(text.product, a.depth), *value.lines)
            body.add(f"*(__local {value.type}*)to = {value.value};")


def _copy_cols(text: _ProductText, cut: Mapping[str, int], meets: _Value | None, value: _Value) -> None:
    """Copy columns of the second operand into local memory, tile by tile, transposed if need be."""
    b, body, tile, product = text.tiling.b, text.body, text.schedule.tile_cols, text.product
    width, deep = int(b.width), cut["depth"] * tile
    if not b.along_inner:
        body.add(f"__local {text.type}* to = b_block;")
        with _points(text, cut, meets), body.block(f"for (int q = inner; q < inner_end; ++q, to += {tile})"):
            body.add(*_at_depth(product, 1))
            with body.block(f"for (int c = 0; c < cols; c += {width})"):
                body.add(*places(b.loops, "col0 + c", last_of(b.loops), width), *value.lines)
                to = f"(to + c / {tile} * {deep} + c % {tile})"
                body.add(f"*(__local {value.type}*){to} = {value.value};")
        return
    with body.block(f"for (int c = 0; c < cols; c += {width})"):
        body.add(f"__local {text.type}* to = b_block + c / {tile} * {deep} + c % {tile};")
        with (
            _points(text, cut, meets),
            body.block(f"for (int q = inner; q < inner_end; q += {width}, to += {width * tile})"),
        ):
            body.add(*_at_depth(product, width), f"{value.type} v[{width}];")
            with text.rounds(f"for (int x = 0; x < {width}; ++x)"):
                column = f"min(col0 + c + x, {argument(size(b.loops) - 1, 'last column')})"
                body.add(*places(b.loops, column), *value.lines, f"v[x] = {value.value};")
            _transpose(body, value.type, width)
            body.add(
                UNROLL, f"for (int x = 0; x < {width}; ++x) *(__local {value.type}*)(to + x * {tile}) = v[x];"
            )


def _at_depth(product: Product, width: int) -> list[str]:
    return places(product.inner[-1:], "q", last_of(product.inner), int(width))


def _transpose(body: Body, kind: str, count: int) -> None:
    """Transpose vectors in registers: v[i].s(j) becomes v[j].s(i), in rounds of exchanging halves."""
    step = 1
    while step < count:
        with body.block(""):
            body.add(f"{kind} t[{count}];")
            for row in range(count):
                upper = row // step % 2
                odd = [lane // step % 2 for lane in range(count)]
                picked = ", ".join(
                    f"v[{row - step * upper + step * o}].s{lane - step * o + step * upper:x}"
                    for lane, o in enumerate(odd)
                )
                body.add(f"t[{row}] = ({kind})({picked});")
            body.add(*[f"v[{row}] = t[{row}];" for row in range(count)])
        step *= 2


def _multiply(text: _ProductText, deep: int) -> None:
    """Multiply the panels tile by tile; where registers are few or short, by parts of tiles."""
    s, body = text.schedule, text.body
    ymm = max(1, s.vector * TYPE_BYTES[text.type] // 32)
    fits = [
        (rows, count)
        for rows in range(1, s.tile_rows + 1)
        for count in range(1, s.vectors + 1)
        if s.tile_rows % rows == s.vectors % count == 0 and (rows + 1) * count * ymm < REGISTERS
    ]
    part = max(fits, key=prod, default=(1, 1))
    if part == (s.tile_rows, s.vectors):
        _multiply_tiles(text, deep, *part)
        return
    body.helpers[WIDE] = None
    for head, tile in (("if (te_wide)", (s.tile_rows, s.vectors)), ("else", part)):
        with body.block(head):
            _multiply_tiles(text, deep, *tile)


def _multiply_tiles(text: _ProductText, deep: int, tile_rows: int, count: int) -> None:
    """Multiply tiles of so many rows and vectors, and add the products to the sums of the chunks before."""
    s, body, rows = text.schedule, text.body, range(tile_rows)
    vector, along = f"{text.type}{s.vector}", text.tiling.a.along_inner
    from_a, from_b = (
        f"{name} * {deep}" if step % whole == 0 else f"{name} / {whole} * {whole * deep} + {name} % {whole}"
        for name, step, whole in (
            ("r", tile_rows, 1 if along else s.tile_rows),
            ("c", count * s.vector, s.tile_cols),
        )
    )
    body.add(f"for (int c = 0; c < cols; c += {count * s.vector})")
    with body.block(f"for (int r = 0; r < rows; r += {tile_rows})"):
        body.add(
            TURN,
            f"__local const {text.type}* from_a = a_block + {from_a};",
            f"__local const {text.type}* from_b = b_block + {from_b};",
            f"__local {text.type}* sums = tile + r * block_cols + c;",
            *[f"{vector} {', '.join(f's{i}_{j} = 0' for j in range(count))};" for i in rows],
        )

        def place(i: int, j: int) -> str:
            return f"*(__local {vector}*)(sums + {i} * block_cols + {j * s.vector})"

        with body.block("if (chunk > first)"):
            body.add(*[" ".join(f"s{i}_{j} = {place(i, j)};" for j in range(count)) for i in rows])
        with body.block("for (int k = 0; k < depth; ++k)"):
            loaded = [f"b{j} = *(__local const {vector}*)(from_b + {j * s.vector})" for j in range(count)]
            body.add(f"const {vector} {', '.join(loaded)};")
            for i in rows:
                products = " ".join(f"s{i}_{j} += x * b{j};" for j in range(count))
                body.add(f"{{ const {text.type} x = from_a[{i * deep if along else i}]; {products} }}")
            body.add(f"from_a += {1 if along else s.tile_rows};", f"from_b += {s.tile_cols};")
        body.add(*[" ".join(f"{place(i, j)} = s{i}_{j};" for j in range(count)) for i in rows])


# "local" ------------------------------------------------------------------------------------------------


def _local(text: _ProductText) -> None:
    """Write a "local": blocks are fetched into registers while those before them are multiplied.

    Where a block of inner points crosses several loops, a few work-items find its places (`points`), a block
    ahead: the others do not divide.
    """
    body, product, s, t = text.body, text.product, text.schedule, text.tiling
    cut = {name: int(number) for name, number in t.cut.items()}
    staged = [_Staged(text, cut, letter, read, text.read(read)) for letter, read in (("a", t.a), ("b", t.b))]
    results, meets = text.results(), text.meets() if cut["nested"] else None
    text.declare(a_block=t.local["a_block"], b_block=t.local["b_block"])
    if cut["table"]:
        text.local["points"] = "int", int(t.local["points"])
        body.add(f"__local int points[2][{len(product.inner)}][{s.depth}];")
    rows, cols = cut["row_blocks"], cut["col_blocks"]
    each = argument(cut["chunks_a_slice"], "chunks a slice")
    number = [("number", rows * cols), ("batch", product.sizes[0])]
    across = s.block_cols // s.tile_cols
    lanes = min(8, across)
    body.add(
        "const int lid = get_local_id(0), part = get_group_id(1);",
        *declared(digits("(int)get_group_id(0)", number)),
        *declared(digits("number", [("within", s.band * cols), ("band", rows)])),
        f"const int height = min({s.band}, {argument(rows, 'row blocks')} - band * {s.band});",
        f"const int row0 = (band * {s.band} + within % height) * {s.block_rows}, "
        f"col0 = within / height * {s.block_cols};",
        *places(product.batch, "batch"),
        f"const int first = part * {each}, last = min(first + {each}, {argument(cut['chunks'], 'chunks')});",
        "const int warp = lid / 32, lane = lid % 32;",
        f"const int tx = (warp % {across // lanes} * {lanes} + lane % {lanes}) * 4;",
        f"const int ty = (warp / {across // lanes} * {32 // lanes} + lane / {lanes}) * 4;",
    )
    for operand in staged:
        operand.place()
    body.add(f"{text.type}4 sums[{s.tile_rows}][{s.vectors}];", UNROLL)
    body.add(f"for (int i = 0; i < {s.tile_rows}; ++i)", f"  {UNROLL}")
    body.add(f"  for (int j = 0; j < {s.vectors}; ++j) sums[i][j] = 0;", "int chunk = first;")
    if meets is not None:
        body.add(*places(product.cols, "col0"))
        _skip(text, cut, meets, "chunk")
    if cut["table"]:
        _find_points(text, "chunk")
        _find_points(text, "chunk + 1")
        body.add("barrier(CLK_LOCAL_MEM_FENCE);")
    with body.block("if (chunk < last)"):
        for operand in staged:
            operand.fetch("chunk")
        for operand in staged:
            operand.keep("0")
    body.add("barrier(CLK_LOCAL_MEM_FENCE);", "int now = 0;")
    with body.block("for (int next; chunk < last; chunk = next)"):
        body.add("next = chunk + 1;")
        if meets is not None:
            _skip(text, cut, meets, "next")
        with body.block("if (next < last)"):
            for operand in staged:
                operand.fetch("next")
        if cut["table"]:
            _find_points(text, "next + 1")
        body.add(TURN)
        _multiply_blocks(text, *[operand.stride for operand in staged])
        body.add("now ^= 1;")
        with body.block("if (next < last)"):
            for operand in staged:
                operand.keep("now")
        body.add("barrier(CLK_LOCAL_MEM_FENCE);")
    _store_tile(text, results)


@dataclass(frozen=True, slots=True)
class _Staged:
    """An operand of a "local" on its way: `letter`_next in registers, then `letter`_block in local memory."""

    text: _ProductText
    cut: Mapping[str, int]
    letter: str
    operand: Operand
    value: _Value

    @property
    def count(self) -> int:
        """Vectors of a work-item."""
        return int(self.operand.time[0].count)

    @property
    def extent(self) -> int:
        """Rows or columns of a block."""
        return self.text.schedule.block_rows if self.letter == "a" else self.text.schedule.block_cols

    @property
    def stride(self) -> int:
        """Elements of a line of a block."""
        return int(self.text.tiling.local[f"{self.letter}_block"]) // (2 * self.text.schedule.depth)

    def _item(self, name: str, within: bool) -> str:
        """Return a work-item's place in a block along its lane (within), or across."""
        beside = self.operand.lanes[0]
        place = f"% {beside.count} * {self.operand.width}" if within else f"/ {beside.count}"
        return f"const int item = lid + s * {self.text.schedule.threads}, {name} = item {place};"

    def place(self) -> None:
        """Find the loop variables of rows (or columns), which stay the same."""
        letter, body, read = self.letter, self.text.body, self.operand
        body.add(f"{self.value.type} {letter}_next[{self.count}];")
        if not read.loops:
            return
        names = [axis.name for axis in read.loops]
        body.add(f"int {', '.join(f'{letter}_{name}[{self.count}]' for name in names)};")
        with self.text.rounds(f"for (int s = 0; s < {self.count}; ++s)"):
            start = f"min({'row0' if letter == 'a' else 'col0'} + x, {size(read.loops) - read.across})"
            last = None if read.along_inner else last_of(read.loops)
            body.add(self._item("x", not read.along_inner), *places(read.loops, start, last, int(read.width)))
            body.add(*[f"{letter}_{name}[s] = {name};" for name in names])

    def fetch(self, block: str) -> None:
        """Read the share of a block into registers."""
        text, read, cut, body = self.text, self.operand, self.cut, self.text.body
        inner, depth, width = text.product.inner, text.schedule.depth, int(read.width)
        over, at = quotient(block, cut["blocks_inner"], "inner blocks"), block
        if cut["nested"] and len(inner) > 1:
            at = f"({block} - {argument(cut['blocks_inner'], 'inner blocks')} * ({over}))"
        with text.rounds(f"for (int s = 0; s < {self.count}; ++s)"):
            body.add(self._item("k", read.along_inner))
            body.add(*[f"const int {a.name} = {self.letter}_{a.name}[s];" for a in read.loops])
            if cut["nested"] or cut["tail"] or not cut["table"]:
                body.add(f"const int q = {at} * {depth} + k;")
            with body.block(""):
                lane = last_of(inner) if read.along_inner else None
                if cut["nested"]:
                    body.add(*places(inner[:-1], over))
                if cut["table"]:
                    for number, axis in enumerate(inner):
                        part = f" / {width}" if axis is inner[-1] and read.depth > 1 else ""
                        body.add(f"const int {axis.name} = points[{block} & 1][{number}][k]{part};")
                else:
                    most = argument(cut["tail"] - read.depth, f"tail {self.letter}")
                    body.add(f"const int within = {f'min(q, {most})' if cut['tail'] else 'q'};")
                    body.add(*places(inner[-1:] if cut["nested"] else inner, "within", lane, width))
                value = self.value.value
                if cut["tail"]:
                    value = f"q < {argument(cut['tail'], 'tail')} ? {value} : ({self.value.type})(0)"
                body.add(*self.value.lines, f"{self.letter}_next[s] = {value};")

    def keep(self, buffer: str) -> None:
        """Write the share of a block from registers into local memory, transposed if need be."""
        text, read, body, letter = self.text, self.operand, self.text.body, self.letter
        width, short = int(read.width), read.lanes[0].count
        place = f"{letter}_block + {buffer} * {text.schedule.depth * self.stride}"
        with text.rounds(f"for (int s = 0; s < {self.count}; ++s)"):
            body.add(f"const int item = lid + s * {text.schedule.threads};")
            if read.along_inner:
                place += f" + item % {short} * {width * self.stride} + item / {short}"
            else:
                place += f" + item / {short} * {self.stride} + item % {short} * {width}"
            body.add(f"__local {text.type}* to = {place};")
            if read.along_inner:
                for lane in range(width):
                    part = f".s{lane:x}" if width > 1 else ""
                    body.add(f"to[{lane * self.stride}] = {letter}_next[s]{part};")
            else:
                body.add(f"*(__local {self.value.type}*)to = {letter}_next[s];")


def _find_points(text: _ProductText, block: str) -> None:
    """Find the places of a block's inner points, a point a work-item."""
    depth, inner, body = text.schedule.depth, text.product.inner, text.body
    with body.block(f"if (lid < {depth})"):
        last = argument(size(inner) - 1, "last point")
        body.add(f"const int within = min(({block}) * {depth} + lid, {last});", *places(inner, "within"))
        body.add(*[f"points[({block}) & 1][{k}][lid] = {axis.name};" for k, axis in enumerate(inner)])


def _skip(text: _ProductText, cut: Mapping[str, int], meets: _Value, block: str) -> None:
    """Go on to the next block that has work."""
    with text.body.block(f"for (; {block} < last; ++{block})"):
        over = quotient(block, cut["blocks_inner"], "inner blocks")
        text.body.add(*places(text.product.inner[:-1], over), *meets.lines, f"if ({meets.value}) break;")


def _multiply_blocks(text: _ProductText, a_stride: int, b_stride: int) -> None:
    """Multiply a work-item's rows and columns of the two blocks in local memory."""
    s, body, kind = text.schedule, text.body, text.type
    body.add(
        f"__local const {kind}* from_a = a_block + now * {s.depth * a_stride} + ty;",
        f"__local const {kind}* from_b = b_block + now * {s.depth * b_stride} + tx;",
    )
    with text.rounds(f"for (int k = 0; k < {s.depth}; ++k)"):
        apart, beside = 4 * s.block_rows // s.tile_rows, s.block_cols // s.vectors
        four = f"const {kind}4 {{0}} = *(__local const {kind}4*)({{1}} + k * {{2}} + {{3}});"
        body.add(*[four.format(f"x{i}", "from_a", a_stride, i * apart) for i in range(s.tile_rows // 4)])
        body.add(*[four.format(f"y{j}", "from_b", b_stride, j * beside) for j in range(s.vectors)])
        for i in range(s.tile_rows):
            body.add(" ".join(f"sums[{i}][{j}] += x{i // 4}.s{i % 4} * y{j};" for j in range(s.vectors)))


def _store_tile(text: _ProductText, results: _Value) -> None:
    """Compute and store what is made of a work-item's sums."""
    s, body, width = text.schedule, text.body, text.width
    with text.rounds(f"for (int i = 0; i < {s.tile_rows}; ++i)"):
        body.add(f"const int row = row0 + i / 4 * {4 * s.block_rows // s.tile_rows} + ty + i % 4;")
        body.add(f"if (row >= {argument(text.product.sizes[1], 'rows')}) continue;")
        body.add(*places(text.product.rows, "row"))
        with text.rounds(f"for (int j = 0; j < {s.vectors}; ++j)"):
            body.add(f"const {text.type}4 four = sums[i][j];")
            column = f"const int col = col0 + j * {s.block_cols // s.vectors} + tx"
            value = {
                1: "x < 2 ? (x == 0 ? four.s0 : four.s1) : (x == 2 ? four.s2 : four.s3)",
                2: "x == 0 ? four.lo : four.hi",
                4: "four",
            }[width]
            if width < LANES:
                body.add(UNROLL)
            with body.block(f"for (int x = 0; x < 4; x += {width})" if width < LANES else ""):
                body.add(
                    f"{column}{' + x' if width < LANES else ''};", f"const {results.type} acc = {value};"
                )
                with body.block(f"if (col < {argument(text.product.sizes[2], 'cols')})"):
                    body.add(*text.at_column("col"), *results.lines)


# "register" ---------------------------------------------------------------------------------------------


def _register(text: _ProductText) -> None:
    """Write a "register": c += a.x * b0 + a.y * b1 + a.z * b2 + a.w * b3 (TMModel, Listing 1)."""
    body, product, s, t, kind = text.body, text.product, text.schedule, text.tiling, text.type
    cut = {name: int(number) for name, number in t.cut.items()}
    operands = [("a", t.a, text.read(t.a), s.tile_rows), ("b", t.b, text.read(t.b), s.tile_cols)]
    results, step = text.results(), cut["step"]
    each, pieces, piece = cut["chunks_a_slice"], cut["pieces"], cut["piece"]
    rows, cols = (argument(n, name) for n, name in zip(product.sizes[1:3], ("rows", "cols"), strict=True))
    slices = argument(s.slices, "slices")
    body.add(
        f"const int col0 = get_global_id(0) * {s.tile_cols}, row0 = get_global_id(1) * {s.tile_rows};",
        f"if (col0 >= {cols} || row0 >= {rows}) return;",
        f"const int batch = get_global_id(2) / {slices}, part = get_global_id(2) % {slices};",
        *places(product.batch, "batch"),
    )
    for letter, read, _, extent in operands:
        for number in range(0, extent, read.across) if read.loops else ():
            names = [(axis.name, f"{letter}{number}_{axis.name}") for axis in read.loops]
            body.add(f"int {', '.join(name for _, name in names)};")
            with body.block(""):
                last = None if read.along_inner else last_of(read.loops)
                start = f"min(x, {size(read.loops) - read.across})"
                body.add(f"const int x = {'row0' if letter == 'a' else 'col0'} + {number};")
                body.add(*places(read.loops, start, last, int(read.width)))
                body.add(*[f"{name} = {axis};" for axis, name in names])
    body.add(
        *[f"{kind}4 {', '.join(f's{i}_{j} = 0' for j in range(s.vectors))};" for i in range(s.tile_rows)],
        f"const int last = min((part + 1) * {each}, {cut['chunks']});",
    )
    with body.block(f"for (int chunk = part * {each}; chunk < last; ++chunk)"):
        body.add(
            f"const int outer = chunk / {pieces}, inner = chunk % {pieces} * {piece}, "
            f"end = min(inner + {piece}, {cut['inner_size']});",
            *places(product.inner[:-1], "outer"),
        )
        with body.block(f"for (int q = inner; q < end; q += {step})"):
            body.add(TURN)
            for letter, read, value, _ in operands:
                for place, k in _rounds(read):
                    _read_into(text, f"{letter}{place}", read, value, k)
            for k in range(step):
                fours = [_four(t.b, j, k, kind) for j in range(s.vectors)]
                for i in range(s.tile_rows):
                    one = _element(t.a, "a", i, k)
                    body.add(" ".join(f"s{i}_{j} += {one} * {four};" for j, four in enumerate(fours)))
    for i in range(s.tile_rows):
        with body.block(f"if (row0 + {i} < {rows})"):
            body.add(f"const int row = row0 + {i};", *places(product.rows, "row"))
            for column in range(0, s.tile_cols, text.width):
                j, x = divmod(column, LANES)
                part = {4: "", 2: ".hi" if x else ".lo", 1: f".s{x}"}[text.width]
                with body.block(f"if (col0 + {column} < {cols})"):
                    body.add(f"const int col = col0 + {column};", *text.at_column("col"))
                    body.add(f"const {results.type} acc = s{i}_{j}{part};", *results.lines)


def _rounds(read: Operand) -> Iterator[tuple[int, int]]:
    """Yield (row or column, inner point) of the reads that are written out, in the order of their loops."""
    near, far, _ = read.time
    for outer in range(int(far.count)):
        for inner in range(int(near.count)):
            numbers = {near.role: inner * int(near.weight), far.role: outer * int(far.weight)}
            yield numbers[read.role], numbers["inner"]


def _read_into(text: _ProductText, variable: str, read: Operand, value: _Value, k: int) -> None:
    """Read a vector into a variable of its own."""
    deepest, body, depth = last_of(text.product.inner), text.body, int(read.depth)
    at = f"q + {k}"
    if depth > 1:
        at = f"q / {depth} + {k // depth}" if k else f"q / {depth}"
    body.add(f"{value.type} {variable}_{k};")
    with body.block(""):
        body.add(f"const int {deepest.name} = {at};")
        body.add(*[f"const int {axis.name} = {variable}_{axis.name};" for axis in read.loops])
        body.add(*value.lines, f"{variable}_{k} = {value.value};")


def _element(read: Operand, letter: str, place: int, k: int) -> str:
    """Return the value at a row (or column) and an inner point."""
    across, depth = int(read.across), int(read.depth)
    name = f"{letter}{place - place % across}_{k - k % depth}"
    return f"{name}.s{place % across or k % depth}" if read.width > 1 else name


def _four(read: Operand, vector: int, k: int, kind: str) -> str:
    """Return the values at four neighbouring columns and an inner point."""
    if read.across == LANES:
        return f"b{vector * LANES}_{k}"
    values = [_element(read, "b", vector * LANES + x, k) for x in range(LANES)]
    return f"({kind}{LANES})({', '.join(values)})"


_WRITERS: Mapping[Kind, Callable[[_ProductText], None]] = {
    "panel": _panel,
    "local": _local,
    "register": _register,
}
