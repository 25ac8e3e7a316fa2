"""From a model to a bundle: capture, lower, check against the device's limits, write."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import torch

from torchedge.bundles.bundle import Bundle
from torchedge.bundles.checks import CHECKS, record_check
from torchedge.bundles.launch_bundles import file_of, write_programs
from torchedge.bundles.manifests import (
    ACCUMULATING,
    CHECK,
    MANIFEST,
    MAX_METHODS,
    METHOD_NAME,
    ONNX,
    SOURCE,
    TOKENIZER,
    WEIGHTS,
    BundleFile,
    BundleTarget,
    Manifest,
    Memory,
    Method,
    Plain,
    memory_of,
    memory_of_schedules,
    plan_path,
    ports_of,
    program_file,
    write_manifest,
)
from torchedge.bundles.onnx_models import check_packages, eager_outputs, write_onnx
from torchedge.bundles.plan_files import PLAN_FILES, plan_file
from torchedge.bundles.sources import SOURCES, Source
from torchedge.bundles.texts import Tokenizer
from torchedge.bundles.weights import read_header
from torchedge.devices import Device, Provenance
from torchedge.errors import (
    DeviceError,
    InputError,
    LoweringError,
    check_choice,
    check_path,
    check_whole,
    described,
    not_a_module,
    shown,
)
from torchedge.graphs import Mode
from torchedge.graphs.steps import Step
from torchedge.graphs.training_steps import TrainingStep
from torchedge.lowering.inference import capture_inferences, target_of_device
from torchedge.lowering.limits import check_limits, profile_limits
from torchedge.lowering.programs import Program
from torchedge.lowering.recomputing import Recomputation
from torchedge.lowering.rules import all_rules
from torchedge.lowering.targets import Limits, Precision, Target, Tuner
from torchedge.storage import write_json
from torchedge.storage.amounts import Amount, bytes_of
from torchedge.storage.codecs import PRINTABLE
from torchedge.storage.replacing import new_folder, recover
from torchedge.storage.tensors import NAMES
from torchedge.streaming.budgets import Budgeted
from torchedge.streaming.far_uses import whole_name
from torchedge.streaming.planning import StreamingPlan, plan_program
from torchedge.streaming.plans import PLANS
from torchedge.streaming.program_costs import predict_program
from torchedge.streaming.repeating import fewest_parts, fit_in_turn, in_parts, plan_in_turn
from torchedge.tracing.capturing import unwrapped
from torchedge.tracing.interception import batch_of, part_of, tensors_in
from torchedge.tracing.objectives import as_arguments
from torchedge.tracing.steps import CapturedStep, capture_step, check_step

STAGES = ("capture", "lower", "write", "model.onnx", "check")
"""The stages passed to `progress`, in order; "model.onnx" only where it is written."""

_DTYPES = frozenset(str(dtype) for dtype in NAMES)

LEARNING_RATE, MOMENTUM = 0.01, 0.9
"""Settings of SGD, the default optimizer."""


@dataclass(frozen=True)
class Call:
    """A method's name ("" of the only one), its model, its positional and keyword arguments.

    step: of a method that trains.
    """

    method: str
    model: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    step: TrainingStep | None = None


@dataclass(frozen=True)
class Request:
    """The arguments of `torchedge.export`; model: one, or (model, example[, step]) by the name of its method.

    tokenizer: a file that the bundle gets a copy of. ends: tokens that end a text.
    """

    model: torch.nn.Module | Mapping[str, tuple[Any, ...]]
    example: Any = None
    mode: Mode = "infer"
    step: TrainingStep = field(default_factory=TrainingStep)
    seed: int | None = None
    name: str | None = None
    plan: StreamingPlan | None = None
    memory_limit: Amount | None = None
    onnx: bool = True
    precision: Precision = "float32"
    tuner: Tuner | None = None
    check: bool = False
    tokenizer: Path | None = None
    ends: tuple[int, ...] = ()

    @property
    def train(self) -> bool:
        """Whether a whole training step is exported."""
        return self.mode == "train"

    @property
    def calls(self) -> list[Call]:
        """What is captured: one call of a model, or one of each method's."""
        if not isinstance(self.model, Mapping):
            step = self.step if self.train else None
            return [Call("", self.model, *as_arguments(self.example), step)]
        return [
            Call(name, model, *as_arguments(example), *step)
            for name, (model, example, *step) in self.model.items()
        ]


