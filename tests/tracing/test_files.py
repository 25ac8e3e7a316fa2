"""`.pt2` and ONNX files: the same graph as the model itself, nothing executed, hostile files refused."""

import json
import zipfile

import pytest
import torch
from oracles.graph_checks import verify
from torch import nn
from tracing.networks import Autocast, NoGrad, Recurrent, SmallNet, image

from torchedge.errors import CaptureError, InputError
from torchedge.ops import call_of, registry
from torchedge.tracing.capturing import capture
from torchedge.tracing.pt2_files import load_pt2
from torchedge.tracing.vision import prepare_torchvision


def parameters(graph):
    return sum(v.numel[0] for v in graph.parameters)


def flops(graph):
    """FLOPs of all convolutions and products."""
    known = registry()
    return sum(
        known[op.kind].flops(call_of(graph, op)) for op in graph.ops if known[op.kind].load.name == "REUSABLE"
    )


def kinds(graph):
    return sorted(op.kind for op in graph.ops)


def saved(model, example, path, **options):
    batch = torch.export.Dim("batch", min=2)
    options = options or {"dynamic_shapes": ({0: batch},)}
    program = torch.export.export(model, (example,), strict=False, **options)
    torch.export.save(program, path)
    return path


# .pt2 --------------------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("build", "size"),
    [
        (SmallNet, (3, 8, 8)),
        (Autocast, (3, 8, 8)),
        (NoGrad, (8,)),
        (lambda: Recurrent(nn.GRU, batch_first=True), (5, 8)),
    ],
)
@pytest.mark.parametrize("mode", ["train", "infer"])
def test_pt2_gives_the_graph_of_the_model(tmp_path, build, size, mode):
    model = build().train(mode == "train")
    path = saved(model, image(*size), tmp_path / "model.pt2")
    graph = capture(load_pt2(path), mode=mode)
    verify(graph)
    direct = capture(model, image(*size), mode=mode, method="export")
    assert {v.name for v in graph.parameters} == {v.name for v in direct.parameters}
    assert kinds(graph) == kinds(direct)
    assert [op.scope for op in graph.ops if op.kind == "conv2d"] == [
        op.scope for op in direct.ops if op.kind == "conv2d"
    ]
    assert [op.grad for op in graph.ops if op.kind == "linear"] == [
        op.grad for op in direct.ops if op.kind == "linear"
    ]
    assert graph.name == "model.pt2"


def test_pt2_of_an_evaluation_export_trains(tmp_path):
    path = saved(SmallNet().eval(), image(3, 8, 8), tmp_path / "model.pt2")
    graph = capture(load_pt2(path))
    assert next(op for op in graph.ops if op.kind == "batch_norm").attrs["training"] is True
    assert any("requested mode" in note for note in graph.notes)


def test_pt2_without_a_dynamic_batch_is_valid_for_its_own(tmp_path):
    path = saved(SmallNet(), image(3, 8, 8), tmp_path / "model.pt2", dynamic_shapes=None)
    graph = capture(load_pt2(path))
    assert graph.fixed_batch == 2
    assert capture(load_pt2(path), batch_size=4).fixed_batch == 4


def test_pt2_cannot_be_run(tmp_path):
    program = load_pt2(saved(SmallNet(), image(3, 8, 8), tmp_path / "model.pt2"))
    with pytest.raises(InputError, match="not to be run"):
        program(image(3, 8, 8))


def edited(path, edit):
    """Return a copy of a .pt2 file whose graph was changed, and whose pickles are bombs."""
    target = path.with_name("edited.pt2")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(target, "w") as new:
        for entry in old.namelist():
            data = old.read(entry)
            if entry.endswith("models/model.json"):
                document = json.loads(data)
                data = edit(document)
                data = data if isinstance(data, bytes) else json.dumps(data or document).encode()
            elif entry.endswith(".pt"):
                data = b"cos\nsystem\n(S'touch /tmp/torchedge-was-here'\ntR."
            new.writestr(entry, data)
    return target


def nodes(document):
    return document["graph_module"]["graph"]["nodes"]


def computing(function, *numbers):
    """The file computes a size first."""

    def kind(number):
        return {int: "as_int", float: "as_float", str: "as_string", list: "as_ints"}[type(number)]

    def edit(document):
        node = {
            "target": f"_operator.{function}",
            "inputs": [{"name": "", "arg": {kind(n): n}, "kind": 1} for n in numbers],
            "outputs": [{"as_sym_int": {"as_name": "computed"}}],
            "metadata": {},
        }
        nodes(document).insert(0, node)

    return edit


