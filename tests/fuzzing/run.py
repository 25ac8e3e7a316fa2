"""`make fuzz MINUTES=10`: mutate files of every format, guided by the code that they reach.

A child process a format runs atheris (libFuzzer) over the readers of `formats.py`, begins with its seeds and
with `corpus/FORMAT`, and counts as a defect every exception that is not torchedge's, every signal, 10 s or
1 GiB for one input. A defect's input is left in `corpus/FORMAT` under its kind, where `test_corpus.py` reads
it in every run of the tests; `--keep` adds the smallest inputs that reached code nothing else reaches.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
CORPUS = HERE / "corpus"
SECONDS, MEBIBYTES = 10, 1024
"""Most time and memory of one input."""

LARGEST, MOST_DEFECTS = 2**17, 5
NAMES = (
    "programs", "plans", "instances", "profiles", "fitted", "forests", "journals", "datasets", "onnx", "pt2",
    "bundles",
)  # fmt: skip
_COUNT = re.compile(r"^#(\d+)\s|^stat::number_of_executed_units:\s*(\d+)", re.MULTILINE)
_COVERED = re.compile(r"cov: (\d+)")


def fuzz(name: str, seconds: float, arguments: list[str]) -> None:
    """Fuzz one format in this process, until its time is over or a defect ends it."""
    import atheris

    sys.path[:0] = [str(HERE), str(HERE.parent)]
    with atheris.instrument_imports(include=["torchedge"], enable_loader_override=False):
        import formats

    form = formats.FORMATS[name].form

    def mutate(data: bytes, most: int, seed: int) -> bytes:
        rng = random.Random(seed)
        if rng.random() < 0.1:
            return bytes(atheris.Mutate(data, most))
        try:
            changed = _mutated(form, data, rng)
        except (ValueError, RecursionError, OverflowError, MemoryError):
            changed = atheris.Mutate(data, most)
        return bytes(changed[:most])

    def one(data: bytes) -> None:
        formats.survives(name, data)

    seeds = formats.SCRATCH / "seeds"
    seeds.mkdir()
    for number, seed in enumerate(formats.FORMATS[name].seeds()):
        (seeds / f"{number}").write_bytes(seed)
    for case in sorted((CORPUS / name).glob("*")):
        (seeds / case.name).write_bytes(case.read_bytes())
    options = [
        f"-max_total_time={max(1, round(seconds))}", f"-timeout={SECONDS}", f"-rss_limit_mb={MEBIBYTES}",
        f"-max_len={LARGEST}", "-len_control=0", "-print_final_stats=1", f"-artifact_prefix={CORPUS / name}/",
    ]  # fmt: skip
    (CORPUS / name).mkdir(parents=True, exist_ok=True)
    atheris.Setup([sys.argv[0], *options, *arguments, str(seeds)], one, custom_mutator=mutate)
    atheris.Fuzz()


def _mutated(form: str, data: bytes, rng: random.Random) -> bytes:
    from mutations import mutate_json, mutate_tensors, mutate_text

    if form == "tensors":
        return mutate_tensors(data, rng)
    if form == "text":
        return mutate_text(data.decode("utf-8", "surrogateescape"), rng).encode("utf-8", "replace")
    if form == "onnx":
        return _mutated_model(data, rng)
    return json.dumps(mutate_json(json.loads(data), rng)).encode()


def _mutated_model(data: bytes, rng: random.Random) -> bytes:
    """Return an ONNX model with other values in its fields; ValueError where none can be written."""
    from google.protobuf.json_format import MessageToDict, ParseDict, ParseError
    from google.protobuf.message import DecodeError
    from mutations import mutate_json
    from onnx import ModelProto

    try:
        document = MessageToDict(ModelProto.FromString(data))
    except DecodeError as error:
        raise ValueError("no model") from error
    for _ in range(20):
        with contextlib.suppress(ParseError, TypeError, AttributeError, KeyError):
            return bytes(ParseDict(mutate_json(document, rng, 2), ModelProto()).SerializeToString())
    raise ValueError("values that fit no field")


def run(names: list[str], minutes: float, most: int | None) -> int:
    """Fuzz formats one after another, each for its share of the time; print a table; return the defects.

    most: inputs of a format, the same in every run.
    """
    print(f"{'format':<10} {'inputs':>10} {'covered':>8}  result", flush=True)
    total = defects = 0
    for name in names:
        left = 60 * minutes / len(names)
        inputs = covered = 0
        results: list[str] = []
        while left > 1 and len(results) < MOST_DEFECTS:
            begun = time.monotonic()
            command = [sys.executable, __file__, "--format", name, "--seconds", str(left)]
            command += [] if most is None else [f"-runs={most}", "-seed=1"]
            same = {} if most is None else {"PYTHONHASHSEED": "0"}
            child = subprocess.run(
                command,
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
                env={**os.environ, **same},
            )
            inputs += max([0, *[int(number or units) for number, units in _COUNT.findall(child.stderr)]])
            covered = max([covered, *map(int, _COVERED.findall(child.stderr))])
            if child.returncode == 0:
                break
            left -= time.monotonic() - begun
            results.append(_defect(name, child.stderr))
        total, defects = total + inputs, defects + len(results)
        print(f"{name:<10} {inputs:>10,} {covered:>8,}  {'; '.join(results) or 'no defect'}", flush=True)
    print(
        f"{total:,} inputs, {defects} defects (an exception of another library, a signal, "
        f"over {SECONDS} s or {MEBIBYTES} MiB)"
    )
    return defects


def _defect(name: str, output: str) -> str:
    """Return what a child that ended early says of its defect."""
    place = re.search(r"Test unit written to (\S+)", output)
    kind = re.search(r"=== Uncaught Python exception: ===\n(.*)|ERROR: libFuzzer: (.*)", output)
    reason = next(filter(None, kind.groups()), "") if kind else output.strip()[-300:]
    frames = re.findall(r'File "[^"]*/(torchedge/[^"]*)", line (\d+)', output)
    where = ":".join(frames[-1]) if frames else name
    return f"{reason[:160]} at {where} ({Path(place[1]).name if place else 'no input'})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--inputs", type=int, help="inputs of each format, the same in every run")
    parser.add_argument("--formats", nargs="*", choices=NAMES, default=list(NAMES))
    parser.add_argument("--format", choices=NAMES, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=60, help=argparse.SUPPRESS)
    options, more = parser.parse_known_args()
    if options.format:
        fuzz(options.format, options.seconds, more)
    else:
        sys.exit(1 if run(options.formats, options.minutes, options.inputs) else 0)


if __name__ == "__main__":
    main()