@dataclass(frozen=True)
class Lowering:
    """What a bundle is made of: captured steps, their source and programs, the plans of those that stream.

    request: what was lowered, in `parts` equal parts of the batch that was asked for. memory: of all programs
    together. notes: defaults that were used. recomputed: what the training step computes again.
    """

    request: Request
    steps: Sequence[CapturedStep]
    source: Source
    programs: Sequence[Program]
    plans: Sequence[Budgeted]
    memory: Memory
    notes: tuple[str, ...]
    recomputed: Recomputation | None = None
    parts: int = 1


def lower_request(
    request: Request, device: Device, progress: Callable[[str], object] = lambda stage: None
) -> Lowering:
    """Capture and lower what is to be exported; weights may lie on the meta device.

    A training step whose whole batch does not stay within the memory limit takes it in equal parts.
    Raises InputError, CaptureError, LoweringError, and LimitError where no plan is within the memory limit.
    """
    if not request.train or request.memory_limit is None:
        return _lowered(request, device, progress)

    def asked(parts: int) -> Request:
        if parts == 1:
            return request
        example, targets = part_of((request.example, request.step.targets), parts)
        accumulation = request.step.accumulation * parts
        return replace(
            request, example=example, step=replace(request.step, targets=targets, accumulation=accumulation)
        )

    def capture(parts: int) -> Step:
        return _captured(asked(parts))[0][0].step

    def attempt(parts: int) -> Lowering:
        return _lowered(asked(parts), device, progress if parts == 1 else lambda stage: None)

    samples = batch_of(request.example) or 1
    parts, lowering = fewest_parts(samples, capture, attempt)
    said = () if parts == 1 else (in_parts(samples, parts),)
    return replace(lowering, parts=parts, notes=(*lowering.notes, *said))


def _lowered(request: Request, device: Device, progress: Callable[[str], object]) -> Lowering:
    progress("capture")
    steps, notes = _captured(request)
    progress("lower")
    target = target_of_device(device, None, request.precision, request.tuner)
    if request.train and request.tuner is None and target.name == "mobile":
        # Without coefficients of its own, those of its class: other phones' choose better than constants.
        target = target_of_device(device, None, request.precision, "model")
    coefficients = target.coefficients
    if coefficients is not None and coefficients.provenance is not Provenance.MEASURED:
        notes.append(f"the cost model's coefficients are partly {coefficients.provenance}")
    source = _source(steps, target, request)
    programs = source.lower()
    lowering = Lowering(request, steps, source, programs, (), memory_of(programs), tuple(notes))
    return within_limit(lowering, request, device)


def within_limit(lowering: Lowering, request: Request, device: Device) -> Lowering:
    """Return a lowering without plans with those that the request asks for: its plan or memory limit.

    A training step computes activations again where the limit needs it. Raises LimitError where no plan stays
    within the limit.
    """
    if request.memory_limit is not None and any(call.step for call in request.calls):
        return _trained_within(lowering, bytes_of(request.memory_limit, "memory_limit"), device)
    plans = _planned(request, lowering.programs, device)
    if not plans:
        return lowering
    return replace(lowering, plans=plans, memory=memory_of_schedules([plan.schedule for plan in plans]))


