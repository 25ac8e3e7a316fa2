"""Wrong uses of the Python functions: one sentence says what was given, what was expected, and what to do.

The twin for the command line is tests/cli/test_wrong_input.py.
"""

import copy
import types

import pytest
import torch
from oracles.messages import judged
from torch import nn
from torch.nn.functional import cross_entropy

import torchedge
from torchedge import CaptureError, DeviceError, InputError, LimitError, LoweringError, ProfileError
from torchedge.runtime.backends import compile_graph

NET = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
X, Y = torch.zeros(2, 3, 8, 8), torch.zeros(2, dtype=torch.long)
TX2 = "jetson-tx2"
SPACE = torchedge.OFAResNet50Space


def sgd(model=NET):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def predict(model=NET, batch_size=2, device=TX2, **more):
    size = {} if "example" in more else {"input_size": (3, 8, 8)}
    return torchedge.predict(model, batch_size, device, **{**size, **more})


def train(model=NET, x=X, y=Y, **more):
    settings = {"loss": cross_entropy, "optimizer": sgd(), **more}
    with torchedge.Trainer(model, x, y, **settings) as trainer:
        trainer.step(x, y)


def step(*batch):
    with torchedge.Trainer(NET, X, Y, loss=cross_entropy, optimizer=sgd()) as trainer:
        trainer.step(*batch)


def export(model=NET, example=X, out="bundle", **more):
    torchedge.export(model, example, device=TX2, out=out, **more)


def export_training(**more):
    export(mode="train", targets=Y, **more)


def plan(model=NET, **more):
    torchedge.plan(model, X[:1], device=TX2, **more)


def search(space=None, constraints=None, score=len, **more):
    limits = {"training_memory": 4000} if constraints is None else constraints
    torchedge.search(SPACE() if space is None else space, limits, score, device=TX2, **more)


def many(models, batch_sizes=8):
    torchedge.Predictor(TX2).predict_many(models, batch_sizes, input_size=(3, 8, 8))


def autocast():
    with torch.autocast("cpu", torch.bfloat16):
        train()


def branch():
    """A module of a namespace without a name, as a notebook's or a debugger's may be."""
    names = {"Module": nn.Module}
    exec("class Branch(Module):\n def forward(self, x): return x if x.sum() > 0 else -x", names)
    return names["Branch"]()


class Reads(nn.Module):
    """Reads values of a tensor, as a number or as an array."""

    def __init__(self, array):
        super().__init__()
        self.scale, self.array = nn.Parameter(torch.ones(())), array

    def forward(self, x):
        value = torch.from_numpy(x.numpy()).sum() if self.array else x.sum().item()
        return self.scale * x.flatten(1) * value


class Undefined(nn.Module):
    """Fails whatever it is called with."""

    def forward(self, x):
        return undefined  # noqa: F821


class Opens(nn.Module):
    """Reads a file that is not there."""

    def forward(self, x):
        return x * len(open("labels.txt").read())


class Masked(nn.Module):
    """Takes elements by their values."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(3, 4, 3)

    def forward(self, x):
        return self.layer(x)[x[:, 0, 0, 0] > 0]


def rated(rate):
    optimizer = sgd()
    optimizer.param_groups[0]["lr"] = rate
    return optimizer


class Marked(nn.Module):
    """Reads what user code has put on a weight."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(192, 2)
        self.layer.weight.gain = 2.0

    def forward(self, x):
        return self.layer(x.flatten(1)) * self.layer.weight.gain


def watch():
    with torchedge.watch(device=TX2) as step:
        pass
    return step.prediction


def watch_twice():
    with torchedge.watch(device=TX2), torchedge.watch(device=TX2):
        pass


