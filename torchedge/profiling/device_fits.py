"""`torchedge.fit`: a device's profile from the measurements of a dataset, with a verdict on every figure."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import isfinite, nan
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

import numpy as np

from torchedge.devices import LOCAL_DEVICE, Device, find_device
from torchedge.errors import InputError, ProfileError, check_choice, check_path, checked_call
from torchedge.graphs import Mode
from torchedge.prediction.memory.workspaces import workspaces_on
from torchedge.prediction.profiles import MODE_TABLES, FittedModels
from torchedge.profiling import profile_folders
from torchedge.profiling.accuracy import NAMES, JudgedFigure, Score
from torchedge.profiling.campaigns.drawn import LABEL
from torchedge.profiling.campaigns.expansion import PLAN
from torchedge.profiling.campaigns.plans import LARGER, parse_plan, read_plan
from torchedge.profiling.datasets import is_dataset, read_dataset
from torchedge.profiling.kind_fitting import fit_kinds, kind_title, read_kind_rows
from torchedge.profiling.latency_fitting import fit_latency, one_thread
from torchedge.profiling.memory_fitting import fit_memory
from torchedge.profiling.profile_folders import KEYS, Accuracy, ModeFit, PartFit
from torchedge.profiling.samples import (
    PROTOCOL,
    QUANTITIES,
    HeldOut,
    Mask,
    Quantity,
    Samples,
    measured_device,
    prepare,
)
from torchedge.profiling.step_fitting import StepErrors, fit_device_programs
from torchedge.profiling.transfer import Adaptation, adapt_mode, base_of, describe_transfer
from torchedge.profiling.workspace_fitting import fit_device_workspaces
from torchedge.storage import user_folder
from torchedge.storage.documents import read_text, writing

Verdict = Literal["good", "rough", "unusable"]
"""What a fitted figure is worth, by its error on networks that the fit has not seen."""

GOOD, USABLE = 10.0, 40.0
"""Largest mean errors in % of a good and of a usable figure. An unmeasured device's latency, whose intervals
are a factor of 2.2 to each side, is expected to err by 40 %: a fit that errs more is worth less than none."""

MEANINGS = {
    "good": f"errs by at most {GOOD:.0f} % on what it has not seen",
    "rough": "errs by more: compare settings by it, and leave a margin",
    "unusable": f"errs by over {USABLE:.0f} %, as an estimate without any measurement does",
}
_LEAST_COVERAGE = 70.0
"""Fewer rows inside their 90 % intervals, in %, make a good figure a rough one."""


class Watcher(Protocol):
    """Receives the progress of a fit; a progress bar, for one."""

    def begin(self, stage: str) -> None:
        """A stage begins; the one before is done."""

    def more(self, steps: int) -> None:
        """So many stages and steps follow."""

    def step(self) -> None:
        """One step is done."""


class _Silent:
    def begin(self, stage: str) -> None: ...
    def more(self, steps: int) -> None: ...
    def step(self) -> None: ...


@dataclass(frozen=True, slots=True)
class FigureFit(JudgedFigure):
    """One fitted figure.

    error: mean absolute error in % on networks held out (on pruning levels or points, where there is one
    network). coverage: % of held-out rows inside their 90 % intervals, NaN where it was not scored. worst:
    the network that errs most, "" where networks were not told apart. written: the profile holds the figure.
    """

    rows: int
    networks: int
    error: float
    coverage: float
    worst: str
    verdict: Verdict
    written: bool


@dataclass(frozen=True, slots=True)
class DeviceFit:
    """A fitted device: the device as written, its figures with their verdicts, and what to measure next.

    missing: a line for each figure that was not fitted, with the reason. notes: other remarks. base: the
    device whose profile was adapted. programs: errors of the model of programs, where launches were timed.
    kinds: mean errors in % of latency by kind of steps under autocast, where these were measured.
    """

    device: Device
    dataset: str
    figures: tuple[FigureFit, ...]
    missing: tuple[str, ...]
    advice: tuple[str, ...]
    notes: tuple[str, ...]
    base: str | None = None
    programs: StepErrors | None = None
    kinds: Mapping[str, float] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """The profile folder."""
        return self.device.folder

    @property
    def verdict(self) -> Verdict:
        """The worst verdict on a figure."""
        order: tuple[Verdict, ...] = get_args(Verdict)
        return max((figure.verdict for figure in self.figures), key=order.index, default="unusable")


@checked_call()
def fit(
    dataset: str | Path,
    device: str | Path | None = None,
    out: str | Path | None = None,
    *,
    base: str | Path | None = None,
    points: int | None = None,
    seed: int = 0,
    modes: Sequence[Mode] = ("train", "infer"),
    accuracy: bool = True,
    force: bool = False,
    keep_unusable: bool | None = None,
    progress: Watcher | None = None,
) -> DeviceFit:
    """Fit a device's profile to the measurements in a folder and write it; return it with verdicts.

    dataset: the folder of a campaign, or one with measurements.csv and topologies.jsonl. device: the measured
    device, a name or a profile folder; default: the one that the campaign describes, else the one the folder
    is called. out: the profile folder; default: the device's in your own folder, where `predict` finds it by
    name. base: adapt this device's profile to few measurements instead: to all, or to the most informative
    `points` of each mode, chosen with `seed`. accuracy: also score the models in every protocol (minutes).
    force: overwrite a profile, and write figures whose verdict is "unusable" too; keep_unusable decides the
    second apart.

    Figures with too few measurements are named in `missing`; the others are fitted. Needs torchedge[fit].

    Raises:
        InputError: no figure can be fitted, none is usable, or `out` is not empty; the message says what to
            measure next.
        ProfileError: the dataset is damaged.
    """
    for mode in modes:
        check_choice("mode", mode, MODE_TABLES)
    folder, watcher = check_path("dataset", dataset), progress or _Silent()
    if folder.is_file():
        raise InputError(f"{folder} is a file; expected a folder: `torchedge fit loads` reads such")
    if out is not None:
        profile_folders.check_target(check_path("out", out), force=force)
    if base is not None:
        base_of(base, "train")  # a device without models fails before the dataset is read
    with one_thread(), tempfile.TemporaryDirectory() as scratch:
        watcher.begin("reading")
        if not is_dataset(folder):
            read_dataset(folder)  # raises the error of a missing folder or table
        described = measured_device(folder, None if device is None else str(device), Path(scratch))
        target = _target(described, force=force) if out is None else Path(out)
        keep = force if keep_unusable is None else keep_unusable
        work = _Fitting(folder, described, target, base, points, seed, accuracy, keep, watcher)
        return work.run(modes)


def _target(device: Device, *, force: bool) -> Path:
    """Return the device's profile folder in the user's own; raises InputError where it is taken."""
    target = user_folder() / "profiles" / device.name
    with writing(target, "set TORCHEDGE_HOME to a folder you may write"):
        target.parent.mkdir(parents=True, exist_ok=True)
    profile_folders.check_target(target, force=force)
    return target


@dataclass
class _Fitting:
    """One run of `fit`: reads, fits mode after mode, judges, writes."""

    dataset: Path
    device: Device
    out: Path
    base: str | Path | None
    points: int | None
    seed: int
    accuracy: bool
    keep_unusable: bool
    watcher: Watcher

    def run(self, modes: Sequence[Mode]) -> DeviceFit:
        measured = read_dataset(self.dataset)
        present = measured.modes or ("train",)
        chosen = [mode for mode in present if mode in modes]
        if not chosen:
            wanted, others = (", ".join(MODE_TABLES[m] for m in names) for names in (modes, present))
            raise InputError(
                f"{self.dataset} holds no measurements of {wanted}; expected some: it holds {others}"
            )
        self.watcher.begin("workspaces")
        workspaces = fit_device_workspaces(self.dataset)
        settings = PROTOCOL
        if workspaces is not None:
            settings = replace(PROTOCOL, workspaces=workspaces_on(self.device, workspaces.model))
        self.watcher.more((3 + profile_folders.SCORES * (self.accuracy and self.base is None)) * len(chosen))
        self.figures: list[FigureFit] = []
        self.missing: list[str] = []
        self.notes: list[str] = []
        fits: dict[Mode, ModeFit] = {}
        for mode in chosen:
            self.watcher.begin(f"simulating ({MODE_TABLES[mode]})")
            samples = prepare(measured, self.device, settings, mode)
            fitted = self._fit(samples) if self.base is None else self._adapt(samples)
            if fitted is not None:
                fits[mode] = fitted
        programs = self._fit_programs()
        advice = self._advice()
        if not fits and programs is None:
            reasons = "; ".join([*self.missing, *map(_sentence, self.figures), *advice])
            raise InputError(f"{self.dataset}: nothing is written: {reasons}")
        parts = {"workspaces": workspaces, "programs": None if programs is None else programs[0]}
        written = profile_folders.write_profile(self.out, self.device, fits, **parts)
        kinds: dict[str, float] = {}
        if self.base is None and any(n.settings.amp is not None for n in measured.networks.values()):
            written = self._fit_kinds(written, kinds)
        return DeviceFit(
            written, measured.name, tuple(self.figures), tuple(self.missing), advice, tuple(self.notes),
            None if self.base is None else find_device(self.base).name,
            None if programs is None else programs[1],
            kinds,
        )  # fmt: skip

    def _fit_kinds(self, fitted: Device, errors: dict[str, float]) -> Device:
        """Fit the latency of steps under autocast on top of the device's; add its errors by kind."""
        self.watcher.begin("autocast")
        try:
            measured = read_kind_rows(self.dataset, fitted, float32=False)
        except ProfileError as error:
            self.missing.append(f"latency under autocast is not fitted: {error}")
            return fitted
        self.watcher.more(measured.fits)
        part = fit_kinds(measured, self.out, self.watcher.step)
        usable = {}
        for (mode, kind), model in part.model.items():
            title = kind_title(mode, kind)
            off = part.described["accuracy"][title]["mean"]
            if off <= USABLE or self.keep_unusable:
                usable[mode, kind], errors[title] = model, off
            else:
                self.missing.append(
                    f"latency of {title} errs by {off:.0f} %: unusable and not written; --force writes it"
                )
        if not usable:
            return fitted
        return profile_folders.write_profile(self.out, fitted, {}, kinds=replace(part, model=usable))

    def _fit_programs(self) -> tuple[PartFit, StepErrors] | None:
        """Fit the model of programs, where launches were timed."""
        self.watcher.begin("programs")
        try:
            fitted = fit_device_programs(self.dataset, self.device)
        except ProfileError as error:
            self.missing.append(f"the model of programs is not fitted: {error}")
            return None
        worst = max(map(fitted[1].mean, ("latency", "memory"))) if fitted is not None else 0.0
        if worst > USABLE and not self.keep_unusable:
            self.missing.append(
                f"the model of programs is not written: it errs by {worst:.0f} %, a usable one by at most "
                f"{USABLE:.0f} % (--force writes it)"
            )
            return None
        return fitted

    def _fit(self, samples: Samples) -> ModeFit | None:
        """Fit one mode from nothing; None where no figure of it can be used."""
        models: dict[Quantity, Any] = {}
        held_out: dict[Quantity, HeldOut] = {}
        for quantity, fit_figure in zip(QUANTITIES, (fit_memory, fit_latency), strict=True):
            self.watcher.begin(quantity)
            try:
                models[quantity] = fit_figure(
                    samples, samples.every, judge=partial(held_out.__setitem__, quantity)
                )
            except ProfileError as error:
                self.missing.append(f"{NAMES[samples.mode, quantity][1]} is not fitted: {error}")
        if not models:
            return None
        scores = None
        if self.accuracy:
            self.watcher.begin("accuracy")
            scores = profile_folders.score_all(samples, self.watcher.step, tuple(models))
            self.notes += scores.problems
        usable = {
            quantity: model
            for quantity, model in models.items()
            if self._judge(samples, quantity, samples.every, *_error(held_out[quantity], quantity, scores))
        }
        if not usable:
            return None
        fitted = FittedModels(usable.get("memory"), usable.get("latency"), samples.source.provenance)
        return profile_folders.describe_fit(self.out, samples, fitted, scores)

    def _adapt(self, samples: Samples) -> ModeFit | None:
        """Adapt the base's models of one mode; None where it has none, or no figure can be used."""
        mode = samples.mode
        assert self.base is not None
        base = base_of(self.base, mode)
        if base is None:
            self.missing.append(f"{MODE_TABLES[mode]} is not fitted: {self.base} has no models of it")
            return None
        try:
            adapted = adapt_mode(base, samples, self.points, self.seed, self.watcher.begin)
        except ProfileError as error:
            self.missing.append(f"{MODE_TABLES[mode]} is not fitted: {error}")
            return None
        used = int(adapted.used.sum())
        if self.points is not None and used < self.points:
            self.notes.append(
                f"{self.points} points of mode {mode} are asked for, {used} are there; all are used"
            )
        usable = {
            quantity: model
            for quantity, model in ((q, getattr(adapted.models, q)) for q in QUANTITIES)
            if model is not None
            and self._judge(samples, quantity, adapted.used, *_adapted_error(adapted, quantity))
        }
        if not usable:
            return None
        kept = replace(adapted.models, memory=usable.get("memory"), latency=usable.get("latency"))
        return describe_transfer(self.out, replace(adapted, models=kept), self.points, self.seed)

    def _judge(
        self, samples: Samples, quantity: Quantity, rows: Mask, error: float, coverage: float, worst: str
    ) -> bool:
        """Record the verdict on a figure; return whether it goes into the profile."""
        verdict: Verdict = "unusable" if error > USABLE else "rough"
        if error <= GOOD and not coverage < _LEAST_COVERAGE:
            verdict = "good"
        used = samples.usable(quantity, rows)
        networks = len(set(samples.network[used].tolist()))
        written = verdict != "unusable" or self.keep_unusable
        self.figures.append(
            FigureFit(
                samples.mode, quantity, int(used.sum()), networks, error, coverage, worst, verdict, written
            )
        )
        return written

    def _advice(self) -> tuple[str, ...]:
        """Return what to measure next, empty where every figure is good."""
        weak = [figure for figure in self.figures if figure.verdict != "good"]
        if not weak and not self.missing:
            return ()
        lines = []
        worst = dict.fromkeys(f.worst for f in weak if f.worst and not f.worst.startswith(LABEL))
        if worst:
            lines.append(f"add networks like {' and '.join(worst)}: left out, they err most")
        stored = self.dataset / PLAN
        if stored.is_file():
            known = parse_plan(str(stored), read_text(stored, "TOML")).points(())
            local = self.dataset == user_folder() / "profiling" / LOCAL_DEVICE
            plans = ("processor",) if local else LARGER
            plan = next((name for name in plans if set(read_plan(name).points(())) - set(known)), None)
            command = (
                "torchedge profile"
                if local
                else (
                    f"torchedge campaign run {self.device.name} --plan {plan} --out {self.dataset} "
                    "(with --over and --processor as before)"
                )
            )
            if plan is not None:
                lines.append(f"measure a larger plan, which keeps these points: {command}")
        if not lines:
            lines.append("measure more networks and batch sizes of the modes named")
        return tuple(lines)


