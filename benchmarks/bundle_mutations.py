"""Change bundles at random, compute every hash anew, load and run them, and count what happens.

    python benchmarks/bundle_mutations.py --ran 5000
    python benchmarks/bundle_mutations.py --count 1000 --trust

A few small networks are exported: inferences and training steps, for processors, GPUs and phones, with
accumulation and with streamed weights. Each mutant is a copy with one to three changes: numbers, words and
lists of a document (its programs, source, plan or manifest), characters of a kernel, bytes of the weights.
All hashes in it are those of what it then holds. Children load and run the mutants; one that a signal ends,
or that is silent for longer than --seconds, is counted and replaced. --ran: go on until so many were run;
--trust: load without the proof that programs are their source's, which is then all that holds them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torchedge.bundles.bundle import Bundle
from torchedge.bundles.manifests import digest_of
from torchedge.errors import TorchedgeError

NUMBERS = (0, 1, -1, 2, 3, 7, 64, 1000, 2**16, 2**31 - 1, 2**31, 2**40, 2**62, 0.5, -1e30, 1e300)
PIECES = ("0", "1", "9", "+", "-", "*", "/", "<", ">", "n0", "n1", "t0", "t1", ";", "}", " ", "[", "return;")
DOCUMENTS = (
    "program.json",
    "program.json",
    "source.json",
    "manifest.json",
    "accumulating.json",
    "streaming_plan.json",
)


def export_all(folder: Path) -> list[Path]:
    """Export the bundles that are changed, and return their folders."""
    import torch
    from torch import nn

    import torchedge

    torch.manual_seed(0)
    images, classes = torch.randn(2, 3, 8, 8), torch.tensor([3, 7])
    convolutions = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(128, 10),
    )  # fmt: skip
    words = nn.Sequential(nn.Embedding(11, 8), nn.LayerNorm(8), nn.Linear(8, 4), nn.Softmax(-1))
    wide = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)])
    train: Any = {"mode": "train", "targets": classes}
    cases: dict[str, tuple[nn.Module, Any, dict[str, Any]]] = {
        "inference": (convolutions, images, {"device": "local-cpu"}),
        "gpu": (convolutions, images, {"device": "nvidia-h200"}),
        "phone": (convolutions, images, {"device": "adreno-740", "precision": "float16"}),
        "training": (convolutions, images, {"device": "local-cpu", **train}),
        "accumulation": (convolutions, images, {"device": "adreno-740", "accumulation": 2, **train}),
        "words": (words, torch.arange(6).reshape(2, 3), {"device": "local-cpu"}),
        "streaming": (wide, torch.randn(2, 256), {"device": "local-cpu", "memory_limit": "900KiB"}),
    }
    return [
        torchedge.export(model, example, out=folder / name, onnx=False, **options).path
        for name, (model, example, options) in cases.items()
    ]


# changing ---------------------------------------------------------------------------------------------------


def places_in(document: dict[str, Any] | list[Any]) -> Iterator[tuple[Any, Any]]:
    """Yield every entry of a document as (holder, key)."""
    items = list(document.items() if isinstance(document, dict) else enumerate(document))
    for key, entry in items:
        yield document, key
        if isinstance(entry, (dict, list)):
            yield from places_in(entry)


def change_document(document: dict[str, Any], draw: random.Random) -> None:
    """Change one entry of a document: a number, a word, a swap of two entries, one omitted or repeated."""
    places = list(places_in(document))
    numbers = [(holder, key) for holder, key in places if type(holder[key]) in (int, float)]
    holder, key = draw.choice(numbers if numbers and draw.random() < 0.6 else places)
    entry = holder[key]
    kind = draw.randrange(4)
    if type(entry) in (int, float) and kind < 3:
        near = (entry + 1, entry - 1, 2 * entry, entry // 2 if type(entry) is int else entry / 2)
        holder[key] = draw.choice(near) if kind < 2 else draw.choice(NUMBERS)
    elif isinstance(entry, list) and len(entry) > 1 and kind < 2:
        one, two = draw.sample(range(len(entry)), 2)
        entry[one], entry[two] = entry[two], entry[one]
    elif isinstance(holder, list):
        holder.insert(key, entry) if kind < 2 else holder.pop(key)
    elif kind == 3:
        del holder[key]
    else:
        other, place = draw.choice(places)
        holder[key] = json.loads(json.dumps(other[place])) if place in other or isinstance(other, list) else 0


def change_text(text: str, draw: random.Random) -> str:
    """Change a few characters of a kernel."""
    place, length = draw.randrange(len(text)), draw.randrange(3)
    return text[:place] + draw.choice(PIECES) + text[place + length :]


def change_weights(path: Path, draw: random.Random) -> None:
    """Change bytes of the weights, seldom of their header."""
    content = bytearray(path.read_bytes())
    begin = min(8 + int.from_bytes(content[:8], "little"), len(content) // 2)
    for _ in range(draw.choice((1, 1, 8, 64))):
        low, high = (0, begin) if draw.random() < 0.1 else (begin, len(content))
        content[draw.randrange(low, high)] = draw.randrange(256)
    path.write_bytes(content)


def make_mutant(bundles: list[Path], seed: int, folder: Path) -> None:
    """Write the mutant of a seed; all hashes are those of what it holds."""
    draw = random.Random(seed)
    shutil.copytree(draw.choice(bundles), folder)
    documents = {
        name: json.loads((folder / name).read_text()) for name in DOCUMENTS if (folder / name).exists()
    }
    for _ in range(draw.choice((1, 1, 2, 3))):
        what = draw.random()
        if what < 0.4:
            change_weights(folder / "weights.safetensors", draw)
        elif what < 0.5:
            path = draw.choice(sorted((folder / "kernels").glob("*.cl")))
            path.write_text(change_text(path.read_text(), draw))
        else:
            change_document(documents[draw.choice([name for name in DOCUMENTS if name in documents])], draw)
    for name, document in documents.items():
        kernels = document.get("kernels")
        for kernel in kernels if isinstance(kernels, list) else ():
            named = str(kernel.get("name"))[:100] if isinstance(kernel, dict) else ""
            path = folder / f"kernels/{named}.cl"
            if path.is_file():
                kernel["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
        if name != "manifest.json":
            (folder / name).write_text(json.dumps(document))
    manifest = documents["manifest.json"]
    files = manifest.get("files")
    for name, file in files.items() if isinstance(files, dict) else ():
        if isinstance(file, dict) and (folder / name[:200]).is_file():
            content = (folder / name).read_bytes()
            file.update(sha256=hashlib.sha256(content).hexdigest(), bytes=len(content))
    (folder / "manifest.json").write_text(json.dumps({**manifest, "sha256": digest_of(manifest)}))


# running ----------------------------------------------------------------------------------------------------


def outcome(folder: Path, trust: bool) -> str:
    """Load a mutant and run it: "refused", "failed" by an error of torchedge, "ran", or "foreign"."""
    import numpy as np

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


def serve(trust: bool) -> None:
    """Read seeds and folders of bundles from standard input; print an outcome for each."""
    bundles = [Path(path) for path in json.loads(sys.stdin.readline())]
    with tempfile.TemporaryDirectory() as scratch:
        for line in sys.stdin:
            folder = Path(scratch, line.strip())
            make_mutant(bundles, int(line), folder)
            print(outcome(folder, trust), flush=True)
            shutil.rmtree(folder)


class Child:
    """A process that runs mutants, replaced after a signal or a hang."""

    def __init__(self, bundles: list[Path], trust: bool, seconds: float) -> None:
        self._bundles, self._seconds = bundles, seconds
        self._command = [sys.executable, __file__, "--serve", *(["--trust"] if trust else [])]
        self._process: subprocess.Popen[str] | None = None

    def run(self, seed: int) -> str:
        """Return the outcome of a mutant."""
        if self._process is None:
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(
                self._command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True
            )
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps([str(path) for path in self._bundles]) + "\n")
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        silent = threading.Timer(self._seconds, process.kill)
        silent.start()
        try:
            process.stdin.write(f"{seed}\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except OSError:
            answer = ""
        silent.cancel()
        if answer:
            return answer.strip()
        code, self._process = process.wait(), None
        if code >= 0:
            raise RuntimeError(f"a child ended with status {code} at mutant {seed}: correct this script")
        return "hang" if code == -signal.SIGKILL else f"signal {-code}"

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def main() -> int:
    """Run mutants in children and print the counts; 1 where one ended badly."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=10**9, help="mutants at most")
    parser.add_argument("--ran", type=int, default=10**9, help="stop when so many have been run")
    parser.add_argument("--minutes", type=float, default=1e6, help="stop after so long")
    parser.add_argument("--first", type=int, default=0, help="seed of the first one")
    parser.add_argument("--seconds", type=float, default=60, help="silence that counts as a hang")
    parser.add_argument("--children", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--trust", action="store_true", help="load without the proof")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.trust)
        return 0
    counts: Counter[str] = Counter()
    seeds = iter(range(options.first, options.first + options.count))
    end = time.monotonic() + 60 * options.minutes

    def work(child: Child) -> None:
        for seed in seeds:
            answer = child.run(seed)
            word = answer.partition(" ")[0]
            counts[word] += 1
            if word not in ("refused", "ran"):
                print(f"{seed}: {answer}", flush=True)
            if counts["ran"] + counts["failed"] >= options.ran or time.monotonic() > end:
                return

    with tempfile.TemporaryDirectory() as folder:
        bundles = export_all(Path(folder))
        children = [Child(bundles, options.trust, options.seconds) for _ in range(options.children)]
        with ThreadPoolExecutor(options.children) as pool:
            list(pool.map(work, children))
        for child in children:
            child.close()
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