def make_bundle(
    request: Request,
    device: Device,
    out: str | Path,
    *,
    force: bool = False,
    progress: Callable[[str], object],
    trust: bool = False,
) -> Bundle:
    """Export a model for a device into the folder `out`, and read the bundle back.

    trust: do not lower it again to prove what was just written.

    Raises the errors that `torchedge.export` lists.
    """
    target = check_free(out, force)
    _check_request(request)
    if request.tokenizer is not None:
        Tokenizer(request.tokenizer)
    onnx: dict[str, Plain] = {} if request.onnx else {"left_out": "on request"}
    if len(request.calls) > 1:
        onnx = {"left_out": "the bundle has several methods"}
    if not onnx:
        check_packages()
    lowering = lower_request(request, device, progress)
    request, calls = lowering.request, lowering.request.calls
    call = calls[0]
    steps, programs, plans, memory = lowering.steps, lowering.programs, lowering.plans, lowering.memory
    program, captured, limits = programs[0], steps[0], profile_limits(device)
    check_memory(lowering, limits)
    if not onnx and captured.step.updates and not request.train:
        onnx = {"left_out": "the model keeps states from run to run, which ONNX does not"}
    expected: list[torch.Tensor] = []
    if not onnx:
        expected = eager_outputs(call.model, call.args, call.kwargs)
    with new_folder(target) as folder:
        progress("write")
        write_json(folder / SOURCE, SOURCES.document(lowering.source))
        names = [program_file(call.method, place) for place, call in enumerate(calls)]
        names += [ACCUMULATING] * (len(programs) - len(calls))
        named = dict(zip(names, programs, strict=True))
        files = {SOURCE: file_of(folder / SOURCE)}
        if request.tokenizer is not None:
            shutil.copyfile(request.tokenizer, folder / TOKENIZER)
            files[TOKENIZER] = file_of(folder / TOKENIZER)
        order = _loading_order(plans)
        files |= write_programs(folder, named, _values(steps, programs), order)
        if not onnx:
            progress("model.onnx")
            names = [program.tensors[place].name for place in _fed(program)]
            args, kwargs = call.args, call.kwargs
            ports = (names[: len(tensors_in((args, kwargs), torch.Tensor))], captured.output_names)
            streaming = None
            if plans:
                streaming = (order, json.dumps(PLANS.document(plans[0].plan), sort_keys=True))
            onnx = write_onnx(folder / ONNX, call.model, args, kwargs, ports, expected, streaming)
            files |= {
                name: file_of(folder / name) for name in (ONNX, f"{ONNX}.data") if (folder / name).is_file()
            }
        for (name, each), plan in zip(named.items(), plans, strict=False):
            places, path = read_header(folder / WEIGHTS).places, plan_path(name)
            write_json(folder / path, PLAN_FILES.document(plan_file(plan, each, places)))
            files[path] = file_of(folder / path)
        checked = BundleTarget(
            device.name, device.title, device.fingerprint, program.target, limits.known, limits.unknown
        )
        manifest = _manifest(request, steps, programs, memory, checked, lowering.notes, onnx, files)
        write_manifest(folder, manifest)
        progress("check")
        bundle = Bundle.open(folder, trust=trust)
        if request.check:
            write_json(folder / CHECK, CHECKS.document(record_check(bundle)))
            write_manifest(folder, replace(manifest, files={**files, CHECK: file_of(folder / CHECK)}))
            bundle = Bundle.open(folder)
    return replace(bundle, path=target)


def _planned(request: Request, programs: Sequence[Program], device: Device) -> Sequence[Budgeted]:
    """Return the streaming plan of each of these very programs; none where all weights stay loaded."""
    program = programs[0]
    if request.plan is not None:
        if request.plan.program.digest != program.digest:
            raise InputError(
                f"plan is of program {request.plan.program.digest[:12]}, and {program.name} is lowered to "
                f"program {program.digest[:12]}: the model, example, device or precision differ; pass those "
                "of the plan, or memory_limit= to plan this program"
            )
        return [request.plan]
    if request.memory_limit is None:
        return []
    if len(programs) > 1:
        limit = bytes_of(request.memory_limit, "memory_limit")
        fits = memory_of(programs).total_bytes <= limit
        return [] if fits else plan_in_turn(programs, limit)
    return [plan_program(program, device, memory_limit=request.memory_limit)]