INPUTS = {
    "no model": (lambda: predict(None), "model is None; expected a torch.nn.Module"),
    "arguments by place": (lambda: torchedge.predict(NET, 8, TX2, sgd()), "too many positional"),
    "a batch for its size": (lambda: predict(NET, X), "batch_size is a Tensor; expected a whole"),
    "a class": (lambda: predict(nn.Linear), "build it: Linear(...)"),
    "weights": (lambda: predict(NET.state_dict()), "load_state_dict"),
    "a function": (lambda: predict(lambda x: x), "model is a function"),
    "an unknown model": (lambda: predict("resnet5O"), "did you mean resnet50"),
    "a number for a device": (lambda: predict(device=3), "device is an int; expected a name"),
    "arguments swapped": (lambda: predict(NET, TX2, 2), "device is an int; expected a name"),
    "an empty device": (lambda: predict(device=""), "device '': expected a name"),
    "no batch": (lambda: predict(batch_size=0), "batch_size is 0; expected a whole number"),
    "half a sample": (lambda: predict(batch_size=2.5), "batch_size is 2.5; expected a whole"),
    "a batch in words": (lambda: predict(batch_size="8"), "batch_size is '8'; expected a whole"),
    "many batches": (lambda: predict(batch_size=[8, 16]), "batch_size is [8, 16]; expected a"),
    "a huge batch": (lambda: predict(batch_size=10**20), "expected a whole number from 1 to 2147"),
    **{
        f"{name} of an inference": (
            lambda name=name, value=value: predict(mode="infer", **{name: value}),
            f"{name} is given without mode='train'; expected it for a training step alone",
        )
        for name, value in {
            "accumulation": 4,
            "optimizer": "adamw",
            "loss": torch.nn.MSELoss(),
            "checkpointing": True,
        }.items()
    },
    "accumulation of a captured inference": (
        lambda: torchedge.predict(torchedge.capture(NET, example=X, mode="infer"), 4, accumulation=4),
        "accumulation is given without mode='train'",
    ),
    "an evaluation within an inference": (
        lambda: torchedge.simulate(NET, 4, example=X, mode="infer", evaluate=4),
        "evaluate is given without mode='train'",
    ),
    "a mode": (lambda: predict(mode="eval"), "mode is 'eval'; expected one of train, infer"),
    "a size": (lambda: predict(input_size=8), "input_size is 8; expected whole numbers"),
    "a size in words": (lambda: predict(input_size="3x8x8"), "like (3, 224, 224)"),
    "a size of zero": (lambda: predict(input_size=(3, 0, 8)), "whole numbers above 0"),
    "no size": (lambda: torchedge.predict(nn.ReLU(), 2, TX2), "pass input_size="),
    "a size and an example": (lambda: predict(input_size=(3, 8, 8), example=X), "one of them"),
    "an array": (lambda: predict(example=X.numpy()), "example is a ndarray without tensors"),
    "a list": (lambda: predict(example=[1, 2]), "example is a list without tensors; expected a"),
    "no such optimizer": (lambda: predict(optimizer="adamx"), "optimizer is 'adamx'; expected"),
    "an optimizer's class": (lambda: predict(optimizer=torch.optim.Adam), "the class Adam; exp"),
    "a step's wrong word": (lambda: torchedge.TrainingStep(optimiser="adam"), "did you mean optimizer"),
    "a word of another function": (lambda: predict(bach_size=8), "did you mean batch_size"),
    "another's optimizer": (lambda: predict(optimizer=sgd(nn.Linear(3, 3))), "model.parameters()"),
    "autocast in int8": (lambda: predict(amp="int8"), "amp is 'int8'; expected one of bfloat16"),
    "autocast in general": (lambda: predict(amp=True), "amp is True; expected one of bfloat16"),
    "no micro-batch": (lambda: predict(accumulation=0), "accumulation is 0; expected a whole"),
    "no loss": (lambda: predict(loss=None), "loss is None; expected a function"),
    "a loss in words": (lambda: predict(loss="mse"), "loss is 'mse'; expected a function"),
    "a loss of two": (
        lambda: predict(loss=lambda scores, classes: scores.sum()),
        "takes scores, classes, and there are no targets",
    ),
    "two optimizers": (lambda: predict(optimizer=[sgd(), sgd()]), "A GAN"),
    "a wrong word": (lambda: predict(optimiser="adam"), "did you mean optimizer"),
    "a limit in bytes": (lambda: predict().fits(8 * 2**30), "numbers are MiB"),
    "a length of images": (lambda: predict(seq_len=128), "the example has no sequence; expected"),
    "a limit below zero": (lambda: predict().fits(-1), "memory_limit is -1; expected"),
    "no limit": (lambda: predict().fits(float("inf")), "is inf; expected a number of MiB"),
    "a limit that is none": (lambda: predict().fits(float("nan")), "is nan; expected"),
    "a limit in words": (lambda: predict().fits("lots"), "'lots'"),
    "a confidence of 95": (lambda: predict().fits(1, confidence=95), "confidence is 95; expected"),
    "no largest batch": (lambda: predict().max_batch_size(largest=0), "largest is 0; expected a"),
    "the longest image": (lambda: predict().max_seq_len(), "predict with seq_len="),
    "a name for many": (lambda: many("resnet18"), "models is a str; expected a list"),
    "none of many": (lambda: many([]), "models is empty; expected at least one"),
    "many without a batch": (lambda: many([NET], []), "batch_size is []; expected a whole number"),
    "advice within nothing": (
        lambda: torchedge.advise(NET, 8, device=TX2, example=X, memory_limit=-1),
        "memory_limit is -1; expected",
    ),
    "advice to a number": (
        lambda: torchedge.advise(NET, 8, device=TX2, example=X, progress=3),
        "progress is an int; expected a function",
    ),
    "an evaluation of none": (
        lambda: torchedge.simulate(NET, 8, example=X, evaluate=0),
        "evaluate is 0; expected a whole number",
    ),
    "a cache emptied": (
        lambda: torchedge.simulate(NET, 8, example=X, empty_cache=True),
        "empty_cache is given without evaluate; expected both",
    ),
    "a report as PDF": (
        lambda: torchedge.report(NET, 8, device=TX2, example=X, out="x.pdf"),
        "ends in .html",
    ),
    "a model for a space": (lambda: search(NET), "space is a Sequential; expected a SearchSpace"),
    "a score of three": (lambda: search(score=3), "score is an int; expected a function"),
    "a space of no size": (
        lambda: torchedge.PruningSpace(NET, None),
        "input_size is None; expected the shape",
    ),
    "nothing to prune": (
        lambda: torchedge.PruningSpace(nn.Linear(3, 3), input_size=(3,)),
        "choose a deeper model",
    ),
    "a plan within much": (lambda: plan(memory_limit="much"), "memory_limit is 'much'; expected"),
    "a plan in int8": (lambda: plan(precision="int8"), "precision is 'int8'; expected one of"),
    "a plan beyond lambda": (lambda: plan(lam=2), "lambda is 2; expected a number from 0 to 1"),
    "a plan of nothing": (lambda: plan(None), "model is None; expected a torch.nn.Module or a"),
    "an export to nowhere": (lambda: export(out=None), "out is None; expected a path"),
    "an export of a name": (lambda: export("resnet18"), "model is a str; expected a torch.nn.Mod"),
    "an export without example": (lambda: export(example=None), "example holds no tensor; exp"),
    "both modes": (lambda: export(mode="both"), "mode is 'both'; expected one of train, infer"),
    "targets of an inference": (lambda: export(targets=Y), "targets is given without mode='train'"),
    "an export in float8": (lambda: export(precision="float8"), "precision is 'float8'; expected"),
    "an optimizer's name": (lambda: export_training(optimizer="adam"), "torch.optim.Adam(model"),
    "no kernel for ASGD": (
        lambda: export_training(optimizer=torch.optim.ASGD(NET.parameters())),
        "expected one of Adadelta, Adagrad, Adam, AdamW, Adamax, NAdam, RAdam, RMSprop, SGD of torch.optim",
    ),
    "an optimizer of one's own": (
        lambda: train(optimizer=type("Own", (torch.optim.SGD,), {"step": len})(NET.parameters())),
        "SGD of torch.optim; for any other write the loop yourself: compiled = torch.compile(model, backend=",
    ),
    "an export of mse": (lambda: export_training(loss="mse"), "loss is 'mse'; expected a function"),
    "no bundle": (lambda: torchedge.load_bundle("nowhere"), "nowhere: is no bundle; expected"),
    "a bundle's number": (lambda: torchedge.load_bundle(3), "path is 3; expected a path"),
    "another capture": (lambda: torchedge.capture(NET, X, method="jit"), "one of auto, trace, exp"),
    "lengths of images": (lambda: torchedge.capture_lengths(NET, X), "has no sequence; expected"),
    "training by place": (
        lambda: torchedge.Trainer(NET, X, Y, cross_entropy, sgd()),
        "too many positional arguments; expected Trainer(model, example_inputs, targets, *, ",
    ),
    "training without an optimizer": (
        lambda: torchedge.Trainer(NET, X, Y, loss=cross_entropy),
        "Trainer has no optimizer; expected optimizer=, such as torch.optim.Adam(",
    ),
    "an optimizer for a batch": (
        lambda: torchedge.Trainer(NET, sgd(), cross_entropy),
        "the inputs are a SGD without tensors; expected a batch",
    ),
    "a loader for a batch": (
        lambda: train(x=torch.utils.data.DataLoader([1])),
        "the inputs are a DataLoader without tensors",
    ),
    "no batch at all": (lambda: torchedge.Trainer(NET), "missing the required argument: 'example_inputs'"),
    "training a name": (lambda: train("resnet18"), "model is a str; expected a torch.nn.Module"),
    "training for epochs": (lambda: train(epochs=3), "Trainer has no argument 'epochs'; expected"),
    "training in half": (lambda: train(amp="fp16"), "expected the default in Trainer"),
    "text of no length": (
        lambda: torchedge.export_lm(NET, device=TX2, out="e"),
        "missing the required argument: 'max_length'",
    ),
    "no feature set": (
        lambda: torchedge.features(NET, 8, example=X, feature_set="x"),
        "expected one of perf4sight",
    ),
    "no device": (lambda: torchedge.find_device(None), "device is None; expected a path, or a name"),
    "training by a tuner": (lambda: train(tuner="best"), "tuner is 'best'; expected"),
    "training by a class": (lambda: train(optimizer=torch.optim.Adam), "is the class Adam; exp"),
    "training for nothing": (lambda: train(loss=None), "loss is None; expected a function"),
    "training by a name": (lambda: train(optimizer="adam"), "torch.optim.Adam(model.parameters())"),
    "training by two": (lambda: train(optimizer=[sgd(), sgd()]), "A GAN"),
    "training another": (lambda: train(optimizer=sgd(nn.Linear(2, 2))), "model.parameters()"),
    "training without targets": (lambda: train(y=None), "targets"),
    "training by no batch": (lambda: train(accumulation=0), "accumulation is 0; expected a whole"),
    "a watch in a watch": (watch_twice, "a watch is active already; expected one at a time"),
    "an optimizer with a capital": (lambda: predict(optimizer="Adam"), "did you mean adam?"),
    "a function for a switch": (
        lambda: predict(compile=torch.compile),
        "compile is a function; expected True, False or 'reduce-overhead'",
    ),
    "a path for a switch": (lambda: export(onnx="x.onnx"), "onnx is 'x.onnx'; expected True or"),
    "a word for a switch": (
        lambda: torchedge.load_bundle("nowhere", prove="no"),
        "prove is 'no'; expected True or False",
    ),
    "zero points in words": (
        lambda: torchedge.quantize(NET, zero_points="yes"),
        "zero_points is 'yes'; expected True or False",
    ),
    "a number's name": (lambda: export(name=3), "name is 3; expected printable text"),
    "a name of two lines": (lambda: export(name="a\nb"), "expected printable text of 1 to 1000"),
    "a seed in words": (lambda: export(seed="0"), "seed is '0'; expected a whole number"),
    "minus five processes": (lambda: search(workers=-5), "workers is -5; expected a number of"),
    "modules by number": (lambda: torchedge.quantize(NET, skip=[0]), "skip is [0]; expected names"),
    "no modules to skip": (lambda: torchedge.quantize(NET, skip=None), "skip is None; expected"),
    "half a group": (lambda: torchedge.quantize(NET, group=2.5), "group is 2.5; expected a whole"),
    "a fit to nothing": (lambda: torchedge.fit(None), "dataset is None; expected a path"),
    "a rate beyond float32": (
        lambda: export_training(optimizer=torch.optim.SGD(NET.parameters(), lr=1e300)),
        "lr is 1e+300; expected a number from 0 to 3.4e+38",
    ),
    "an endless rate": (
        lambda: train(optimizer=torch.optim.SGD(NET.parameters(), lr=float("inf"))),
        "lr is inf; expected a number from 0 to 3.4e+38",
    ),
    "a rate in words": (lambda: train(optimizer=rated("0.1")), "lr is '0.1'; expected a number"),
    "targets by place": (
        lambda: torchedge.Trainer.step(None, X, Y, Y),
        "expected Trainer.step(inputs, targets)",
    ),
    "a batch without targets": (
        lambda: step(X),
        "the batch is float32[2, 3, 8, 8]; expected float32[2, 3, 8, 8], int64[2], as in the Trainer's",
    ),
    "a batch swapped": (lambda: step(Y, X), "pass inputs, then targets"),
    "a batch of names": (lambda: step({"x": X}, Y), "dict"),
    "no batch to step": (lambda: step(), "missing"),
    "a plan for a network": (
        lambda: torchedge.plan_lm(NET, device=TX2, max_length=64),
        "expected a causal model",
    ),
    "a plan of a number as a step": (
        lambda: torchedge.plan(NET, X, TX2, step=3),
        "step is an int; expected a torchedge.TrainingStep",
    ),
    "a plan of a step in autocast": (
        lambda: torchedge.plan(NET, X, TX2, step=torchedge.TrainingStep(amp="bfloat16")),
        "amp is 'bfloat16'; expected the default in plan",
    ),
    "a plan of a step in chunks": (
        lambda: torchedge.plan(NET, X, TX2, step=torchedge.TrainingStep(), chunk="1MiB"),
        "chunk is given with step, and is of an inference's plan alone: omit it",
    ),
    "a plan of a step without an example": (
        lambda: torchedge.plan(NET, device=TX2, step=torchedge.TrainingStep()),
        "example holds no tensor",
    ),
    "a step of a name": (
        lambda: torchedge.plan("resnet18", X, TX2, step=torchedge.TrainingStep()),
        "expected a torch.nn.Module",
    ),
    "a plan of no length": (
        lambda: torchedge.plan_lm(NET, device=TX2),
        "missing the required argument: 'max_length'",
    ),
    "text of a network": (
        lambda: torchedge.export_lm(NET, device=TX2, out="e", max_length=64),
        "expected a causal model",
    ),
    "weights from a text": (lambda: torchedge.load_gguf(NET, "notes.txt"), "expected"),
    "weights for a file": (lambda: torchedge.load_gguf("x.gguf", NET), "expected a causal model"),
    "a name to quantize": (lambda: torchedge.quantize("resnet18"), "expected a torch.nn.Module"),
    "a fit of a text": (lambda: torchedge.fit(), "missing the required argument"),
    "a watch of a model": (lambda: torchedge.watch(NET), "expected"),
    "a list to report": (
        lambda: torchedge.report([NET], 8, device=TX2, example=X, out="x.html"),
        "expected a torch.nn.Module",
    ),
    "a batch in words to simulate": (
        lambda: torchedge.simulate(NET, "8", example=X),
        "batch_size is '8'; expected a whole number",
    ),
    "advice within words": (
        lambda: torchedge.advise(NET, 8, device=TX2, example=X, memory_limit="big"),
        "'big'; expected",
    ),
    "a list to capture": (lambda: torchedge.capture([NET], X), "expected a torch.nn.Module"),
    "a ninth dimension": (lambda: torchedge.capture(NET, X, batch_dim=9), "expected 0 to 3"),
    "a constraint alone": (lambda: search(constraints=4000), "expected"),
    "a constraint of no name": (lambda: search(constraints={"memory": 4}), "expected some of"),
    "a prediction of nothing": (lambda: torchedge.Predictor(TX2).predict(), "missing"),
    "a step for a model": (lambda: torchedge.TrainingStep(NET), "expected"),
    "checkpoints in words": (lambda: predict(checkpointing="yes"), "expected True or False"),
    "a compiler's name": (lambda: predict(compile="fast"), "expected"),
    "a host's number": (lambda: predict(on_host=3), "expected"),
    "a limit in a list": (lambda: predict().fits([1]), "expected"),
}

