"""Documents from declarations: a frozen dataclass gives its reader, its writer and its JSON schema.

The annotations of its fields are the rules of its documents: `msgspec.Meta` bounds numbers and lengths,
`Literal` and `OneOf` list words, `Key` gives a field another key, `REQUIRED` writes a field even at its
default, `OUTSIDE` keeps a field out of documents, and `DERIVED` marks a property that a document repeats and
a reader compares. A mapping from whole numbers is a list of pairs, since the keys of JSON are texts. Unknown
keys are rejected.
"""

# ruff: noqa: ANN401 - annotations and the values of documents are of any type
from __future__ import annotations

import difflib
import types
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Generic,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec
from msgspec import Meta

from torchedge.errors import InputError, TorchedgeError
from torchedge.storage.documents import MAX_DOCUMENT_BYTES, Document, read_json, write_json
from torchedge.storage.locks import cached_property

Noun = TypeVar("Noun")

DIALECT = "https://json-schema.org/draft/2020-12/schema"
PRINTABLE = r"^[^\x00-\x1f\x7f-\x9f\xad\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff]*(?![\s\S])"
"""Texts without control characters, as Python and ECMAScript write the pattern."""

Text = Annotated[
    str,
    Meta(
        min_length=1, max_length=1000, pattern=PRINTABLE, description="printable text of 1 to 1000 characters"
    ),
]
OptionalText = Annotated[
    str, Meta(max_length=1000, pattern=PRINTABLE, description="printable text of up to 1000 characters")
]
Sha256 = Annotated[
    str, Meta(pattern=r"^[0-9a-f]{64}(?![\s\S])", description="64 hexadecimal digits in lower case")
]


@dataclass(frozen=True, slots=True)
class Key:
    """The key of a field in documents, where it differs from the field's name."""

    name: str


@dataclass(frozen=True, slots=True)
class OneOf:
    """The words that a text may be, where they are data and no Literal."""

    words: tuple[str, ...]


class _Mark(Enum):
    REQUIRED = "required"
    DERIVED = "derived"
    OUTSIDE = "outside"


REQUIRED, DERIVED, OUTSIDE = _Mark.REQUIRED, _Mark.DERIVED, _Mark.OUTSIDE


class _Entry(NamedTuple):
    """One entry of a document: the noun's field or property, its key, its annotation and its default."""

    name: str
    key: str
    kind: Any
    default: Callable[[], object] | None
    derived: bool


@cache
def _entries(noun: Any) -> tuple[_Entry, ...]:
    hints = get_type_hints(noun, include_extras=True)
    entries = []
    for field in fields(noun):
        extras = getattr(hints[field.name], "__metadata__", ())
        if OUTSIDE in extras:
            continue
        default: Callable[[], object] | None = None
        if REQUIRED not in extras and field.default_factory is not MISSING:
            default = field.default_factory
        elif REQUIRED not in extras and field.default is not MISSING:
            default = lambda value=field.default: value  # noqa: E731
        entries.append(_Entry(field.name, _key(field.name, extras), hints[field.name], default, False))
    for name, member in vars(noun).items():
        getter = getattr(member, "fget", None) or getattr(member, "func", None)
        kind = get_type_hints(getter, include_extras=True).get("return") if getter else None
        extras = getattr(kind, "__metadata__", ())
        if DERIVED in extras:
            entries.append(_Entry(name, _key(name, extras), kind, None, True))
    return tuple(entries)


def _key(name: str, extras: tuple[object, ...]) -> str:
    return next((extra.name for extra in extras if isinstance(extra, Key)), name)