def _trained_within(lowering: Lowering, limit: int, device: Device) -> Lowering:
    """Return the lowering of a training step within a limit."""
    if lowering.memory.total_bytes <= limit:
        return lowering

    def latency(plans: Sequence[Budgeted]) -> float:
        with suppress(DeviceError):
            return sum(predict_program(plan.schedule.program, device, plan).latency.value for plan in plans)
        return 0.0  # nothing is known about the device's speed

    fitted = fit_in_turn(lowering.programs, limit, latency=latency)
    streams = any(plan.schedule.streamed for plan in fitted.plans)
    schedules = [plan.schedule for plan in fitted.plans]
    return replace(
        lowering,
        programs=fitted.programs,
        source=replace(
            lowering.source,
            recomputed=tuple([None if own is None else own.number for own in fitted.recomputed]),
        ),
        plans=fitted.plans if streams else (),
        recomputed=next((own for own in fitted.recomputed if own is not None), None),
        memory=memory_of_schedules(schedules) if streams else memory_of(fitted.programs),
    )


def check_memory(lowering: Lowering, limits: Limits) -> None:
    """Raise DeviceError where programs as they run, sharing their weights, exceed a limit of the device."""
    programs = [plan.schedule.program for plan in lowering.plans] or lowering.programs
    for program in programs:
        check_limits(program, limits, lowering.memory.staging_bytes)
    total = lowering.memory.total_bytes
    if limits.memory_bytes is not None and total > limits.memory_bytes:
        raise DeviceError(
            f"{programs[0].name} takes {total} bytes in all, {limits.device} has {limits.memory_bytes} "
            f"({limits.sources['memory_bytes']}); use a smaller batch, or half storage"
        )


def _source(captured: Sequence[CapturedStep], target: Target, request: Request) -> Source:
    """Return the captured steps and their target as the bundle holds them."""
    for value in [value for entry in captured for value in entry.step.values]:
        if value.dtype not in _DTYPES:
            raise LoweringError(
                f"{value.name} is {value.dtype}, with which kernels do not compute; expected float32 or "
                "float16: cast the model"
            )
    steps = [entry.step for entry in captured]
    if request.train:
        steps += [entry.accumulating for entry in captured if entry.accumulating is not None]
        return Source.of(steps, target)
    apart = sorted(request.plan.apart) if request.plan else ()
    return Source.of(steps, replace(target, half_weights=target.half), apart)


def check_example(call: Call) -> None:
    """Raise InputError unless a model is called with a tensor."""
    if not tensors_in((call.args, call.kwargs), torch.Tensor):
        raise InputError("example holds no tensor; expected what the model is called with, batch included")


def _check_request(request: Request) -> None:
    if isinstance(request.model, Mapping):
        _check_methods(request)
    for call in request.calls:
        model = call.model
        if not isinstance(model, torch.nn.Module):
            raise not_a_module(model)
        check_example(call)
        state = unwrapped(model).state_dict()
        empty = [name for name, value in state.items() if isinstance(value, torch.Tensor) and value.is_meta]
        if empty:
            raise InputError(
                f"{type(model).__name__} has {len(empty)} weights on the meta device ({empty[0]}), "
                "without values; expected a model with its weights: load them first"
            )
    if request.seed is not None:
        check_whole("seed", request.seed, 0)
    name: object = request.name
    if name is not None and not (
        isinstance(name, str) and 0 < len(name) <= 1000 and re.match(PRINTABLE, name)
    ):
        raise InputError(f"name is {shown(name)}; expected printable text of 1 to 1000 characters")
    check_choice("mode", request.mode, get_args(Mode))
    check_choice("precision", request.precision, get_args(Precision))
    check_step(request.step, "export")
    if request.plan is not None and request.train:
        raise InputError("plan is given with mode='train'; expected memory_limit for a training step")
    if request.tuner == "measured":
        raise InputError(
            "tuner is 'measured'; expected 'fixed' or 'model' for a bundle, whose device need not be here: "
            "Trainer and torch.compile measure on the device they run on"
        )
    if request.plan is not None and request.memory_limit is not None:
        raise InputError("plan and memory_limit are given; expected one of them")
    if request.plan is not None and not isinstance(request.plan, StreamingPlan):
        raise InputError(f"plan is {described(request.plan)}; expected what torchedge.plan returns")


