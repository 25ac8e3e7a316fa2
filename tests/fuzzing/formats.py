"""The formats that torchedge reads, each with files to begin with and the code that a file reaches.

A reader takes the bytes of one file (for a format of several files: a JSON object of their contents) and may
raise TorchedgeError; any other exception, a result that is not finite, an unverified plan, a signal, over
10 s or over 1 GiB is a defect.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import io
import json
import math
import shutil
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from oracles.sealing import seal

from torchedge.bundles.bundle import Bundle
from torchedge.bundles.manifests import MANIFEST, WEIGHTS
from torchedge.devices.device import parse_device, read_device
from torchedge.errors import TorchedgeError
from torchedge.forests.trees import evaluate, read_forests
from torchedge.lowering.program_files import parse_program, program_document
from torchedge.prediction.predictor import predict_graph
from torchedge.prediction.profiles import file_names, load_models
from torchedge.profiling.campaigns.recording import CampaignJournal
from torchedge.profiling.datasets import read_dataset
from torchedge.profiling.kernel_fitting import read_kernels
from torchedge.profiling.load_fitting import read_loads
from torchedge.profiling.workspace_fitting import read_workspaces
from torchedge.searching.evolution import SearchJournal
from torchedge.storage import data_folder
from torchedge.storage.documents import format_toml, parse_json, read_toml
from torchedge.storage.journals import read_rows
from torchedge.streaming.instances import INSTANCES
from torchedge.streaming.plans import PLANS
from torchedge.streaming.solving.planner import solve
from torchedge.streaming.verification import verify_plan
from torchedge.textures.coefficients import CODEC as COEFFICIENTS
from torchedge.textures.coefficients import coefficients_of
from torchedge.tracing.capturing import capture
from torchedge.tracing.onnx_files import load_onnx
from torchedge.tracing.pt2_files import load_pt2

MEMORY = Path("/dev/shm")
SCRATCH = Path(tempfile.mkdtemp(prefix="torchedge-fuzz-", dir=MEMORY if MEMORY.is_dir() else None))
atexit.register(shutil.rmtree, SCRATCH, ignore_errors=True)
SOLVED_SIZE = 400
"""Layers and weights of an instance that is solved, not only read."""


@dataclass(frozen=True)
class Format:
    """How files of a format look ("json", "text", "tensors", "onnx"), their seeds, and their reader."""

    form: str
    seeds: Callable[[], Iterable[bytes]]
    read: Callable[[bytes], object]


def survives(name: str, data: bytes) -> bool:
    """Read a file; return whether it was accepted. An exception that is not torchedge's is a defect."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            FORMATS[name].read(data)
        except TorchedgeError as error:
            assert "\n" not in str(error), "a message of several lines"
            return False
    return True


def _json(document: object) -> bytes:
    return json.dumps(document).encode()


# programs, plans, instances ---------------------------------------------------------------------------------


def _program_seeds() -> Iterable[bytes]:
    from oracles.small_programs import chain, image_copy, sgd, vector_add

    from torchedge.textures.layouts import Layout

    layout = Layout((0, 2, 3, 1), "image", 2, "block-4")
    for program in (
        vector_add(),
        chain(in_place=True),
        chain(length=5),
        sgd(),
        image_copy((3, 7, 5, 6), layout),
    ):
        yield _json(program_document(program))


def _instance_seeds() -> Iterable[bytes]:
    from oracles.random_instances import random_instance

    for seed in range(12):
        yield _json(INSTANCES.document(random_instance(seed, "tiny" if seed < 9 else "small")))


def _read_instance(data: bytes) -> None:
    instance = INSTANCES.parse("instance.json", parse_json("instance.json", data))
    if len(instance.layers) + len(instance.weights) <= SOLVED_SIZE:
        checked = verify_plan(instance, solve(instance, effort=0.01))
        assert checked.ok, checked.problems


@cache
def _planned() -> tuple[Any, Any]:
    from oracles.random_instances import random_instance

    instance = random_instance(3, "small")
    return instance, solve(instance)


def _read_plan(data: bytes) -> None:
    instance, _ = _planned()
    verify_plan(instance, PLANS.parse("plan.json", parse_json("plan.json", data)))


# profiles and forests ---------------------------------------------------------------------------------------