CAPTURES = {
    "a size with a batch": (lambda: predict(input_size=(2, 3, 8, 8)), "without the batch"),
    "other channels": (lambda: predict(input_size=(5, 8, 8)), "Check that input_size=(5, 8, 8)"),
    "a sample": (lambda: predict(example=X[0]), "batch included: float32[3, 8, 8]"),
    "whole numbers": (lambda: predict(example=X.long()), "batch included: int64[2, 3, 8, 8]"),
    "a value read": (lambda: predict(Reads(array=False)), "use torch.where, or make the choice"),
    "an array read": (lambda: predict(Reads(array=True)), "use torch.where, or make the choice"),
    "a loss of many": (lambda: predict(loss=lambda y: y), "expected a scalar"),
    "a branch on values": (lambda: predict(branch(), mode="infer"), "use torch.where, or make"),
    "training by arrays": (
        lambda: train(net := Reads(array=True), optimizer=sgd(net)),
        "leaves PyTorch by .numpy()",
    ),
    "an attribute of a weight": (
        lambda: train(net := Marked(), optimizer=sgd(net)),
        "reads 'gain', an attribute of a parameter or buffer, which a capture does not follow",
    ),
    "a model that opens a file": (
        lambda: predict(Opens(), example=X),
        "No such file or directory: 'labels.txt': correct the model",
    ),
    "elements by a mask": (
        lambda: predict(Masked(), example=X),
        "so that sizes depend on data; expected sizes that do not: use torch.where",
    ),
    "a name that no call defines": (
        lambda: predict(Undefined(), example=X),
        "NameError: name 'undefined' is not defined: correct the model",
    ),
    "classes as floats": (
        lambda: predict(example=X, loss=cross_entropy, targets=Y.float()),
        "the loss cross_entropy raised RuntimeError: gather(): Expected dtype",
    ),
    "classes as an array": (
        lambda: predict(example=X, loss=cross_entropy, targets=Y.numpy()),
        "Check that loss= and targets= suit each other",
    ),
    "no step to watch": (watch, "expected a training step"),
    "a step to come": (lambda: torchedge.watch(device=TX2).prediction, "expected a block"),
}