def retarget(name):
    def edit(document):
        nodes(document)[0]["target"] = name

    return edit


def resize(size):
    def edit(document):
        document["graph_module"]["graph"]["tensor_values"]["p_conv_weight"]["sizes"][0] = size

    return edit


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (retarget("os.system"), "no operator"),
        (retarget("torch.ops.aten.from_file.default"), "reads no tensor"),
        (retarget("torch.ops.aten.__class__.default"), "no operator"),
        (retarget("torch.ops.higher_order.cond"), "control flow"),
        (lambda d: nodes(d)[0]["inputs"][0]["arg"].update(as_bomb=1), ""),
        (lambda d: nodes(d)[0]["inputs"].clear(), ""),
        (resize({"as_int": -5}), r"a tensor of shape \[-5"),
        (resize({"as_expr": {"expr_str": "__import__('os').abort()"}}), ""),
        (lambda d: d.pop("graph_module"), "not understood"),
        (lambda d: b"{" * 100_000, "JSON"),
        (lambda d: b"[1]", "holds a list, expected a JSON object"),
        (lambda d: b'{"a":[' + b"[]," * 3_000_000 + b"[]]}", "values, expected at most"),
        (resize({"as_int": 2**41}), "elements"),
        (resize({"as_int": 10**30}), "64 bits"),
        (resize({"as_expr": {"expr_str": "s0", "hint": {"as_int": 2**40}}}), "elements"),
        (computing("pow", 10, 10**9), "64 bits"),
        (computing("mul", 2**62, 2**62), "64 bits"),
        (computing("pow", 10, 300), "64 bits"),
        (computing("pow", 2.0, 5000.0), "OverflowError|64 bits"),
        (computing("pow", -8, 0.5), "a complex that"),
        (computing("mul", "x", 10**10), "a str that"),
        (computing("mod", "%2000000000d", 5), "a str that"),
        (computing("add", [1], [2]), "a list that"),
    ],
)
def test_hostile_pt2(tmp_path, edit, words):
    path = edited(saved(SmallNet(), image(3, 8, 8), tmp_path / "model.pt2"), edit)
    with pytest.raises((InputError, CaptureError), match=words) as caught:
        capture(load_pt2(path))
    assert "\n" not in str(caught.value)


def test_pickles_in_a_pt2_are_not_opened(tmp_path):
    path = edited(saved(SmallNet(), image(3, 8, 8), tmp_path / "model.pt2"), lambda d: None)
    assert parameters(capture(load_pt2(path))) == sum(p.numel() for p in SmallNet().parameters())


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 broken", b"no archive"])
def test_broken_pt2(tmp_path, content):
    path = tmp_path / "model.pt2"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"model\.pt2"):
        load_pt2(path)


# ONNX --------------------------------------------------------------------------------


def onnx_of(model, example, path, *, dynamic=True, optimize=False):
    pytest.importorskip("onnxscript")
    shapes = ({0: torch.export.Dim("batch", min=2)},) if dynamic else None
    torch.onnx.export(
        model.eval(), (example,), path, dynamo=True, dynamic_shapes=shapes, external_data=False,
        verbose=False, optimize=optimize,
    )  # fmt: skip
    return path


def vision(name):
    prepare_torchvision()
    models = pytest.importorskip("torchvision.models")
    return models.get_model(name, weights=None)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3_small", "shufflenet_v2_x0_5"])
def test_onnx_gives_the_graph_of_the_model(tmp_path, name):
    onnx_files = pytest.importorskip("torchedge.tracing.onnx_files")
    model = vision(name).eval()
    path = onnx_of(model, image(3, 64, 64), tmp_path / "model.onnx")
    graph = capture(onnx_files.load_onnx(path), mode="infer")
    direct = capture(model, image(3, 64, 64), mode="infer")
    verify(graph)
    assert graph.fixed_batch is None
    assert parameters(graph) == parameters(direct)
    assert flops(graph) == flops(direct)
    heavy = {"conv2d", "linear", "batch_norm", "max_pool2d", "relu", "hardswish"}
    assert [k for k in kinds(graph) if k in heavy] == [k for k in kinds(direct) if k in heavy]
    shapes = [[g.values[i].shape for i in g.outputs] for g in (graph, direct)]
    assert shapes[0] == shapes[1]