@cache
def _graph(mode: Any) -> Any:
    import torch
    from torch import nn

    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4)
    )
    return capture(model, torch.zeros(2, 3, 8, 8), mode=mode)


def _check_prediction(device: Any) -> None:
    for mode in ("train", "infer"):
        prediction = predict_graph(_graph(mode), 4, device)
        for estimate in (prediction.memory, prediction.latency):
            values = (estimate.low, estimate.value, estimate.high)
            assert all(map(math.isfinite, values)) and min(values) >= 0, f"a prediction of {values}"
    load_models.__globals__["_loaded"].cache_clear()


def _profile_seeds() -> Iterable[bytes]:
    for name in ("jetson-nano", "adreno-640", "nvidia-h200", "local-cpu", "mali-g77"):
        folder = data_folder("profiles") / name
        document = read_toml(folder / "device.toml")
        document.pop("profile", None)
        kernels = folder / "kernels.toml"
        yield _json({"device": document, "kernels": read_toml(kernels) if kernels.is_file() else {}})


def _read_profile(data: bytes) -> None:
    """Read a device's figures and its kernel coefficients; predict with what was read."""
    document = parse_json("profile.json", data)
    device, kernels = document.get("device"), document.get("kernels")
    if isinstance(kernels, dict) and kernels:
        COEFFICIENTS.parse("kernels.toml", kernels)
    if isinstance(device, dict):
        device.pop("profile", None)
        known = parse_device(device, folder=SCRATCH)
        coefficients_of(known)
        _check_prediction(known)


def _sealed_profile(tables: bytes, forests: bytes) -> Any:
    """Return a device whose fitted files have the hashes that its profile gives."""
    document = read_toml(data_folder("profiles") / "jetson-tx2" / "device.toml")
    folder = SCRATCH / "fitted"
    folder.mkdir(exist_ok=True)
    profile: Any = document["profile"]
    contents = dict(zip(file_names("train"), (tables, forests), strict=True))
    for name, content in contents.items():
        (folder / name).write_bytes(content)
        profile["training"]["files"][name] = hashlib.sha256(content).hexdigest()
    document["profile"] = {"training": profile["training"]}
    (folder / "device.toml").write_text(format_toml(document))
    return read_device(folder)


@cache
def _fitted() -> tuple[bytes, bytes]:
    folder = data_folder("profiles") / "jetson-tx2"
    tables, forests = ((folder / name).read_bytes() for name in file_names("train"))
    return tables, forests


def _forest_seeds() -> Iterable[bytes]:
    import numpy as np

    from torchedge.forests.trees import build_forest, write_forests

    path = SCRATCH / "seed.safetensors"
    for name in ("jetson-nano", "mali-g77"):
        forest = build_forest(
            learner=name,
            feature_names=("a", "b"),
            feature=np.array([0, -1, 1, -1, -1], np.int16),
            payload=np.array([0.5, 1.0, 2.5, 2.0, 3.0], np.float32),
            sizes=np.array([5], np.int32),
            hull=np.array([[0, 0], [4, 4]], np.float32),
            scale=1.0,
            offset=0.0,
            metadata={"source": "a test"},
            source="seed",
        )
        write_forests(path, {"gamma": forest, "phi": forest})
        yield path.read_bytes()


def _read_forests(data: bytes) -> None:
    import numpy as np

    path = SCRATCH / "forests.safetensors"
    path.write_bytes(data)
    for forest in read_forests(path).values():
        rows = np.linspace(-10, 10, 3 * len(forest.feature_names)).reshape(3, -1)
        assert np.isfinite(evaluate(forest, rows)).all(), "a prediction that is not finite"


# journals and datasets --------------------------------------------------------------------------------------


