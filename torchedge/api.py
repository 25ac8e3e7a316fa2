"""The public functions: thin, validating, enriching errors with what the user passed."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from torchedge.devices import (
    LOCAL_DEVICE,
    Device,
    board_name,
    default_device_name,
    find_device,
    is_jetson,
    match_device,
    stand_in,
)
from torchedge.errors import (
    DeviceError,
    InputError,
    check_function,
    check_path,
    check_whole,
    checked_call,
    described,
)
from torchedge.graphs import ForwardGraph
from torchedge.graphs.graph import Mode
from torchedge.graphs.training_steps import STEP_FIELDS, StepOptions, TrainingStep
from torchedge.notices import noticed, stage
from torchedge.prediction.feature_sets import checked_batches, features
from torchedge.prediction.memory.settings import StepSettings
from torchedge.prediction.memory.simulation import MemoryProfile
from torchedge.prediction.predictor import (
    device_settings,
    joined_batches,
    predict_graph,
    predict_graphs,
    predict_length,
    predict_lengths,
)
from torchedge.prediction.profiles import load_models
from torchedge.prediction.results import Prediction, Predictions, checked_confidence
from torchedge.searching.driver import (
    Search,
    SearchProgress,
    SearchTask,
    check_batch_size,
    check_limits,
    check_score,
    run_search,
)
from torchedge.searching.evolution import Recipe
from torchedge.searching.spaces import SearchSpace, check_space
from torchedge.storage.amounts import Amount, mib_of
from torchedge.streaming.capacities import LAMBDA
from torchedge.tracing.capturing import CaptureRequest, capture, capture_request, use_graph
from torchedge.tracing.model_variants import request_of
from torchedge.tracing.optimizer_replays import replay_of
from torchedge.tracing.sequence_lengths import LengthFamily, capture_lengths

if TYPE_CHECKING:
    import torch
    from typing_extensions import Unpack

    from torchedge.bundles.bundle import Bundle
    from torchedge.bundles.bundle_plans import BundlePlan
    from torchedge.bundles.exporting import Request
    from torchedge.bundles.language_plans import LanguagePlan
    from torchedge.lowering.targets import Precision
    from torchedge.prediction.advice import Advice
    from torchedge.runtime.model_plans import ModelPlan
    from torchedge.streaming.planning import Fusion, StreamingPlan

__all__ = [
    "Predictor",
    "advise",
    "capture",
    "capture_lengths",
    "choose_device",
    "export",
    "export_lm",
    "features",
    "plan",
    "plan_lm",
    "predict",
    "report",
    "search",
    "simulate",
]

Model = Any
"""A torch.nn.Module, a ForwardGraph, a model's name ("resnet50") or a file's, as for `torchedge predict`."""


@checked_call(STEP_FIELDS)
def predict(
    model: Model,
    batch_size: int = 1,
    device: str | Path | Device | None = None,
    *,
    mode: Mode = "train",
    input_size: tuple[int, ...] | None = None,
    example: Any = None,  # noqa: ANN401 - any pytree of tensors
    seq_len: int | None = None,
    batch_dim: int | None = None,
    step: TrainingStep | None = None,
    **options: Unpack[StepOptions],
) -> Prediction:
    """Predict what one training step (or inference) of `model` takes from a device, without running it.

    model: an nn.Module on any device in any mode (left as found), a ForwardGraph from `capture`, or a
    LengthFamily from `capture_lengths`.
    device: a name or alias (`torchedge devices` lists them) or a profile's folder; by default
    $TORCHEDGE_DEVICE, the device in the configuration file, this machine's GPU or Jetson board (a note names
    the profile that stands for it where it has none), else this machine's CPU.
    input_size: shape of one sample, such as (3, 224, 224); example: any pytree of tensors. With neither, the
    model's own metadata decides, else its first layer, with a note in the result. batch_dim: the dimension of
    the example that is the batch, as in `capture`.
    seq_len: length of the sequences of the example, which may be of another length (`max_seq_len`); by
    default the example's.
    step: a `TrainingStep`, which documents its fields: optimizer, loss and targets, amp, accumulation, dtype,
    checkpointing, compile. Each of them may be an argument of its own: ``optimizer="adamw", amp="bfloat16"``.
    Returns a Prediction: `memory` is Γ (perf4sight, section 4), in MiB, `latency` Φ, in ms, each with a 90 %
    interval. Raises InputError, CaptureError, DeviceError or ProfileError with a message
    that says what to do.
    """
    predictor = Predictor(device)
    return predictor.predict(
        model,
        batch_size,
        mode=mode,
        input_size=input_size,
        example=example,
        seq_len=seq_len,
        batch_dim=batch_dim,
        step=step,
        **options,
    )


def _limit(memory_limit: Amount | None) -> float | None:
    return None if memory_limit is None else mib_of(memory_limit, "memory_limit")


def _request(
    request: CaptureRequest, step: TrainingStep | None, options: StepOptions
) -> tuple[CaptureRequest, StepSettings]:
    """Return a request and settings for a step that is given whole, by its fields, or both."""
    asked = TrainingStep.of(step, options, _mode_of(request.model, request.mode))
    return request_of(request, asked), _settings(asked, request.model)


def _mode_of(model: Model, mode: Mode) -> Mode:
    """Return the mode in which a model was captured, else the one that is asked for."""
    if isinstance(model, LengthFamily):
        return model.request.mode
    if isinstance(model, ForwardGraph):
        return "train" if model.training else "infer"
    return mode


def _settings(step: TrainingStep, model: object = None) -> StepSettings:
    """Return the settings of a step; model: the one whose parameters an optimizer object has to hold."""
    optimizer: Any = step.optimizer
    if not isinstance(optimizer, str):
        optimizer = replay_of(optimizer, model)
    return StepSettings(optimizer=optimizer, amp=step.amp, accumulation=step.accumulation)


class Predictor:
    """Predictions for one device, loaded once: for search loops over many models.

    `device` is as in `predict`; `predictor.device` is the Device found.
    """

    @checked_call()
    def __init__(self, device: str | Path | Device | None = None) -> None:
        self.device = choose_device(device)
        load_models(self.device, "train")  # a damaged profile fails here, not in the loop

    @checked_call(STEP_FIELDS)
    def predict(
        self,
        model: Model,
        batch_size: int = 1,
        *,
        mode: Mode = "train",
        input_size: tuple[int, ...] | None = None,
        example: Any = None,  # noqa: ANN401 - any pytree of tensors
        seq_len: int | None = None,
        batch_dim: int | None = None,
        step: TrainingStep | None = None,
        **options: Unpack[StepOptions],
    ) -> Prediction:
        """Predict one model at one batch size. See `torchedge.predict`."""
        asked = CaptureRequest(
            model, batch_size, mode, example, input_size, batch_dim=batch_dim, device=self.device
        )
        request, settings = _request(asked, step, options)
        if seq_len is None and isinstance(model, LengthFamily):
            seq_len = model.length
        if seq_len is not None:
            if isinstance(model, LengthFamily):
                family = model.on(self.device, batch_size)
            else:
                family = LengthFamily(request)
            request = replace(family.request, batch_size=batch_size)
            prediction = predict_length(family, seq_len, batch_size, self.device, settings)
        else:
            request = replace(request, partitioned=True)
            prediction = use_graph(request, lambda g: predict_graph(g, batch_size, self.device, settings))
        return replace(prediction, notes=(*prediction.notes, *request.notes))

    @checked_call(STEP_FIELDS)
    def predict_many(
        self,
        models: Sequence[Model],
        batch_sizes: int | Sequence[int],
        *,
        mode: Mode = "train",
        input_size: tuple[int, ...] | None = None,
        example: Any = None,  # noqa: ANN401 - any pytree of tensors
        seq_len: int | Sequence[int] | None = None,
        batch_dim: int | None = None,
        step: TrainingStep | None = None,
        **options: Unpack[StepOptions],
    ) -> Predictions:
        """Predict every model (or graph) at every batch size: G models, B batch sizes give arrays (G, B).

        seq_len: S lengths of the example's sequences give arrays (G, B, S). The other arguments are those of
        `predict`; each is the same for all models. A step under torch.compile is traced at each batch size.
        The result has what was assumed and what is unknown of each graph in `notes` and `unsupported`.
        """
        if isinstance(models, (str, bytes)) or not isinstance(models, Sequence):
            raise InputError(f"models is {described(models)}; expected a list of modules or graphs")
        modes = {_mode_of(m, mode) for m in models} or {mode}
        chosen = TrainingStep.of(step, options, "infer" if modes == {"infer"} else "train")
        settings = _settings(chosen)
        asked = CaptureRequest(None, None, mode, example, input_size, batch_dim=batch_dim, device=self.device)
        requests = [request_of(replace(asked, model=m), chosen) for m in models]
        if seq_len is None:

            def predicted(sizes: Any, batch_size: int | None = None) -> Predictions:  # noqa: ANN401
                each = [
                    replace(r, batch_size=batch_size, partitioned=batch_size is not None) for r in requests
                ]
                graphs = [capture_request(request) for request in each]
                return predict_graphs(graphs, sizes, self.device, settings)

            if not any(request.compiled for request in requests):
                return predicted(batch_sizes)
            sizes = np.atleast_1d(checked_batches(batch_sizes)).tolist()
            return joined_batches([predicted(size, size) for size in sizes])
        lengths = np.atleast_1d(seq_len).tolist()
        if not lengths:
            raise InputError("seq_len is empty; expected a sequence length, or several")
        families = [
            m.on(self.device) if isinstance(m, LengthFamily) else LengthFamily(r)
            for m, r in zip(models, requests, strict=True)
        ]
        return predict_lengths(families, batch_sizes, lengths, self.device, settings)


@checked_call(STEP_FIELDS)
def advise(
    model: Model,
    batch_size: int,
    device: str | Path | Device | None = None,
    *,
    memory_limit: Amount | None = None,
    confidence: float = 0.95,
    input_size: tuple[int, ...] | None = None,
    example: Any = None,  # noqa: ANN401 - any pytree of tensors
    seq_len: int | None = None,
    batch_dim: int | None = None,
    step: TrainingStep | None = None,
    runtime: bool = True,
    progress: Callable[[str], object] = lambda stage: None,
    **options: Unpack[StepOptions],
) -> Advice:
    """Return the settings under which updates of `batch_size` samples fit a device, with memory and time.

    Combined are gradient accumulation, autocast, optimizers with less state, torch.compile on GPUs that
    have it, activation checkpointing (models of transformers) and training the last layer alone.
    memory_limit: in MiB, or a text such as "4GiB"; by default the device's memory. runtime: for a language
    model of transformers also plan torchedge's own runtime, with weights in float32, int8 and int4: a step of
    adapters of rank 16 on all samples, each a text, and generation of one text (`LanguageAdvice.runtime`);
    takes minutes for a billion parameters. The other arguments and the errors are those of `predict`.
    """
    from torchedge.prediction.advice import advise_settings

    check_function("progress", progress)
    chosen = choose_device(device)
    asked = CaptureRequest(
        model, batch_size, "train", example, input_size, batch_dim=batch_dim, device=chosen
    ).loaded()
    request, settings = _request(asked, step, options)
    if settings.accumulation != 1:
        raise InputError(
            f"accumulation is {settings.accumulation}, which advise chooses itself; leave it out: batch_size "
            "is the samples of an update"
        )
    request = request if seq_len is None else LengthFamily(request).at(seq_len)
    advice = advise_settings(
        request, chosen, settings, limit_mib=_limit(memory_limit), confidence=confidence, progress=progress
    )
    from torchedge.tracing.language_models import is_language_model

    if not runtime or not is_language_model(asked.model):
        return advice
    from torchedge.bundles.language_advice import with_runtime

    return with_runtime(advice, replace(request, model=asked.model), chosen, progress)


@checked_call(STEP_FIELDS)
def simulate(
    model: Model,
    batch_size: int = 1,
    device: str | Path | Device | None = None,
    *,
    mode: Mode = "train",
    input_size: tuple[int, ...] | None = None,
    example: Any = None,  # noqa: ANN401 - any pytree of tensors
    evaluate: int | None = None,
    empty_cache: bool = False,
    seq_len: int | None = None,
    batch_dim: int | None = None,
    step: TrainingStep | None = None,
    **options: Unpack[StepOptions],
) -> MemoryProfile:
    """Simulate the memory of one step by tensor and replay PyTorch's caching allocator; nothing is fitted.

    Returns a MemoryProfile: allocated and reserved peaks in MiB, when the peak happens, which tensors make
    it, the timeline. With a device its framework's behaviour is simulated, else today's PyTorch on CUDA.
    evaluate: batch size of an evaluation between training steps, with `torch.cuda.empty_cache` before and
    after it if empty_cache: `stages` has the peaks of the first step, later ones, and the evaluation.
    """
    from torchedge.prediction.memory import simulation

    if evaluate is not None:
        check_whole("evaluate", evaluate)
    elif empty_cache:
        raise InputError("empty_cache is given without evaluate; expected both: add evaluate, a batch size")
    if evaluate is not None and mode == "infer":
        raise InputError("evaluate is given without mode='train'; expected it between training steps alone")
    chosen = None if device is None else choose_device(device)
    asked = CaptureRequest(
        model,
        batch_size,
        mode,
        example,
        input_size,
        batch_dim=batch_dim,
        device=find_device("nvidia-h200") if chosen is None else chosen,
    )
    request, settings = _request(asked, step, options)
    if chosen is not None:
        settings = device_settings(chosen, settings)
    request = request if seq_len is None else LengthFamily(request).at(seq_len)
    if evaluate is None:
        return use_graph(request, lambda graph: simulation.simulate(graph, batch_size, settings))
    if isinstance(model, ForwardGraph):
        raise InputError("a captured graph has no evaluation; expected the module or its name: pass that")
    inference = capture_request(replace(request, batch_size=evaluate, mode="infer"))
    return use_graph(
        request,
        lambda graph: simulation.simulate(
            graph, batch_size, settings, evaluation=(inference, evaluate, empty_cache)
        ),
    )


@checked_call(STEP_FIELDS)
def report(
    model: Model,
    batch_size: int = 1,
    device: str | Path | Device | None = None,
    *,
    out: str | Path,
    mode: Mode = "train",
    input_size: tuple[int, ...] | None = None,
    example: Any = None,  # noqa: ANN401 - any pytree of tensors
    seq_len: int | None = None,
    batch_dim: int | None = None,
    memory_limit: Amount | None = None,
    confidence: float = 0.95,
    step: TrainingStep | None = None,
    progress: Callable[[str], object] = lambda stage: None,
    **options: Unpack[StepOptions],
) -> Prediction:
    """Write a prediction as one HTML file that loads nothing, and return it.

    The page shows the prediction, memory over the step and by batch size, settings that fit, and the layers.
    out: the file. memory_limit: in MiB, or a text such as "4GiB"; by default the device's memory. The other
    arguments and the errors are those of `predict`; ProfileError where the file cannot be written.
    """
    from torchedge.prediction.pages import collect_report, render_report
    from torchedge.storage.documents import write_bytes

    path = check_path("out", out)
    if path.suffix.lower() not in (".html", ".htm"):
        raise InputError(f"out is {path}; expected a file that ends in .html or .htm")
    check_function("progress", progress)
    check_whole("batch_size", batch_size)
    checked_confidence(confidence)
    chosen = choose_device(device)
    asked = CaptureRequest(model, batch_size, mode, example, input_size, batch_dim=batch_dim, device=chosen)
    request, settings = _request(asked, step, options)
    data = collect_report(
        request,
        chosen,
        settings,
        seq_len=seq_len,
        limit_mib=_limit(memory_limit),
        confidence=confidence,
        progress=progress,
    )
    write_bytes(path, render_report(data).encode("utf-8", "backslashreplace"))
    return data.prediction


@checked_call()
def search(
    space: SearchSpace,
    constraints: Mapping[str, Amount],
    score: Callable[[Any], Any],
    *,
    device: str | Path | Device | None = None,
    batch_size: int = 32,
    inference_batch_size: int = 1,
    optimizer: str | torch.optim.Optimizer = "sgd-momentum",
    amp: str | None = None,
    confidence: float | None = None,
    population: int = 100,
    iterations: int = 500,
    mutation: float = 0.1,
    parents: float = 0.25,
    seed: int = 0,
    batched: bool = True,
    workers: int | None = 1,
    journal: str | Path | None = None,
    progress: Callable[[SearchProgress], object] | None = None,
) -> Search:
    """Search a space for the candidate with the highest score within hard constraints (perf4sight, 6.4).

    space: an OFAResNet50Space, a PruningSpace, or your own SearchSpace. constraints: the most that
    "training_memory" and "inference_memory" (MiB, or "4GiB"), "training_latency" and "inference_latency" (ms)
    may be, any of them; memory is what a candidate needs (`Prediction.needed`). Training at `batch_size`,
    inference at `inference_batch_size`. score: a function of a list of encodings that returns as many numbers
    (with batched=False: of one encoding), such as your accuracy predictor; higher is better. It is asked only
    for candidates within the constraints.
    device, optimizer, amp: as in `predict`. confidence: None compares the predicted figures with the limits;
    a one-sided confidence such as 0.95 what runs stay below with it.
    population, iterations, mutation, parents, seed: the evolution; the same seed gives the same result
    whatever the number of workers. workers: processes (joblib's n_jobs); None follows
    `joblib.parallel_config`, by which a Dask or Ray cluster does the work. journal: a file that records every
    candidate; a search that was killed goes on where it was when it is started again with it, and ends with
    the same result. progress: called after each iteration.
    Returns a Search: `best`, `build()`, `fronts`, and, where nothing meets the constraints, `violations`.
    """
    target = choose_device(device)
    settings = _settings(TrainingStep(optimizer=optimizer, amp=amp))
    if not isinstance(settings.optimizer, str):  # an optimizer of one network does not fit the candidates
        settings = replace(settings, optimizer=str(settings.optimizer))
    task = SearchTask(
        check_space(space),
        target,
        check_limits(constraints),
        {
            "train": check_batch_size("train", batch_size),
            "infer": check_batch_size("infer", inference_batch_size),
        },
        settings,
        None if confidence is None else checked_confidence(confidence),
        Recipe(population, iterations, mutation, parents),
        check_whole("seed", seed, 0),
    )
    path = None if journal is None else check_path("journal", journal)
    if progress is not None:
        check_function("progress", progress)
    return run_search(task, check_score(score, batched), workers=workers, journal=path, progress=progress)


_OF_AN_INFERENCE: Mapping[str, object] = {
    "input_size": None, "seq_len": None, "m_peak": "500MiB", "lam": LAMBDA, "chunk": "256KiB",
    "fusion": "all", "effort": 1.0,
}  # fmt: skip
"""What `plan` takes of an inference alone, with the defaults."""


@overload
def plan(
    model: torch.nn.Module | str,
    example: Any = None,  # noqa: ANN401 - any pytree of tensors
    device: str | Path | Device | None = None,
    *,
    step: None = None,
    memory_limit: Amount | None = None,
    input_size: tuple[int, ...] | None = None,
    seq_len: int | None = None,
    precision: Precision = "float32",
    m_peak: Amount | None = "500MiB",
    lam: float = LAMBDA,
    chunk: Amount = "256KiB",
    fusion: Fusion = "all",
    effort: float = 1.0,
) -> ModelPlan: ...
@overload
def plan(
    model: torch.nn.Module,
    example: Any,  # noqa: ANN401
    device: str | Path | Device | None = None,
    *,
    step: TrainingStep,
    memory_limit: Amount | None = None,
    precision: Precision = "float32",
) -> BundlePlan: ...
@checked_call()
def plan(
    model: torch.nn.Module | str,
    example: Any = None,
    device: str | Path | Device | None = None,
    *,
    step: TrainingStep | None = None,
    memory_limit: Amount | None = None,
    input_size: tuple[int, ...] | None = None,
    seq_len: int | None = None,
    precision: Precision = "float32",
    m_peak: Amount | None = "500MiB",
    lam: float = LAMBDA,
    chunk: Amount = "256KiB",
    fusion: Fusion = "all",
    effort: float = 1.0,
) -> ModelPlan | BundlePlan:
    """Plan which launch of an inference loads which weights, for models larger than the memory (FlashMem).

    The model is lowered as by `export`: the plan is of the kernels that run.
    step: plan this training step of a model instead, with its example, memory_limit and precision alone, as
    `export` with mode="train" writes it: which weights are streamed, what is computed again. Returns a
    BundlePlan, memory in bytes to the byte and times in ms: `total_bytes`, `step`; print it, or `to_dict()`.
    model, example, input_size, seq_len, device: as in `predict`. Weights may be on the meta device.
    memory_limit: all that a run allocates (weights, inputs and outputs, intermediates, staging buffers), in
    MiB or as "500MiB"; None: no limit but `m_peak`, the most that is in flight beside what is preloaded.
    precision: "float32" or "float16", in which weights and large intermediates are stored.
    lam: the weight of preloaded chunks against loading distances (section 3.1): towards 1 fewer weights are
    resident, towards 0 more are preloaded and executing takes less time.
    chunk: the unit of loading. fusion: "all", as `export` lowers a model, or "adaptive": element-wise values
    leave the products they are fused into where the capacity of their own kernel pays (section 4.3); takes
    longer. effort: how hard the solver tries; the same effort gives the same plan.
    Returns a ModelPlan, verified: `print` it, `.to_json()`, `.plot()`, `.layers`, `.timeline`; `.run(inputs)`
    runs it through OpenCL in this process.
    Raises InputError, CaptureError, LoweringError, DeviceError, and LimitError, which names the smallest
    limit that works.
    """
    from torchedge.lowering.inference import capture_model, target_of_device
    from torchedge.runtime.model_plans import ModelPlan
    from torchedge.streaming.planning import plan_model

    chosen = choose_device(device)
    if step is not None:
        from torchedge.bundles.bundle_plans import plan_request
        from torchedge.bundles.exporting import Request
        from torchedge.tracing.capturing import checked_model
        from torchedge.tracing.steps import check_step

        asked = TrainingStep.of(step, {}, "train")
        check_step(asked, "plan")
        given = (input_size, seq_len, m_peak, lam, chunk, fusion, effort)
        for (name, default), value in zip(_OF_AN_INFERENCE.items(), given, strict=True):
            if value != default:
                raise InputError(f"{name} is given with step, and is of an inference's plan alone: omit it")
        whole = checked_model(model)
        return plan_request(
            Request(whole, example, "train", asked, memory_limit=memory_limit, precision=precision), chosen
        )
    target = target_of_device(chosen, precision=precision)
    captured = capture_model(model, example, input_size=input_size, seq_len=seq_len)
    planned = plan_model(
        captured,
        target,
        chosen,
        fusion=fusion,
        memory_limit=memory_limit,
        m_peak=m_peak,
        lam=lam,
        chunk=chunk,
        effort=effort,
    )
    return ModelPlan.of(planned, captured.tensors)


@checked_call(STEP_FIELDS)
def export(
    model: torch.nn.Module | Mapping[str, tuple[torch.nn.Module, Any]],
    example: Any = None,  # noqa: ANN401 - any pytree of tensors
    device: str | Path | Device | None = None,
    *,
    out: str | Path,
    mode: Mode = "infer",
    step: TrainingStep | None = None,
    seed: int | None = None,
    name: str | None = None,
    plan: StreamingPlan | None = None,
    memory_limit: Amount | None = None,
    onnx: bool = True,
    precision: Literal["float32", "float16"] = "float32",
    tuner: Literal["fixed", "model"] | None = None,
    check: bool = False,
    force: bool = False,
    progress: Callable[[str], object] | None = None,
    **options: Unpack[StepOptions],
) -> Bundle:
    """Write a model as a folder of kernels, launches and weights that runs through OpenCL on a device.

    model: an nn.Module with its weights, left as found. example: what it is called with, batch included (a
    tuple: positional arguments, a mapping: keywords); the bundle is for these shapes. Several inferences that
    share weights and states make one bundle: model={"prefill": (model, example), "decode": (model, example)},
    without example (`Bundle.run(..., method="decode")`). out: the folder to
    make; `force` replaces a bundle that is there. device: as in `predict`; it need not be here: the program
    is held against the limits in its profile.
    mode: "train" exports a whole training step. step: a `TrainingStep`, or its fields as arguments of their
    own: optimizer (an object with its state, by default SGD with momentum), loss and targets, accumulation.
    seed: of dropout.
    precision: in which large intermediates lie, and large weights of an inference; kernels compute in
    float32. memory_limit: of all that an inference allocates, in MiB or as "500MiB": the bundle streams its
    weights (FlashMem); plan: stream as planned by `torchedge.plan` with the same model, example, device and
    precision. onnx: also write model.onnx, checked by onnx and run by onnxruntime where that is installed.
    tuner: what chooses the kernels' schedules and layouts: "fixed" constants of the device class, or "model",
    TMModel's cost model, the default where the device's profile has coefficients of kernels, and for training
    steps on phones, with assumed ones.
    check: also record what each launch writes on this machine's OpenCL device: `torchedge-run --check` finds
    the kernel that another driver gets wrong.
    progress: called with each stage; without it, an export of over three seconds reports them.
    Returns the Bundle, read back and checked. Raises InputError, CaptureError, LoweringError (operators
    without kernels), DeviceError (a limit of the device, with the tensor or kernel that is beyond it),
    LimitError (which names a memory limit that works) and MissingExtraError.
    """
    from torchedge.bundles.exporting import Request

    request = Request(
        model,
        example,
        mode,
        TrainingStep.of(step, options, mode),
        seed,
        name,
        plan,
        memory_limit,
        onnx,
        precision,
        tuner,
        check,
    )
    return _bundle(request, device, out, force, progress)


def _bundle(
    request: Request,
    device: str | Path | Device | None,
    out: str | Path,
    force: bool,
    progress: Callable[[str], object] | None,
) -> Bundle:
    from torchedge.bundles.exporting import make_bundle

    if progress is not None:
        check_function("progress", progress)
    target = choose_device(device)
    with noticed(f"exporting for {target.name}") if progress is None else nullcontext():
        return make_bundle(request, target, out, force=force, progress=progress or stage)


@checked_call()
def export_lm(
    model: Any,  # noqa: ANN401 - transformers need not be installed
    device: str | Path | Device | None = None,
    *,
    out: str | Path,
    max_length: int,
    chunk: int = 64,
    batch: int = 1,
    encoder_length: int | None = None,
    cache_dtype: Literal["float32", "float16"] = "float32",
    quantize: Literal["int8", "int4"] | None = None,
    lora: int | None = None,
    memory_limit: Amount | None = None,
    seed: int | None = None,
    name: str | None = None,
    precision: Literal["float32", "float16"] = "float32",
    tuner: Literal["fixed", "model"] | None = None,
    tokenizer: str | Path | None = None,
    force: bool = False,
    progress: Callable[[str], object] | None = None,
) -> Bundle:
    """Write a language model of transformers as a bundle that generates text: `Bundle.generate`.

    model: it, with its weights, left as found; or its configuration, for random weights. max_length: tokens
    of a prompt and its continuation, which caches on the device hold. chunk: tokens of a prompt that run at
    once. batch: prompts that `generate` takes together. cache_dtype: "float16" halves the caches.
    The bundle has methods over the same weights and caches: "prefill" (a chunk), "decode" (one token), and
    from 128 tokens on "decode_64" and the like, from 1,024 on "prefill_256", which read the first places of
    the caches alone. An encoder-decoder (T5, Whisper) has "prefill", "decode" and "encode", and takes one
    prompt at a time, of at most encoder_length tokens, by default max_length, or features of the model's own
    length; max_length is then that of its decoder. quantize: "int8" (a scale a row) or "int4" (a scale for 32
    weights of a row) of linear layers and embeddings; for other groups and zero points pass a model of
    `torchedge.quantize`.
    lora: the rank of adapters (peft) in all linear layers but the head, which a further method, "train",
    trains by AdamW: `bundle.train_step(ids, labels)`, arrays int64[batch, max_length] with labels of -100
    where a text says nothing. Generation has what they learnt at once.
    memory_limit: of all that is allocated; weights beyond it are read for every token, chunk and step.
    tokenizer: a tokenizer.json, of which the bundle gets a copy for `Bundle.generate_text`. The other
    arguments and errors are those of `export`; CaptureError also for a model whose attention takes no caches.
    """
    from torchedge.bundles.language_plans import LanguageSettings, language_request
    from torchedge.tracing.language_models import language_model

    settings = LanguageSettings(
        max_length, chunk, batch, encoder_length, cache_dtype, quantize, lora, memory_limit, precision, tuner
    )
    request = language_request(language_model(model, quantize), settings)
    words = None if tokenizer is None else check_path("tokenizer", tokenizer)
    request = replace(request, seed=seed, name=name or request.name, tokenizer=words)
    return _bundle(request, device, out, force, progress)


@checked_call()
def plan_lm(
    model: Any,  # noqa: ANN401 - transformers need not be installed
    device: str | Path | Device | None = None,
    *,
    max_length: int,
    chunk: int = 64,
    batch: int = 1,
    encoder_length: int | None = None,
    cache_dtype: Literal["float32", "float16"] = "float32",
    quantize: Literal["int8", "int4"] | None = None,
    lora: int | None = None,
    memory_limit: Amount | None = None,
    precision: Literal["float32", "float16"] = "float32",
    tuner: Literal["fixed", "model"] | None = None,
    prompt: int = 0,
    new_tokens: int = 0,
) -> LanguagePlan:
    """Return memory and time of a language model on a device as `export_lm` would export it; nothing runs.

    model: as in `export_lm`, or a model's name or file, as for `plan`; only shapes of its weights count, and
    none is computed or copied. prompt, new_tokens: of the text whose times are predicted (0: up to 64 each).
    The other arguments are those of `export_lm`.
    Returns a LanguagePlan, memory in bytes and times in ms: `total_bytes`, that of the bundle to the byte,
    `first_token`, `token`, `reply`, `tokens_per_s`, `step`; print it, or `to_dict()`.
    Raises what `export_lm` raises; LimitError names the smallest limit that works, DeviceError a limit of
    the device that is exceeded.
    """
    from torchedge.bundles.language_plans import LanguageSettings, plan_language_model
    from torchedge.tracing.sources import load_model

    settings = LanguageSettings(
        max_length, chunk, batch, encoder_length, cache_dtype, quantize, lora, memory_limit, precision, tuner,
        prompt, new_tokens,
    )  # fmt: skip
    chosen = choose_device(device)
    return plan_language_model(load_model(model)[0] if isinstance(model, str) else model, chosen, settings)


def choose_device(device: object) -> Device:
    """Find a device by name; without one: environment, configuration file, this machine's GPU, its CPU.

    A torch.device, "cuda" or "cuda:1" is this machine's. A GPU without a profile gets the nearest one, scaled
    to its published figures, and predictions say so; a device that is named is never replaced. Raises
    DeviceError for a device that has no profile, and InputError for anything else.
    """
    if isinstance(device, Device):
        return device
    if isinstance(device, (str, Path)) and _CUDA.fullmatch(str(device)) is None:
        return find_device(device)
    if device is not None:
        return _own_device(device)
    named = default_device_name()
    if named is not None:
        return find_device(named)
    import torch

    if torch.cuda.is_available():
        gpu = _own_gpu(0)
        if gpu is not None:
            return gpu
    board = board_name()
    jetson = board if is_jetson(board) else None
    match = (match_device(jetson) or stand_in(jetson)) if jetson is not None else None
    return match if match is not None else find_device(LOCAL_DEVICE)


_CUDA = re.compile(r"cuda(:[0-9]+)?")


def _own_device(device: object) -> Device:
    """Return the profile of a device of this machine, as torch names it."""
    import torch

    if not isinstance(device, (str, torch.device)):
        raise InputError(
            f"device is {described(device)}; expected a name of `torchedge devices`, a profile's "
            "folder or a torch.device"
        )
    own = torch.device(device)
    if own.type == "cpu":
        return find_device(LOCAL_DEVICE)
    if own.type != "cuda" or not torch.cuda.is_available():
        raise DeviceError(
            f"device is {str(own)!r}, and PyTorch sees no CUDA device here; name the device that is meant, "
            "as `torchedge devices` lists it"
        )
    match = _own_gpu(own.index or 0)
    if match is None:
        raise DeviceError(
            f"{torch.cuda.get_device_name(own)} has no profile; name a similar device of `torchedge "
            "devices`, or measure it with `torchedge campaign run`"
        )
    return match


def _own_gpu(index: int) -> Device | None:
    """Return the profile of one of this machine's CUDA devices, else what stands for it; None: neither."""
    import torch

    properties, name, board = (
        torch.cuda.get_device_properties(index),
        torch.cuda.get_device_name(index),
        board_name(),
    )
    total = properties.total_memory / 2**20
    if is_jetson(board) and is_jetson(name):
        name = board or name  # several boards share the name of their GPU
    match = match_device(name, total)
    if match is not None or torch.version.hip is not None:
        return match
    numbers = [getattr(properties, part, None) for part in ("major", "minor")]
    capability = (numbers[0], numbers[1]) if all(type(number) is int for number in numbers) else None
    return stand_in(name, total, capability)  # type: ignore[arg-type]