OTHERS = {
    "an unknown device": (lambda: predict(device="jetson-tx3"), DeviceError, "did you mean jetson-tx2"),
    "a report to nowhere": (
        lambda: torchedge.report(NET, 8, device=TX2, example=X, out="nowhere/x.html"),
        ProfileError,
        "nowhere/x.html: cannot be written",
    ),
    "a plan within 1 KiB": (
        lambda: plan(memory_limit="1KiB"),
        LimitError,
        "smallest memory limit that works",
    ),
    "a class beyond": (lambda: train(y=Y + 5), torchedge.TorchedgeError, "5"),
    "training within autocast": (autocast, LoweringError, "leave out torch.autocast of another dtype"),
    "a batch of other channels": (lambda: step(torch.zeros(2, 5, 8, 8), Y), torchedge.TorchedgeError, "5"),
    "a watch elsewhere": (lambda: torchedge.watch(device="tx9").__enter__(), DeviceError, "expected"),
    "a function of a name": (lambda: torchedge.measure_operator_us("relu"), DeviceError, "expected a device"),
    "training within a byte": (lambda: train(memory_limit="1B"), LimitError, "limit that works is"),
    "training elsewhere": (lambda: train(device="tx9"), torchedge.TorchedgeError, "expected"),
    "an unknown board": (lambda: torchedge.find_device("tx3"), DeviceError, "did you mean jetson-tx2"),
    "training in bfloat16": (
        lambda: train(net := copy.deepcopy(NET).bfloat16(), X.bfloat16(), optimizer=sgd(net)),
        LoweringError,
        "holds tensors of bfloat16; expected float32",
    ),
}

