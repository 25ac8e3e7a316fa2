"""A bundle's folder, read and checked to the last byte, and how it runs on an OpenCL device."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from torchedge.arrays import Array
from torchedge.bundles.generation import Column, Sampling, Windows, generate
from torchedge.bundles.manifests import (
    CHECK,
    MANIFEST,
    MANIFESTS,
    MAX_PLAN_BYTES,
    ONNX,
    PROGRAM,
    SOURCE,
    TOKENIZER,
    TRAIN,
    WEIGHTS,
    Manifest,
    Memory,
    Method,
    Port,
    kernel_file,
    memory_of,
    memory_of_schedules,
    ports_of,
    read_manifest,
)
from torchedge.bundles.plan_files import PlanFile, read_schedule, schedule_apart
from torchedge.bundles.sources import MAX_SOURCE_BYTES, prove_programs
from torchedge.bundles.texts import Tokenizer
from torchedge.bundles.weights import check_weights, packed_weights, read_header
from torchedge.devices import find_device
from torchedge.errors import (
    DivisionError,
    IndexRangeError,
    InputError,
    check_function,
    check_path,
    checked_call,
    did_you_mean,
)
from torchedge.graphs import RESIDENT_ROLES, SHARED_ROLES
from torchedge.lowering.assembly import ALIGNMENT
from torchedge.lowering.placement import placed_for
from torchedge.lowering.program_files import MAX_FILE_BYTES, parse_program
from torchedge.lowering.programs import MAX_SOURCE, Program, StoredTensor
from torchedge.opencl.sharing import serialised
from torchedge.storage import file_sha256, resolve_inside
from torchedge.storage.amounts import Amount, bytes_of
from torchedge.storage.documents import Document, open_file, parse_json, read_bytes
from torchedge.storage.locks import PROCESS, cached_property
from torchedge.storage.replacing import recover
from torchedge.storage.tensors import Header
from torchedge.streaming.budgets import Budgeted
from torchedge.streaming.repeating import fit_in_turn, plan_in_turn
from torchedge.streaming.schedules import StreamingSchedule, schedule_for

if TYPE_CHECKING:
    from torchedge.devices import Device
    from torchedge.lowering.kernels.loading import LoadingWay
    from torchedge.opencl import ClDevice
    from torchedge.runtime import Executor, LaunchTime
    from torchedge.runtime.measured_runs import MeasuredRun
    from torchedge.runtime.weight_sources import Reads, WeightSource
    from torchedge.streaming.program_costs import ProgramPrediction
    from torchedge.streaming.schedules import StreamingSchedule

MEBIBYTE = 2**20


def _is_bundle(folder: Path) -> bool:
    try:
        recover(folder)
        return folder.is_dir() and (folder / MANIFEST).exists()
    except OSError:  # its folder may not be searched
        return False


@dataclass(frozen=True, eq=False)
class Bundle:
    """An exported model: kernels, launches, weights. `open` reads one; `run` and `train_step` execute it.

    path: its folder. manifest: what it says of itself. programs: what runs, by name; the first one is that of
    `run` without a method. header: where weights lie in the file. weights_state: its bytes and time of
    change (ns) before it was checked. plans: the streaming plan of each program with its instance, and
    schedules: the copies that it makes; none where all weights stay on the device.
    """

    path: Path
    manifest: Manifest
    programs: Mapping[str, Program]
    header: Header
    weights_state: tuple[int, int]
    plans: Mapping[str, PlanFile] = field(default_factory=dict)
    schedules: Mapping[str, StreamingSchedule] = field(default_factory=dict)

    def predict(
        self, device: str | Path | Device | None = None, *, method: str | None = None
    ) -> ProgramPrediction:
        """Predict memory and time of a step on a device, by default the one it was exported for.

        method: as in `run`. Weights of a bundle that streams are there where they stay from run to run.
        Raises InputError for a method that it does not have, DeviceError for a device without a profile, or
        whose profile says too little.
        """
        from torchedge.devices import Device
        from torchedge.streaming.program_costs import predict_program

        chosen = device if isinstance(device, Device) else find_device(device or self.manifest.target.name)
        name, plan = self.method(method).name, None
        if name in self.plans:
            plan = Budgeted(self.plans[name].instance, self.plans[name].plan, self.schedules[name])
        return predict_program(self.programs[name], chosen, plan)

    @classmethod
    def open(cls, path: str | Path, *, trust: bool = False, prove: bool = False) -> Bundle:
        """Read a bundle and check everything in it: hashes, sizes, schemas, indices, layouts, the arena.

        Its programs, kernels included, have to be those that its source is lowered to. trust: they need not;
        they then run as they are, as programs do. prove: the source is lowered now, even where the user's
        cache folder says that it was before.

        Raises:
            InputError: it is no bundle, or something in it is missing, changed or out of range.
            ProfileError: a file cannot be read or is damaged, or leads out of the folder.
        """
        folder = check_path("path", path)
        if trust and prove:
            raise InputError("trust and prove are both true; expected one: trust omits what prove asks for")
        if not _is_bundle(folder):
            raise InputError(
                f"{path}: is no bundle; expected a folder with a {MANIFEST}, which torchedge.export makes"
            )
        manifest = read_manifest(folder)
        weights = resolve_inside(folder, WEIGHTS)
        with open_file(weights) as file:
            status = os.fstat(file.fileno())
        contents = _read_files(folder, manifest)
        texts = {
            name[len("kernels/") : -len(".cl")]: _text(folder / name, content)
            for name, content in contents.items()
            if name.startswith("kernels/")
        }
        programs = {
            name: parse_program(folder / file, parse_json(folder / file, contents[file]), texts)
            for name, file in manifest.programs.items()
        }
        if not trust:
            deciding = [f"{name} {manifest.files[name].sha256}" for name in sorted(contents)]
            prove_programs(folder / SOURCE, contents[SOURCE], [*programs.values()], deciding, anew=prove)
        header = read_header(weights)
        check_weights(weights, header, [*programs.values()])
        plans, schedules = dict[str, PlanFile](), dict[str, StreamingSchedule]()
        for name, written in manifest.plans.items():
            document = parse_json(folder / written, contents[written])
            read = read_schedule(folder / written, document, programs[name], header.places)
            plans[name], schedules[name] = read
        _check_same(folder, manifest, programs, schedules)
        state = (status.st_size, status.st_mtime_ns)
        return cls(folder.resolve(), manifest, programs, header, state, plans, schedules)

    @property
    def program(self) -> Program:
        """The program of `run` without a method, and of `train_step`."""
        return next(iter(self.programs.values()))

    @property
    def plan(self) -> PlanFile | None:
        """The streaming plan of `program`; None where all weights stay on the device."""
        return next(iter(self.plans.values()), None)

    @property
    def schedule(self) -> StreamingSchedule | None:
        """The copies that a streaming run of `program` makes; None where all weights stay on the device."""
        return next(iter(self.schedules.values()), None)

    @property
    def inputs(self) -> tuple[Port, ...]:
        """The inputs of `run` and `train_step`, in order (of other methods: `method(name).inputs`)."""
        return self.manifest.inputs

    @property
    def outputs(self) -> tuple[Port, ...]:
        """The outputs of `run`, in order."""
        return self.manifest.outputs

    @property
    def states(self) -> tuple[Port, ...]:
        """What stays on the device from run to run and changes: buffers that an inference writes to, sums."""
        tensors = [tensor for program in self.programs.values() for tensor in program.tensors]
        states = {tensor.name: tensor for tensor in tensors if tensor.role == "state"}
        return tuple([Port(tensor.name, tensor.shape, tensor.dtype) for tensor in states.values()])

    @property
    def trains(self) -> bool:
        """Whether a run is a training step."""
        return self.manifest.mode == "train"

    @property
    def methods(self) -> tuple[str, ...]:
        """Names of what `run` can run, the first one by default."""
        return tuple([method.name for method in self.manifest.methods]) or (self.manifest.mode,)

    def method(self, name: str | None = None) -> BundleMethod:
        """Return one method of the bundle, without a name the first one; raises InputError for no such."""
        if name is not None and name not in self.methods:
            raise InputError(
                f"{self.path}: has no method {str(name)[:80]!r}; expected {', '.join(self.methods)}"
            )
        chosen = self.methods[0] if name is None else name
        for method in self.manifest.methods:
            if method.name == chosen:
                return BundleMethod(self, chosen, method.inputs, method.outputs)
        return BundleMethod(self, chosen, self.manifest.inputs, self.manifest.outputs)

    @checked_call()
    def place(
        self,
        device: ClDevice | str | int | None = None,
        *,
        memory_limit: Amount | None = None,
        reads: Reads = "plain",
        loading: LoadingWay = "copy",
        profile: bool = False,
    ) -> Runner:
        """Return a Runner of the bundle on an OpenCL device, with the weights that it was exported with.

        memory_limit: of all that runs allocate, in MiB or as "500MiB". None: as exported. reads: how the
        weights of a streaming run are read ("plain", "mmap", "direct": past the page cache). loading: how
        they get into the device's memory ("copy" commands, loading "kernel"s, or the "slot"s of launches).
        Raises LimitError: no streaming plan stays within the limit; the message names a limit that works.
        """
        # Reading a bundle needs no OpenCL.
        from torchedge.opencl import open_context

        chosen = open_context(device).device
        schedules = self.schedules if memory_limit is None else self.schedules_within(memory_limit, chosen)
        return Runner(self, chosen, schedules=schedules, reads=reads, loading=loading, profile=profile)

    def schedules_within(
        self, memory_limit: Amount, device: ClDevice | None = None
    ) -> Mapping[str, StreamingSchedule]:
        """Return how programs run within a limit: by streaming, or (none) with all weights on the device.

        The exported schedules are taken if they stay within the limit; otherwise the programs are planned
        again, a single inference with the profile that it was exported for, and training so that it computes
        activations again where it must. device: the OpenCL device that
        runs it.

        Raises:
            LimitError: no plan stays within the limit.
            DeviceError: the device's profile is not there, or lacks a figure.
        """
        limit = bytes_of(memory_limit, "memory_limit")
        programs, schedules = dict(self.programs), dict(self.schedules)
        if device is not None:
            programs = {name: placed_for(program, device, ALIGNMENT) for name, program in programs.items()}
            schedules = {name: schedule_for(schedule, device) for name, schedule in schedules.items()}
        if memory_of([*programs.values()]).total_bytes <= limit:
            return {}
        if schedules and memory_of_schedules([*schedules.values()]).total_bytes <= limit:
            return schedules
        if len(programs) > 1 or self.trains:
            in_turn = [*programs.values()]
            learns = any(program.hyperparameters for program in in_turn)  # the learning rate of a step
            plans = fit_in_turn(in_turn, limit).plans if learns else plan_in_turn(in_turn, limit)
            return dict(zip(programs, [plan.schedule for plan in plans], strict=True))
        name, program = next(iter(programs.items()))
        return {name: schedule_apart(program, self.device, limit, self.header.places)}

    @property
    def device(self) -> Device:
        """The profile that the bundle was exported for; raises DeviceError if it is not there."""
        return find_device(self.manifest.target.name)

    @property
    def runner(self) -> Runner:
        """The runner of `run` and `train_step`: on the default device, created on first use."""
        with PROCESS:
            return self._runner

    @cached_property
    def _runner(self) -> Runner:
        return self.place()

    @checked_call()
    def run(self, *inputs: object, method: str | None = None) -> list[Array]:
        """Run one batch of arrays in the order of `inputs` and return the outputs; raises what Runner does.

        method: one of `methods`, without it the first one.
        Raises InputError: too few or many arrays, a wrong shape or dtype, or no such method.
        """
        return self.runner.step(*inputs, method=method)

    @checked_call()
    def generate(
        self,
        ids: Iterable[Any],
        max_new_tokens: int | None = None,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        stop: Iterable[int] = (),
        seed: int = 0,
        stream: Callable[[Any], object] | None = None,
        begin_with: Iterable[int] | None = None,
    ) -> list[Any]:
        """Return the tokens that follow a prompt, by a bundle of `torchedge.export_lm`.

        ids: the prompt, of any length that the caches hold; it runs in chunks. What it has in common with the
        tokens of the call before, from the first one on, is kept and not computed again. max_new_tokens: by
        default 64, or as many as the caches hold.
        temperature: 0 takes the most likely token; above it tokens are drawn, among the top_k most likely, or
        the fewest whose probabilities reach top_p. The same seed draws the same. stop: tokens that end the
        text; the one found is returned, too. stream: called with each new token.

        Several prompts, of any lengths, give a list of each one's tokens: as many as the bundle's `batch`.
        Prompt n draws by seed + n; stream gets a list, with None for texts that have ended.

        An encoder-decoder encodes `ids`, tokens or features (an array), once, and returns the tokens of its
        decoder. begin_with: tokens that the decoder begins with, by default the decoder_start_token_id of the
        model.

        Raises:
            InputError: the bundle is no language model, an argument is out of range, or the tokens are more
            than the caches hold, or the prompts more than the bundle takes. IndexRangeError: a token is not
            in the vocabulary.
        """
        sampling = Sampling(temperature, top_k, top_p)
        return self.runner.generate(ids, max_new_tokens, sampling, stop, seed, stream, begin_with)

    def generate_text(
        self,
        text: str,
        max_new_tokens: int | None = None,
        *,
        stop: str | Iterable[int | str] | None = None,
        stream: Callable[[str], object] | None = None,
        tokenizer: str | Path | None = None,
        **options: Any,  # noqa: ANN401 - those of `generate`
    ) -> str:
        """Return the text that follows another one; the package `tokenizers` makes its tokens.

        stop: tokens that end it, by name or number, by default those that the model's settings name; () for
        none. stream: called with each piece of text as soon as it is there. tokenizer: a tokenizer.json, by
        default the bundle's. Other options and errors are those of `generate`; InputError too where the
        bundle has no tokenizer and none is given.
        """
        words = self.tokenizer(tokenizer)
        if stream is not None:
            check_function("stream", stream)
        pieces = None if stream is None else words.pieces(stream)
        ends = self.manifest.ends if stop is None else words.numbers(stop)
        tokens = self.generate(words.tokens(text), max_new_tokens, stop=ends, stream=pieces, **options)
        return words.text(tokens)

    def tokenizer(self, path: str | Path | None = None) -> Tokenizer:
        """Return the bundle's tokenizer, or that of a tokenizer.json; raises InputError without either."""
        if path is None and TOKENIZER not in self.manifest.files:
            raise InputError(
                f"{self.path}: holds no tokenizer; expected one here or at its export, a tokenizer.json, or "
                "tokens in place of a text"
            )
        return Tokenizer(self.path / TOKENIZER if path is None else path)

    def train_step(self, *inputs: object) -> float:
        """Train on one batch and return the loss; weights stay on the device. Of several methods by "train".

        Raises InputError: the bundle is one for inference, or an array does not fit.
        """
        if not self.trains and TRAIN not in self.methods:
            raise InputError(
                f"{self.path}: is a bundle for inference; expected one that trains: export with mode='train'"
            )
        return float(self.run(*inputs, method=TRAIN)[0])

    def state_dict(self) -> dict[str, Array]:
        """Return parameters and buffers after the steps run so far, by PyTorch's names.

        A bundle for inference has only those that were not folded into constants, and its states.
        """
        if self.trains:
            return self.runner.state_dict()
        names = {
            t.name for p in self.programs.values() for t in p.tensors if t.role in ("parameter", "buffer")
        }
        weights = {name: array for name, array in self.weights().items() if name in names}
        return weights | {port.name: self.runner.read(port.name) for port in self.states}

    def weights(self, names: Collection[str] | None = None) -> dict[str, Array]:
        """Return what the file holds: parameters, buffers and constants by name, as PyTorch has them.

        names: of those to return; all without it.
        """
        packed = self._packed(names)
        return {tensor.name: tensor.layout.unpack(array, tensor.shape) for tensor, array in packed}

    def packed(self, names: Collection[str]) -> Iterator[tuple[str, Array]]:
        """Yield those of the tensors that the file holds, in the layout of the device."""
        for tensor, array in self._packed(names) if names else ():
            yield tensor.name, array

    def _packed(self, names: Collection[str] | None) -> Iterator[tuple[StoredTensor, Array]]:
        digest = self.manifest.files[WEIGHTS].sha256
        return packed_weights(self.path / WEIGHTS, self.header, [*self.programs.values()], digest, names)

    def packed_states(self) -> Iterator[tuple[str, Array]]:
        """Yield the states that the file holds: they are loaded once, also where weights are streamed.

        Streamed weights that are indices are checked meanwhile, once for all runs.
        """
        tensors = [tensor for program in self.programs.values() for tensor in program.tensors]
        states = {tensor.name for tensor in tensors if tensor.role == "state"}
        indices = {tensor.name for tensor in tensors if tensor.indices and tensor.role in RESIDENT_ROLES}
        for name, packed in self.packed(states | indices):
            if name in states:
                yield name, packed

    def open_source(self, reads: Reads = "plain") -> WeightSource:
        """Open the file as the source of a streaming run; raises ProfileError where it cannot be opened."""
        from torchedge.runtime.weight_sources import FileSource

        return FileSource(self.path / WEIGHTS, self.header.places, reads, state=self.weights_state)

    def document(self) -> Document:
        """Return the manifest, and the counts of its program, as plain data."""
        return {
            "path": str(self.path),
            **MANIFESTS.document(self.manifest),
            "kernels": len({k.name for program in self.programs.values() for k in program.kernels}),
            "launches": sum(len(program.launches) for program in self.programs.values()),
        }

    def __str__(self) -> str:
        manifest = self.manifest
        memory, target = manifest.memory, manifest.target
        step = "training step" if self.trains else "inference"
        if manifest.accumulation > 1:
            step += f", weights updated every {manifest.accumulation} batches"
        rows = [("for", f"{target.name} ({target.device_class})")]
        for name in self.methods:
            method, prefix = self.method(name), f"{name}: " if manifest.methods else ""
            rows += [
                (f"{prefix}inputs", _listed(method.inputs)),
                (f"{prefix}outputs", _listed(method.outputs)),
                (
                    f"{prefix}kernels",
                    f"{len(method.program.kernels)} in {len(method.program.launches)} launches",
                ),
            ]
        rows += [
            ("weights", f"{manifest.files[WEIGHTS].nbytes / MEBIBYTE:.1f} MiB"),
            ("device memory", _memory_text(memory)),
            ("limits", f"{len(target.checked)} respected, unknown: {', '.join(target.unknown) or 'none'}"),
            ("onnx", ", ".join(f"{key} {_shown(value)}" for key, value in manifest.onnx.items())),
        ]
        if manifest.hyperparameters:
            values = ", ".join(f"{name} = {value:g}" for name, value in manifest.hyperparameters.items())
            rows.insert(3, ("set before a step", values))
        if self.plan is not None and self.schedule is not None:
            rows.append(
                ("streaming", _streaming_text(self.plan, self.schedule, memory_of([*self.programs.values()])))
            )
        rows += [("note", note) for note in manifest.notes]
        width = max(len(name) for name, _ in rows)
        lines = [f"{name:<{width}}  {text}" for name, text in rows]
        return "\n".join([f"{manifest.model}: {step}", *lines])


