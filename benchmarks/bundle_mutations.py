"""Change bundles at random, compute every hash anew, load and run them, and count what happens.

    python benchmarks/bundle_mutations.py --ran 5000 --record mutants.txt
    python benchmarks/bundle_mutations.py --count 1000 --trust
    python benchmarks/bundle_mutations.py --ran 5000 --native build/sanitized/torchedge-open

A few small networks are exported: inferences and training steps, for processors, GPUs and phones, with
accumulation, with streamed weights, and with indices that weights hold or the network computes. Each mutant
is a copy with changes of one of three ways:

    any      one to three changes of all files: numbers, words and lists of a document (programs, source, plan
             or manifest), characters of a kernel, bytes of the weights
    numbers  changes that may leave a bundle as loadable as it was: bytes of the weights, numbers and words of
             the manifest and of the streaming plan
    source   another network: source.json is changed and lowered, and all other files are made from it, as
             somebody would who has torchedge at hand; new integers among the weights are large

All hashes in it are those of what it then holds. Children load and run the mutants; one that a signal ends,
or that is silent for longer than --seconds, is counted and replaced. --ran: go on until so many were run;
--record: a file with a line for each mutant, which a later call continues; --trust: load without the proof
that programs are their source's, which is then all that holds them. --native FILE: the native runner loads
and runs them, under the sanitizers of compilers:

    cmake -S export/runner -B build/sanitized -D TORCHEDGE_SANITIZE=ON && cmake --build build/sanitized

It trusts texts of kernels and launches of programs, which stay as they are then, unless all is made anew.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from itertools import filterfalse
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from harness import Worker, options_of

# isort: split
from drivers.processes import default_device, loader
from fuzzing.mutations import NUMBERS, mutate_json, mutate_text
from oracles.sealing import seal

from torchedge.bundles.bundle import Bundle
from torchedge.bundles.manifests import memory_of
from torchedge.bundles.sources import SOURCES
from torchedge.bundles.weights import write_weights
from torchedge.errors import TorchedgeError
from torchedge.graphs import RESIDENT_ROLES
from torchedge.lowering.program_files import program_document
from torchedge.lowering.programs import Program, StoredTensor
from torchedge.opencl import compiling

DOCUMENTS = (
    "program.json",
    "program.json",
    "source.json",
    "manifest.json",
    "accumulating.json",
    "program.decode.json",
    "streaming_plan.json",
    "streaming_plan.one.json",
    "streaming_plan.accumulating.json",
)


def export_all(folder: Path) -> dict[str, Path]:
    """Export the bundles that are changed, and return their folders by name."""
    import torch
    from torch import nn

    import torchedge

    torch.manual_seed(0)
    images, classes = torch.randn(2, 3, 8, 8), torch.tensor([3, 7])
    convolutions = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(128, 10),
    )  # fmt: skip
    linear = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    words = nn.Sequential(nn.Embedding(11, 8), nn.LayerNorm(8), nn.Linear(8, 4), nn.Softmax(-1))
    narrow = nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)])

    class Indexing(nn.Module):
        """Has indices among its weights (of positions and rows), and computes others."""

        def __init__(self) -> None:
            super().__init__()
            self.words, self.places = nn.Embedding(11, 8), nn.Embedding(5, 8)
            self.register_buffer("positions", torch.tensor([0, 3, 1]))
            self.register_buffer("rows", torch.tensor([1, 0, 1, 1]))

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.words(tokens) + self.places(self.positions)
            x = x + self.places(x.argmax(-1) // 2)
            x = torch.cat([x.index_select(0, self.rows), x[self.rows, :, :]])
            return torch.zeros(8, 3, 8).scatter_add(2, (x * 100).long() % 8, x)

    class Cached(nn.Module):
        """Keeps what it is given at a position."""

        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(11, 8)
            self.register_buffer("cache", torch.zeros(2, 6, 8))
            self.register_buffer("next", torch.zeros(1, dtype=torch.int64))

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            self.cache.index_copy_(1, self.next + torch.arange(tokens.shape[1]), self.words(tokens))
            self.next += tokens.shape[1]
            return self.cache @ self.words.weight.T

    cached = Cached()
    methods: Any = {
        "prefill": (cached, torch.zeros(2, 3, dtype=torch.int64)),
        "decode": (cached, torch.zeros(2, 1, dtype=torch.int64)),
    }
    deep = nn.Sequential(
        nn.Embedding(11, 64), *[layer for _ in range(9) for layer in (nn.Linear(64, 64), nn.GELU())]
    )
    frozen = copy.deepcopy(deep).requires_grad_(False)
    frozen[1].requires_grad_(True)
    streams: Any = {
        "many": (deep, torch.zeros(2, 3, dtype=torch.int64)),
        "one": (deep, torch.zeros(2, 1, dtype=torch.int64)),
    }
    learns: Any = {"mode": "train", "accumulation": 2, "loss": lambda y: y.square().mean()}
    learns["optimizer"] = torch.optim.Adam(frozen[1].parameters())
    train: Any = {"mode": "train", "targets": classes}
    cases: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "inference": (convolutions, images, {"device": "local-cpu"}),
        "gpu": (convolutions, images, {"device": "nvidia-h200"}),
        "phone": (convolutions, images, {"device": "adreno-740", "precision": "float16"}),
        "training": (convolutions, images, {"device": "local-cpu", **train}),
        "accumulation": (linear, torch.randn(2, 4), {"device": "adreno-740", "accumulation": 2, **train}),
        "words": (words, torch.arange(6).reshape(2, 3), {"device": "local-cpu"}),
        "methods": (methods, None, {"device": "adreno-740"}),
        "indices": (Indexing(), torch.arange(6).reshape(2, 3), {"device": "local-cpu"}),
        "streaming": (
            narrow,
            torch.randn(2, 64),
            {"device": "adreno-740", "memory_limit": "118KiB", "check": True},
        ),
        "streams": (streams, None, {"device": "adreno-740", "memory_limit": "124KiB"}),
        "learns": (
            frozen,
            torch.arange(6).reshape(2, 3),
            {"device": "local-cpu", "memory_limit": "219KiB", **learns},
        ),
    }
    return {
        name: torchedge.export(model, example, out=folder / name, onnx=False, **options).path
        for name, (model, example, options) in cases.items()
    }


# changing ---------------------------------------------------------------------------------------------------


def change_document(document: dict[str, Any], draw: random.Random) -> None:
    """Change one entry of a document."""
    changed = mutate_json(document, draw, 1)
    document.clear()
    document.update(changed)


def change_weights(path: Path, draw: random.Random, headers: float = 0.1) -> None:
    """Change bytes of the weights, seldom (`headers`) of their header."""
    content = bytearray(path.read_bytes())
    begin = min(8 + int.from_bytes(content[:8], "little"), len(content) - 1)
    for _ in range(draw.choice((1, 1, 8, 64))):
        low, high = (0, begin) if draw.random() < headers else (begin, len(content))
        content[draw.randrange(low, high)] = draw.randrange(256)
    path.write_bytes(content)


def change_any(folder: Path, documents: dict[str, Any], draw: random.Random, kernels: bool = True) -> None:
    """Change the weights, a kernel or a document; kernels: also texts, kernels and launches of programs."""
    for _ in range(draw.choice((1, 1, 2, 3))):
        what = draw.random()
        if what < 0.3:
            change_weights(folder / "weights.safetensors", draw)
        elif what < 0.45 and kernels:
            path = draw.choice(sorted((folder / "kernels").glob("*.cl")))
            path.write_text(mutate_text(path.read_text(), draw))
        else:
            document = documents[draw.choice([name for name in DOCUMENTS if name in documents])]
            trusted = (
                {} if kernels else {k: document.pop(k) for k in ("kernels", "launches") if k in document}
            )
            change_document(document, draw)
            document |= trusted


def change_numbers(folder: Path, documents: dict[str, Any], draw: random.Random) -> None:
    """Change weights, hyperparameters, notes, versions, or the streaming plan."""
    choice, manifest = draw.random(), documents["manifest.json"]
    if choice < 0.6:
        change_weights(folder / "weights.safetensors", draw, headers=0.01)
    elif choice < 0.75 and manifest["hyperparameters"]:
        name = draw.choice(sorted(manifest["hyperparameters"]))
        manifest["hyperparameters"][name] = draw.choice([*NUMBERS, draw.uniform(-1, 2), draw.gauss(0, 1e6)])
    elif choice < 0.85 and (plans := [name for name in documents if name.startswith("streaming_plan")]):
        change_document(documents[draw.choice(plans)], draw)
    else:
        word = draw.choice(["", "x" * draw.randrange(300), "\x1b[2J", "\u202e", "0.0", "../..", "%s{}"])
        entry = draw.choice([manifest["versions"], manifest["onnx"], None])
        if entry is None:
            manifest["notes"].append(word)
        else:
            entry[draw.choice([*sorted(entry), "new"])] = word


def change_network(folder: Path, documents: dict[str, Any], draw: random.Random) -> None:
    """Change the source, and make all other files of it if it can be lowered."""
    for _ in range(12):
        document = copy.deepcopy(documents["source.json"])
        try:
            for _ in range(draw.choice((1, 1, 2, 3))):
                change_source(document, draw)
            programs = SOURCES.parse(folder / "source.json", document).lower()
            if memory_of(programs).total_bytes < 2**29:
                break
        except Exception:  # loading it again is the test
            continue
    else:
        documents["source.json"] = document
        return
    documents["source.json"] = document
    for name in [name for name in documents if name.startswith("streaming_plan")]:
        documents.pop(name)
        (folder / name).unlink()
    shutil.rmtree(folder / "kernels")
    (folder / "kernels").mkdir()
    for kernel in [kernel for program in programs for kernel in program.kernels]:
        (folder / f"kernels/{kernel.name}.cl").write_text(kernel.source)
    for name, program in zip(program_files(documents["manifest.json"]), programs, strict=False):
        documents[name] = program_document(program, sources=False)
    (folder / "weights.safetensors").unlink()
    adapt_manifest(documents["manifest.json"], folder, programs)
    # Without the ranges of indices, which hold the writer, too.
    programs = [replace(p, tensors=tuple([replace(t, indices=None) for t in p.tensors])) for p in programs]
    resident = [t for program in programs for t in program.tensors if t.role in RESIDENT_ROLES]
    data = {t.name: new_weights(t, draw) for t in resident}
    with contextlib.suppress(TorchedgeError):  # two programs may want one weight in two ways
        write_weights(folder / "weights.safetensors", programs, data)


def change_source(document: dict[str, Any], draw: random.Random) -> None:
    """Change a network or the settings of its device, mostly to one that can be lowered."""
    steps = [document["step"], *document.get("others", ())]
    step, choice = draw.choice(steps), draw.randrange(8)
    ops, values = step["ops"], step["values"]
    if choice == 0:  # an operator reads another value
        inputs = draw.choice([op["inputs"] for op in ops if any(n is not None for n in op["inputs"])])
        place = draw.choice([place for place, n in enumerate(inputs) if n is not None])
        before = values[inputs[place]]
        kind = (before["shape"], before["dtype"])
        inputs[place] = draw.choice([n for n, v in enumerate(values) if (v["shape"], v["dtype"]) == kind])
    elif choice == 1 and draw.random() < 0.3:  # another shape of one value
        shape = draw.choice([value["shape"] for value in values if value["shape"]])
        shape[draw.randrange(len(shape))] = draw.choice([1, 5, 64, 1000, 10**5])
    elif choice == 1:  # another size wherever it is
        old = draw.choice(sorted({size for value in values for size in value["shape"]}))
        new = draw.choice([0, 1, 2, 3, 5, 8, 17, 64, 100, 1000])
        for each in steps:
            holders = [(value, "shape") for value in each["values"]]
            holders += [(op["attrs"], key) for op in each["ops"] for key in ("size", "normalized_shape")]
            for holder, key in holders:
                if isinstance(holder.get(key), list):
                    holder[key] = [new if size == old else size for size in holder[key]]
    elif choice == 2:  # another element type
        old, new = draw.choice([("float32", "float16"), ("float32", "float64"), ("int64", "int32")])
        for value in [value for each in steps for value in each["values"]]:
            value["dtype"] = new if value["dtype"] == old else value["dtype"]
    elif choice == 3:  # another device
        key = draw.choice(["device_class", "half", "half_weights", "image_width", "image_height", "pitch"])
        choices = {"device_class": ["cpu", "gpu", "mobile"], "half": [True, False]}
        sizes = [1, 2, 16, 64, 100, 512, 4096, 2**20]
        document[key] = draw.choice(choices.get(key.removesuffix("_weights"), sizes))
    elif choice == 4:  # values computed by kernels of their own
        document["apart"] = sorted({draw.choice(values)["name"] for _ in range(draw.randrange(1, 4))})
    elif choice == 5:  # another element-wise operator
        unary = ["relu", "sigmoid", "tanh", "exp", "neg", "abs", "sqrt", "log", "floor", "silu"]
        draw.choice([op for op in ops if list(op["attrs"]) == ["input"]] or ops)["kind"] = draw.choice(unary)
    elif choice == 6:  # an attribute
        change_document(draw.choice([op["attrs"] for op in ops if op["attrs"]]), draw)
    else:
        change_document(document, draw)


def new_weights(tensor: StoredTensor, draw: random.Random) -> np.ndarray:
    """Return content of a tensor: normal numbers, or integers that may be far out of every range."""
    numbers = np.random.default_rng(draw.randrange(2**32))
    if np.dtype(tensor.dtype).kind == "f":
        return numbers.standard_normal(tensor.shape).astype(tensor.dtype)
    high = draw.choice((2, 2, 2, 4, 1000, 2**31 - 1))
    low = draw.choice((0, 0, -high))
    return numbers.integers(low, high, tensor.shape).astype(tensor.dtype)


def program_files(manifest: dict[str, Any]) -> list[str]:
    """Return the files of a bundle's programs, in order."""
    methods = [method["program"] for method in manifest.get("methods", ())]
    return methods or [n for n in ("program.json", "accumulating.json") if n in manifest["files"]]