WRONG = {name: (call, InputError, words) for name, (call, words) in INPUTS.items()}
WRONG |= {name: (call, CaptureError, words) for name, (call, words) in CAPTURES.items()} | OTHERS


FUNCTIONS = [n for n in torchedge.__all__ if isinstance(getattr(torchedge, n), types.FunctionType)]
METHODS = [
    torchedge.Predictor, torchedge.Predictor.predict, torchedge.Predictor.predict_many, torchedge.Trainer,
    torchedge.Trainer.step, torchedge.Prediction.fits, torchedge.Prediction.max_batch_size,
    torchedge.Bundle.run, torchedge.Bundle.generate, torchedge.TrainingStep, torchedge.PruningSpace,
    torchedge.OFAResNet50Space,
]  # fmt: skip


@pytest.mark.parametrize("call", [*[getattr(torchedge, name) for name in FUNCTIONS], *METHODS])
def test_an_unknown_argument_is_refused_by_name_everywhere(call):
    with pytest.raises(InputError, match=f"{call.__qualname__} has no argument 'bach_size'; ") as caught:
        call(bach_size=8)
    judged(str(caught.value))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"devcie": 0}, "takes device, profile, tuner: did you mean device?"),
        ({"profile": "no"}, "the option profile is 'no'; expected True or False"),
        ({"tuner": "modle"}, "expected one of fixed, model, measured: did you mean model?"),
        (["device"], "options is ['device']; expected a dict with any of device, profile, tuner"),
    ],
)
def test_a_wrong_option_of_compiled_models_is_named(options, words):
    with pytest.raises(InputError) as caught:
        compile_graph(torch.fx.symbolic_trace(nn.ReLU()), [X], options=options)
    assert words in str(caught.value)


@pytest.mark.sampled(40)
@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_call_is_one_sentence(case, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    call, kind, words = WRONG[case]
    with pytest.raises(kind) as caught:
        call()
    assert words in judged(str(caught.value))
    assert list(tmp_path.iterdir()) == []