@dataclass(frozen=True, eq=False)
class BundleMethod:
    """One method of a bundle: what it takes and returns. Its weights and states are those of the others."""

    bundle: Bundle
    name: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]

    @property
    def program(self) -> Program:
        """What it runs."""
        return self.bundle.programs[self.name]

    def run(self, *inputs: object) -> list[Array]:
        """Run one batch as `Bundle.run` does."""
        return self.bundle.run(*inputs, method=self.name)


class Runner:
    """Runs a bundle; weights and optimizer state stay on the device from step to step, or are streamed.

    The arena is planned again where the device does not take its allocations (`placed_for`). Threads may
    share a runner: its steps run one after the other.

    kept: tokens that the caches of a language model hold. streams: whether weights are loaded in every run.
    device, profile: as Executor takes them. schedules: copies of streaming runs on this device, by
    program; none: all weights are loaded before the first run. reads, loading: see `Bundle.place`.

    Raises:
        DeviceError: there is no such device, or it does not take what the program needs.
        MissingExtraError: pyopencl is not installed. OpenCLError: the driver fails.
        ProfileError: the weights cannot be read.
    """

    def __init__(
        self,
        bundle: Bundle,
        device: ClDevice | str | int | None = None,
        *,
        schedules: Mapping[str, StreamingSchedule] | None = None,
        reads: Reads = "plain",
        loading: LoadingWay = "copy",
        profile: bool = False,
    ) -> None:
        # Reading a bundle needs no OpenCL.
        from torchedge.opencl import open_context
        from torchedge.runtime import Executor

        self._lock = threading.RLock()
        self.bundle, self.streams = bundle, bool(schedules)
        self.batches = 0
        self.kept: tuple[Column, ...] = ()
        context = open_context(device)
        self.executors: dict[str, Executor] = {}
        placed: dict[str, Program | StreamingSchedule] = {}
        for name, program in bundle.programs.items():
            if schedules:
                placed[name] = schedule_for(schedules[name], context.device)
            else:
                placed[name] = placed_for(program, context.device, ALIGNMENT)
        arenas = [(p if isinstance(p, Program) else p.program).arena for p in placed.values()]
        for name, each in placed.items():
            self.executors[name] = Executor(
                each,
                context.device,
                source=bundle.open_source(reads) if schedules else None,
                loading=loading,
                profile=profile,
                shared=[*self.executors.values()],
                shared_roles=RESIDENT_ROLES,
                in_turn=arenas if len(arenas) > 1 else (),
            )
        self._owners: dict[str, Executor] = {}
        for executor in self.executors.values():
            for name in sorted(_names(executor.program, RESIDENT_ROLES)):
                self._owners.setdefault(name, executor)
        if schedules:
            for name, packed in bundle.packed_states():
                self._owner(name).load_packed([(name, packed)])
        else:
            self._load(self._owners)
        self._last = self.executor
        for name, value in bundle.manifest.hyperparameters.items():
            self.set(name, value)

    @property
    def executor(self) -> Executor:
        """The executor of the program that runs by default."""
        return next(iter(self.executors.values()))

    def _load(self, names: Collection[str]) -> None:
        """Write those of the tensors that the file holds."""
        for name, packed in self.bundle.packed(names):
            self._owners[name].load_packed([(name, packed)])

    def _owner(self, name: str) -> Executor:
        return self._owners.get(name, self.executor)

    @serialised
    def step(self, *inputs: object, method: str | None = None) -> list[Array]:
        """Run one batch and return the outputs; each `accumulation`-th batch of training updates weights.

        method: as in `Bundle.run`.

        Raises:
            InputError: too few or many arrays, a wrong shape or dtype, or no such method.
            OpenCLError: the driver fails.
            IndexRangeError: an index is out of range; nothing is updated, and the batch does not count.
        """
        chosen = self.bundle.method(method).name
        if (self.batches + 1) % self.bundle.manifest.accumulation:
            chosen = "accumulating"
        self._last, self.kept = self.executors[chosen], ()
        try:
            outputs = self._last.run(*inputs)
        except (IndexRangeError, DivisionError):
            self.batches += self._last.updates_before_checks
            raise
        self.batches += 1
        return outputs

    @serialised
    def generate(
        self,
        ids: Iterable[Any],
        max_new_tokens: int | None,
        sampling: Sampling,
        stop: Iterable[int] = (),
        seed: int = 0,
        stream: Callable[[Any], object] | None = None,
        begin_with: Iterable[int] | None = None,
    ) -> list[Any]:
        """Return the tokens that follow a prompt, as `Bundle.generate` does."""
        methods = {name: self.bundle.method(name) for name in self.bundle.methods}
        ports = {name: (method.inputs, method.outputs) for name, method in methods.items()}
        windows = Windows.of(ports, self.bundle.states)
        return generate(self, windows, ids, max_new_tokens, sampling, stop, seed, stream, begin_with)

    @serialised
    def set(self, name: str, value: float) -> None:
        """Set a hyperparameter, which keeps its value until it is set again."""
        executors = [e for e in self.executors.values() if name in e.program.hyperparameters]
        for executor in executors or [self.executor]:
            executor.set(name, value)

    @serialised
    def read(self, name: str) -> Array:
        """Return what a parameter, buffer or state holds now."""
        return self._owner(name).read(name)

    @serialised
    def write(self, name: str, array: object) -> None:
        """Change what a parameter, buffer or state holds; raises InputError for another shape or dtype."""
        self.kept = ()
        self._owner(name).write(name, array)

    @serialised
    def reset(self, *names: str) -> None:
        """Put states back to what they hold in the bundle: those named, or all.

        Raises InputError: the bundle has no such state. ProfileError: the weights cannot be read.
        """
        programs = self.bundle.programs.values()
        states = {t.name: t for program in programs for t in program.tensors if t.role == "state"}
        for name in names:
            if name not in states:
                hint = did_you_mean(name, states, "it keeps none" if not states else "", most=3)
                raise InputError(f"{self.bundle.path}: has no state {name!r}; {hint}")
        chosen, self.kept = set(names or states), ()
        for name in chosen - self.bundle.header.entries.keys():
            self.write(name, np.full(states[name].shape, states[name].fill, states[name].dtype))
        self._load(chosen & self.bundle.header.entries.keys())

    @serialised
    def state_dict(self) -> dict[str, Array]:
        """Return parameters and buffers as they are now, by PyTorch's names."""
        names = [t.name for t in self.bundle.program.tensors if t.role in ("parameter", "buffer")]
        held = {tensor.name for tensor in self.executor.held}
        streamed = {name for name in names if name not in held}
        frozen = self.bundle.weights(streamed) if streamed else {}
        return {name: frozen[name] if name in frozen else self.read(name) for name in names}

    @serialised
    def timings(self) -> list[LaunchTime]:
        """Return when each launch of the last step ran; raises InputError without `profile`."""
        return self._last.timings()

    @serialised
    def measured(self) -> MeasuredRun:
        """Return times and memory of the last streaming run; raises InputError without one or `profile`."""
        return self._last.measured()

    @serialised
    def close(self) -> None:
        """Give the device's memory back."""
        for executor in reversed(self.executors.values()):  # the first one has what they share
            executor.close()

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@checked_call()
def load_bundle(path: str | Path, *, trust: bool = False, prove: bool = False) -> Bundle:
    """Read a bundle that `export` wrote, and check everything in it; see `Bundle.run` and `train_step`.

    Its kernels are those that its source is lowered to, or it is refused: it is lowered once by each version
    of torchedge, and that is noted in your cache folder. prove: lower it now, whatever is noted. trust: its
    kernels may be others, such as those of another version; they run as any program does.

    Raises InputError and ProfileError for what is missing, damaged, changed or hostile.
    """
    return Bundle.open(path, trust=trust, prove=prove)


