"""Programs as files: what is written is read back, and what is mangled is refused in one line."""

import json
from dataclasses import replace
from hashlib import sha256

import pytest
from oracles.small_programs import chain, image_copy, sgd, vector_add

from torchedge.errors import InputError
from torchedge.expressions.dialect import CHECK, SAMPLER, UNALIGNED
from torchedge.lowering.kernel_texts import ITEMS_ANYWAY
from torchedge.lowering.program_files import (
    parse_program,
    program_document,
    program_schema,
    read_program,
    write_program,
)
from torchedge.textures.layouts import Layout

IMAGE = Layout((0, 2, 3, 1), "image", 2, "block-4")
PROGRAMS = {
    "add": vector_add(),
    "chain": chain(in_place=True),
    "sgd": sgd(),
    "images": image_copy((3, 7, 5, 6), IMAGE),
    "texels": image_copy((3, 7, 5, 6), Layout(IMAGE.order, "", 2, row_texels=64), "float16", "image_buffer"),
}
FIELDS = (
    "name", "tensors", "kernels", "launches", "inputs", "outputs", "arena", "hyperparameters", "target",
    "notes",
)  # fmt: skip


def same(first, second):
    return first.digest == second.digest and all(getattr(first, f) == getattr(second, f) for f in FIELDS)


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("ending", [".json", ".json.gz"])
def test_what_is_written_is_read_back(tmp_path, name, ending):
    path = tmp_path / f"program{ending}"
    write_program(path, PROGRAMS[name])
    assert same(read_program(path), PROGRAMS[name])


@pytest.mark.parametrize("items", [ITEMS_ANYWAY, ITEMS_ANYWAY + 1])
def test_few_numbers_have_some_work_items_at_least(items):
    """Few numbers may be the bounds of a long sum, as of a mask; more work-items than that are refused."""
    document = json.loads(json.dumps(program_document(PROGRAMS["add"])))
    (launch,) = document["launches"]
    launch["global_size"], launch["local_size"] = [items], [1]
    if items == ITEMS_ANYWAY:
        assert parse_program("x", document).launches[0].global_size == (items,)
    else:
        with pytest.raises(InputError, match=f"at most {ITEMS_ANYWAY} work-items"):
            parse_program("x", document)


@pytest.mark.parametrize("name", PROGRAMS)
def test_texts_of_kernels_may_lie_elsewhere(name):
    program = PROGRAMS[name]
    document = json.loads(json.dumps(program_document(program, sources=False)))
    texts = {kernel.name: kernel.source for kernel in program.kernels}
    assert same(parse_program("x", document, texts), program)
    with pytest.raises(InputError, match="there is no text of kernel"):
        parse_program("x", document, {})
    with pytest.raises(InputError, match=r"sha256 is .* computed from the other entries"):
        parse_program("x", document, {n: text + "\n" for n, text in texts.items()})


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_schema_accepts_what_is_written(name):
    jsonschema = pytest.importorskip("jsonschema")
    said = program_schema()
    validator = jsonschema.Draft202012Validator
    validator.check_schema(said)
    validator(said).validate(program_document(PROGRAMS[name]))
    validator(said).validate(program_document(PROGRAMS[name], sources=False))
    assert list(validator(said).iter_errors({}))


def at(document, path):
    """Return the container that holds the last step of a path, and that step."""
    *before, last = path
    for step in before:
        document = document[step]
    return document, last