def _journal_seeds() -> Iterable[bytes]:
    point = {"job": "net-0", "mode": "train", "batch_size": 4}
    rows = [
        {"row": "environment", "device": "GPU", "machine": "m", "driver": "1", "date": "2026-01-01"},
        {"row": "session", "boot": "b"},
        {"row": "start", **point},
        {
            "row": "point",
            **point,
            "fits": True,
            "memory_mib": 100.0,
            "latency_p10_ms": 1.0,
            "latency_p90_ms": 2.0,
        },
        {"row": "lost"},
    ]
    yield b"".join(_json(row) + b"\n" for row in rows)
    header = {"schema": "torchedge-search-1", "figures": ["memory"], "genes": 3}
    yield _json(header) + b"\n" + _json({"genes": [[1, 2, 3]], "figures": [[1.5]], "scores": [2.5]}) + b"\n"
    kernels = [
        {"row": "environment", "device": "GPU", "driver": "1", "vendor": "v", "warp": 32},
        {"pass": 1, "benchmark": "barrier", "value": 3.5, "unit": "ns"},
    ]
    yield b"".join(_json(row) + b"\n" for row in kernels)
    load = {
        "kernel": "add", "size": [64, 64], "class": "elemental", "global": [64], "local": [8], "flops": 64,
        "input_bytes": 64, "output_bytes": 64, "loads": [[0, 1.0, 1.0], [64, 1.2, 1.1], [128, 1.5, 1.4]],
    }  # fmt: skip
    environment = {
        "row": "environment",
        "device": "GPU",
        "driver": "1",
        "texture": "no",
        "command": "c",
        "date": "d",
    }
    disk = {"row": "disk", "bytes": 1000, "ms": 1.0}
    yield b"".join(_json(row) + b"\n" for row in (environment, disk, load))
    convolution = {
        "kernel": [3, 3], "stride": [1, 1], "padding": [1, 1], "dilation": [1, 1], "size": [8, 8],
        "inputs": 4, "outputs": 4, "groups": 1, "batch": 2, "forward_workspace_mib": 1.0,
        "input_workspace_mib": 1.0, "weight_workspace_mib": 2.0,
    }  # fmt: skip
    yield (_json(convolution) + b"\n") * 3


def _read_journal(data: bytes) -> None:
    """Read rows as those of campaigns, of searches, and of each kind of measurement."""
    folder = SCRATCH / "journal"
    folder.mkdir(exist_ok=True)
    path = folder / "rows.jsonl"
    header = {"figures": ["memory"], "genes": 3}

    def campaign() -> None:
        with CampaignJournal(folder) as journal:
            journal.given_up()

    def search() -> None:
        with SearchJournal(path, header):
            pass

    readers: list[Callable[[], object]] = [
        lambda: list(read_rows(path)), campaign, search, lambda: read_kernels(path), lambda: read_loads(path),
        lambda: read_workspaces(path),
    ]  # fmt: skip
    accepted = 0
    for reader in readers:
        path.write_bytes(data)
        with contextlib.suppress(TorchedgeError):
            reader()
            accepted += 1
    if not accepted:
        raise TorchedgeError("no journal")


def _dataset_seeds() -> Iterable[bytes]:
    from oracles.small_datasets import nodes, write_small_dataset

    folder = SCRATCH / "dataset-seed"
    shutil.rmtree(folder, ignore_errors=True)
    write_small_dataset(folder)
    table = (folder / "measurements.csv").read_text().splitlines()[:12]
    topologies = (folder / "topologies.jsonl").read_text().splitlines()[:2]
    yield _json({"measurements.csv": "\n".join(table), "topologies.jsonl": "\n".join(topologies)})
    names = "id,mode,batch_size,fits,memory_mib,allocated_mib,reserved_mib,latency_ms"
    job = {
        "id": "n0", "network": "one", "pruning_level": 0, "strategy": "random", "input_size": [3, 32, 32],
        "optimizer": "adam", "build": {"nodes": nodes(4)},
    }  # fmt: skip
    kinds = "product_forward,product_backward,depthwise,norm,activation,pool"
    sums = f"id,mode,batch_size,{kinds}\nn0,train,4,1,2,,1,1,1"
    layers = {"id": "n0", "mode": "train", "batch_size": 4, "layers": [["a", 1.0, 2.0], ["b", 0.5, None]]}
    common = {
        "measurements.csv": f"{names}\nn0,train,4,1,100,50,60,3.5\nn0,train,8,0,,,,",
        "networks.jsonl": json.dumps(job),
    }
    yield _json({**common, "layer_times.csv": sums})
    yield _json({**common, "layers.jsonl": json.dumps(layers)})