@pytest.mark.slow
def test_onnx_of_a_transformer(tmp_path):
    onnx_files = pytest.importorskip("torchedge.tracing.onnx_files")
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 1), nn.Flatten(1), nn.Linear(80, 3)).eval()
    path = onnx_of(model, image(5, 16), tmp_path / "model.onnx")
    graph = capture(onnx_files.load_onnx(path), mode="infer")
    assert parameters(graph) == sum(p.numel() for p in model.parameters())
    assert graph.values[graph.outputs[0]].at(7) == (7, 3)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("cells", [nn.LSTM, nn.GRU])
def test_onnx_of_recurrent_layers(tmp_path, cells):
    onnx_files = pytest.importorskip("torchedge.tracing.onnx_files")
    path = onnx_of(Recurrent(cells, batch_first=True), image(5, 8), tmp_path / "model.onnx", dynamic=False)
    graph = capture(onnx_files.load_onnx(path), mode="infer", batch_size=2)
    assert any(op.kind in ("lstm", "gru") for op in graph.ops)
    assert graph.values[graph.outputs[0]].shape == (2, 4)


def test_onnx_with_a_written_batch(tmp_path):
    onnx_files = pytest.importorskip("torchedge.tracing.onnx_files")
    path = onnx_of(SmallNet(), torch.zeros(1, 3, 8, 8), tmp_path / "model.onnx", dynamic=False)
    graph = capture(onnx_files.load_onnx(path))
    assert graph.fixed_batch is None
    assert graph.loss is not None
    assert any("dimension 0" in note for note in graph.notes)
    assert graph.values[graph.outputs[0]].at(9) == (9, 2)


def made(nodes, inputs, outputs, initializers=()):
    """Write a small ONNX model by hand."""
    onnx = pytest.importorskip("onnx")
    helper = onnx.helper
    graph = helper.make_graph(
        [helper.make_node(*n[:3], **(n[3] if len(n) > 3 else {})) for n in nodes],
        "g",
        [helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, s) for n, s in inputs],
        [helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, None) for n in outputs],
        [onnx.numpy_helper.from_array(a, n) for n, a in initializers],
    )
    return helper.make_model(graph)


def loaded(model, tmp_path):
    onnx = pytest.importorskip("onnx")
    from torchedge.tracing.onnx_files import load_onnx

    onnx.save(model, tmp_path / "model.onnx")
    return load_onnx(tmp_path / "model.onnx")


def test_unknown_onnx_operators_are_named(tmp_path):
    nodes = [("Relu", ["x"], ["y"]), ("NonMaxSuppression", ["y"], ["z"]), ("Det", ["z"], ["w"])]
    with pytest.raises(CaptureError, match="Det, NonMaxSuppression"):
        loaded(made(nodes, [("x", ["batch", 4])], ["w"]), tmp_path)


def test_open_onnx_dimensions_ask_for_a_size(tmp_path):
    program = loaded(made([("Relu", ["x"], ["y"])], [("x", ["batch", 4, "width"])], ["y"]), tmp_path)
    with pytest.raises(InputError, match="'width'"):
        capture(program)
    assert capture(program, input_size=(4, 6)).values[0].at(2) == (2, 4, 6)


def test_onnx_slices_like_numpy(tmp_path):
    numpy = pytest.importorskip("numpy")
    for start, stop, step in [
        (0, 3, 1),
        (1, 2**62, 2),
        (-2, 2**62, 1),
        (-1, -(2**62), -1),
        (5, 0, -2),
        (0, -1, 1),
    ]:
        arrays = [("s", [start]), ("e", [stop]), ("a", [1]), ("t", [step])]
        held = [(n, numpy.array(v, dtype=numpy.int64)) for n, v in arrays]
        program = loaded(
            made([("Slice", ["x", "s", "e", "a", "t"], ["y"])], [("x", ["b", 7])], ["y"], held), tmp_path
        )
        graph = capture(program, mode="infer")
        low = None if stop < -100 else stop
        assert graph.values[graph.outputs[0]].at(2)[1] == len(range(7)[start:low:step])