def _names(program: Program, roles: Collection[str]) -> set[str]:
    return {tensor.name for tensor in program.tensors if tensor.role in roles}


# checking ---------------------------------------------------------------------------------------------------


def _read_files(folder: Path, manifest: Manifest) -> dict[str, bytes]:
    """Check that every file listed is inside the folder, known, and what was hashed; return the small ones.

    What is returned is what was hashed: they are not read twice. Weights are hashed again when they are used.
    """
    most = {SOURCE: MAX_SOURCE_BYTES, **dict.fromkeys(manifest.plans.values(), MAX_PLAN_BYTES)}
    most |= dict.fromkeys(manifest.programs.values(), MAX_FILE_BYTES)
    large = (WEIGHTS, ONNX, f"{ONNX}.data", CHECK, TOKENIZER)  # hashed alone
    contents = {}
    for name, file in manifest.files.items():
        kernel = name.startswith("kernels/") and name.endswith(".cl") and name.count("/") == 1
        if name not in large and name not in most and not kernel:
            raise InputError(
                f"{folder}: lists the file {name[:80]!r}; expected only those that export writes"
            )
        path = resolve_inside(folder, name)
        if name in large:
            digest = file_sha256(path, max_bytes=file.nbytes)
        else:
            contents[name] = read_bytes(path, max_bytes=min(file.nbytes, most.get(name, 4 * MAX_SOURCE)))
            digest = hashlib.sha256(contents[name]).hexdigest()
        if digest != file.sha256:
            raise InputError(
                f"{path}: has another SHA-256 than {MANIFEST} says: it was changed, or damaged on its way; "
                "copy or export the bundle again"
            )
    return contents


