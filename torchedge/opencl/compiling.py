"""Kernels from source: few programs for many kernels, a cache on disk, errors that show the line."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torchedge.errors import KernelBuildError
from torchedge.notices import stage
from torchedge.opencl.binary_caches import BinaryCache, default_cache, key_of
from torchedge.opencl.build_processes import TrialRun, build_in_processes, end_waiting, process_count
from torchedge.opencl.contexts import DeviceContext, translated
from torchedge.opencl.foreign_caches import pocl_cache
from torchedge.opencl.platforms import ClDevice
from torchedge.opencl.sharing import check_process, keep_in_forks
from torchedge.storage.locks import warnings_ignored

OPTIONS = ("-cl-std=CL1.2",)

MOST_KERNELS = 4
"""Kernels of a program whose binary is cached: few, so that processes share the work evenly."""

SELF_CACHING = frozenset({"Portable Computing Language"})
"""Platforms with a cache of their own: PoCL compiles a kernel when it is first enqueued, for each work-group
size, and would compile all kernels once more to return binaries."""

DRIVER_CACHES = ("POCL_CACHE_DIR", "XDG_CACHE_HOME", "HOME")
"""Environment variables that say where such a cache lies."""

_KERNEL = re.compile(r"^.*\b__kernel\b", re.MULTILINE)
_ERROR = re.compile(r":(\d+):\d+:\s*(?:fatal )?error:\s*(.+)|error:\s*\S*?:(\d+):\d+:\s*(.+)")


@dataclass(frozen=True, slots=True)
class CompiledKernels:
    """Built programs by the names of their kernels."""

    context: DeviceContext
    programs: Mapping[str, Any]

    def kernel(self, name: str) -> Any:
        """Return a new kernel object, with arguments of its own; raises OpenCLError."""
        hint = ""
        if self.context.device.platform in SELF_CACHING:
            hint = f" (if the driver knows no such kernel, its cache is damaged: empty {pocl_cache()})"
        with translated(f"kernel {name}{hint}", device=self.context.device):
            return keep_in_forks(self.context.cl.Kernel, self.programs[name], name)


def compile_kernels(
    context: DeviceContext,
    sources: Mapping[str, str],
    cache: BinaryCache | Literal["auto"] | None = "auto",
    trials: Sequence[TrialRun] = (),
) -> CompiledKernels:
    """Build kernels, each given by its name and the source that defines it.

    Kernels with the same text before their `__kernel` share a program, `MOST_KERNELS` at most where binaries
    are cached: on PoCL, one program of 40 kernels is built in a tenth of the time of 40 programs. Much text
    that is not in the cache is built by several processes. cache: of binaries ("auto": `cache_for` the
    device; None: no cache). trials: runs by which those processes let a driver compile that compiles kernels
    when they first run.
    Raises KernelBuildError: names the kernel and shows the line of the compiler's first error.
    """
    check_process()
    binaries = cache_for(context.device) if cache == "auto" else cache
    groups: dict[str, dict[str, str]] = {}
    for name, source in sources.items():
        begin = _KERNEL.search(source)
        place = begin.start() if begin else 0
        groups.setdefault(source[:place].strip(), {})[name] = source[place:]
    by_itself = context.device.platform in SELF_CACHING
    count = process_count(sum(map(len, sources.values()))) if trials and by_itself else 0
    parts = [
        (preamble, dict(part))
        for preamble, bodies in groups.items()
        for part in _shares(bodies, -(-len(bodies) // MOST_KERNELS) if binaries else max(1, count))
    ]
    texts = ["\n".join([preamble, *bodies.values()]) for preamble, bodies in parts]
    if binaries is not None:
        _build_ahead(context, texts, binaries)
    elif count > 1:
        own = {
            text: [t for t in trials if t.kernel in bodies]
            for (_, bodies), text in zip(parts, texts, strict=True)
        }
        _run_ahead(context, own, count)
    end_waiting()
    programs: dict[str, Any] = {}
    for number, ((_, bodies), text) in enumerate(zip(parts, texts, strict=True), 1):
        stage(f"building program {number:,} of {len(texts):,}, {len(sources):,} kernels in all")
        try:
            program = build_text(context, text, binaries)
        except context.cl.Error as error:
            _raise_build_error(context, {name: sources[name] for name in bodies}, error)
        programs.update(dict.fromkeys(bodies, program))
    return CompiledKernels(context, programs)


def cache_for(device: ClDevice) -> BinaryCache | None:
    """Return the cache in the user's cache folder, or None for drivers with a cache of their own."""
    return None if device.platform in SELF_CACHING else default_cache()