class Codec(Generic[Noun]):
    """Reads, writes and describes the documents of one noun.

    Args:
        noun: a dataclass.
        title: the name of its documents.
        schema: the value of the key "schema", where documents have one.
        verify: raises InputError for a fault across fields; called with the noun that was read.
        remedy: the next step after a bad document, the end of every message.
        max_bytes: the largest file that `read` accepts.
        error: the class of the errors raised.
    """

    def __init__(
        self,
        noun: type[Noun],
        title: str,
        *,
        schema: str | None = None,
        verify: Callable[[Noun], object] | None = None,
        remedy: str = "correct the file",
        max_bytes: int = MAX_DOCUMENT_BYTES,
        error: type[TorchedgeError] = InputError,
    ) -> None:
        self.noun: Any = noun
        self.title, self.tag = title, schema
        self.verify, self.remedy, self.max_bytes, self.error = verify, remedy, max_bytes, error

    @cached_property
    def _struct(self) -> Any:
        return _struct(self.noun, self.tag)

    def read(self, path: str | Path) -> Noun:
        """Read a JSON file, unpacked where its name ends in .gz.

        Raises:
            InputError (or the codec's own class): an entry is missing, unknown, out of range or inconsistent.
            ProfileError: the file cannot be read, is too large or is not JSON.
        """
        return self.parse(path, read_json(path, max_bytes=self.max_bytes))

    def write(self, path: str | Path, noun: Noun) -> None:
        """Write a JSON file atomically, packed where its name ends in .gz.

        Raises ProfileError: it cannot be written, or its free content has no JSON form.
        """
        write_json(path, self.document(noun))

    def parse(self, source: str | Path, document: Mapping[str, object], **outside: object) -> Noun:
        """Build the noun from its document; `source` is named in errors.

        outside: the fields that documents do not hold.
        Raises InputError (or the codec's own class): an entry is missing, unknown, out of range or
        inconsistent.
        """
        try:
            struct = msgspec.convert(document, self._struct)
            if self.tag is not None and "schema" not in document:  # msgspec asks for no tag
                raise msgspec.ValidationError
        except (msgspec.ValidationError, UnicodeError):
            raise self.error(f"{source}: {self._complaint(document)}; {self.remedy}") from None
        try:
            noun: Noun = _noun_builder(self.noun)(struct, (), outside)
            if self.verify is not None:
                self.verify(noun)
        except InputError as error:
            raise self.error(f"{source}: {error}; {self.remedy}") from error
        return noun

    def check(self, noun: Noun) -> None:
        """Raise InputError (or the codec's own class) where a noun made in code breaks a field's rule."""
        if not _fits(noun, self._struct):
            raise self.error(self._complaint(noun))

    def _complaint(self, value: object) -> str:
        return _complaint(value, self._struct, "", f"the {self.title.lower()}")

    def document(self, noun: Noun) -> Document:
        """Return the document of a noun."""
        document: Document = {} if self.tag is None else {"schema": self.tag}
        document.update(_noun_dumper(self.noun)(noun, ()))
        return document

    def schema(self) -> Document:
        """Return the JSON schema of the documents."""
        schema: dict[str, Any] = msgspec.json.schema(self._struct)
        top = schema["$defs"].pop(self.noun.__name__)
        head: Document = {"$schema": DIALECT, **top, "title": self.title}
        return head | ({"$defs": schema["$defs"]} if schema["$defs"] else {})


# from annotations to msgspec's structs ----------------------------------------------------------------------


@cache
def _struct(noun: Any, tag: str | None = None) -> Any:
    """Return the struct of a dataclass's documents."""
    items = []
    for entry in _entries(noun):
        default: dict[str, Any] = {}
        if entry.default is not None:
            value = entry.default()
            default = {"default_factory": type(value)} if isinstance(value, dict) else {"default": value}
        items.append((entry.name, _converted(entry.kind), msgspec.field(name=entry.key, **default)))
    tagged: dict[str, Any] = {} if tag is None else {"tag_field": "schema", "tag": tag}
    return msgspec.defstruct(
        noun.__name__,
        items,
        forbid_unknown_fields=True,
        kw_only=True,
        frozen=True,
        namespace={"__doc__": (noun.__doc__ or "").partition("\n")[0]},  # a schema's description
        **tagged,
    )