def ports(program: Program) -> dict[str, list[dict[str, Any]]]:
    """Return the inputs and outputs of a program as a manifest has them."""
    fed = [place for place in program.inputs if place not in program.hyperparameters.values()]
    return {
        entry: [
            {"name": t.name, "shape": list(t.shape), "dtype": t.dtype}
            for t in (program.tensors[place] for place in places)
        ]
        for entry, places in (("inputs", fed), ("outputs", program.outputs))
    }


def memory(programs: list[Program]) -> dict[str, int]:
    """Return the memory of programs as a manifest has it."""
    counted = memory_of(programs)
    return {**asdict(counted), "total_bytes": counted.total_bytes}


def adapt_manifest(manifest: dict[str, Any], folder: Path, programs: list[Program]) -> None:
    """Let a manifest describe new programs."""
    program = programs[0]
    manifest |= ports(program)
    for method, own in zip(manifest.get("methods", ()), programs, strict=False):
        method |= {**ports(own), "memory": memory([own])}
    before = manifest["hyperparameters"]
    manifest["hyperparameters"] = {name: before.get(name, 0.1) for name in program.hyperparameters}
    manifest["memory"] = memory(programs)
    manifest["device"]["class"] = program.target
    several = len(programs) > 1 and "methods" not in manifest
    manifest["accumulation"] = max(manifest["accumulation"], 2) if several else 1
    files = {"source.json", "weights.safetensors", *program_files(manifest)}
    names = [*files, *[f"kernels/{path.name}" for path in (folder / "kernels").iterdir()]]
    manifest["files"] = {name: {"sha256": "", "bytes": 0} for name in sorted(names)}


