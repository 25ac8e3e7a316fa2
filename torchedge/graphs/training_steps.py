"""`TrainingStep`: what one step of a training is, as users set it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypedDict

from torchedge.errors import (
    InputError,
    check_choice,
    check_whole,
    checked_call,
    described,
    did_you_mean,
    shown,
)

OPTIMIZERS = (
    "none", "sgd", "sgd-momentum", "adam", "adamw", "adafactor", "adagrad", "adadelta", "adamax",
    "adamw-8bit", "asgd", "nadam", "radam", "rmsprop", "rprop",
)  # fmt: skip
"""Names of optimizers: the steps of PyTorch's own are replayed with its default options."""
AMP_DTYPES = ("bfloat16", "float16")
DTYPES = ("float32", *AMP_DTYPES)
_WORDS = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}

CUDA_GRAPHS = "reduce-overhead"
"""The mode of torch.compile in which CUDA graphs replay the kernels of a step."""

Loss = Callable[..., Any] | Literal["default", "model"]


def dtype_named(word: object) -> Any:  # noqa: ANN401 - an unknown word is returned for the check of settings
    """Return the name of `DTYPES` that a word ("bf16") or a torch.dtype means, any other as it is."""
    text = str(word).removeprefix("torch.") if word is not None else None
    name = None if text is None else _WORDS.get(text, text)
    return name if name in DTYPES else word


class TrainerOptions(TypedDict, total=False):
    """The fields of `TrainingStep` beside targets as keyword arguments."""

    optimizer: Any
    loss: Loss
    amp: Any
    accumulation: int
    dtype: Any
    checkpointing: bool
    compile: bool | str


class StepOptions(TrainerOptions, total=False):
    """The fields of `TrainingStep` as keyword arguments: functions that take a step take them, too."""

    targets: Any


@dataclass(frozen=True, slots=True, eq=False)
class TrainingStep:
    """What one training step is: `predict`, `simulate`, `advise`, `report`, `Trainer` and `export` take it.

    optimizer: a torch.optim object of the model, of any library for predictions; or for predictions the name
    of one with its default options: "sgd", "sgd-momentum", "adam", "adamw", "none", "adafactor",
    "adamw-8bit" (as bitsandbytes stores its state), or another of torch.optim in lower case.
    loss: called as ``loss(outputs, *targets)``, returns a 0-d tensor. "model": the `loss` that the model
    itself returns. "default": that one if there is any, else cross entropy.
    targets: what the loss gets beside the outputs, an example: a tensor or a tuple of them. For predictions
    only shapes and dtypes count; without targets, those of PyTorch's own losses follow from the outputs.
    amp: "bfloat16" or "float16" autocast. accumulation: batches to an update. dtype: of parameters and
    inputs, None: as the model is. checkpointing: the model's own activation checkpointing is on. compile: the
    step runs under torch.compile; "reduce-overhead": in that mode, with CUDA graphs.
    `Trainer` and `export` refuse by name what they cannot do. Raises InputError for a setting that is none.
    """

    optimizer: Any = "sgd-momentum"
    loss: Loss = "default"
    targets: Any = ()
    amp: str | None = None
    accumulation: int = 1
    dtype: str | None = None
    checkpointing: bool = False
    compile: bool | str = False

    def __post_init__(self) -> None:
        """Raise InputError for wrong settings; words for data types become their names."""
        _check_optimizer(self.optimizer)
        check_loss(self.loss)
        for name, choices in (("amp", AMP_DTYPES), ("dtype", DTYPES)):
            value = dtype_named(getattr(self, name))
            if value is not None:
                check_choice(name, value, choices)
            object.__setattr__(self, name, value)
        check_whole("accumulation", self.accumulation)
        if self.compile != CUDA_GRAPHS and type(self.compile).__name__ not in ("bool", "bool_"):
            raise InputError(
                f"compile is {shown(self.compile)}; expected True, False or {CUDA_GRAPHS!r}, a mode of it"
            )
        object.__setattr__(self, "targets", () if self.targets is None else as_tuple(self.targets))

    @classmethod
    def of(
        cls, step: TrainingStep | None, options: Mapping[str, Any], mode: object = "train"
    ) -> TrainingStep:
        """Return the step with options in place of its own: the one place where options become a step.

        An inference ("infer") takes amp, dtype and compile of a step.
        Raises InputError for an option that is none, or none of an inference.
        """
        if step is not None and not isinstance(step, cls):
            raise InputError(f"step is {described(step)}; expected a torchedge.TrainingStep")
        names = [field.name for field in fields(cls)]
        for name in options:
            if name not in names:
                hint = did_you_mean(name, names, f"expected one of {', '.join(names)}")
                raise InputError(f"there is no argument {name!r}; {hint}")
        asked = cls(**options) if step is None else replace(step, **options)
        if mode != "infer":
            return asked
        unused: dict[str, Any] = {
            f.name: f.default for f in fields(cls) if f.name not in ("amp", "dtype", "compile")
        }
        for name, default in unused.items():
            if name in options and getattr(asked, name) != default:
                raise InputError(
                    f"{name} is given without mode='train'; expected it for a training step alone"
                )
        return replace(asked, **unused)

    def refuse(self, function: str, **reasons: str) -> None:
        """Raise InputError where a setting differs from its default; reasons: what to do instead, by name."""
        for name, instead in reasons.items():
            value = getattr(self, name)
            if value not in (None, False):
                raise InputError(f"{name} is {value!r}; expected the default in {function}: {instead}")


def as_tuple(arguments: Any) -> tuple[Any, ...]:  # noqa: ANN401 - any pytree of tensors
    """Return positional arguments: those of a tuple or list, else the one argument."""
    return tuple(arguments) if isinstance(arguments, (tuple, list)) else (arguments,)


def _check_optimizer(optimizer: object) -> None:
    """Raise InputError unless an optimizer is one object with groups of parameters, or a name."""
    if isinstance(optimizer, str):
        check_choice("optimizer", optimizer, OPTIMIZERS)
    elif isinstance(optimizer, (list, tuple, dict)):
        raise InputError(
            f"optimizer is a {type(optimizer).__name__} of {len(optimizer)}; expected one: for several, "
            'follow "A GAN, and other steps with several optimizers" in docs/recipes.md'
        )
    elif not getattr(optimizer, "param_groups", None):
        raise InputError(
            f"optimizer is {described(optimizer)}; expected an object such as "
            "torch.optim.Adam(model.parameters()), or for predictions a name such as 'adam'"
        )


def check_loss(loss: object) -> None:
    """Raise InputError unless a loss is a function or a word."""
    if isinstance(loss, type):
        raise InputError(
            f"loss is the class {loss.__name__}; expected a function loss(outputs, *targets): pass "
            f"{loss.__name__}()"
        )
    if not callable(loss) and loss not in ("default", "model"):
        raise InputError(
            f'loss is {loss!r}; expected a function loss(outputs, *targets), "default" (the loss that the '
            'model returns, or else cross entropy) or "model" (the former alone)'
        )


STEP_FIELDS = tuple([field.name for field in fields(TrainingStep)])
"""Names of a step's fields: keyword arguments of the functions that take one."""

TrainingStep.__init__ = checked_call()(TrainingStep.__init__)  # type: ignore[method-assign]