def _converted(kind: Any) -> Any:
    """Return a noun's annotation as msgspec understands it."""
    if kind is ... or kind is object:
        return Any if kind is object else kind
    base, extras = _split(kind)
    words = next((extra.words for extra in extras if isinstance(extra, OneOf)), None)
    if words is not None:
        return Literal[words]
    origin, arguments = get_origin(base), [_converted(item) for item in get_args(base)]
    if _is_noun(base):
        base = _struct(base)
    elif origin is tuple:
        base = tuple.__class_getitem__(tuple(arguments))
    elif _is_mapping(origin) and _split(get_args(base)[0])[0] is int:
        pair: Any = tuple.__class_getitem__(tuple(arguments))
        base = tuple.__class_getitem__((pair, ...))
    elif _is_mapping(origin):
        base = dict.__class_getitem__(tuple(arguments))
    elif origin in (Union, types.UnionType):
        base = Union[tuple(arguments)]  # noqa: UP007 - of any number
    for extra in extras:
        base = Annotated[base, extra] if isinstance(extra, Meta) else base
    return base


def _split(kind: Any) -> tuple[Any, tuple[object, ...]]:
    return (kind.__origin__, kind.__metadata__) if get_origin(kind) is Annotated else (kind, ())


def _is_noun(base: object) -> bool:
    return is_dataclass(base)


def _is_mapping(origin: object) -> bool:
    return isinstance(origin, type) and issubclass(origin, Mapping)


def _choices(kind: Any) -> tuple[Any, ...]:
    """Return the bare annotations that a value may fit."""
    base, _ = _split(kind)
    return (
        tuple([_split(item)[0] for item in get_args(base)])
        if get_origin(base) in (Union, types.UnionType)
        else (base,)
    )


def _some(kind: Any) -> Any:
    """Return the bare annotation of a value that is not None."""
    return next((item for item in _choices(kind) if item is not type(None)), kind)


# between nouns, structs and documents -----------------------------------------------------------------------
#
# msgspec checks and converts in C. Only nouns, mappings and what contains them take a Python function each,
# made once for an annotation; None stands for "as it is".

_Where = tuple[Any, ...]
"""The path of a value: (path of the whole, key or index), () for the document itself."""

_PLAIN_TYPES = (str, int, float, bool, type(None))


def _path(where: _Where) -> str:
    """Return a path as errors show it."""
    steps: list[str] = []
    while where:
        where, step = where
        steps.insert(0, f"[{step}]" if isinstance(step, int) else f".{step}")
    return "".join(steps).removeprefix(".")


@cache
def _mapper(kind: Any, dumping: bool) -> Callable[[Any, _Where], Any] | None:
    """Return the function from a struct's value to a noun's, or (dumping) from that to a document's.

    None: the value stays as it is.
    """
    base = _some(kind)
    map_value: Callable[[Any, _Where], Any] | None
    if _is_noun(base):
        map_value = _noun_dumper(base) if dumping else _noun_builder(base)
    elif get_origin(base) is tuple:
        map_value = _tuple_mapper(get_args(base), dumping)
    elif _is_mapping(get_origin(base)):
        map_value = _mapping_mapper(get_args(base), dumping)
    elif dumping and any(
        item not in _PLAIN_TYPES and get_origin(item) is not Literal for item in _choices(kind)
    ):
        return lambda value, where: thaw(value)
    else:
        return None
    if map_value is None or type(None) not in _choices(kind):
        return map_value
    return lambda value, where: None if value is None else map_value(value, where)


@cache
def _noun_builder(noun: Any) -> Callable[..., Any]:
    entries = _entries(noun)
    stored = [(entry.name, entry.key, _mapper(entry.kind, False)) for entry in entries if not entry.derived]
    derived = [(entry.name, entry.key) for entry in entries if entry.derived]

    def build(value: Any, where: _Where, outside: Mapping[str, object] = types.MappingProxyType({})) -> Any:
        fields = {
            name: getattr(value, name) if inner is None else inner(getattr(value, name), (where, key))
            for name, key, inner in stored
        }
        built = noun(**fields, **outside)
        for name, key in derived:
            if getattr(value, name) != getattr(built, name):
                raise InputError(
                    f"{_path((where, key))} is {shortened(getattr(value, name))}; expected "
                    f"{shortened(getattr(built, name))}, computed from the other entries"
                )
        return built

    return build