def _sentence(figure: FigureFit) -> str:
    return (
        f"{figure.name} errs by {figure.error:.0f} % on what the fit has not seen, over the {USABLE:.0f} % "
        "of a usable fit (--force writes it)"
    )


def _error(held_out: HeldOut, quantity: Quantity, scores: Accuracy | None) -> tuple[float, float, str]:
    """Return the error in %, the coverage, and the worst network of a figure fitted from nothing."""
    scored = None if scores is None else scores.scores.get((KEYS[quantity], "left-out"))
    if scored is None:
        return held_out.percent, nan, held_out.worst
    return scored.mean, scored.mean_coverage, _worst(scored)


def _adapted_error(adapted: Adaptation, quantity: Quantity) -> tuple[float, float, str]:
    """Return the same of an adapted figure: of its points, each held out, or of the points not used."""
    scored = adapted.scores.get(KEYS[quantity])
    if scored is None or not isfinite(scored.mean):
        return adapted.held_out[quantity].percent, nan, adapted.held_out[quantity].worst
    return scored.mean, scored.mean_coverage, _worst(scored)


def _worst(scored: Score) -> str:
    return max(scored.error, key=lambda name: scored.error[name]) if len(scored.error) > 1 else ""


def fit_document(result: DeviceFit) -> Mapping[str, Any]:
    """Return a fit as plain data: verdicts, what is missing, what to measure next, the profile's tables."""
    figures = [
        {
            "symbol": f.symbol, "figure": f.name, "rows": f.rows, "networks": f.networks, "error": f.error,
            "coverage": f.coverage if np.isfinite(f.coverage) else None, "worst": f.worst or None,
            "verdict": f.verdict, "written": f.written,
        }
        for f in result.figures
    ]  # fmt: skip
    tables = {
        name: result.device.profile[name] for name in MODE_TABLES.values() if name in result.device.profile
    }
    errors = result.programs
    programs = None if errors is None else {name: errors.mean(name) for name in ("latency", "memory")}
    return {
        "device": result.device.name, "folder": str(result.folder), "verdict": result.verdict,
        "figures": figures, "missing": list(result.missing), "advice": list(result.advice),
        "notes": list(result.notes), "programs": programs, "kinds": dict(result.kinds), **tables,
    }  # fmt: skip
