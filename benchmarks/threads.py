"""Call every public function from four threads at once, and compare each result with that of one thread.

    python benchmarks/threads.py --operations 1000000 --seed 0

Cheap functions (figures of predictions, of devices and of plans) make up most operations; captures, plans,
exports, searches and steps of trainers are among them in fixed numbers. Then the user's objects and
PyTorch's settings are compared with those before.
"""

from __future__ import annotations

import copy
import gc
import hashlib
import os
import random
import shutil
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import options_of
from torch import nn
from torch.nn import functional as F

import torchedge

THREADS = 4
DEVICE = "jetson-tx2"


class Work:
    """The operations by name, (share of a million, function of the thread's number)."""

    def __init__(self, root: Path) -> None:
        torch.manual_seed(0)
        self.root = root
        self.model = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10)
        )
        self.sequences = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.x, self.y = torch.randn(2, 3, 8, 8), torch.tensor([1, 2])
        device = torchedge.find_device(DEVICE)
        graph = torchedge.capture(self.model, self.x)
        predictor = torchedge.Predictor(DEVICE)
        prediction = predictor.predict(graph, 32)
        plan = torchedge.plan(self.model, self.x, device=DEVICE)
        bundle = torchedge.export(self.model, self.x, out=root / "bundle", device="local-cpu", onnx=False)
        layers = [nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU()]
        network = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
        space = torchedge.PruningSpace(network, (3, 32, 32), ratios=(0.5, 1), name="small")
        self.space, self.evaluating = space, self.trainer()
        self.trainers = [self.trainer() for _ in range(THREADS)]
        self.losses = [[] for _ in range(THREADS)]
        self.compiled = torch.compile(copy.deepcopy(self.model).eval(), backend="torchedge")
        self.run_compiled(0)
        ofa = torchedge.OFAResNet50Space()
        advice = torchedge.advise(self.model, 8, device=DEVICE, example=self.x)
        self.operations: dict[str, tuple[int, Callable[[int], Any]]] = {
            "Estimate": (0, lambda n: str(prediction.memory)),
            "Prediction": (0, lambda n: (prediction.fits(4096), prediction.latency.value)),
            "Device": (0, lambda n: device.value("memory_mib")),
            "ForwardGraph": (0, lambda n: graph.digest),
            "features": (100_000, lambda n: torchedge.features(graph, 7).values.tobytes()),
            "StreamingPlan": (2_000, lambda n: str(plan)),
            "Predictor": (40_000, lambda n: str(predictor.predict(graph, 1 + n))),
            "find_device": (2_000, lambda n: torchedge.find_device("adreno-640").fingerprint),
            "list_devices": (100, lambda n: [d.name for d in torchedge.list_devices()]),
            "simulate": (2_000, lambda n: torchedge.simulate(graph, 4 + n).allocated_mib),
            "capture": (1_000, lambda n: torchedge.capture(self.model, self.x).digest),
            "predict": (1_000, self.predict),
            "SearchSpace": (1_000, lambda n: space.decode([n % 2] * len(space.counts))),
            "OFAResNet50Space": (1_000, lambda n: str(ofa.decode([0] * len(ofa.counts)))),
            "advise": (24, lambda n: str(torchedge.advise(self.model, 8 + n, device=DEVICE, example=self.x))),
            "Advice": (0, lambda n: advice.fits),
            "capture_lengths": (24, lambda n: self.lengths()),
            "PruningSpace": (8, lambda n: str(torchedge.PruningSpace(network, (3, 32, 32)).counts)),
            "search": (8, self.search),
            "Search": (8, lambda n: len(self.search(n))),
            "plan": (24, lambda n: torchedge.plan(self.model, self.x, device=DEVICE).program.digest),
            "ModelPlan": (24, lambda n: plan.run(self.x).outputs[0].tobytes()),
            "export": (16, self.export),
            "load_bundle": (100, lambda n: torchedge.load_bundle(root / "bundle").program.digest),
            "Bundle": (4_000, lambda n: bundle.run(self.x.numpy())[0].tobytes()),
            "Trainer": (4_000, self.step),
            "Trainer.predict": (4_000, lambda n: self.evaluating.predict(self.x).numpy().tobytes()),
            "program_reports": (1_000, lambda n: [str(report) for report in torchedge.program_reports()]),
            "torch.compile": (1_000, self.run_compiled),
        }  # fmt: skip

    def trainer(self) -> torchedge.Trainer:
        """Return a trainer of a model of its own."""
        torch.manual_seed(1)
        model = nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.ReLU(), nn.Linear(16, 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return torchedge.Trainer(model, self.x, self.y, loss=F.cross_entropy, optimizer=optimizer)

    def step(self, number: int) -> str:
        """Train the thread's own trainer; its losses are those of every other's."""
        self.losses[number].append(self.trainers[number].step(self.x, self.y))
        return "a step"

    def predict(self, number: int) -> str:
        """Capture and predict the shared model."""
        return str(torchedge.predict(self.model, 3, device=DEVICE, example=self.x))

    def lengths(self) -> str:
        """Predict a model of sequences at two lengths."""
        family = torchedge.capture_lengths(self.sequences, torch.zeros(2, 16, 8), loss=None, mode="infer")
        return "".join(
            str(torchedge.predict(family, 2, device=DEVICE, mode="infer", seq_len=length))
            for length in (16, 24)
        )

    def search(self, number: int) -> str:
        """Search the small space."""
        score = lambda encodings: [-sum(encoding.values()) for encoding in encodings]  # noqa: E731
        limits = {"training_memory": 1e6}
        found = torchedge.search(self.space, limits, score, device=DEVICE, population=4, iterations=2)
        return f"{found.best.encoding} {found.best.score}"

    def export(self, number: int) -> str:
        """Export the model to the thread's own folder."""
        out = self.root / f"export{number}"
        bundle = torchedge.export(self.model, self.x, out=out, device="adreno-640", onnx=False, force=True)
        return hashlib.sha256(b"".join(a.tobytes() for a in bundle.weights().values())).hexdigest()

    def run_compiled(self, number: int) -> bytes:
        """Run the compiled model."""
        with torch.no_grad():
            return self.compiled(self.x).numpy().tobytes()

    def state(self) -> dict[str, Any]:
        """Return the user's objects and the settings of the process, to compare."""
        model = {name: tensor.numpy().tobytes() for name, tensor in self.model.state_dict().items()}
        hooks = [(m.training, len(m._forward_hooks), sorted(vars(m))) for m in self.model.modules()]
        cuda, numbers = torch.backends.cuda, np.random.get_state()
        return {
            "model": model,
            "modules": hooks,
            "generators": (
                torch.get_rng_state().tolist(),
                random.getstate(),
                numbers[1].tolist(),
                numbers[2],
            ),
            "attention": (
                cuda.flash_sdp_enabled(),
                cuda.mem_efficient_sdp_enabled(),
                cuda.math_sdp_enabled(),
            ),
            "kernels": (torch._C._get_mkldnn_enabled(), torch.backends.mha.get_fastpath_enabled()),
            "settings": (torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_num_threads()),
            "compiling": torch.compiler.is_compiling(),
            "process": (gc.isenabled(), list(warnings.filters), dict(os.environ), Path.cwd()),
            "streams": (id(sys.stdout), id(sys.stderr), os.fstat(1).st_ino),
        }


def schedule(operations: dict[str, tuple[int, Any]], count: int, seed: int) -> list[list[str]]:
    """Return the names of the operations of each thread, shuffled; what has the share 0 fills the rest."""
    plans = []
    cheap = [name for name, (share, _) in operations.items() if not share]
    for number in range(THREADS):
        size = count // THREADS
        names = [
            name
            for name, (share, _) in operations.items()
            for _ in range(max(1, share * size // 1_000_000) if share else 0)
        ]
        names += [cheap[place % len(cheap)] for place in range(size - len(names))]
        random.Random(seed + number).shuffle(names)
        plans.append(names)
    return plans


def main() -> int:
    """Run the operations and print a table; return 1 if anything differs."""
    parser = options_of(__doc__)
    parser.add_argument("--operations", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="torchedge-threads-"))
    try:
        work = Work(root)
        covered = {name.partition(".")[0] for name in work.operations}
        public = {n for n in torchedge.__all__ if not n.startswith("_") and not n.endswith("Error")}
        print(f"public names without an operation: {', '.join(sorted(public - covered)) or 'none'}")
        expected = {
            name: [function(number) for number in range(THREADS)]
            for name, (_, function) in work.operations.items()
        }
        before = work.state()
        counts: Counter[str] = Counter()
        different: list[str] = []
        lock = threading.Lock()

        def run(number: int, names: list[str]) -> None:
            for name in names:
                try:
                    result = work.operations[name][1](number)
                    problem = None if result == expected[name][number] else f"{name}: another result"
                except BaseException as error:
                    problem = f"{name}: {type(error).__name__}: {error}"
                if problem is not None:
                    with lock:
                        different.append(problem)
            with lock:
                counts.update(names)

        plans = schedule(work.operations, options.operations, options.seed)
        threads = [threading.Thread(target=run, args=(n, names)) for n, names in enumerate(plans)]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - start
        after = work.state()
    finally:
        shutil.rmtree(root, ignore_errors=True)
    for name, count in counts.most_common():
        print(f"{count:9} {name}")
    steps = [len(losses) for losses in work.losses]
    uneven = any(losses != max(work.losses, key=len)[: len(losses)] for losses in work.losses)
    changed = [key for key, value in before.items() if value != after[key]]
    print(f"{counts.total()} operations in {THREADS} threads, {seconds:.0f} s")
    print(f"different from one thread: {len(different)} {dict(Counter(different).most_common(5)) or ''}")
    print(f"losses of the threads' trainers over {max(steps)} steps: {'different' if uneven else 'the same'}")
    print(f"changed of the user's and of the process: {', '.join(changed) or 'nothing'}")
    return 1 if different or changed or uneven else 0


if __name__ == "__main__":
    sys.exit(main())