def _shares(bodies: Mapping[str, str], count: int) -> list[list[tuple[str, str]]]:
    """Return kernels by programs that take about as long to compile."""
    items = sorted(bodies.items(), key=lambda item: -len(item[1])) if count > 1 else list(bodies.items())
    return [items[first::count] for first in range(min(count, len(items)))]


def _run_ahead(context: DeviceContext, trials: Mapping[str, Sequence[TrialRun]], count: int) -> None:
    """Let several processes fill the driver's own cache, once for the same texts and the same place of it."""
    folders = [f"{name}={os.environ.get(name, '')}" for name in DRIVER_CACHES]
    key = key_of(context.device, "".join(trials), [*OPTIONS, *folders, repr(list(trials.values()))])
    done = default_cache()
    if done.read(key) is None:
        build_in_processes(context.device, list(trials), None, count, trials)
        done.write(key, b"compiled")


def _build_ahead(context: DeviceContext, texts: Sequence[str], cache: BinaryCache) -> None:
    """Build what the cache lacks in several processes, where that is much."""
    keys = {text: key_of(context.device, text, OPTIONS) for text in texts}
    missing = [text for text in texts if not cache.holds(keys[text])]
    count = min(process_count(sum(map(len, missing))), len(missing))

    def waiting() -> None:
        built = sum([cache.holds(keys[text]) for text in missing])
        stage(f"built {built:,} of {len(missing):,} programs in {count} processes")

    if count > 1:
        build_in_processes(context.device, missing, cache, count, waiting=waiting)


def build_text(context: DeviceContext, text: str, cache: BinaryCache | None) -> Any:
    """Return the program of a text from the cache, or build and cache it; raises the driver's errors."""
    cl, handle = context.cl, context.handle
    key = key_of(context.device, text, OPTIONS)
    binary = cache.read(key) if cache else None
    with warnings_ignored(cl.CompilerWarning):  # notes of a build that succeeds
        if binary is not None:
            try:
                return cl.Program(context.context, [handle], [binary]).build(list(OPTIONS))
            except cl.Error:  # of another driver, in spite of its key
                pass
        program = cl.Program(context.context, text).build(list(OPTIONS))
    if cache is not None:
        cache.write(key, bytes(program.get_info(cl.program_info.BINARIES)[0]))
    return program


def _raise_build_error(context: DeviceContext, sources: Mapping[str, str], error: Exception) -> None:
    """Raise KernelBuildError for the first kernel that does not build by itself."""
    for name, source in sources.items():
        try:
            build_text(context, source, None)
        except context.cl.Error as own:
            log = str(own)
            text = _build_error_text(name, source, log, context.device)
            raise KernelBuildError(text, kernel=name, log=log) from own
    log = str(error)
    names = ", ".join(sources)
    raise KernelBuildError(
        f"kernels {names} build one by one but not together on {context.device.described}: "
        f"{' '.join(log.split())[:300]}; "
        "rename helper functions or macros that they define twice",
        log=log,
    ) from error


def _build_error_text(name: str, source: str, log: str, device: ClDevice) -> str:
    match, end = _ERROR.search(log), f"correct its source, or update the driver: {device.described}"
    if match is None:
        return f"kernel {name} does not build: {' '.join(log.split())[:400]}; {end}"
    number, message = int(match[1] or match[3]), (match[2] or match[4]).strip()
    lines = source.splitlines()
    shown = lines[number - 1].strip() if 0 < number <= len(lines) else ""
    return f"kernel {name} does not build, line {number}, `{shown}`: {message}; {end}"