def _read_dataset(data: bytes) -> None:
    document = parse_json("dataset.json", data)
    folder = SCRATCH / "dataset"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name in ("measurements.csv", "topologies.jsonl", "networks.jsonl", "layers.jsonl", "layer_times.csv"):
        if isinstance(document.get(name), str):
            (folder / name).write_bytes(str(document[name]).encode("utf-8", "surrogatepass"))
    dataset = read_dataset(folder, input_size=(3, 32, 32))
    for name in list(dataset.networks)[:2]:
        dataset.graph_of(name, "infer")


# models -----------------------------------------------------------------------------------------------------


def _onnx_seeds() -> Iterable[bytes]:
    import numpy as np
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    def model(nodes: Any, size: Any, arrays: Any) -> bytes:
        graph = helper.make_graph(
            [helper.make_node(n[0], n[1], n[2], **(n[3] if len(n) > 3 else {})) for n in nodes],
            "g",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["b", *size])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
            [numpy_helper.from_array(np.array(v), n) for n, v in arrays.items()],
        )
        return bytes(helper.make_model(graph).SerializeToString())

    weights = {"w": np.zeros((4, 3, 3, 3), np.float32), "v": np.zeros((5, 144), np.float32), "s": [0, -1]}
    yield model(
        [
            ("Conv", ["x", "w"], ["a"], {"pads": [0, 0, 0, 0]}),
            ("Relu", ["a"], ["r"]),
            ("Reshape", ["r", "s"], ["c"]),
            ("Gemm", ["c", "v"], ["y"], {"transB": 1}),
        ],
        [3, 8, 8],
        weights,
    )
    yield model(
        [
            ("Shape", ["x"], ["sizes"]),
            ("Gather", ["sizes", "last"], ["width"]),
            ("Div", ["width", "five"], ["two"]),
            ("Div", ["width", "two"], ["six"]),
            ("Concat", ["zero", "six", "two"], ["shape"], {"axis": 0}),
            ("Reshape", ["x", "shape"], ["z"]),
            ("Slice", ["z", "zero", "five", "zero"], ["q"]),
            ("Softmax", ["q"], ["y"], {"axis": -1}),
        ],
        [12],
        {"last": [-1], "five": [5], "zero": [0]},
    )
    yield model(
        [
            ("MaxPool", ["x"], ["a"], {"kernel_shape": [2, 2], "strides": [2, 2]}),
            ("Pad", ["a", "pads"], ["p"]),
            ("Resize", ["p", "", "scales"], ["r"], {"mode": "linear"}),
            ("Transpose", ["r"], ["t"], {"perm": [0, 2, 3, 1]}),
            ("ReduceMean", ["t", "axes"], ["m"], {"keepdims": 0}),
            ("Range", ["zero", "three", "one"], ["k"]),
            ("Cast", ["k"], ["f"], {"to": 1}),
            ("Tile", ["f", "ones"], ["g"]),
            ("Expand", ["g", "ones"], ["h"]),
            ("Add", ["m", "h"], ["y"]),
        ],
        [3, 8, 8],
        {
            "pads": [0, 0, 1, 1, 0, 0, 1, 1], "scales": np.array([1, 1, 2, 2], np.float32), "axes": [1, 2],
            "zero": np.int64(0), "three": np.int64(3), "one": np.int64(1), "ones": [1],
        },
    )  # fmt: skip
    assert onnx.__version__


def _read_onnx(data: bytes) -> None:
    path = SCRATCH / "model.onnx"
    path.write_bytes(data)
    program = load_onnx(path)
    capture(program, mode="infer")


@cache
def _exported() -> tuple[Any, ...]:
    import torch
    from torch import nn

    class Sizes(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            half = x.shape[1] * x.shape[0] // 2
            return torch.cat([x.reshape(half, 2), x.new_zeros(1, 2)]).mean(0)

    convolution = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)
    )
    attention = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    documents = []
    models = ((convolution, (3, 8, 8)), (attention, (5, 8)), (Sizes(), (6,)))
    for model, size in models:
        batch = {0: torch.export.Dim("batch", min=2)}
        program = torch.export.export(
            model.eval(), (torch.zeros(2, *size),), strict=False, dynamic_shapes=(batch,)
        )
        packed = io.BytesIO()
        torch.export.save(program, packed)
        with zipfile.ZipFile(packed) as archive:
            name = next(n for n in archive.namelist() if n.endswith("models/model.json"))
            documents.append(archive.read(name))
    return tuple(documents)