CHANGES = {"any": change_any, "numbers": change_numbers, "source": change_network}


def make_mutant(bundles: list[Path], seed: int, folder: Path, kernels: bool = True) -> None:
    """Write the mutant of a seed; all hashes are those of what it then holds."""
    draw = random.Random(seed)
    shutil.copytree(draw.choice(bundles), folder)
    documents = {
        name: json.loads((folder / name).read_text()) for name in DOCUMENTS if (folder / name).exists()
    }
    (way,) = draw.choices(("any", "numbers", "source"), (4, 7, 1))
    CHANGES[way](folder, documents, draw, **({} if kernels or way != "any" else {"kernels": False}))
    for name, document in documents.items():
        (folder / name).write_text(json.dumps(document))
    seal(folder)


# running ----------------------------------------------------------------------------------------------------


def outcome(folder: Path, trust: bool) -> str:
    """Load a mutant and run it: "refused", "failed" by an error of torchedge, "ran", or "foreign"."""
    loaded = False
    try:
        bundle = Bundle.open(folder, trust=trust)
        loaded = True
        draw = np.random.default_rng(0)
        inputs = [
            draw.standard_normal(p.shape).astype(p.dtype)
            if np.dtype(p.dtype).kind == "f"
            else draw.integers(0, 4, p.shape).astype(p.dtype)
            for p in bundle.inputs
        ]
        with bundle.place() as runner:
            for _ in range(bundle.manifest.accumulation if bundle.manifest.accumulation < 5 else 1):
                runner.step(*inputs)
    except TorchedgeError as error:
        return ("failed " if loaded else "refused ") + str(error)[-150:].replace("\n", " ")
    except Exception as error:
        return f"foreign {type(error).__name__}: {error}"[:200].replace("\n", " ")
    return "ran"