def _check_methods(request: Request) -> None:
    """Raise InputError unless the models are pairs by the names of at least two inferences."""
    methods = request.model
    assert isinstance(methods, Mapping)
    pairs: Mapping[Any, Any] = methods
    for name, pair in pairs.items():
        if not isinstance(name, str) or METHOD_NAME.match(name) is None or name == "infer":
            raise InputError(
                f"{name!r} is a method's name; expected a small letter and up to 31 small letters, digits "
                "and _, not infer: rename it"
            )
        if not isinstance(pair, (tuple, list)) or len(pair) not in (2, 3):
            raise InputError(
                f"method {name} is {described(pair)}; expected (model, example), and the TrainingStep of one "
                "that trains"
            )
        for step in pair[2:]:
            if not isinstance(step, TrainingStep):
                raise InputError(
                    f"method {name} has {described(step)} behind its example; expected a TrainingStep"
                )
            check_step(step, "export")
            if step.accumulation > 1:
                raise InputError(
                    f"accumulation is {step.accumulation} in method {name}; expected 1 among several methods"
                )
            if step.loss == "default":
                raise InputError(f"method {name} gives no loss; expected loss= a function, or 'model'")
    if not 2 <= len(methods) <= MAX_METHODS:
        raise InputError(f"there are {len(methods)} methods; expected 2 to {MAX_METHODS}, or one model alone")
    given = {"example": request.example, "plan": request.plan}
    for name, value in given.items():
        if value is not None:
            raise InputError(f"{name} is given beside several methods; expected it with one model: omit it")
    if request.train:
        raise InputError(
            "mode is 'train' beside several methods; expected the step of the one that trains behind its "
            "example, as (model, example, TrainingStep(...)): omit mode"
        )


def _captured(request: Request) -> tuple[list[CapturedStep], list[str]]:
    """Return the captured steps, and notes on the defaults that were used."""
    notes, calls = list[str](), request.calls
    trained = [_captured_training(request, call, call.step, notes) for call in calls if call.step is not None]
    if request.train:
        return trained, notes
    inferences = [(call.model, call.args, call.kwargs) for call in calls if call.step is None]
    steps = iter(capture_inferences(inferences, trained, seed=request.seed, name=request.name))
    ordered = sorted(range(len(calls)), key=lambda place: calls[place].step is not None)
    placed = dict(zip(ordered, steps, strict=True))
    return [placed[place] for place in range(len(calls))], notes


def _captured_training(request: Request, call: Call, step: TrainingStep, notes: list[str]) -> CapturedStep:
    model, targets = call.model, step.targets
    optimizer: Any = step.optimizer
    if step.loss == "default":
        outputs = [] if targets else eager_outputs(model, call.args, call.kwargs)
        if not (outputs and not outputs[0].dim()):  # else the model returns its loss
            notes.append("the loss is cross entropy")
            targets = targets or (_class_numbers(model, outputs),)
    if optimizer == "sgd-momentum":
        optimizer, trained = None, [p for p in model.parameters() if p.requires_grad]
        if trained:
            optimizer = torch.optim.SGD(trained, lr=LEARNING_RATE, momentum=MOMENTUM)
            notes.append(f"the optimizer is SGD with momentum {MOMENTUM}")
    return capture_step(
        model,
        call.args,
        call.kwargs,
        targets=targets,
        loss=step.loss,
        optimizer=optimizer,
        accumulation=step.accumulation,
        training=True,
        keep=frozenset(all_rules()),
        seed=request.seed,
        name=request.name,
    )