@cache
def _noun_dumper(noun: Any) -> Callable[[Any, _Where], Document]:
    entries = [
        (
            entry.name,
            entry.key,
            entry.default is None,
            entry.default and entry.default(),
            _mapper(entry.kind, True),
        )
        for entry in _entries(noun)
    ]

    def dump(value: Any, where: _Where) -> Document:
        document: Document = {}
        for name, key, required, default, inner in entries:
            item = getattr(value, name)
            if required or item != default:
                document[key] = item if inner is None else inner(item, where)
        return document

    return dump


def _tuple_mapper(arguments: tuple[Any, ...], dumping: bool) -> Callable[[Any, _Where], Any] | None:
    inner = [_mapper(item, dumping) for item in arguments if item is not ...]
    result: Any = list if dumping else tuple
    if not any(inner):
        return (lambda value, where: list(value)) if dumping else None  # msgspec makes tuples
    if arguments[-1] is ...:
        each: Any = inner[0]
        return lambda value, where: result([each(item, (where, n)) for n, item in enumerate(value)])
    return lambda value, where: result(
        [
            item if each is None else each(item, (where, n))
            for n, (item, each) in enumerate(zip(value, inner, strict=True))
        ]
    )


def _mapping_mapper(arguments: tuple[Any, ...], dumping: bool) -> Callable[[Any, _Where], Any] | None:
    key, inner = arguments[0], _mapper(arguments[1], dumping)
    each: Any = inner or (lambda item, where: item)
    if _split(key)[0] is not int:
        if inner is None and not dumping:
            return None
        return lambda value, where: {name: each(item, (where, name)) for name, item in value.items()}
    if dumping:
        return lambda value, where: [[name, each(item, where)] for name, item in value.items()]

    def build(value: Any, where: _Where) -> Any:
        table = {number: each(item, (where, place)) for place, (number, item) in enumerate(value)}
        if len(table) != len(value):
            raise InputError(f"{_path(where)} names a number twice; expected each once")
        return table

    return build