def test_onnx_arithmetic_on_shapes_is_computed(tmp_path):
    numpy = pytest.importorskip("numpy")
    nodes = [
        ("Shape", ["x"], ["sizes"]),
        ("Gather", ["sizes", "last"], ["width"]),
        ("Div", ["width", "five"], ["two"]),  # 12 / 5, whole numbers
        ("Div", ["width", "two"], ["six"]),
        ("Concat", ["zero", "six", "two"], ["shape"], {"axis": 0}),
        ("Reshape", ["x", "shape"], ["y"]),
        ("Gather", ["y", "places"], ["z"], {"axis": 1}),
    ]
    known = {"last": [-1], "five": [5], "zero": [0], "places": [[0, 1], [5, 2], [3, 3]]}
    arrays = [(name, numpy.array(value, dtype=numpy.int64)) for name, value in known.items()]
    graph = capture(loaded(made(nodes, [("x", ["b", 12])], ["z"], arrays), tmp_path), mode="infer")
    assert graph.values[graph.outputs[0]].at(7) == (7, 3, 2, 2)
    assert {op.kind for op in graph.ops} <= {"reshape", "view", "getitem", "index"}


def growing(count):
    """As many Concats, each of the result before and itself."""
    nodes = [("Concat", [f"k{n}", f"k{n}"], [f"k{n + 1}"], {"axis": 0}) for n in range(count)]
    return [*nodes, ("Expand", ["x", f"k{count}"], ["y"])]


@pytest.mark.parametrize(
    ("nodes", "known", "size"),
    [
        (growing(40), {"k0": [1]}, 4),
        ([("ConstantOfShape", ["k0"], ["k1"]), ("Expand", ["x", "k1"], ["y"])], {"k0": [2**20, 2**20]}, 4),
        ([("Tile", ["k0", "k1"], ["k2"]), ("Expand", ["x", "k2"], ["y"])], {"k0": [1], "k1": [2**40]}, 4),
        ([("Range", ["a", "b", "c"], ["k"]), ("Expand", ["x", "k"], ["y"])], {"a": 0, "b": 2**40, "c": 1}, 4),
        ([("Expand", ["k0", "k1"], ["k2"]), ("Add", ["x", "k2"], ["y"])], {"k0": [1], "k1": [2**40]}, 4),
        (
            [("Mul", ["k0", "k1"], ["k2"]), ("Add", ["x", "k2"], ["y"])],
            {"k0": [[1]] * 100_000, "k1": [[1] * 100_000]},
            4,
        ),
        ([("Pad", ["k0", "k1"], ["k2"]), ("Add", ["x", "k2"], ["y"])], {"k0": [1], "k1": [2**40, 0]}, 4),
        ([("OneHot", ["k0", "k1", "k2"], ["k3"]), ("Add", ["x", "k3"], ["y"])],
         {"k0": [1], "k1": [2**40], "k2": [0, 1]}, 4),
        ([("Gather", ["x", "k0"], [f"y{n}"], {"axis": 1}) for n in range(200)] + [("Relu", ["x"], ["y"])],
         {"k0": [0] * 500_000}, 4),
        ([("Split", ["x"], ["y"], {"axis": 1, "num_outputs": 10**6})], {}, 10**6),
        ([("SplitToSequence", ["x"], ["y"], {"axis": 1})], {}, 10**6),
        ([("Relu", ["x"], ["y"])], {}, 2**41),
        ([("Add", ["x", "k0"], ["y"])], {"k0": [[1]]}, 2**62),
    ],
)  # fmt: skip
def test_onnx_that_asks_for_much_is_refused_before_it_is_computed(tmp_path, nodes, known, size):
    numpy = pytest.importorskip("numpy")
    arrays = [(name, numpy.array(value, dtype=numpy.int64)) for name, value in known.items()]
    with pytest.raises((InputError, CaptureError), match=r"elements|over 33554432 values|loops over"):
        capture(loaded(made(nodes, [("x", ["b", size])], ["y"], arrays), tmp_path), mode="infer")


def test_weights_of_an_onnx_file_have_a_size_that_pytorch_can_describe(tmp_path):
    model = made([("Gemm", ["x", "w"], ["y"])], [("x", ["b", 4])], ["y"])
    weight = model.graph.initializer.add(name="w", data_type=1)
    weight.dims.extend([2**40, 2**40])
    with pytest.raises(InputError, match=r"model\.onnx.*elements"):
        loaded(model, tmp_path)


@pytest.mark.parametrize("content", [b"", b"\x00\x01broken", b"{}"])
def test_broken_onnx(tmp_path, content):
    pytest.importorskip("onnx")
    from torchedge.tracing.onnx_files import load_onnx

    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"model\.onnx"):
        load_onnx(path)
