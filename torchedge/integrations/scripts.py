"""Predictions of the step that a user's own code runs: a script, or a block of a notebook."""

from __future__ import annotations

import contextlib
import runpy
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

import torch

from torchedge.api import choose_device
from torchedge.devices import Device
from torchedge.errors import CaptureError, InputError, TorchedgeError, check_path, checked_call, first_line
from torchedge.graphs import ForwardGraph
from torchedge.prediction.memory.settings import StepSettings
from torchedge.prediction.predictor import predict_graph
from torchedge.prediction.results import Prediction
from torchedge.tracing.device_answers import Accelerator
from torchedge.tracing.optimizer_replays import replay_of
from torchedge.tracing.vision import prepare_torchvision
from torchedge.tracing.watching import StepWatch, WatchedStep, is_watched


class Watch:
    """A context that captures the training step run inside of it: `with torchedge.watch() as step:`.

    The block runs up to its first `optimizer.step()`, which ends it: code behind it in the block does not
    run. Where other optimizers hold parameters of the modules that it calls, such as those of a GAN, it runs
    up to the step of the last of them. Nothing is trained, and nothing is allocated on a device: devices that
    the code names are mapped to the CPU, and the model's operators are recorded in place of being run.
    Afterwards `prediction` is what the step takes from the device, with its model, optimizers, autocast,
    accumulation, losses and batch.
    """

    def __init__(self, device: str | Path | Device | None = None) -> None:
        self.device = choose_device(device)
        self._watch: StepWatch | None = None
        self._step: WatchedStep | None = None
        self._prediction: Prediction | None = None

    def __enter__(self) -> Watch:
        if is_watched():
            raise InputError("a watch is active already; expected one at a time: end its block first")
        self._watch = StepWatch(Accelerator(self.device)).watch()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        assert self._watch is not None
        watch, self._watch = self._watch, None
        ended = watch.end(kind, error)
        self._step = watch.step
        return ended

    @property
    def graph(self) -> ForwardGraph:
        """The captured step: a forward pass with its loss, or all passes and updates of a whole step."""
        return self._captured.graph

    @property
    def batch_size(self) -> int:
        """The number of samples of a micro-batch."""
        return self._captured.batch_size

    @property
    def settings(self) -> StepSettings:
        """The optimizers, the accumulation and the end of gradients of the step, as predictions take them."""
        step = self._captured
        replays = [replay_of(optimizer, step.model) for optimizer in step.optimizers]
        return StepSettings(
            optimizer=replays[0] if replays else "none",
            accumulation=step.accumulation,
            zero_grad="zero" if step.keeps_gradients else "set_to_none",
            others=tuple(replays[1:]),
        )

    @property
    def prediction(self) -> Prediction:
        """The prediction of the step on the watch's device."""
        if self._prediction is None:
            self._prediction = self.predict()
        return self._prediction

    def predict(self, device: str | Path | Device | None = None) -> Prediction:
        """Predict the step on a device, by default the watch's.

        Raises CaptureError where nothing was captured.
        """
        target = self.device if device is None else choose_device(device)
        return predict_graph(self.graph, self.batch_size, target, self.settings)

    @property
    def _captured(self) -> WatchedStep:
        if self._step is None:
            raise CaptureError(
                "no step is captured yet; expected a block `with torchedge.watch() as step:` that has run "
                "up to optimizer.step()"
            )
        return self._step


@checked_call()
def watch(device: str | Path | Device | None = None) -> Watch:
    """Return a context that predicts the training step of the code in it, as `step.prediction`.

    device: as in `torchedge.predict`. The code runs up to its first `optimizer.step()`; see `Watch`.
    """
    return Watch(device)


def watch_script(
    script: str | Path, arguments: Sequence[str] = (), device: str | Path | Device | None = None
) -> Watch:
    """Run a training script up to its first update, and return the watch with its step.

    The script runs as `python script arguments` does, as `__main__` in this process; what it writes to files
    up to there is its own matter. Raises InputError with the file and the line where the script raises an
    exception or ends before its first update.
    """
    path = check_path("the script", script)
    if not path.is_file():
        raise InputError(f"{path}: there is no such file; expected a training script")
    watching = Watch(device)
    prepare_torchvision()  # which scripts import, directly or not, and mismatched builds of which fail
    with _as_main(path, arguments):
        try:
            with watching:
                runpy.run_path(str(path), run_name="__main__")
        except TorchedgeError as error:
            if isinstance(error, CaptureError):
                raise CaptureError(
                    f"{path}: {error} (a function that returns a model: {path}:NAME)"
                ) from error
            raise
        except SystemExit as end:
            raise InputError(
                f"{path} ended (exit {end.code}) before its first optimizer.step(); pass its arguments "
                f"behind --: torchedge predict {path} -- ARGUMENTS"
            ) from end
        except Exception as error:
            raise InputError(
                f"{_place(path, error)}: {type(error).__name__}: {first_line(error)}; expected it to "
                "run up to its first optimizer.step(): correct the script"
            ) from error
    return watching


def _place(path: Path, error: BaseException) -> str:
    """Return file:line of the script's own frame of an exception, and of the innermost in its folder."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{Path(error.filename).name}:{error.lineno}"
    folder = path.resolve().parent
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).resolve().is_relative_to(folder)
        and "site-packages" not in frame.filename
        and not frame.filename.startswith("<")
    ]
    own = [frame for frame in frames if Path(frame.filename).resolve() == path.resolve()]
    places = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in (*own[-1:], *frames[-1:])]
    return ", ".join(dict.fromkeys(places)) if places else str(path)


@contextlib.contextmanager
def _as_main(path: Path, arguments: Sequence[str]) -> Iterator[None]:
    """Give a script its arguments and its folder on the path, as Python does."""
    argv, paths, main = sys.argv, list(sys.path), sys.modules.get("__main__")
    threads = torch.get_num_threads()
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.resolve().parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, paths
        if main is not None:
            sys.modules["__main__"] = main
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