def thaw(value: object) -> object:
    """Return free content with its read-only mappings and tuples as dicts and lists, and words of an Enum."""
    if isinstance(value, Mapping):
        return {key: thaw(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [thaw(item) for item in value]
    return value.value if isinstance(value, Enum) else value


def _below(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


# what is wrong with a document ------------------------------------------------------------------------------


def _fits(value: object, kind: Any) -> bool:
    try:
        msgspec.convert(value, kind, from_attributes=True)
    except (msgspec.ValidationError, UnicodeError):
        return False
    return True


def _complaint(value: Any, kind: Any, where: str, root: str = "") -> str:
    """Return the expectation of the innermost value that does not fit its annotation.

    where: the path of the value; root: the name of the whole.
    """
    base = _some(kind)
    if isinstance(base, type) and issubclass(base, msgspec.Struct):
        if isinstance(value, Mapping):
            return _object_complaint(value, base, where, root)
        for name, inner in get_type_hints(base, include_extras=True).items():
            if hasattr(value, name) and not _fits(getattr(value, name), inner):
                key = msgspec.structs.fields(base)[base.__struct_fields__.index(name)].encode_name
                return _complaint(getattr(value, name), inner, _below(where, key))
    if get_origin(base) is tuple and isinstance(value, (list, tuple)):
        arguments = get_args(base)
        if arguments[-1] is ...:
            arguments = arguments[:1] * len(value)
        if len(arguments) == len(value):
            for place, (item, inner) in enumerate(zip(value, arguments, strict=True)):
                if not _fits(item, inner):
                    return _complaint(item, inner, f"{where}[{place}]")
    if get_origin(base) is dict and isinstance(value, Mapping):
        key, inner = get_args(base)
        for name, item in value.items():
            if not _fits(name, key):
                return f"{where} has the key {shortened(name)}; expected {_nearest(name, _words(key), key)}"
            if not _fits(item, inner):
                return _complaint(item, inner, _below(where, name))
    return f"{where or root} is {shortened(value)}; expected {_expected(kind)}"


def _object_complaint(value: Mapping[str, Any], struct: Any, where: str, root: str) -> str:
    hints = get_type_hints(struct, include_extras=True)
    entries = msgspec.structs.fields(struct)
    known = {item.encode_name: hints[item.name] for item in entries}
    needed = [item.encode_name for item in entries if item.required]
    tag = struct.__struct_config__.tag
    if tag is not None:
        known, needed = {"schema": Literal[tag], **known}, ["schema", *needed]
    for key in value:
        if key not in known:
            expected = _nearest(key, known, Literal[tuple(known)])
            return f"{where or root} has the unknown key {shortened(key)}; expected {expected}"
    for key in needed:
        if key not in value:
            return f"{where or root} has no {key!r}; expected {', '.join(needed)}"
    key = next(key for key in value if not _fits(value[key], known[key]))
    return _complaint(value[key], known[key], _below(where, key))


def _nearest(key: object, known: Collection[str], kind: Any) -> str:
    """Return the expected key in place of an unknown one: the nearest known key, else any."""
    near = difflib.get_close_matches(str(key)[:100], known, n=1)
    return f"{near[0]!r}, the nearest known key" if near else _expected(kind)


_KINDS = {
    "integer": "a whole number",
    "number": "a number",
    "string": "text",
    "boolean": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}


def _words(kind: Any) -> tuple[str, ...]:
    """Return the words that a text may be, where they are listed."""
    base = _some(kind)
    if isinstance(base, type) and issubclass(base, Enum):
        return tuple(item.value for item in base)
    return get_args(base) if get_origin(base) is Literal else ()


def _expected(kind: Any) -> str:
    base, words = _some(kind), _words(kind)
    if isinstance(base, type) and issubclass(base, msgspec.Struct):
        return f"an object with the keys {', '.join(base.__struct_encode_fields__)}"
    return f"one of {', '.join(words)}" if len(words) > 1 else _in_words(msgspec.json.schema(kind))


def _in_words(schema: Mapping[str, Any]) -> str:
    if "description" in schema:
        return str(schema["description"])
    if "enum" in schema:
        return " or ".join(repr(word) for word in schema["enum"])
    if "anyOf" in schema:
        choices = [_in_words(choice) for choice in schema["anyOf"]]
        return " or ".join(
            words for words in choices if "a number" not in choices or words != "a whole number"
        )
    words = _KINDS.get(schema.get("type", "object"), "a value")
    for bound, unit in (
        ("imum", ""),
        ("Length", " characters"),
        ("Items", " entries"),
        ("Properties", " entries"),
    ):
        low, high = schema.get(f"min{bound}"), schema.get(f"max{bound}")
        if low is not None and low == high:
            words += f" of {low:,}{unit}"
        elif low is not None and high is not None:
            words += f" {'of' if unit else 'from'} {low:,} to {high:,}{unit}"
        elif low is not None or high is not None:
            words += f" of at least {low:,}{unit}" if high is None else f" of at most {high:,}{unit}"
    return words


def shortened(value: object) -> str:
    """Return a value as a message shows it."""
    if isinstance(value, (list, tuple)) and len(value) > 8:
        return f"a list of {len(value)} ({shortened(list(value[:4]))[1:-1]}, ...)"
    if isinstance(value, Mapping) and len(value) > 4:
        return f"an object of {len(value)} keys"
    if isinstance(value, int) and abs(value) > 2**64:  # Python refuses to write thousands of digits
        value = hex(value)[:20]
    shown = repr(value[:60] if isinstance(value, str) else value)
    return shown if len(shown) <= 64 else shown[:60] + "..."