def _read_pt2(data: bytes) -> None:
    """Read the document of a .pt2 file: the archive around it is the library's."""
    path = SCRATCH / "model.pt2"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("model/models/model.json", data)
    capture(load_pt2(path), mode="infer")


# bundles ----------------------------------------------------------------------------------------------------


@cache
def _bundles() -> tuple[Path, ...]:
    import torch
    from torch import nn

    import torchedge

    small = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
    wide = nn.Sequential(nn.Linear(8, 160), nn.Linear(160, 160), nn.Linear(160, 160), nn.Linear(160, 4))
    images, classes = torch.zeros(2, 3, 8, 8), torch.tensor([0, 1])
    cases: list[tuple[Any, Any, dict[str, Any]]] = [
        (small, images, {}),
        (small, images, {"mode": "train", "targets": classes, "accumulation": 2}),
        (wide, torch.zeros(1, 8), {"memory_limit": "290KiB"}),
    ]
    for number, (model, example, more) in enumerate(cases):
        torchedge.export(
            model, example, device="adreno-640", out=SCRATCH / f"bundle-{number}", onnx=False, **more
        )
    return tuple([SCRATCH / f"bundle-{number}" for number in range(len(cases))])


def _bundle_seeds() -> Iterable[bytes]:
    """The documents and texts of bundles; their weights stay as they are."""
    for number, folder in enumerate(_bundles()):
        files = {
            str(path.relative_to(folder)): json.loads(path.read_text())
            if path.suffix == ".json"
            else path.read_text()
            for path in sorted(folder.rglob("*"))
            if path.suffix in (".json", ".cl")
        }
        header = (folder / WEIGHTS).read_bytes()[8:]
        files[WEIGHTS] = json.JSONDecoder().raw_decode(header.decode("utf-8", "replace"))[0]
        yield _json({"seed": number, "files": files})


def _read_bundle(data: bytes) -> None:
    """Write the files of a bundle with their hashes computed again, and open it."""
    document = parse_json("bundle.json", data)
    files, number = document.get("files"), document.get("seed")
    if not isinstance(files, dict) or not isinstance(files.get(MANIFEST), dict) or number not in (0, 1, 2):
        raise TorchedgeError("no bundle")
    source = _bundles()[number]
    folder = SCRATCH / "bundle"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source, folder)
    weights = (source / WEIGHTS).read_bytes()
    header = json.dumps(files.get(WEIGHTS), separators=(",", ":")).encode()
    header += b" " * (int.from_bytes(weights[:8], "little") - len(header))
    contents = {
        WEIGHTS: len(header).to_bytes(8, "little")
        + header
        + weights[8 + int.from_bytes(weights[:8], "little") :]
    }
    for name, content in files.items():
        if (
            isinstance(content, str)
            and name.startswith("kernels/")
            and name.count("/") == 1
            and len(name) < 200
        ):
            contents[name] = content.encode("utf-8", "surrogatepass")
        elif name != MANIFEST and name.endswith(".json") and "/" not in name and len(name) < 200:
            contents[name] = _json(content)
    for name, content in contents.items():
        with contextlib.suppress(OSError, ValueError):
            (folder / name).write_bytes(content)
    (folder / MANIFEST).write_bytes(_json(files[MANIFEST]))
    seal(folder)
    str(Bundle.open(folder))


FORMATS: dict[str, Format] = {
    "programs": Format(
        "json", _program_seeds, lambda data: parse_program("program.json", parse_json("program.json", data))
    ),
    "plans": Format("json", lambda: [_json(PLANS.document(_planned()[1]))], _read_plan),
    "instances": Format("json", _instance_seeds, _read_instance),
    "profiles": Format("json", _profile_seeds, _read_profile),
    "fitted": Format(
        "tensors", lambda: [_fitted()[0]], lambda data: _check_prediction(_sealed_profile(data, _fitted()[1]))
    ),
    "forests": Format("tensors", _forest_seeds, _read_forests),
    "journals": Format("text", _journal_seeds, _read_journal),
    "datasets": Format("json", _dataset_seeds, _read_dataset),
    "onnx": Format("onnx", _onnx_seeds, _read_onnx),
    "pt2": Format("json", lambda: _exported(), _read_pt2),
    "bundles": Format("json", _bundle_seeds, _read_bundle),
}
