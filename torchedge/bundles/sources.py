"""source.json of a bundle: the steps and the target from which its programs were lowered.

A kernel is a program, and no reader can decide what C does. So a bundle carries its source, operators of
PyTorch with their shapes, and reading it lowers the source again: kernels, launches and tensors of a bundle
are those that the lowering gives, or the bundle is refused. Every operator is checked by its rule: a changed
source is an error or another network, never a kernel that somebody else wrote.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

from msgspec import Meta

from torchedge.bundles.manifests import MAX_METHODS
from torchedge.errors import InputError, LoweringError, TorchedgeError, clipped
from torchedge.graphs import RESIDENT_ROLES
from torchedge.graphs.graph import Op, Role, Value
from torchedge.graphs.steps import Input, Step
from torchedge.lowering.assembly import ALIGNMENT, lower_step
from torchedge.lowering.programs import (
    MAX_ITEMS,
    MAX_SIZE,
    DType,
    Extent,
    Index,
    Indices,
    Program,
    Shape,
    Size,
)
from torchedge.lowering.recomputing import Checkpoints
from torchedge.lowering.targets import TARGETS, DeviceClass, Limits, Target, bounded
from torchedge.opencl.binary_caches import BinaryCache
from torchedge.runtime.program_caches import code_digest
from torchedge.storage import cache_folder
from torchedge.storage.codecs import REQUIRED, Codec, OptionalText, Text
from torchedge.storage.documents import parse_json
from torchedge.textures.coefficients import KernelCoefficients
from torchedge.textures.layouts import MAX_EXTENT, Layout

MAX_SOURCE_BYTES = 2**26
_PROVED = b"proved\n"
_Kind = TypeVar("_Kind")


@dataclass(frozen=True, slots=True)
class SourceValue:
    """One tensor of a step."""

    name: Text
    shape: Shape
    dtype: DType
    role: Role = "activation"


@dataclass(frozen=True, slots=True)
class SourceOp:
    """One operator of a step.

    attrs: plain data; a tensor is {"input": its place among the inputs}, a number that JSON lacks {"number":
    "inf"}.
    """

    kind: Text
    inputs: Annotated[tuple[Index | None, ...], Meta(max_length=MAX_ITEMS)]
    outputs: Indices
    attrs: Mapping[Text, object]
    scope: OptionalText = ""


@dataclass(frozen=True, slots=True)
class SourceStep:
    """A `graphs.steps.Step`."""

    name: Text
    values: Annotated[tuple[SourceValue, ...], Meta(max_length=MAX_ITEMS)]
    ops: Annotated[tuple[SourceOp, ...], Meta(max_length=MAX_ITEMS)]
    inputs: Indices
    outputs: Indices
    updates: Annotated[tuple[tuple[Index, Index], ...], Meta(max_length=MAX_ITEMS)] = ()
    hyperparameters: Annotated[dict[Text, Index], REQUIRED] = field(default_factory=dict)
    initial: Annotated[dict[Index, float], REQUIRED] = field(default_factory=dict)

    @classmethod
    def of(cls, step: Step) -> SourceStep:
        """Return a step as a bundle holds it; raises LoweringError for an attribute that is no plain data."""
        ops = []
        for op in step.ops:
            attrs = {key: _stored(op.kind, item) for key, item in op.attrs.items()}
            ops.append(_like(SourceOp, op, attrs=attrs))
        initial = {index: float(number) for index, number in step.initial.items()}
        values = tuple([_like(SourceValue, value) for value in step.values])
        return _like(cls, step, values=values, ops=tuple(ops), initial=initial)

    def step(self) -> Step:
        """Return the step, verified; raises InputError and CaptureError."""
        count = len(self.values)
        indices = [*self.inputs, *self.outputs, *self.hyperparameters.values(), *self.initial]
        indices += [index for pair in self.updates for index in pair]
        indices += [i for op in self.ops for i in (*op.inputs, *op.outputs) if i is not None]
        if max(indices, default=0) >= max(count, 1):
            raise InputError(f"{self.name} names value {max(indices)} of {count}; expected one that it has")
        for value in self.values:
            if math.prod(value.shape) > MAX_SIZE:
                raise InputError(f"value {value.name} has over {MAX_SIZE} elements; expected no more")
        ops = []
        for op in self.ops:
            attrs = {key: _restored(item, len(op.inputs)) for key, item in op.attrs.items()}
            ops.append(Op(op.kind, op.inputs, op.outputs, attrs, op.scope))
        values = tuple([Value(v.name, v.shape, v.dtype, v.role) for v in self.values])
        step = Step(values, tuple(ops), **{name: getattr(self, name) for name in _OF_STEPS})
        step.verify()
        return step


_OF_STEPS = ("inputs", "outputs", "updates", "hyperparameters", "initial", "name")
"""Entries of a `SourceStep` that are those of the `Step`."""


def _like(kind: type[_Kind], item: Any, **other: Any) -> _Kind:  # noqa: ANN401 - any dataclass
    """Return a dataclass with the fields of an object, some of them replaced."""
    own = {field.name: getattr(item, field.name) for field in fields(kind) if field.name not in other}  # type: ignore[arg-type]
    return kind(**own, **other)


@dataclass(frozen=True, slots=True)
class Source:
    """What a bundle's programs were lowered from.

    others: the steps of further programs over the same weights, such as the one that adds up gradients.
    recomputed: for each program the number of its choice of `Checkpoints`, null: it computes nothing again.
    apart: element-wise values that kernels of their own compute. The other entries are those of `Target` in
    which devices of a class differ.
    """

    step: SourceStep
    device_class: Annotated[DeviceClass, REQUIRED]
    image_width: Annotated[int, Meta(ge=0, le=MAX_EXTENT)]
    image_height: Annotated[int, Meta(ge=0, le=MAX_EXTENT)]
    half_images: bool
    pitch: Extent
    shared_pitch: Annotated[int, Meta(ge=0, le=MAX_ITEMS)]
    alignment: Annotated[int, Meta(ge=1, le=MAX_EXTENT)]
    largest_group: Extent
    group_sizes: tuple[Extent, Extent, Extent]
    local_bytes: Size
    double: bool
    half: bool
    half_weights: bool
    allocation_bytes: Size = 0
    coefficients: KernelCoefficients | None = None
    apart: Annotated[tuple[Text, ...], Meta(max_length=MAX_ITEMS)] = ()
    others: Annotated[tuple[SourceStep, ...], Meta(max_length=MAX_METHODS)] = ()
    recomputed: Annotated[tuple[Index | None, ...], Meta(max_length=MAX_METHODS)] = ()

    @classmethod
    def of(cls, steps: Sequence[Step], target: Target, apart: Sequence[str] = ()) -> Source:
        """Return the source of steps that are lowered for a target of `target_of_device`."""
        names = (*_LIMITS, "alignment", "largest_group", "group_sizes", *_SETTINGS)
        settings = {name: getattr(target, name) for name in names}
        first, *others = [SourceStep.of(step) for step in steps]
        source = cls(first, target.name, apart=tuple(sorted(apart)), others=tuple(others), **settings)
        if source.target() != target:
            raise LoweringError(f"target {target.name} has settings that no bundle holds; use a device's own")
        return source

    def target(self) -> Target:
        """Return the target."""
        same = {name: getattr(self, name) for name in _LIMITS}
        limits = Limits(
            "",
            work_group=self.largest_group,
            work_item_sizes=self.group_sizes,
            offset_bytes=self.alignment,
            **same,
        )
        target = bounded(TARGETS[self.device_class], limits)
        return replace(target, **{name: getattr(self, name) for name in _SETTINGS})

    def lower(self) -> list[Program]:
        """Return the program of each step, the first one's first.

        They share their tensors by name, and so the layouts: what later programs write lies as the first of
        those wants it. All else lies as the one wants it that computes least (a token, not a prompt), whose
        time is that of reading the weights.
        Raises TorchedgeError: the steps are not well formed, or have operators without kernels.
        """
        steps, target = [self.step.step(), *[other.step() for other in self.others]], self.target()
        settled: dict[str, Layout] = {}
        alone: dict[int, Program] = {}
        for place, step in enumerate(steps[1:], 1):
            written = {step.values[before].name for before, _ in step.updates}
            if written:
                alone[place] = lower_step(step, target).program
                own = {name: layout for name, layout in _layouts(alone[place]).items() if name in written}
                settled = own | settled
        programs: dict[int, Program] = {}
        elements = [sum(math.prod(v.at(1)) for v in s.values if v.role == "activation") for s in steps]
        for place in sorted(range(len(steps)), key=elements.__getitem__):
            step, program = steps[place], alone.get(place)
            if program is None or any(settled.get(n, own) != own for n, own in _layouts(program).items()):
                program = lower_step(step, target, settled, () if place else self.apart).program
            programs[place] = program
            settled = _layouts(program) | settled
        numbers = self.recomputed or (None,) * len(steps)
        return [
            program if number is None else _chosen(program, number)
            for program, number in zip([programs[place] for place in range(len(steps))], numbers, strict=True)
        ]


def _chosen(program: Program, number: int) -> Program:
    """Return a program that computes activations again; raises InputError where it has no such choice."""
    checkpoints = Checkpoints(program)
    if number >= len(checkpoints):
        raise InputError(
            f"recomputed is {number} for {program.name}, which has {len(checkpoints)} choices; expected one"
        )
    return checkpoints.choice(number, ALIGNMENT).program


_LIMITS = ("image_width", "image_height", "half_images", "local_bytes", "double")
"""Entries of a `Source` that `Limits` has under the same name."""
_SETTINGS = ("pitch", "shared_pitch", "allocation_bytes", "half", "half_weights", "coefficients")


SOURCES = Codec(
    Source,
    "Source of a bundle",
    schema="torchedge-source-2",
    remedy="export the model again",
    max_bytes=MAX_SOURCE_BYTES,
)


def _layouts(program: Program) -> dict[str, Layout]:
    return {tensor.name: tensor.layout for tensor in program.tensors if tensor.role in RESIDENT_ROLES}


def _stored(kind: str, item: Any) -> object:  # noqa: ANN401 - attributes are any plain data
    if isinstance(item, Input):
        return {"input": item.position}
    if isinstance(item, (list, tuple)):
        return [_stored(kind, entry) for entry in item]
    if isinstance(item, float) and not math.isfinite(item):
        return {"number": str(item)}
    if item is None or type(item) in (bool, int, float, str):
        return item
    raise LoweringError(
        f"operator {kind} has an attribute of type {type(item).__name__}; expected plain data"
    )


def _restored(item: object, inputs: int) -> object:
    if isinstance(item, dict):
        place = item.get("input")
        if len(item) == 1 and type(place) is int and 0 <= place < inputs:
            return Input(place)
        if item in ({"number": "inf"}, {"number": "-inf"}, {"number": "nan"}):
            return float(item["number"])
        raise InputError(f"an attribute is {str(item)[:60]}; expected an input that the operator has, or inf")
    if isinstance(item, list):
        return tuple([_restored(entry, inputs) for entry in item])
    return item


# the proof --------------------------------------------------------------------------------------------------


def prove_programs(
    path: Path, content: bytes, programs: Sequence[Program], digests: Sequence[str], *, anew: bool = False
) -> None:
    """Raise InputError unless programs are what the source in `content` is lowered to.

    path: of the source, named in errors. digests: hashes of all files that decide. What is proved is noted in
    the user's cache folder, so that each bundle is lowered once by each version of the package; anew: it is
    lowered whatever is noted.
    """
    key = hashlib.sha256("\n".join([code_digest(), *digests]).encode()).hexdigest()
    notes: BinaryCache | None = None
    with contextlib.suppress(InputError):  # no home folder
        notes = BinaryCache(cache_folder() / "proofs")
    if not anew and notes is not None and notes.read(key) == _PROVED:
        return
    source = SOURCES.parse(path, parse_json(path, content))
    try:
        lowered = source.lower()
    except TorchedgeError as error:
        raise InputError(f"{path}: {error}; export the model again") from error
    except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
        reason = clipped(f"{type(error).__name__}: {error}")
        raise InputError(f"{path}: is not the source of a step ({reason}); export the model again") from error
    names = [entry.name for entry in fields(Program)]
    different = [
        name
        for program, expected in zip(programs, lowered, strict=False)
        for name in names
        if getattr(program, name) != getattr(expected, name)
    ]
    if len(programs) != len(lowered):
        different.append("programs")
    if different:
        raise InputError(
            f"{path}: is lowered to other {different[0]} than {programs[0].name} has: the bundle was "
            "changed, or exported by another version; export the model again, or if you trust whoever made "
            "it, as you would a program, pass trust=True (--trust)"
        )
    if notes is not None:
        notes.write(key, _PROVED)
