"""What tinygrad does in `benchmarks/lowering_tinygrad.py`, which starts it.

    DEV=CL python benchmarks/tinygrad_models.py resnet18 START.npz --opencl libOpenCL.so.1

Runs in an environment of its own, with tinygrad and numpy and nothing else; the same file serves tinygrad
0.10 and 0.14. Layers bear torchvision's names, so that START.npz (parameters and buffers, `images`, `labels`)
gives it PyTorch's start. Each line read from the standard input is a number of steps to make; each line
written is JSON: the seconds of each step and its results. A training step is TinyJit's replay of loss,
backward and SGD with momentum, and ends when its result, the loss, is on the host.
"""

from __future__ import annotations

import argparse
import ctypes.util
import json
import os
import sys

import numpy as np
from harness import timed_steps

LEARNING_RATE, MOMENTUM = 0.01, 0.9
INVERTED = (  # expansion, channels, blocks, stride of the first: table 2 of the MobileNetV2 paper
    *((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2)),
    *((6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)),
)


def point_to_opencl(library: str | None) -> None:
    """Have tinygrad load this libOpenCL: 0.14 reads a variable, 0.10 asks ctypes."""
    if library is None:
        return
    os.environ["OPENCL_PATH"] = library
    os.environ.setdefault("PYOPENCL_HOME", os.path.dirname(library))  # pyopencl's loader crashes without
    find = ctypes.util.find_library
    ctypes.util.find_library = lambda name: library if name == "OpenCL" else find(name)


def convolution(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> object:
    """Return a convolution that keeps the size (but for its stride) and has no bias."""
    from tinygrad import nn

    return nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, groups=groups, bias=False)


def normalization(channels: int) -> object:
    """Return a batch norm whose statistics are plain numbers also where IMAGE=2 makes images of sums."""
    from tinygrad import dtypes, nn

    class Normalization(nn.BatchNorm2d):
        def calc_stats(self, x):  # noqa: ANN001, ANN202
            return tuple(each.cast(dtypes.float32) for each in super().calc_stats(x))

    return Normalization(channels)


class Residual:
    """Two 3x3 convolutions beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        self.conv1, self.bn1 = convolution(inputs, outputs, 3, stride), normalization(outputs)
        self.conv2, self.bn2 = convolution(outputs, outputs, 3), normalization(outputs)
        changes = stride != 1 or inputs != outputs
        self.downsample = [convolution(inputs, outputs, 1, stride), normalization(outputs)] if changes else []

    def __call__(self, x):  # noqa: ANN001, ANN204
        """Return the block's output, N C H W."""
        inner = self.bn1(self.conv1(x)).relu()
        return (self.bn2(self.conv2(inner)) + x.sequential(self.downsample)).relu()


class ResNet18:
    """ResNet-18 for N 3 H W images."""

    def __init__(self, classes: int) -> None:
        from tinygrad import nn

        self.conv1, self.bn1 = convolution(3, 64, 7, 2), normalization(64)
        self.layer1 = [Residual(64, 64, 1), Residual(64, 64, 1)]
        self.layer2 = [Residual(64, 128, 2), Residual(128, 128, 1)]
        self.layer3 = [Residual(128, 256, 2), Residual(256, 256, 1)]
        self.layer4 = [Residual(256, 512, 2), Residual(512, 512, 1)]
        self.fc = nn.Linear(512, classes)

    def __call__(self, x):  # noqa: ANN001, ANN204
        """Return logits, N by classes."""
        x = self.bn1(self.conv1(x)).relu()
        x = x.pad((1, 1, 1, 1), value=-float("inf")).max_pool2d((3, 3), stride=2)
        x = x.sequential([*self.layer1, *self.layer2, *self.layer3, *self.layer4])
        return self.fc(x.mean((2, 3)))


class Inverted:
    """Inverted residual: widen, filter each channel, narrow."""

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int) -> None:
        wide = inputs * expansion
        self.adds = stride == 1 and inputs == outputs
        widen = [[convolution(inputs, wide, 1), normalization(wide)]] if expansion != 1 else []
        each = [convolution(wide, wide, 3, stride, groups=wide), normalization(wide)]
        self.conv = [*widen, each, convolution(wide, outputs, 1), normalization(outputs)]

    def __call__(self, x):  # noqa: ANN001, ANN204
        """Return the block's output, N C H W."""
        inner = x
        for layers in self.conv[:-2]:
            inner = inner.sequential(layers).relu6()
        inner = inner.sequential(self.conv[-2:])
        return x + inner if self.adds else inner


class MobileNetV2:
    """MobileNetV2 of width 1 for N 3 H W images; dropout is left out on all sides."""

    def __init__(self, classes: int) -> None:
        from tinygrad import nn

        self.features = [[convolution(3, 32, 3, 2), normalization(32)]]
        inputs = 32
        for expansion, outputs, blocks, stride in INVERTED:
            for block in range(blocks):
                self.features.append(Inverted(inputs, outputs, stride if block == 0 else 1, expansion))
                inputs = outputs
        self.features.append([convolution(inputs, 1280, 1), normalization(1280)])
        self.classifier = [lambda x: x, nn.Linear(1280, classes)]

    def __call__(self, x):  # noqa: ANN001, ANN204
        """Return logits, N by classes."""
        x = x.sequential(self.features[0]).relu6()
        x = x.sequential(self.features[1:-1])
        x = x.sequential(self.features[-1]).relu6()
        return x.mean((2, 3)).sequential(self.classifier)


MODELS = {"resnet18": ResNet18, "mobilenet_v2": MobileNetV2}


def training(name: str, start: dict[str, np.ndarray]):  # noqa: ANN201
    """Return a function that makes one training step, with the batch's statistics, and returns its loss."""
    from tinygrad import Tensor, TinyJit, nn

    if hasattr(Tensor, "train"):  # 0.10
        Tensor.training = True
    else:
        from tinygrad.helpers import TRAINING

        TRAINING.value = 1
    classes = next(array for key, array in start.items() if key in ("fc.bias", "classifier.1.bias"))
    model = MODELS[name](len(classes))
    state = nn.state.get_state_dict(model)
    missing = {key for key in start if not key.endswith("num_batches_tracked")} - state.keys()
    if missing - {"images", "labels"}:
        raise SystemExit(f"tinygrad's {name} lacks {sorted(missing)[:3]}")
    for key, tensor in state.items():
        if not key.endswith("num_batches_tracked"):
            tensor.assign(Tensor(start[key])).realize()
    optimizer = nn.optim.SGD(nn.state.get_parameters(model), lr=LEARNING_RATE, momentum=MOMENTUM)
    images, labels = Tensor(start["images"]).realize(), Tensor(start["labels"]).realize()

    @TinyJit
    def step(x, y):  # noqa: ANN001, ANN202
        optimizer.zero_grad()
        loss = model(x).sparse_categorical_crossentropy(y)
        loss.backward()
        return loss.realize(*optimizer.schedule_step())

    return lambda: step(images, labels).item()


def main() -> None:
    """Build what is asked for; make as many steps as each line of the input says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("job", choices=MODELS)
    parser.add_argument("start", help=".npz with parameters, buffers, images, labels")
    parser.add_argument("--opencl", help="libOpenCL.so to load")
    arguments = parser.parse_args()
    point_to_opencl(arguments.opencl)
    with np.load(arguments.start, allow_pickle=False) as arrays:
        start = dict(arrays)
    run = timed_steps(training(arguments.job, start))
    for line in sys.stdin:
        seconds, results = run(int(line))
        print(json.dumps({"seconds": seconds, "results": results}), flush=True)


if __name__ == "__main__":
    main()
