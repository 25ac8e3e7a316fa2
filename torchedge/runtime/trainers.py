"""`Trainer`: a model, its loss and its optimizer as one program a step; weights stay on the device."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from operator import is_
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from torchedge.errors import (
    DivisionError,
    IndexRangeError,
    InputError,
    OpenCLError,
    TorchedgeWarning,
    check_rate,
    checked_call,
    described,
)
from torchedge.graphs import SHARED_ROLES, WEIGHT_ROLES
from torchedge.graphs.steps import Step
from torchedge.graphs.training_steps import STEP_FIELDS, Loss, TrainerOptions, TrainingStep, as_tuple
from torchedge.lowering.programs import Program
from torchedge.lowering.rules.registry import all_rules
from torchedge.lowering.targets import Tuner, target_for
from torchedge.notices import noticed, stage
from torchedge.opencl import ClDevice, open_context
from torchedge.opencl.sharing import serialised
from torchedge.runtime.executors import Executor, ProgramReport, report_on
from torchedge.runtime.host_marks import HostMarks
from torchedge.runtime.kernel_times import CachedTimes
from torchedge.runtime.limited_memory import LimitedMemory, array_of
from torchedge.runtime.program_caches import CaptureCache, lowered
from torchedge.storage.amounts import Amount, bytes_of
from torchedge.streaming.repeating import Fitted, fewest_parts, in_parts
from torchedge.textures.layouts import Layout
from torchedge.tracing.capturing import checked_model, unwrapped
from torchedge.tracing.interception import batch_of, part_of, tensors_in
from torchedge.tracing.objectives import as_arguments
from torchedge.tracing.optimizers import OptimizerSettings, check_kind, states_of, take_states
from torchedge.tracing.plain_tensors import check_tensors
from torchedge.tracing.python_state import Guard, identity_of
from torchedge.tracing.steps import ACCUMULATED, CapturedStep, capture_step, check_step

if TYPE_CHECKING:
    from typing_extensions import Unpack

MAX_SHAPES = 8
"""Shapes of batches for which programs are made; more of them are rather a mistake."""
MAX_STATES = 4
"""Earlier Python states of the model whose programs stay."""


@dataclass(frozen=True, slots=True)
class TrainerMemory:
    """Bytes that a Trainer holds on the device.

    arena: what the intermediates of all its programs take, and streamed weights; other: constants, inputs and
    outputs. staging: memory through which weights are streamed.
    """

    parameters: int
    buffers: int
    optimizer: int
    arena: int
    other: int
    staging: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return self.parameters + self.buffers + self.optimizer + self.arena + self.other + self.staging


@dataclass(frozen=True)
class _Made:
    """Programs for one shape of batches.

    Of training the one that updates, then the one that only adds up gradients, if any. Of an inference the
    one that infers, and rebuild: how its outputs become what the model returns.
    """

    executors: Sequence[Executor]
    rebuild: Callable[[list[torch.Tensor]], Any] | None = None


class Trainer:
    """Trains a model on an OpenCL device: forward, backward and update in one call; only batches are copied.

    model: in the mode in which it is to be trained. example_inputs: a batch, as in `step`: a tensor, a tuple
    of arguments, or a dict, which is passed as keyword arguments (`model(**inputs)`); a model with one
    dict as its argument takes ``(inputs,)``. targets: further arguments of the loss, a tensor or a tuple.
    step: a `TrainingStep`, or its fields as arguments of their own: loss (``loss(outputs, *targets)``, by
    default the model's own, else cross entropy), optimizer (a torch.optim object over the model's parameters;
    its learning rates are read at each step, so that PyTorch's schedulers work), accumulation (batches whose
    gradients are averaged before one update). device: as in `torchedge devices --opencl`. seed: of dropout,
    by default `torch.initial_seed()`. profile: measure the times of kernels for `report`. tuner: what chooses
    the schedules of kernels, "fixed", "model" or "measured" (docs/kernels.md). memory_limit: of all that is
    held on the device, in MiB or as "500MiB": frozen weights beyond it are streamed from a file in the cache
    folder, for the forward and again for the backward; activations are computed again, and where that does
    not do each batch runs in equal `parts`, whose gradients and losses are averaged, with a warning.

    What the model's code reads is checked at each step (attributes, globals, closures, hooks, modes, patched
    functions, PyTorch's flags): where it has changed, the model is captured again.
    The model's own tensors change with `sync` only, which leaving the trainer as a context manager calls;
    what other code writes to them is refused at the next step, until `load` or `sync`.
    Threads may share a trainer: its steps run one after the other.
    Raises InputError, CaptureError, LoweringError (operators without a kernel, by name), DeviceError,
    DeviceMemoryError, LimitError (no plan is within memory_limit), MissingExtraError.
    """

    @checked_call(STEP_FIELDS)
    def __init__(
        self,
        model: torch.nn.Module,
        example_inputs: Any,
        targets: Any = (),
        *,
        step: TrainingStep | None = None,
        device: ClDevice | str | int | None = None,
        seed: int | None = None,
        profile: bool = False,
        tuner: Tuner | None = None,
        memory_limit: Amount | None = None,
        **options: Unpack[TrainerOptions],
    ) -> None:
        self._lock = threading.RLock()
        weights = dict(checked_model(model).named_parameters())
        _batch_of(example_inputs)
        if step is None and "optimizer" not in options:
            raise InputError(
                "Trainer has no optimizer; expected optimizer=, such as torch.optim.Adam(model.parameters())"
            )
        asked = TrainingStep.of(step, options)
        check_step(asked, "Trainer")
        check_kind(asked.optimizer)
        self._model, self._loss, self._optimizer = model, asked.loss, cast(Any, asked.optimizer)
        self._accumulation, self._seed, self._profile = asked.accumulation, seed, profile
        context = open_context(device)
        self._device = context.device
        self._target = target_for(context.device, tuner)
        self._timer = CachedTimes(context) if tuner == "measured" else None
        self._limited: LimitedMemory | None = None
        if memory_limit is not None:
            limit = bytes_of(memory_limit, "memory_limit")
            self._limited = LimitedMemory(limit, context.device, profile=profile)
        check_tensors(weights, type(model).__name__)
        self._settings = OptimizerSettings(self._optimizer)
        self._example = _batch_of(example_inputs, asked.targets or targets)
        roots = {"model": unwrapped(model), "loss": self._loss}
        self._state, self._state_in_eval = Guard(roots), Guard(roots, modes=False)
        self._training: dict[Any, _Made] = {}
        self._inferences: dict[Any, _Made] = {}
        self._rates: dict[Executor, dict[str, float]] = {}
        self._first: Executor | None = None
        self.batches, self.parts = 0, 1
        self._closed = False
        self._mark()
        self._first = self._trained_on(self._example)[0]
        self._roles = {tensor.name: tensor.role for tensor in self._first.held}

    # training and inference --------------------------------------------------------------------------------

    @checked_call()
    @serialised
    def step(self, inputs: Any, targets: Any = ()) -> float:
        """Train on one batch and return its loss; the batch that completes `accumulation` ones updates.

        A batch of another size, such as a loader's last one, gets a program of its own when it first comes.

        Raises:
            InputError: other dtypes or another structure than the example's, too many different shapes, or a
                setting of the optimizer other than its learning rates, or what it trains, has changed.
            IndexRangeError: an index is out of range, in the batch or as the model computes it. Nothing is
                updated then, and the batch does not count; if earlier parts of it ran, those batches before
                it do not either that have led to no update yet.
        """
        batch = _batch_of(inputs, targets)
        programs = self._trained_on(batch)
        completes = (self.batches + 1) % self._accumulation == 0
        losses = []
        for place in range(self.parts):
            updates = completes and place == self.parts - 1
            executor = programs[not updates]
            sent = self._rates.setdefault(executor, {})
            for name, rate in self._settings.rates().items():
                if name in executor.program.hyperparameters and sent.get(name) != rate:
                    executor.set(name, rate)
                    sent[name] = rate
            try:
                (loss,) = executor.run(*batch.arrays(self.parts, place))
            except (IndexRangeError, DivisionError):
                updated = executor.updates_before_checks
                if self.parts == 1 or (updates and updated):
                    self.batches += updated
                elif updated or place:
                    self._forget_gradients()
                raise
            losses.append(float(loss))
        self.batches += 1
        self._settings.count_step()
        return sum(losses) / self.parts

    def _forget_gradients(self) -> None:
        """Take back the sums of gradients since the last update."""
        first = self._opened()
        sums = [tensor.name for tensor in first.held if tensor.name.startswith(ACCUMULATED)]
        first.load({name: np.zeros_like(first.read(name)) for name in sums})
        self.batches -= self.batches % self._accumulation

    @property
    def steps(self) -> int:
        """Updates that were made."""
        return self.batches // self._accumulation

    @checked_call()
    @serialised
    def predict(self, inputs: Any) -> Any:
        """Return what the model returns for a batch in eval mode, with the weights as they are now."""
        batch = _batch_of(inputs)
        made = self._inference_on(batch, None)
        assert made.rebuild is not None
        return made.rebuild([torch.from_numpy(a) for a in made.executors[0].run(*batch.arrays())])

    @checked_call()
    @serialised
    def evaluate(self, inputs: Any, targets: Any = ()) -> float:
        """Return the loss of a batch in eval mode, with the weights as they are now."""
        batch = _batch_of(inputs, targets)
        (loss,) = self._inference_on(batch, self._loss).executors[0].run(*batch.arrays())
        return float(loss)

    @property
    def lr(self) -> float:
        """The learning rate of the first group of parameters; setting it sets those of all groups."""
        return float(self._optimizer.param_groups[0]["lr"])

    @lr.setter
    def lr(self, rate: float) -> None:
        check_rate("lr", rate)
        for group in self._optimizer.param_groups:
            group["lr"] = rate

    # the model in PyTorch ----------------------------------------------------------------------------------

    @serialised
    def sync(self) -> None:
        """Copy weights, buffers and the optimizer's state from the device into PyTorch's objects."""
        first = self._opened()
        with torch.no_grad():
            for name, tensor in self._tensors().items():
                tensor.copy_(torch.from_numpy(first.read(name)))
        if self.steps:
            take_states(self._optimizer, self._settings, self._parameters(), self._states(), first.read)
        self._mark()

    @serialised
    def load(self) -> None:
        """Copy weights, buffers and the optimizer's state to the device: after `load_state_dict`, say."""
        first = self._opened()
        self._mark()
        if self._limited is not None:
            self._limited.check_frozen(self._weights())
        states = states_of(self._optimizer, self._settings, self._parameters(), self._states())
        first.load({name: array_of(tensor) for name, tensor in {**self._tensors(), **states}.items()})

    # what there is -----------------------------------------------------------------------------------------

    @property
    @serialised
    def memory(self) -> TrainerMemory:
        """What is held on the device, in bytes."""
        executors = self._executors()
        held = [tensor for executor in executors for tensor in executor.held]
        own = [tensor for tensor in held if tensor.role in ("constant", "input", "output")]
        shared = {tensor.name: tensor for tensor in held if tensor.role in SHARED_ROLES}
        by_role = dict.fromkeys(SHARED_ROLES, 0)
        for tensor in shared.values():
            by_role[tensor.role] += tensor.nbytes
        arena = sum(executor.arena_bytes for executor in executors if executor.owns_arena)
        staging = 0 if self._first is None else self._first.allocated["staging"]
        other = sum(tensor.nbytes for tensor in own)
        kinds = by_role["parameter"], by_role["buffer"], by_role["state"]
        return TrainerMemory(*kinds, arena, other, staging)

    @serialised
    def report(self) -> tuple[ProgramReport, ...]:
        """Return what each program consists of, holds and (with profile=True) takes; print its items."""
        return tuple([report_on(executor, profiled=self._profile) for executor in self._executors()])

    @serialised
    def close(self) -> None:
        """Give the device's memory back; the model keeps what the last `sync` left there."""
        for executor in reversed(self._executors()):  # the first one has what they share
            executor.close()
        if self._limited is not None:
            self._limited.close()
        self._training, self._inferences, self._rates = {}, {}, {}
        self._first, self._closed = None, True

    def __enter__(self) -> Trainer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and not self._closed:
            self.sync()
        self.close()

    # programs ----------------------------------------------------------------------------------------------

    def _trained_on(self, batch: _Batch) -> Sequence[Executor]:
        self._check_open()
        _check_form(batch, self._example)
        making = "the training step", lambda: _Made(self._capture_training(batch))
        return self._made(self._training, self._state, batch, (batch.shapes,), *making).executors

    def _made(
        self,
        programs: dict[Any, _Made],
        state: Guard,
        batch: _Batch,
        form: tuple[Any, ...],
        what: str,
        make: Callable[[], _Made],
    ) -> _Made:
        """Return the programs for the present Python state and a batch; form: by which batches share them."""
        kept = [tensor for _, _, tensor in self._kept_states()]
        replaced = len(kept) != len(self._kept) or not all(map(is_, kept, self._kept))
        changed = "the optimizer's state" if replaced else self._marks.changed()
        if changed is not None:
            raise InputError(
                f"{changed} was written to in main memory, and the Trainer trains the copy on the device; "
                "call load() to train on with the model and the optimizer as they are in main memory, or "
                "sync() to overwrite them (before such a write: sync())"
            )
        key = (state.check(), *form)
        if key not in programs:
            self._check_room([k for k in programs if k[0] == key[0]], batch)
            with noticed(self._making(what, batch, programs, state)):
                programs[key] = make()
            self._forget_states(key[0], programs)
        return programs[key]

    def _capture_training(self, batch: _Batch) -> list[Executor]:
        if self._limited is None or self._first is not None:
            return self._opened_on(*self._programs_of(batch, self.parts))
        limited = self._limited

        def attempt(parts: int) -> tuple[Sequence[Program], Mapping[str, torch.Tensor], Fitted]:
            programs, tensors = self._programs_of(batch, parts)
            return programs, tensors, limited.fitted(programs)

        self.parts, opened = fewest_parts(
            batch.samples, lambda parts: self._captured_training(batch, parts).step, attempt
        )
        if self.parts > 1:
            warnings.warn(in_parts(batch.samples, self.parts), TorchedgeWarning, stacklevel=2)
        return self._opened_on(*opened)

    def _captured_training(self, batch: _Batch, parts: int) -> CapturedStep:
        """Return the step on one of the equal parts of a batch."""
        stage("capturing the model")
        batch = batch.part(parts)
        with self._settings.as_captured(), _keywords_named(batch):
            return capture_step(
                self._model,
                batch.args,
                batch.kwargs,
                targets=batch.targets,
                loss=self._loss,
                optimizer=self._optimizer,
                accumulation=self._accumulation * parts,
                keep=frozenset(all_rules()),
                seed=self._seed,
            )

    def _programs_of(self, batch: _Batch, parts: int) -> tuple[Sequence[Program], Mapping[str, torch.Tensor]]:
        """Return the training programs of one of the equal parts of a batch, and tensors by name."""
        cache = None if self._first else self._capture_cache(batch.part(parts), self._accumulation * parts)
        known = cache.read() if cache else []
        weights = self._weights()
        if known and _fit(known, weights):
            return known, weights
        captured = self._captured_training(batch, parts)
        self._check_weights(captured.step)
        owner = None if self._first is None else self._first.program
        steps = [(captured.step, _shared_layouts(None))]
        programs = [self._lowered(captured.step, owner)]
        if captured.accumulating is not None:
            owner = owner or programs[0]
            steps.append((captured.accumulating, _shared_layouts(owner)))
            programs.append(self._lowered(captured.accumulating, owner))
        if cache is not None and set(captured.tensors) <= {*weights, *captured.step.hyperparameters}:
            cache.write(steps)
        return programs, captured.tensors

    def _capture_cache(self, batch: _Batch, accumulation: int) -> CaptureCache | None:
        """Return the cache of what the capture on a batch leads to; None where too much decides about it."""
        names = {id(parameter): name for name, parameter in self._parameters().items()}
        groups = [
            (settings, [names.get(id(parameter), "") for parameter in group["params"]])
            for settings, group in zip(self._settings.fixed, self._optimizer.param_groups, strict=True)
        ]
        state = self._state.text
        settings = identity_of(
            tree_map(
                lambda leaf: (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf,
                (batch.args, dict(batch.kwargs), batch.targets),
            ),
            type(self._optimizer),
            groups,
            accumulation,
            torch.initial_seed() if self._seed is None else self._seed,
        )
        if state is None or settings is None or self._optimizer.state:
            return None
        return CaptureCache(
            f"{state}{settings}", self._target, "" if self._timer is None else self._timer.device
        )

    def _inference_on(self, batch: _Batch, loss: Loss | None) -> _Made:
        self._check_open()
        form, making = (batch.shapes, batch.form, loss is None), lambda: self._capture_inference(batch, loss)
        return self._made(self._inferences, self._state_in_eval, batch, form, "the inference", making)

    def _capture_inference(self, batch: _Batch, loss: Loss | None) -> _Made:
        stage("capturing the model")
        with _keywords_named(batch):
            captured = capture_step(
                self._model,
                batch.args,
                batch.kwargs,
                targets=batch.targets,
                loss=loss,
                gradients=False,
                training=False,
                keep=frozenset(all_rules()),
            )
        self._check_weights(captured.step)
        program = self._lowered(captured.step, self._opened().program)
        return _Made(self._opened_on([program], captured.tensors), captured.rebuild)

    def _lowered(self, step: Step, owner: Program | None) -> Program:
        """Return the program of a step, which shares weights and states with that of `owner`."""
        layouts = _shared_layouts(owner)
        return lowered(step, self._target, layouts, timer=self._timer, device=self._device)[0]

    def _opened_on(
        self, programs: Sequence[Program], tensors: Mapping[str, torch.Tensor], fitted: Fitted | None = None
    ) -> list[Executor]:
        """Return the executors of programs, loaded with what they do not share with the first of all."""
        if self._limited is not None:
            return self._limited.open(programs, tensors, fitted)
        opened: list[Executor] = []
        for program in programs:
            owner = self._first or next(iter(opened), None)
            executor = Executor(program, self._device, profile=self._profile, shared=owner)
            shared = _shared_layouts(None if owner is None else owner.program)
            names = {tensor.name for tensor in program.tensors}.difference(shared)
            executor.load({name: array_of(tensor) for name, tensor in tensors.items() if name in names})
            opened.append(executor)
        return opened

    def _check_weights(self, step: Step) -> None:
        """Raise InputError where a changed model reads or trains what the first program does not hold."""
        if self._first is None:
            return
        held = {tensor.name for tensor in self._first.program.tensors}
        names = [v.name for v in step.values if v.role in SHARED_ROLES and not v.name.startswith("random.")]
        others = [name for name in names if name not in held]
        weights = self._named_weights()
        replaced = [n for n in names if n in weights and weights[n] is not self._held.get(n)]
        if replaced and not others:
            raise InputError(
                f"{replaced[0]} is another tensor than the one whose values the Trainer holds on the device; "
                "call load() to copy the model's weights there, or make another Trainer"
            )
        if others:
            changed = ", ".join([str(change) for change in self._state.changes[:2]])
            raise InputError(
                f"the step now reads {others[0]}, which the Trainer's first program does not hold"
                f"{f', as {changed} changed' if changed else ''}; call sync() and make another Trainer"
            )

    def _mark(self) -> None:
        """Note the model's and the optimizer's tensors in main memory: device and host agree now."""
        self._held = self._named_weights()
        states = {
            f"the optimizer's {kind} of parameter {number}": tensor
            for number, kind, tensor in self._kept_states()
        }
        self._kept = [*states.values()]
        self._marks = HostMarks({**self._held, **states})

    def _kept_states(self) -> list[tuple[int, str, torch.Tensor]]:
        """Return the tensors of the optimizer's state in main memory, with parameter and kind."""
        return [
            (number, kind, item)
            for number, entry in enumerate(self._optimizer.state.values())
            for kind, item in entry.items()
            if isinstance(item, torch.Tensor)
        ]

    def _forget_states(self, number: int, programs: dict[Any, _Made]) -> None:
        """Close the programs of Python states other than `number` and the latest MAX_STATES before it."""
        for old in [*dict.fromkeys([key[0] for key in programs if key[0] != number])][:-MAX_STATES]:
            for key in [key for key in programs if key[0] == old]:
                if self._first in programs[key].executors:
                    continue
                for executor in programs.pop(key).executors:
                    self._rates.pop(executor, None)
                    executor.close()
                    if self._limited is not None:
                        self._limited.forget(executor)

    def _check_room(self, programs: Sequence[Any], batch: _Batch) -> None:
        if len(programs) >= MAX_SHAPES:
            raise InputError(
                f"a batch of shapes {[list(shape) for shape in batch.shapes]} is the {MAX_SHAPES + 1}th "
                "different one, each of which takes a program; pad batches to one shape (DataLoader: "
                "drop_last=True)"
            )

    # names -------------------------------------------------------------------------------------------------

    def _opened(self) -> Executor:
        self._check_open()
        assert self._first is not None
        return self._first

    def _check_open(self) -> None:
        if self._closed:
            raise OpenCLError("the trainer is closed; make another one")

    def _executors(self) -> list[Executor]:
        made = [*self._training.values(), *self._inferences.values()]
        return [executor for each in made for executor in each.executors]

    def _making(self, what: str, batch: _Batch, programs: Mapping[Any, Any], state: Guard) -> str:
        """Return what is made for a batch, and why it is made again."""
        text = f"making {what} of {type(unwrapped(self._model)).__name__} for {_described(batch)}"
        if not programs:
            return text
        if batch.shapes not in [key[1] for key in programs]:
            return f"{text}, as batches of this size are new"
        return f"{text}, as {', '.join(map(str, state.changes[:2])) or 'the state of the model'} changed"

    def _tensors(self) -> dict[str, torch.Tensor]:
        """The model's parameters and buffers that the first program holds, by name."""
        return {n: t for n, t in self._weights().items() if self._roles.get(n) in ("parameter", "buffer")}

    def _weights(self) -> dict[str, torch.Tensor]:
        """All parameters and buffers of the model, by name, without gradients."""
        return {name: tensor.detach() for name, tensor in self._named_weights().items()}

    def _named_weights(self) -> dict[str, torch.Tensor]:
        buffers = unwrapped(self._model).named_buffers(remove_duplicate=False)
        return {**self._parameters(), **dict(buffers)}

    def _parameters(self) -> dict[str, torch.Tensor]:
        return dict(unwrapped(self._model).named_parameters(remove_duplicate=False))

    def _states(self) -> frozenset[str]:
        return frozenset(name for name, role in self._roles.items() if role == "state")


def _shared_layouts(owner: Program | None) -> dict[str, Layout]:
    """Return the layouts of the tensors that other programs share with a program, by name."""
    return {} if owner is None else {t.name: t.layout for t in owner.tensors if t.role in SHARED_ROLES}


def _fit(programs: Sequence[Program], weights: Mapping[str, torch.Tensor]) -> bool:
    """Whether a model has all that programs load, in the same form."""
    loaded = [t for program in programs for t in program.tensors if t.role in WEIGHT_ROLES]
    forms = {name: (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in weights.items()}
    return all(forms.get(tensor.name) == (tensor.shape, tensor.dtype) for tensor in loaded)


@dataclass(frozen=True)
class _Batch:
    """Arguments, keyword arguments and targets; `tensors` in their order.

    form: structure, dtypes and everything that is no tensor, as text; shapes: of the tensors.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    targets: tuple[Any, ...]
    tensors: tuple[torch.Tensor, ...]
    form: str
    shapes: tuple[tuple[int, ...], ...]

    @property
    def samples(self) -> int:
        """The size of the batch; 1 where no tensor has one."""
        return batch_of(self.tensors) or 1

    def part(self, parts: int) -> _Batch:
        """Return the first of the equal parts of the batch.

        Raises InputError: the batch is not divisible by their number.
        """
        if self.samples % parts:
            raise InputError(
                f"the batch has {self.samples} samples, and the memory limit cuts batches into {parts} equal "
                f"parts; expected a multiple of {parts}: leave out a loader's last batch (drop_last=True)"
            )
        whole = self.args, dict(self.kwargs), self.targets, self.tensors
        args, kwargs, targets, tensors = part_of(whole, parts)
        shapes = tuple([tuple(tensor.shape) for tensor in tensors])
        return replace(self, args=args, kwargs=kwargs, targets=targets, tensors=tensors, shapes=shapes)

    def arrays(self, parts: int = 1, place: int = 0) -> list[npt.NDArray[Any]]:
        """Return the tensors of one of the equal parts of the batch as arrays in main memory."""
        return [array_of(tensor) for tensor in part_of(self.tensors, parts, place)]


def _batch_of(inputs: Any, targets: Any = ()) -> _Batch:
    """Read a batch of tensors or numpy arrays: one, a tuple of arguments or a dict of keyword arguments.

    Raises InputError: there is no tensor in it.
    """
    (args, kwargs), wanted = as_arguments(inputs), as_tuple(targets)
    leaves, structure = tree_flatten((args, kwargs, wanted))
    if any([isinstance(leaf, np.ndarray) for leaf in leaves]):
        leaves = [torch.from_numpy(leaf) if isinstance(leaf, np.ndarray) else leaf for leaf in leaves]
        args, kwargs, wanted = tree_unflatten(leaves, structure)
    check_tensors(as_tuple(inputs), "input")
    check_tensors(wanted, "target")
    tensors = tuple([leaf for leaf in leaves if isinstance(leaf, torch.Tensor)])
    if not tensors_in((args, kwargs), torch.Tensor):
        raise InputError(
            f"the inputs are {described(inputs)} without tensors; expected a batch: a tensor, a tuple of "
            "arguments, or a dict of keyword arguments"
        )
    marks = [str(leaf.dtype) if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves]
    shapes = tuple([tuple(tensor.shape) for tensor in tensors])
    return _Batch(args, kwargs, wanted, tensors, f"{structure} {marks}", shapes)


@contextmanager
def _keywords_named(batch: _Batch) -> Iterator[None]:
    """Add to errors of the model's arguments that a dict was passed as keyword arguments."""
    try:
        yield
    except InputError as error:
        if not batch.kwargs:
            raise
        raise InputError(
            f"{error}; the dict of inputs was passed as keyword arguments ({', '.join(batch.kwargs)}): for a "
            "model with one dict as its argument, pass a tuple with that dict"
        ) from error


def _check_form(batch: _Batch, example: _Batch) -> None:
    """Raise InputError where a batch is not made up like the example: number of tensors, dtypes, ranks."""
    if [len(s) for s in batch.shapes] == [len(s) for s in example.shapes] and batch.form == example.form:
        return
    passed, wanted = _described(batch), _described(example)
    if passed == wanted:
        raise InputError(
            "the batch has another structure, or other arguments that are not tensors, than the Trainer's "
            "example; pass the same structure (a dict becomes keyword arguments), or create another Trainer"
        )
    raise InputError(
        f"the batch is {passed}; expected {wanted}, as in the Trainer's example: pass inputs, then targets, "
        "convert them (.to(dtype), .unsqueeze()), or create another Trainer"
    )


def _described(batch: _Batch) -> str:
    return ", ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in batch.tensors)