class Native:
    """The native runner in a process of its own, started again where it ended."""

    def __init__(self, opener: Path, folder: Path) -> None:
        device, variables = default_device(folder)
        self._command = [str(opener), device, str(folder / "compiled")]
        self._environment = {**os.environ, **loader(), **variables}
        self._log, self._process = folder / "log", None

    def outcome(self, folder: Path) -> str:
        """Load a mutant and run it: as `outcome`, or "signal" with the report of a sanitizer."""
        if self._process is None:
            with self._log.open("w") as log:
                self._process = subprocess.Popen(
                    self._command,
                    env=self._environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                )
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(f"{folder}\n".encode())
            self._process.stdin.flush()
        answer = self._process.stdout.readline()
        return answer.decode().rstrip("\n") if answer.endswith(b"\n") else self.end()

    def end(self) -> str:
        """End the process; return "ran", or "signal" and what it reported, such as leaks."""
        if self._process is None:
            return "ran"
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        code, self._process = self._process.wait(), None
        errors = [
            line
            for line in self._log.read_text(errors="replace").splitlines()
            if "ERROR" in line or "error:" in line
        ]
        return f"signal {code} {' '.join(errors)[:300]}" if code or errors else "ran"


def serve(pipe: Connection, bundles: list[Path], trust: bool, opener: Path | None) -> None:
    """Answer seeds with the outcomes of their mutants, and None with that of the native runner's end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # what drivers print
    # PoCL takes longer to load a program from its cache than a network here to run
    compiling.build_text = functools.lru_cache(maxsize=64)(compiling.build_text)
    with tempfile.TemporaryDirectory() as scratch:
        native = None if opener is None else Native(opener, Path(scratch))
        while (seed := pipe.recv()) is not None:
            folder = Path(scratch, str(seed))
            make_mutant(bundles, seed, folder, kernels=native is None)
            pipe.send(native.outcome(folder) if native else outcome(folder, trust))
            shutil.rmtree(folder)
        pipe.send(native.end() if native else "ran")


class Child:
    """A process that runs mutants, replaced after a signal or a hang."""

    def __init__(self, bundles: list[Path], trust: bool, opener: Path | None, seconds: float) -> None:
        self._arguments, self._seconds = (bundles, trust, opener), seconds
        self._worker: Worker | None = None

    def run(self, seed: int | None) -> str:
        """Return the outcome of a mutant; None: of the end."""
        self._worker = worker = self._worker or Worker(serve, *self._arguments)
        try:
            return str(worker.answer(self._seconds, seed))
        except TimeoutError:
            self._worker = None
            return "hang"
        except EOFError:
            self._worker, code = None, worker.process.exitcode or 0
        if code >= 0:
            raise RuntimeError(f"a child ended with status {code} at mutant {seed}: correct this script")
        return f"signal {-code}"


def main() -> int:
    """Run mutants in children and print the counts; 1 where one ended badly."""
    parser = options_of(__doc__)
    parser.add_argument("--count", type=int, default=10**9, help="mutants at most")
    parser.add_argument("--ran", type=int, default=10**9, help="stop when so many have been run")
    parser.add_argument("--minutes", type=float, default=1e6, help="stop after so long")
    parser.add_argument("--first", type=int, default=0, help="seed of the first one")
    parser.add_argument("--seconds", type=float, default=60, help="silence that counts as a hang")
    parser.add_argument("--children", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--record", type=Path, help="file of outcomes, which a later call continues")
    parser.add_argument("--trust", action="store_true", help="load without the proof")
    parser.add_argument("--native", type=Path, help="torchedge-open, built with sanitizers")
    options = parser.parse_args()
    record = options.record or Path(os.devnull)
    before = record.read_text().splitlines() if record.is_file() else []
    done = {int(line.split()[0]) for line in before}
    counts = Counter(line.split()[1] for line in before)
    seeds = filterfalse(done.__contains__, range(options.first, options.first + options.count))
    end = time.monotonic() + 60 * options.minutes

    def work(child: Child) -> None:
        for seed in seeds:
            answer = child.run(seed)
            word = answer.partition(" ")[0]
            counts[word] += 1
            with record.open("a") as file:
                file.write(f"{seed} {answer}\n")
            if word not in ("refused", "ran"):
                print(f"{seed}: {answer}", flush=True)
            if counts["ran"] + counts["failed"] >= options.ran or time.monotonic() > end:
                break
        if (answer := child.run(None)) != "ran":
            counts["signal"] += 1
            print(f"at the end: {answer}", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        bundles = [*export_all(Path(folder)).values()]
        children = [
            Child(bundles, options.trust, options.native, options.seconds) for _ in range(options.children)
        ]
        with ThreadPoolExecutor(options.children) as pool:
            list(pool.map(work, children))
    total = sum(counts.values())
    print(
        f"{total} mutants of {len(bundles)} bundles, hashes computed anew: {counts['refused']} refused, "
        f"{counts['ran'] + counts['failed']} loaded and run ({counts['failed']} gave an error), "
        f"{counts['signal']} ended by a signal, {counts['hang']} hung, "
        f"{counts['foreign']} foreign exceptions"
    )
    return int(bool(counts["signal"] or counts["hang"] or counts["foreign"]))


if __name__ == "__main__":
    raise SystemExit(main())