def _text(path: Path, content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: is not UTF-8 text, expected OpenCL C; export the model again") from error


def _check_same(
    folder: Path, manifest: Manifest, named: Mapping[str, Program], schedules: Mapping[str, StreamingSchedule]
) -> None:
    """Check that the manifest describes the programs, and that programs keep what they share in one way."""
    programs = [*named.values()]
    program = programs[0]
    memory = memory_of(programs)
    if schedules:
        memory = memory_of_schedules([*schedules.values()])
        sizes = {schedule.staging_bytes for schedule in schedules.values()}
        if len(sizes) > 1 or schedules.keys() != named.keys():
            raise InputError(
                f"{folder}: has {len(schedules)} streaming plans for {len(named)} programs, with "
                f"{len(sizes)} sizes of staging memory; expected one each, and one size: export it again"
            )
    pairs: list[tuple[str, object, object]] = [
        ("hyperparameters", set(manifest.hyperparameters), {n for p in programs for n in p.hyperparameters}),
        ("memory", manifest.memory, memory),
        (
            "kernels",
            {name for name in manifest.files if name.startswith("kernels/")},
            {kernel_file(kernel.name) for each in programs for kernel in each.kernels},
        ),
    ]
    loss = [program.tensors[place].shape for place in program.outputs[:1]]
    if manifest.mode == "train" and (loss != [()] or not _updates(program)):
        raise InputError(
            f"{folder}: {MANIFEST} says mode 'train', and {PROGRAM} gives no loss or updates no weights; "
            "expected a training step: export the model again"
        )
    described: list[Manifest | Method] = [*manifest.methods] or [manifest] * len(programs)
    for each, entry in zip(programs, [manifest, *described[1:]], strict=True):
        fed = [place for place in each.inputs if place not in each.hyperparameters.values()]
        pairs += [
            ("inputs", entry.inputs, _ports(each, fed, entry.inputs)),
            ("outputs", entry.outputs, _ports(each, each.outputs, entry.outputs)),
            ("class", manifest.target.device_class, each.target),
        ]
    for method in manifest.methods:
        pairs.append((f"memory of {method.name}", method.memory, memory_of([named[method.name]])))
    for first in manifest.methods[:1]:
        pairs.append(("methods", (first.inputs, first.outputs), (manifest.inputs, manifest.outputs)))
    for what, declared, actual in pairs:
        if declared != actual:
            raise InputError(
                f"{folder}: {MANIFEST} and {PROGRAM} have different {what}; expected the same: export the "
                "model again"
            )
    kept: dict[str, StoredTensor] = {}
    for name, each in named.items():
        for tensor in each.tensors:
            plain = replace(tensor, indices=None)
            if tensor.role in RESIDENT_ROLES and kept.setdefault(tensor.name, plain) != plain:
                raise InputError(
                    f"{folder}: {manifest.programs[name]} and another program hold {tensor.name} in "
                    "different ways; expected the same: export the model again"
                )


def _updates(program: Program) -> bool:
    """Whether a program writes to a parameter, buffer or state."""
    return any(
        access != "read" and program.tensors[index].role in SHARED_ROLES
        for launch in program.launches
        for index, access in zip(launch.tensors, program.kernels[launch.kernel].access, strict=True)
    )


def _ports(program: Program, places: Sequence[int], declared: tuple[Port, ...]) -> tuple[Port, ...] | None:
    """Return tensors of the program under the names that the manifest gives, None where it gives others."""
    names = [port.name for port in declared]
    return ports_of(program, places, names) if len(names) == len(places) else None


# as text ----------------------------------------------------------------------------------------------------


def _memory_text(memory: Memory) -> str:
    parts = [
        f"{memory.resident_bytes / MEBIBYTE:.1f} resident",
        f"{memory.arena_bytes / MEBIBYTE:.1f} in the arena",
    ]
    if memory.staging_bytes:
        parts.append(f"{memory.staging_bytes / MEBIBYTE:.1f} for staging")
    return f"{memory.total_bytes / MEBIBYTE:.1f} MiB: {', '.join(parts)}"


def _streaming_text(file: PlanFile, schedule: StreamingSchedule, preloaded: Memory) -> str:
    """Return how many weights a plan streams, and what preloading all of them takes."""
    streamed, weights = len(schedule.streamed), len(schedule.streamed) + len(schedule.preload)
    return (
        f"{streamed} of {weights} weights, plan {file.plan.status}; with all of them on the device "
        f"{preloaded.total_bytes / MEBIBYTE:.1f} MiB"
    )


def _listed(ports: tuple[Port, ...]) -> str:
    shown = [f"{port.name} {port.dtype}{list(port.shape)}" for port in ports[:4]]
    return ", ".join(shown) + (f" and {len(ports) - 4} more" if len(ports) > 4 else "")


def _shown(value: object) -> str:
    return f"{value:.2g}" if isinstance(value, float) else str(value)