def _class_numbers(model: torch.nn.Module, expected: list[torch.Tensor]) -> torch.Tensor:
    """Return example targets of cross entropy: one class number for each score vector of the output."""
    if len(expected) != 1 or expected[0].dim() < 2 or not expected[0].is_floating_point():
        shapes = ", ".join(str(list(t.shape)) for t in expected) or "none"
        raise InputError(
            f"{type(model).__name__} returns tensors of shapes {shapes}, for which no targets of "
            "cross entropy have no default; expected loss= and targets="
        )
    shape = expected[0].shape
    return torch.zeros((shape[0], *shape[2:]), dtype=torch.int64)


def _fed(program: Program) -> list[int]:
    return [place for place in program.inputs if place not in program.hyperparameters.values()]


def _values(captured: Sequence[CapturedStep], programs: Sequence[Program]) -> dict[str, npt.NDArray[Any]]:
    """Return the tensors of captured steps by name, without hyperparameters, which are fed to each step."""
    fed = {name for program in programs for name in program.hyperparameters}
    tensors = [item for entry in captured for item in entry.tensors.items()]
    return {name: tensor.detach().cpu().numpy() for name, tensor in tensors if name not in fed}


def _loading_order(plans: Sequence[Budgeted]) -> list[str]:
    """Return the weights in the order in which runs load them, those that stay first."""
    schedules = [plan.schedule for plan in plans]
    loaded = [(s.program.tensors, s.preload) for s in schedules]
    loaded += [(s.program.tensors, tuple(s.streamed)) for s in schedules]
    names = [tensors[index].name for tensors, indices in loaded for index in indices]
    return [*dict.fromkeys(whole_name(name) for name in names)]


def _manifest(
    request: Request,
    steps: Sequence[CapturedStep],
    programs: Sequence[Program],
    memory: Memory,
    target: BundleTarget,
    notes: Sequence[str],
    onnx: Mapping[str, Plain],
    files: Mapping[str, BundleFile],
) -> Manifest:
    from torchedge import __version__

    program, methods = programs[0], list[Method]()
    for place, (call, step, each) in enumerate(zip(request.calls, steps, programs, strict=False)):
        names = step.output_names
        if call.step is not None:
            names = tuple([step.step.values[index].name for index in step.step.outputs])
        fed = _fed(each)
        inputs = ports_of(each, fed, [each.tensors[index].name for index in fed])
        outputs = ports_of(each, each.outputs, names)
        file = program_file(call.method, place)
        methods.append(Method(call.method, file, inputs, outputs, memory_of([each])))
    return Manifest(
        model=program.name,
        mode=request.mode,
        accumulation=request.step.accumulation,
        versions={"torchedge": __version__, "torch": torch.__version__, "numpy": np.__version__},
        target=target,
        inputs=methods[0].inputs,
        outputs=methods[0].outputs,
        hyperparameters={
            name: float(step.tensors[name])
            for step, each in zip(steps, programs, strict=False)
            for name in each.hyperparameters
        },
        memory=memory,
        onnx=onnx,
        notes=(*notes, *program.notes),
        files=files,
        sha256="",
        methods=tuple(methods) if len(methods) > 1 else (),
        ends=request.ends,
    )


# the folder -------------------------------------------------------------------------------------------------


def check_free(out: str | Path, force: bool) -> Path:
    """Return the absolute path of a folder that may be written.

    Raises InputError: it is there already (with `force`: and is no bundle), or its own folder is not there.
    """
    target = check_path("out", out).absolute()
    recover(target)
    if target.is_symlink():
        target = target.resolve()
    if not target.parent.is_dir():
        raise InputError(f"{out}: there is no folder {target.parent}; expected one to write into: make it")
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise InputError(f"{out}: {target.parent} is not writable; expected a folder that is: choose another")
    if not os.path.lexists(target):
        return target
    if not target.is_dir():
        raise InputError(f"{out}: is a file; expected the name of a folder to make: choose another")
    if not any(target.iterdir()) or (force and (target / MANIFEST).is_file()):
        return target
    if force:
        raise InputError(f"{out}: is a folder but no bundle, and is not replaced; choose another")
    raise InputError(f"{out}: is there already; expected a new folder: pass force (--force) to replace it")