WRONG = [
    ("sgd", ("tensors", 0, "shape"), [2**40, 2**40], "order is|too large"),
    ("sgd", ("tensors", 0, "shape"), [2**39], "too large"),
    ("sgd", ("tensors", 0, "name"), "w", "two tensors are called 'w'"),
    ("sgd", ("tensors", 0, "layout", "order"), [1], "order is"),
    ("sgd", ("tensors", 0, "layout", "pattern"), "column", "a buffer has neither"),
    ("sgd", ("kernels", 0, "name"), "a/../b", "identifier"),
    ("sgd", ("kernels", 0, "name"), "TOTAL", "does not define exactly one"),
    ("sgd", ("kernels", 0, "sha256"), "0" * 64, r"kernels\[0\].sha256 is '0+'; .* computed from"),
    ("sgd", ("kernels", 0, "in_place"), [[0, 9]], "in_place names argument 9"),
    ("chain", ("kernels", 0, "in_place"), [[1, 0]], r"in_place is \[1, 0\]; expected an argument"),
    ("sgd", ("launches", 0, "kernel"), 7, "kernel is 7; expected a whole number from 0 to 2"),
    ("sgd", ("launches", 0, "tensors"), [0], "1 tensors for kernel total"),
    ("sgd", ("launches", 0, "tensors"), [0, 99], "from 0 to 4"),
    ("add", ("launches", 0, "tensors"), [0, 1, 1], r"argument 2 is y|writes input y"),
    ("add", ("launches", 0, "tensors"), [2, 1, 2], "writes z, which is another argument, too"),
    ("add", ("tensors", 0, "dtype"), "float16", "argument 0 is x, a buffer of float16; .* buffer of float"),
    ("images", ("tensors", 0, "layout"), {"order": [0, 2, 3, 1]}, "argument 0 is x, a buffer of float32"),
    ("add", ("launches", 0, "global_size"), [2**40], r"work-items; expected at most \d+"),
    ("add", ("launches", 0, "global_size"), [2**31, 2], r"work-items; expected at most \d+"),
    ("add", ("kernels", 0, "local_bytes"), 4, "local_bytes is 4; its text declares 0"),
    ("add", ("kernels", 0, "access"), ["write", "read", "write"], r"access\[0\] is write"),
    ("add", ("kernels", 0, "access"), ["read", "read"], "declares 3 parameters; expected 2"),
    ("sgd", ("launches", 0, "sizes"), [3], "1 sizes for kernel total; expected 0"),
    ("sgd", ("kernels", 0, "sizes"), 1, "declares 2 parameters; expected 2 tensors, then 1 sizes"),
    ("sgd", ("kernels", 0, "checks"), True, "declares 2 parameters"),
    ("sgd", ("launches", 0, "global_size"), [], "global_size"),
    ("sgd", ("launches", 0, "global_size"), [2**30, 2**30], r"work-items; expected at most \d+"),
    ("sgd", ("launches", 0, "local_size"), [2], "whole groups"),
    ("sgd", ("inputs",), [2], "another role than input"),
    ("sgd", ("inputs",), [0, 0, 1], "inputs lists a tensor twice"),
    ("sgd", ("hyperparameters", "lr"), 0, "is not a single number"),
    ("chain", ("outputs",), [3], "is an intermediate"),
    ("chain", ("arena", "nbytes"), 8, "within 8"),
    ("chain", ("arena", "offsets"), [], "has no place"),
    ("chain", ("arena", "offsets"), [[99, 0]], "has no place|is no intermediate"),
    ("chain", ("arena", "offsets", 0), [3, 0], "arena.offsets names a number twice"),
    ("chain", ("kernels", 0, "in_place"), [], "writes t1 over t0"),
    ("chain", ("launches", 0, "tensors"), [2, 3], "before it is written"),
    ("images", ("arena", "slots"), [], "does not fit slot"),
    ("images", ("arena", "slots"), [[1, 1, "float32"]], "does not fit slot"),
    ("images", ("tensors", 0, "layout", "split"), 9, "split is 9"),
    ("images", ("tensors", 0, "layout", "row_texels"), 64, "row_texels is 64"),
    ("texels", ("tensors", 0, "layout", "row_texels"), 1, "row_texels is 1"),
    ("images", ("tensors", 0, "shape"), [2**30, 7, 5, 6], "an image of"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "path", "value", "message"), WRONG)
def test_what_is_wrong_is_named(name, path, value, message):
    document = json.loads(json.dumps(program_document(PROGRAMS[name])))
    holder, last = at(document, path)
    holder[last] = value
    with pytest.raises(InputError, match=message) as caught:
        parse_program("x.json", document)
    assert str(caught.value).startswith("x.json") and "\n" not in str(caught.value)


SOURCES = {
    '#include "/etc/passwd"': "its text has '#'",
    "/* */ %: include <a>": "its text has '%:'|'/\\*'",
    "#/* */include <a>": "its text has '#'",
    "#\\\ninclude <a>": "its text has '#'",
    "??=include <a>": "its text has '\\?\\?'",
    "\f#include <a>": "its text has '.x0c'",
    "\v#include <a>": "its text has '.x0b'",
    "#pragma unroll \\\n#include <a>": "its text has '#'",
    'constant char* a = "/*";\n#include <a>\n// */': "its text has '\"'|'#'",
    "int a = '/*';": """its text has "'\"""",
    "#if __has_include(<a>)": "its text has '#'",
    "int a = __has_include(<a>);": "its text has '__has_include'",
    '__asm__(".incbin /etc/passwd");': """its text has '"'""",
    "void f() { asm volatile(1); }": "its text has 'asm'",
    "_Pragma(1)": "its text has '_Pragma'",
    "__attribute__((constructor)) void f() {}": "its text has '__attribute__'",
    "// hides \\\nint a;": "its text has '.*'",
    "/* hides */": "its text has '/.'",
    "int \u00e9;": "its text has '\u00e9'",
    "__kernel void other() {}": "exactly one __kernel",
    "\ud800": "expected OpenCL C",
    "\0": "expected OpenCL C",
}


@pytest.mark.parametrize("text", SOURCES)
def test_hostile_texts_of_kernels_are_refused(text):
    program = vector_add()
    document = program_document(program, sources=False)
    source = f"{text}\n{program.kernels[0].source}"
    document["kernels"][0]["sha256"] = sha256(source.encode(errors="replace")).hexdigest()
    with pytest.raises(InputError, match=SOURCES[text]):
        parse_program("x", document, {"add": source})


def test_texts_may_define_the_macros_of_exports_alone():
    kernel = vector_add().kernels[0]
    macros = SAMPLER + CHECK + UNALIGNED.format(stored="half", width=8)
    for text in (f"{macros}// loading slot\n#pragma unroll\n{kernel.source}", kernel.source):
        program = replace(vector_add(), kernels=(replace(kernel, source=text),))
        assert same(parse_program("x", program_document(program)), program)
    for line in macros.splitlines(keepends=True)[1:]:
        if "#" in line:
            program = replace(vector_add(), kernels=(replace(kernel, source=line + kernel.source),))
            with pytest.raises(InputError, match="its text has"):
                parse_program("x", program_document(program))
