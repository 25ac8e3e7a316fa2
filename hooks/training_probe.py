#!/usr/bin/env python3
"""Measures training steps and inferences of networks on the machine it runs on; needs only PyTorch.

    python3 training_probe.py JOBS.jsonl [--out ROWS.jsonl] [--device cuda|cpu]

One file, Python 3.6 or newer, PyTorch 1.6 or newer, POSIX; torchedge is not needed. JOBS ("-": standard
input) has one network a line:

    {"id": "resnet18-random-50", "input_size": [3, 224, 224], "optimizer": "sgd-momentum",
     "build": {"library": "torchvision", "name": "resnet18", "kwargs": {}},      or {"nodes": [...]}
     "points": [["infer", 1], ["train", 2], ["train", 16]]}

and the output has one row a line: "environment" first, then "start" and "point" for each point. Memory is in
MiB (2^20 bytes), time in ms. Each network runs in its own process, forked before CUDA starts, inference
before training, batch sizes ascending. A training step is zero_grad, forward, cross entropy, backward and the
optimizer's update (perf4sight, section 4 and appendix A); inference is a forward pass in eval mode.

A model of the transformers library is built from its configuration, with random weights, and reads inputs
by name: token numbers below a limit, or normal random numbers without one. Other keys are settings, all
optional:

    {"id": "gpt2", "build": {"library": "transformers", "name": "GPT2LMHeadModel", "config": {"n_layer": 6}},
     "inputs": {"input_ids": {"shape": ["batch", 128], "below": 50257}, "labels": ...}, "loss": "model",
     "dtype": "bfloat16", "amp": "bfloat16", "channels_last": true, "checkpointing": true,
     "frozen": {"share": 0.9, "way": "leading" or "scattered"}, "optimizer_options": {"fused": true},
     "limit_share": 0.9, "compile": true or a mode of torch.compile, "accumulation": 4,
     "inputs_require_grads": true, "points": [["train", 4]]}

A "build" may also name the "dtype" of the weights and adapters of peft, {"lora": {"r": 8, ...}}, which keep
their own dtype. "loss": "model" is the one the model returns. Frozen are the parameters ahead of the one
with which that share of the elements is reached, or all but every tenth tensor. "limit_share" allows PyTorch
that share of the memory that the last point of the process reserved. Successive jobs of one build share a
process and a model.

Memory (Γ, γ) is the device memory of the run, with context and libraries: NVML's used memory minus the used
memory before the process opened the GPU; /proc/meminfo (MemTotal - MemFree - Buffers - Cached, minus the idle
system) if CPU and GPU share the memory; peak resident memory on a CPU. A point that runs out of memory
is a row with "fits": 0, and the probe continues.

With --wave N, N processes prepare their networks side by side (build them and run a step of every job), wait
for each other, and measure in turn while all others sleep; Γ is then NVML's figure of the process. Every row
has "launch_us", the host's time for one of 2,000 launches of a tiny kernel, and "step_us", its time for a
training step of 16 tiny layers, both measured just before the point.
With --memory other processes may use the GPU: a point is a few steps, and only its memory means anything.
"host_ms" is the host's time for the launches of one step, after which it would wait for the device;
"host_phases_ms" are its parts: zero_grad and forward, backward (of each batch of "accumulation"), update.
"""

import argparse
import contextlib
import fcntl
import gc
import hashlib
import itertools
import json
import operator
import os
import platform
import select
import signal
import statistics
import sys
import tempfile
import time
import warnings

VERSION = "training_probe 2"
MIB = 2.0**20
WARMUP, TIMED = [3, 12, 20.0], [5, 15, 4.0]
HURRY = [2, 3, 0.2], [4, 12, 0.2]
FEW = [1, 2, 0.0], [2, 2, 0.0]
"""Fewest and most steps, and after how many seconds the fewest are enough."""
LAUNCHES = 2000
STEADY = 0.03


# memory and clocks ------------------------------------------------------------------------------------------


def meminfo():
    """Return the used system memory (appendix A) and the total, in MiB."""
    mib = {}
    with open("/proc/meminfo") as file:
        for line in file:
            name, _, amount = line.partition(":")
            mib[name] = int(amount.split()[0]) / 1024.0
    return mib["MemTotal"] - mib["MemFree"] - mib["Buffers"] - mib["Cached"], mib["MemTotal"]


def status_mib(field):
    """Return a field of /proc/self/status in MiB, or None."""
    with contextlib.suppress(OSError, ValueError), open("/proc/self/status") as file:
        for line in file:
            if line.startswith(field):
                return int(line.split()[1]) / 1024.0
    return None


class Nvml:
    """Used memory, clock and throttling of the GPU that CUDA calls device 0."""

    name = "nvml"

    def __init__(self):
        import pynvml

        self.nvml = pynvml
        pynvml.nvmlInit()
        first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip() or "0"
        if first.isdigit():
            self.handle = pynvml.nvmlDeviceGetHandleByIndex(int(first))
        else:
            self.handle = pynvml.nvmlDeviceGetHandleByUUID(first.encode())
        self.used()

    def used(self):
        """Return the used MiB of all processes; raises if the GPU has no memory of its own."""
        return self.nvml.nvmlDeviceGetMemoryInfo(self.handle).used / MIB

    def used_by(self, process):
        """Return the used MiB of one process, 0 before it opens the GPU; None if NVML does not tell."""
        for entry in self.nvml.nvmlDeviceGetComputeRunningProcesses(self.handle):
            if entry.pid == process:
                return None if entry.usedGpuMemory is None else entry.usedGpuMemory / MIB
        return 0.0

    def total(self):
        """Return MiB of the GPU."""
        return self.nvml.nvmlDeviceGetMemoryInfo(self.handle).total / MIB

    def clock(self):
        """Return the clock of the multiprocessors in MHz, or None."""
        with contextlib.suppress(self.nvml.NVMLError):
            return self.nvml.nvmlDeviceGetClockInfo(self.handle, self.nvml.NVML_CLOCK_SM)
        return None

    def throttled(self):
        """Return 1 if heat or power lower the clock, 0 if not, None if unknown."""
        names = ("SwThermalSlowdown", "HwThermalSlowdown", "HwPowerBrakeSlowdown", "SwPowerCap", "HwSlowdown")
        mask = 0
        for name in names:
            mask |= getattr(self.nvml, "nvmlClocksThrottleReason" + name, 0)
        with contextlib.suppress(self.nvml.NVMLError, AttributeError):
            reasons = self.nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self.handle)
            return int(bool(reasons & mask))
        return None

    def driver(self):
        """Return the driver's version."""
        version = self.nvml.nvmlSystemGetDriverVersion()
        return version.decode() if isinstance(version, bytes) else version


class Meter:
    """Device memory of this process; create it before CUDA starts."""

    def __init__(self, device, idle_mib=0.0, shared=False):
        self.device, self.gpu, self.name, self.before, self.peak = device, None, "rss", 0.0, 0.0
        if device != "cuda":
            return
        with contextlib.suppress(Exception):
            self.gpu = Nvml()
        unified = os.path.exists("/etc/nv_tegra_release") or (self.gpu is None and integrated_board())
        if unified or self.gpu is None:
            self.name = "meminfo" if unified else "torch"
        else:
            self.name = "nvml-process" if shared else "nvml"
        self.before = (
            idle_mib if self.name == "meminfo" else settled(self.gpu) if self.gpu is not None else 0.0
        )

    def sample(self):
        """Read the meter and update the peak."""
        if self.name == "nvml":
            self.peak = max(self.peak, self.gpu.used() - self.before)
        elif self.name == "nvml-process":
            self.peak = max(self.peak, self.gpu.used_by(os.getpid()) or 0.0)
        elif self.name == "meminfo":
            self.peak = max(self.peak, meminfo()[0] - self.before)
        elif self.name == "torch":
            import torch

            if hasattr(torch.cuda, "mem_get_info"):
                free, total = torch.cuda.mem_get_info()
                self.peak = max(self.peak, (total - free) / MIB)
        else:
            self.peak = max(self.peak, status_mib("VmHWM") or 0.0)

    def restart(self):
        """Reset the peak between two points."""
        self.peak = 0.0
        if self.name == "rss":
            with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
                file.write("5")

    def total(self):
        """Return MiB of the device's memory, or None."""
        if self.name.startswith("nvml"):
            return self.gpu.total()
        if self.name == "torch":
            import torch

            return torch.cuda.get_device_properties(0).total_memory / MIB
        return meminfo()[1] if os.path.exists("/proc/meminfo") else None

    def clock(self):
        """Return MHz of the GPU, or of the first core of a CPU, or None."""
        if self.gpu is not None:
            return self.gpu.clock()
        with contextlib.suppress(OSError, ValueError):
            if self.device == "cuda":  # Tegra
                for name in sorted(os.listdir("/sys/class/devfreq")):
                    if name.endswith(("gpu", "gp10b", "gv11b", "ga10b", "gm20b")):
                        with open("/sys/class/devfreq/" + name + "/cur_freq") as file:
                            return int(file.read()) / 1e6
            else:
                with open("/sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq") as file:
                    return int(file.read()) / 1e3
        return None


def integrated_board():
    """Return whether CPU and GPU of the board share memory (a Jetson, by its device tree)."""
    with contextlib.suppress(OSError), open("/proc/device-tree/model", "rb") as file:
        return b"jetson" in file.read().lower()
    return False


def settled(gpu):
    """Return the used memory once two readings agree: a process that just ended may still free some."""
    last = gpu.used()
    for _ in range(100):
        time.sleep(0.01)
        now = gpu.used()
        if now == last:
            break
        last = now
    return last


# networks ---------------------------------------------------------------------------------------------------

LAYERS = (
    "Conv1d Conv2d Conv3d ConvTranspose2d BatchNorm1d BatchNorm2d GroupNorm LayerNorm Linear Identity "
    "Flatten MaxPool2d AvgPool2d AdaptiveAvgPool2d AdaptiveMaxPool2d Dropout Dropout2d ReLU ReLU6 "
    "LeakyReLU PReLU ELU GELU SiLU Hardswish Hardsigmoid Hardtanh Sigmoid Tanh Softmax Softplus Mish "
    "ChannelShuffle PixelShuffle Upsample ZeroPad2d LocalResponseNorm StochasticDepth"
).split()
OPERATORS = "add sub mul truediv floordiv getitem iadd isub imul neg".split()
TORCH_FUNCTIONS = "cat flatten unsqueeze squeeze add mul sub mean sigmoid tanh chunk split transpose".split()
FUNCTIONS = (
    "relu relu6 gelu silu hardswish hardsigmoid leaky_relu softmax dropout adaptive_avg_pool2d avg_pool2d "
    "max_pool2d pad interpolate layer_norm linear scaled_dot_product_attention"
).split()
METHODS = (
    "size view squeeze mean flatten reshape permute transpose contiguous unsqueeze chunk split add add_ "
    "mul mul_ sigmoid expand sum"
).split()


def stochastic_depth(p, mode):
    """Return torchvision's layer: in training it drops samples ("row") or the batch with probability p."""
    import torch

    if not 0 <= p <= 1 or mode not in ("row", "batch"):
        raise ValueError("p is {} and mode {!r}; expected 0 to 1 and row or batch".format(p, mode))

    class StochasticDepth(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.p, self.mode = p, mode

        def forward(self, x):
            if not self.training or self.p == 0:
                return x
            size = [x.shape[0] if self.mode == "row" else 1] + [1] * (x.dim() - 1)
            noise = torch.empty(size, dtype=x.dtype, device=x.device).bernoulli_(1 - self.p)
            if self.p < 1:
                noise.div_(1 - self.p)
            return x * noise

    return StochasticDepth()


def names_read(item):
    """Return the names of the nodes that an argument reads."""
    if isinstance(item, dict):
        return [item["node"]] if "node" in item else [n for v in item.values() for n in names_read(v)]
    return [n for v in item for n in names_read(v)] if isinstance(item, list) else []


def topology(nodes, note=None):
    """Return a module that runs a list of nodes: layers, functions and methods by name, nothing else.

    note: called with each node's name and its result.
    """
    import torch

    def find(name):
        if name in OPERATORS:
            return getattr(operator, name)
        if name in FUNCTIONS:
            return getattr(torch.nn.functional, name)
        if name in TORCH_FUNCTIONS:
            return getattr(torch, name)
        raise ValueError("function {!r} is not known".format(name))

    def value(item, results):
        if isinstance(item, dict):
            if "node" in item:
                return results[item["node"]]
            if "slice" in item:
                return slice(*[value(i, results) for i in item["slice"]])
            return {k: value(v, results) for k, v in item.items()}
        return [value(i, results) for i in item] if isinstance(item, list) else item

    last = {}
    for position, node in enumerate(nodes):
        for name in names_read([node.get("args", []), node.get("kwargs", {})]):
            last[name] = position

    def layer(node):
        if node["type"] not in LAYERS:
            raise ValueError("layer {!r} is not known".format(node["type"]))
        options = {k: tuple(v) if isinstance(v, list) else v for k, v in node.get("kwargs", {}).items()}
        special = node["type"] == "StochasticDepth"
        make = stochastic_depth if special else getattr(torch.nn, node["type"])
        try:
            return make(**options)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError("node {name!r} ({type}) is not valid: {}".format(error, **node)) from error

    class Topology(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleDict()
            for node in nodes:
                if node["op"] == "module":
                    self.layers[node["name"].replace(".", "_")] = layer(node)

        def forward(self, x):
            results = {}
            for position, node in enumerate(nodes):
                op = node["op"]
                if op == "input":
                    results[node["name"]] = x
                    del x
                    continue
                args = value(node.get("args", []), results)
                if op == "output":
                    return args[0]
                kwargs = value(node.get("kwargs", {}), results) if op != "module" else {}
                for used in [n for n in results if last.get(n) == position]:
                    del results[used]  # as in code whose variables are overwritten
                if op == "module":
                    result = self.layers[node["name"].replace(".", "_")](*args)
                elif op == "function":
                    if node["target"] == "getitem" and isinstance(args[1], list):
                        args[1] = tuple(args[1])
                    result = find(node["target"])(*args, **kwargs)
                elif op == "method" and node["target"] in METHODS:
                    result = getattr(args[0], node["target"])(*args[1:], **kwargs)
                else:
                    raise ValueError("node {!r} is not known".format(node))
                if note is not None:
                    note(node["name"], result)
                results[node["name"]] = result
                del args, kwargs, result
            raise ValueError("the list of nodes has no output")

    return Topology()


def build(recipe):
    """Return the network of a job, with random weights, on the CPU."""
    if "nodes" in recipe:
        return topology(recipe["nodes"])
    name, kwargs = recipe["name"], recipe.get("kwargs", {})
    library = load(recipe["library"])
    if recipe["library"] == "torchvision":
        return getattr(library.models, name)(**kwargs)
    if recipe["library"] == "transformers":
        kind = getattr(library, name)
        return adapted(kind(kind.config_class(**recipe["config"])), recipe)
    return library.create_model(name, **kwargs)


def adapted(model, recipe):
    """Return a model in the dtype of its recipe, with the adapters of peft that this names, if any."""
    import torch

    if "dtype" in recipe:
        model = model.to(getattr(torch, recipe["dtype"]))
    if "lora" in recipe:
        peft = __import__("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(**recipe["lora"]))
    return model


def load(name):
    """Return torchvision or timm; torchvision's networks do not need its compiled operators."""
    if name not in LIBRARIES:
        raise ValueError("library is {!r}; expected one of {}".format(name, ", ".join(LIBRARIES)))
    try:
        return __import__(name)
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
    import torch

    for module in [n for n in sys.modules if n.split(".")[0] in LIBRARIES]:
        del sys.modules[module]
    library = torch.library.Library("torchvision", "DEF")
    for operation in (
        "nms(Tensor a, Tensor b, float c) -> Tensor",
        "qnms(Tensor a, Tensor b, float c) -> Tensor",
    ):
        library.define(operation)
    KEPT.append(library)
    return __import__(name)


LIBRARIES = ("torchvision", "timm", "transformers")

KEPT = []
"""References to libraries of declared operators, which end with their last reference."""


def make_optimizer(name, parameters, options=None):
    """Return the optimizer a job names, with more arguments (such as fused), or None."""
    import torch

    options = options or {}
    if name == "none":
        return None
    if name in ("sgd", "sgd-momentum"):
        momentum = 0.9 if name == "sgd-momentum" else 0.0
        return torch.optim.SGD(parameters, lr=1e-4, momentum=momentum, weight_decay=5e-4, **options)
    kinds = {"adam": "Adam", "adamw": "AdamW", "adafactor": "Adafactor"}
    if name in kinds:
        return getattr(torch.optim, kinds[name])(parameters, lr=1e-4, **options)
    known = ", ".join(("none", "sgd", "sgd-momentum") + tuple(kinds))
    raise ValueError("optimizer is {!r}; expected one of {}".format(name, known))


# one point --------------------------------------------------------------------------------------------------


class Clock:
    """Marks on the device's time line, read in ms afterwards."""

    def __init__(self, device):
        self.cuda = device == "cuda"

    def mark(self):
        """Return a mark of now."""
        if not self.cuda:
            return time.perf_counter()
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self):
        """Wait for the device to finish."""
        if self.cuda:
            import torch

            torch.cuda.synchronize()

    def between(self, start, end):
        """Return the ms from one mark to another."""
        return start.elapsed_time(end) if self.cuda else 1e3 * (end - start)


class Layers:
    """Forward and backward times of every layer of one step, and the memory at every hook."""

    def __init__(self, model, clock, meter):
        self.model, self.clock, self.meter = model, clock, meter
        self.starts, self.forward, self.backward, self.handles = {}, [], [], []

    def __enter__(self):
        for path, module in self.model.named_modules():
            if not list(module.children()):
                self.handles.append(module.register_forward_pre_hook(self._before(path)))
                self.handles.append(module.register_forward_hook(self._after(path)))
        return self

    def __exit__(self, *_):
        for handle in self.handles:
            handle.remove()

    def _look(self):
        if self.meter.name == "meminfo":
            self.meter.sample()

    def _before(self, path):
        def hook(*_):
            self._look()
            self.starts[path] = self.clock.mark()

        return hook

    def _after(self, path):
        def hook(_module, _inputs, output):
            if path in self.starts:
                self.forward.append((path, self.starts.pop(path), self.clock.mark()))
            made_by = getattr(output, "grad_fn", None)
            if made_by is not None:
                made_by.register_hook(self._done(path))

        return hook

    def _done(self, path):
        def hook(*_):
            self._look()
            self.backward.append((path, self.clock.mark()))

        return hook

    def times(self, backward_start):
        """Return [path, forward ms, backward ms or None] a layer; backward runs from the layer behind it."""
        behind, back = backward_start, {}
        for path, mark in self.backward:
            back[path] = back.get(path, 0.0) + self.clock.between(behind, mark)
            behind = mark
        fore = {}
        for path, start, end in self.forward:
            fore[path] = fore.get(path, 0.0) + self.clock.between(start, end)
        return [[p, short(ms), short(back.get(p))] for p, ms in fore.items()]


def short(number, digits=4):
    """Round to significant digits; None stays."""
    return None if number is None else float("{:.{}g}".format(number, digits))


def scores(output):
    """Return the float tensors that a loss reads, with auxiliary outputs."""
    import torch

    logits = getattr(output, "logits", None)
    if isinstance(logits, torch.Tensor) and not isinstance(output, tuple):
        return [logits]
    if isinstance(output, dict):
        output = list(output.values())
    items = output if isinstance(output, (list, tuple)) else [output]
    return [t for t in items if isinstance(t, torch.Tensor) and t.is_floating_point()]


def arrange(model, job):
    """Switch checkpoints on or off and freeze parameters as a job says; return all parameters."""
    if hasattr(model, "gradient_checkpointing_enable"):
        model.gradient_checkpointing_disable()
        if hasattr(model, "disable_input_require_grads"):  # which enabling leaves in the embeddings
            model.disable_input_require_grads()
        if job.get("checkpointing"):
            model.gradient_checkpointing_enable()
    if job.get("inputs_require_grads"):
        model.enable_input_require_grads()
    parameters, frozen = list(model.parameters()), job.get("frozen")
    trainable = model.__dict__.setdefault("probe_trainable", [p.requires_grad for p in parameters])
    total, before = sum(p.numel() for p in parameters), 0
    for place, parameter in enumerate(parameters):
        trained = True
        if frozen is not None:
            ahead = before + parameter.numel() <= frozen["share"] * total
            trained = place % 10 == 9 if frozen["way"] == "scattered" else not ahead
        parameter.requires_grad_(trained and trainable[place])
        before += parameter.numel()
    return parameters


def ready(model, job, device, form):
    """Return the model on the device in the dtype and layout of a job, and these; as a new process has it."""
    import torch

    wanted = (job.get("dtype", job["build"].get("dtype", "float32")), bool(job.get("channels_last")))
    if form != wanted:
        if form is not None:
            model = model.cpu()
            clean(model, device)
        layout = torch.channels_last if wanted[1] else torch.contiguous_format
        if "dtype" not in job["build"]:  # else its adapters have a dtype of their own
            model = model.to(getattr(torch, wanted[0]))
        model = model.to(memory_format=layout) if form is not None or wanted[1] else model
        model = model.to(device)
    return model, wanted


class Work:
    """One network at one batch size in one mode, ready to run."""

    def __init__(self, model, job, mode, batch, device, clock):
        import torch

        self.torch, self.model, self.train, self.clock, self.job = torch, model, mode == "train", clock, job
        self.device, self.call = device, model
        way = job.get("compile")
        if way:  # kept with the model, so that a point is compiled once
            compiled = model.__dict__.setdefault("probe_compiled", {})
            if way not in compiled:
                options = {} if way is True else {"mode": way}
                compiled[way] = torch.compile(model, dynamic=False, **options)
            self.call = compiled[way]
        model.train(self.train)
        parameters = arrange(model, job)
        self.x, self.named = None, {}
        if "inputs" in job:
            self.named = {name: self.input(form, batch) for name, form in job["inputs"].items()}
        else:
            self.x = self.input({"shape": ["batch"] + job["input_size"]}, batch)
        self.y, self.optimizer, self.backward_start = None, None, None
        if self.train:
            trained = [p for p in parameters if p.requires_grad]
            name, options = job.get("optimizer", "sgd-momentum"), job.get("optimizer_options", {})
            self.optimizer = make_optimizer(name, trained, options)

    def input(self, form, batch):
        """Return a random input of a form: {"shape": [...], "below": limit of whole numbers, if they are}."""
        shape = [batch if side == "batch" else side for side in form["shape"]]
        if "below" in form:
            return self.torch.randint(0, form["below"], shape).to(self.device)
        x = self.torch.randn(*shape).to(self.device)
        if self.job.get("channels_last") and len(shape) == 4:
            x = x.contiguous(memory_format=self.torch.channels_last)
        return x.to(next(self.model.parameters()).dtype)

    def forward(self):
        """Return the outputs, or in training the loss."""
        output = self.call(**self.named) if self.x is None else self.call(self.x)
        if not self.train:
            return output
        return output.loss if self.job.get("loss") == "model" else self.loss(output)

    def autocast(self):
        """Return the context of a forward pass."""
        amp = self.job.get("amp")
        if amp is None:
            return contextlib.ExitStack()
        return self.torch.autocast(self.device, dtype=getattr(self.torch, amp))

    def loss(self, output):
        """Return the cross entropy over classes (dimension 1), or the mean of other outputs."""
        torch, total = self.torch, 0.0
        tensors = scores(output)
        del output
        for t in tensors:
            if t.dim() in (2, 4) and t.shape[1] > 1:
                if self.y is None:
                    shape = (t.shape[0],) + tuple(t.shape[2:])
                    self.y = torch.randint(0, t.shape[1], shape, device=t.device)
                total = total + torch.nn.functional.cross_entropy(t, self.y)
            else:
                total = total + t.mean()
        return total

    def run(self):
        """Run one step; return the marks of its start and end. ticks: the host's clock at its phases."""
        start, self.ticks = self.clock.mark(), [time.perf_counter()]
        if not self.train:
            with self.torch.no_grad(), self.autocast():
                self.forward()
            return start, self.clock.mark()
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        else:
            self.model.zero_grad()
        batches = self.job.get("accumulation", 1)
        for _ in range(batches):
            with self.autocast():
                loss = self.forward()
            self.ticks.append(time.perf_counter())
            self.backward_start = self.clock.mark()
            (loss if batches == 1 else loss / batches).backward()
            self.ticks.append(time.perf_counter())
        if self.optimizer is not None:
            self.optimizer.step()
        return start, self.clock.mark()

    def warm_up(self):
        """Run until two successive steps take the same time, at most 12 steps or 20 seconds.

        CUDA graphs are recorded in two steps before.
        """
        begun, last, before = time.perf_counter(), None, 2 * replayed(self.job)
        for step in range(-before, WARMUP[1]):
            since = time.perf_counter()
            self.run()
            self.clock.wait()
            took = time.perf_counter() - since
            steady = last is not None and abs(took - last) <= STEADY * last
            enough = step + 1 >= WARMUP[0] and steady
            if enough or (step > 0 and time.perf_counter() - begun > WARMUP[2]):
                break
            last = took

    def timed(self):
        """Return the ms of several steps in a row."""
        begun, marks, took = time.perf_counter(), [], 0.0
        for step in range(TIMED[1]):
            marks.append(self.run())
            if step == 0:
                self.clock.wait()
                took = time.perf_counter() - begun
            if step + 1 >= TIMED[0] and (step + 1) * took > TIMED[2]:
                break
        self.clock.wait()
        return [self.clock.between(start, end) for start, end in marks[1:]]

    def launched(self):
        """Return the ms that the host needs to launch a step on an idle device, the shortest of three.

        First of all of it, then of its phases: forward (with zero_grad) and backward of each batch, update.
        """
        took = []
        for _ in range(3):
            self.clock.wait()
            begun = time.perf_counter()
            self.run()
            ticks = self.ticks + [time.perf_counter()]
            phases = [1000 * (ticks[k] - ticks[k - 1]) for k in range(1, len(ticks))]
            took.append([1000 * (ticks[-1] - begun)] + phases)
        self.clock.wait()
        return [short(ms, 6) for ms in min(took)]


def replayed(job):
    """Return whether a job's mode of torch.compile replays CUDA graphs."""
    return job.get("compile") in ("reduce-overhead", "max-autotune")


def launches(device):
    """Return the µs that the host needs to launch a tiny kernel."""
    import torch

    x = torch.zeros(1, device=device)
    for _ in range(LAUNCHES // 10):
        x.add_(1.0)
    Clock(device).wait()
    begun = time.perf_counter()
    for _ in range(LAUNCHES):
        x.add_(1.0)
    took = time.perf_counter() - begun
    Clock(device).wait()
    return short(1e6 * took / LAUNCHES)


def steps(device):
    """Return the µs that the host needs for a training step of 16 tiny layers, the median of ten rounds."""
    import torch

    layers = [torch.nn.Linear(16, 16) for _ in range(16)]
    model = torch.nn.Sequential(*[part for layer in layers for part in (layer, torch.nn.ReLU())]).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    x, took = torch.randn(4, 16, device=device), []
    for _ in range(11):
        begun = time.perf_counter()
        for _ in range(3):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
        took.append(time.perf_counter() - begun)
        Clock(device).wait()
    return short(1e6 * statistics.median(took[1:]) / 3, 6)


def prepare(jobs, device):
    """Return the network of jobs and its form after a step of each job: libraries load kernels when used."""
    import torch

    model, form = None, None
    with contextlib.suppress(Exception):  # what fails here fails again, and is told, when it is measured
        try:
            with torch.device(device):  # where random numbers are drawn fast
                model = build(jobs[0]["build"]).cpu()
        except Exception:  # some networks compute on the CPU while they are built
            model = build(jobs[0]["build"])
        clean(model, device)
        for job in reversed(jobs):
            with contextlib.suppress(Exception):
                model, form = ready(model, job, device, form)
                mode, batch = job["points"][0]
                Work(model, job, mode, batch, device, Clock(device)).run()
            clean(model, device)
    return model, form


def measure(model, job, mode, batch, device, meter):
    """Return the figures of one point."""
    import torch

    clock = Clock(device)
    meter.restart()
    work = Work(model, job, mode, batch, device, clock)
    work.warm_up()
    meter.sample()
    if device == "cuda" and not replayed(job):  # memory of CUDA graphs counts when they are recorded alone
        torch.cuda.reset_peak_memory_stats()
    times = sorted(work.timed())
    mhz, throttled = meter.clock(), meter.gpu.throttled() if meter.gpu is not None else None
    meter.sample()
    row = {"fits": 1, "reason": "", "steps": len(times), "clock_mhz": mhz, "throttled": throttled}
    row["latency_ms"] = short(statistics.median(times), 6)
    row["latency_p10_ms"] = short(times[int(0.1 * (len(times) - 1))], 6)
    row["latency_p90_ms"] = short(times[-1 - int(0.1 * (len(times) - 1))], 6)
    for name in ("allocated", "reserved"):
        row[name + "_mib"] = None
        if device == "cuda":
            row[name + "_mib"] = round(getattr(torch.cuda, "max_memory_" + name)() / MIB, 3)
    if not job.get("compile"):  # a hook would have the model compiled again
        with Layers(model, clock, meter) as layers:
            work.run()
        clock.wait()
        row["layers"] = layers.times(work.backward_start)
    row["memory_mib"] = round(meter.peak, 3) or None
    if device == "cuda":  # a CPU launches and computes in turn
        row["host_ms"], *row["host_phases_ms"] = work.launched()
    return row


def clean(model, device):
    """Free everything but the weights, so that the next point starts as in a new process."""
    import torch

    for parameter in model.parameters():
        parameter.grad = None
    gc.collect()
    if device == "cuda":
        clear_workspaces()
        torch.cuda.empty_cache()
        reset = getattr(torch.cuda, "reset_peak_memory_stats", None)
        if reset is not None:
            reset()
    with contextlib.suppress(ImportError, OSError, AttributeError):
        import ctypes  # glibc keeps freed memory, which would count for the next point

        ctypes.CDLL(None).malloc_trim(0)


def clear_workspaces():
    """Free the workspaces that cuBLAS keeps for each thread."""
    import torch

    if hasattr(torch._C, "_cuda_clearCublasWorkspaces"):
        torch._C._cuda_clearCublasWorkspaces()


def keep_heap():
    """Let glibc keep what is freed, as in a process that has trained for a while.

    A fresh one returns large blocks to the system and takes them again in every step: a small network may
    take four times as long, mostly for page faults. Blocks above 32 MiB are returned by every process.
    """
    with contextlib.suppress(ImportError, OSError, AttributeError):
        import ctypes

        libc, trim_threshold, mmap_threshold = ctypes.CDLL(None), -1, -3
        libc.mallopt(trim_threshold, 2**30)
        libc.mallopt(mmap_threshold, 32 * 2**20)


NOTHING = dict.fromkeys(
    (
        "memory_mib allocated_mib reserved_mib latency_ms latency_p10_ms latency_p90_ms host_ms "
        "host_phases_ms steps clock_mhz throttled layers"
    ).split()
)


def run_jobs(jobs, device, idle_mib, emit, turn=None, shared=False):
    """Measure all points of jobs with one build; runs in the child. turn: a file to lock before measuring.

    shared: other processes use the GPU.
    """
    warnings.filterwarnings("ignore")
    meter = Meter(device, idle_mib, shared)
    if device == "cpu":
        keep_heap()
    import torch

    torch.manual_seed(0)
    model, form, reserved = None, None, None
    getattr(gc, "freeze", gc.collect)()  # else collections read the libraries' objects every time
    if turn is not None:
        torch.set_num_threads(1)  # the others' cores
        model, form = prepare(jobs, device)
        emit({"row": "prepared"})
        lock = open(turn)
        fcntl.flock(lock, fcntl.LOCK_EX)  # until the process ends
    for job in jobs:
        failed = {}
        for mode, batch in sorted(job["points"], key=lambda p: (p[0] != "infer", p[1])):
            label = {"job": job["id"], "mode": mode, "batch_size": batch}
            row = dict(NOTHING, row="point")
            emit(dict(label, row="start"))
            if failed.get(mode, 0) >= 2:
                row.update(fits=0, reason="out of memory at two smaller batch sizes")
                emit(dict(row, **label))
                continue
            try:
                model = build(job["build"]) if model is None else model
                model, form = ready(model, job, device, form)
                if device == "cuda":
                    limit = limited(job.get("limit_share"), reserved)
                    row.update({} if limit is None else {"limit_mib": round(limit, 3)})
                row["launch_us"], row["step_us"] = launches(device), steps(device)
                if device == "cuda":
                    clear_workspaces()  # which the step of tiny layers took
                    torch.cuda.empty_cache()
                row.update(measure(model, job, mode, batch, device, meter))
                reserved = row["reserved_mib"]
            except Exception as error:
                said = " ".join(str(error).split())
                if isinstance(error, MemoryError) or any(words in said for words in OUT_OF_MEMORY):
                    failed[mode] = failed.get(mode, 0) + 1
                    row.update(fits=0, reason="out of memory")
                else:
                    row.update(fits=None, reason="{}: {}".format(type(error).__name__, said)[:300])
            emit(dict(row, **label))
            if model is not None:
                clean(model, device)


OUT_OF_MEMORY = ("out of memory", "not enough memory")


def limited(share, reserved):
    """Allow PyTorch a share of the MiB reserved before (None: all memory); return the limit in MiB."""
    import torch

    total = torch.cuda.get_device_properties(0).total_memory / MIB
    if not hasattr(torch.cuda, "set_per_process_memory_fraction"):
        return None
    limit = None if share is None or reserved is None else share * reserved
    torch.cuda.set_per_process_memory_fraction(1.0 if limit is None else min(limit / total, 1.0))
    return limit


# the machine ------------------------------------------------------------------------------------------------


def environment(device, command, shared=False):
    """Return the environment row; runs in a child, since it starts CUDA."""
    import torch

    meter = Meter(device, shared=shared)
    row = {"row": "environment", "probe": VERSION, "device": device, "memory_meter": meter.name}
    if device == "cuda":
        row["device_name"] = torch.cuda.get_device_name(0)
        row["cuda"], row["cudnn"] = torch.version.cuda, torch.backends.cudnn.version()
        row["tf32"] = [
            bool(getattr(torch.backends.cudnn, "allow_tf32", False)),
            bool(getattr(torch.backends.cuda.matmul, "allow_tf32", False)),
        ]
        row["driver"] = meter.gpu.driver() if meter.gpu is not None else None
        if meter.name == "nvml-process":  # what both meters say of one process
            torch.zeros(1, device=device)
            row["context_mib"] = [meter.gpu.used() - meter.before, meter.gpu.used_by(os.getpid())]
    else:
        row["device_name"], row["threads"] = processor(), torch.get_num_threads()
    total = meter.total()
    row["memory_total_mib"] = None if total is None else round(total)
    row.update(python=platform.python_version(), torch=torch.__version__, cpu=processor())
    for name in LIBRARIES:
        with contextlib.suppress(Exception):
            row[name] = load(name).__version__
    row["machine"] = digest([row.get(k) for k in MACHINE])
    row["host"] = digest([platform.node()])
    row["kernel"] = platform.release()
    row["date"] = time.strftime("%Y-%m-%d", time.gmtime())
    row["command"] = command
    return row


MACHINE = "device_name device memory_meter torch cuda cudnn driver cpu threads python".split()
"""The fields that identify a machine."""


def digest(parts):
    """Return a short hash."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def processor():
    """Return the name of the CPU."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:
            if line.lower().startswith(("model name", "hardware")):
                return " ".join(line.partition(":")[2].split())
    return platform.processor() or platform.machine()


# processes --------------------------------------------------------------------------------------------------


class Child:
    """A forked process that runs `work(emit)`, whose rows come through a pipe."""

    def __init__(self, work):
        sys.stdout.flush()
        self.read, write = os.pipe()
        self.process, self.buffered, self.killed = os.fork(), b"", ""
        if self.process == 0:
            status = 1
            try:
                os.close(self.read)
                with os.fdopen(write, "w") as out:

                    def emit(row):
                        out.write(json.dumps(row) + "\n")
                        out.flush()

                    work(emit)
                status = 0
            except BaseException as error:
                sys.stderr.write("{}: {}\n".format(type(error).__name__, error))
            finally:
                sys.stderr.flush()
                os._exit(status)
        os.close(write)

    def rows(self):
        """Return the rows that have come, None at the end."""
        data = os.read(self.read, 1 << 16)
        if not data:
            return None
        *lines, self.buffered = (self.buffered + data).split(b"\n")
        return [json.loads(line.decode()) for line in lines]

    def kill(self, reason):
        """End the process."""
        self.killed = reason
        os.kill(self.process, signal.SIGKILL)

    def ended(self):
        """Wait for the end; return the reason of a failure, or ''."""
        os.close(self.read)
        _, status = os.waitpid(self.process, 0)
        if self.killed or not status:
            return self.killed
        signalled = os.WIFSIGNALED(status)
        return "killed by signal {}".format(os.WTERMSIG(status)) if signalled else "the process failed"


def forked(work, each, limit_s):
    """Run `work(emit)` in a child, pass each row to `each`; return the reason of a failure, or ''."""
    child = Child(work)
    try:
        while True:
            if not child.killed and not select.select([child.read], [], [], limit_s)[0]:
                child.kill("no answer within {:.0f} s".format(limit_s))
            rows = child.rows()
            if rows is None:
                return child.ended()
            for row in rows:
                each(row)
    except BaseException:
        child.kill("")
        raise


class Supervisor:
    """Measures the networks of jobs with one build in children until every point has a row.

    A point that kills its child costs no other.
    """

    def __init__(self, jobs, work, tell):
        self.jobs, self.work, self.tell = jobs, work, tell
        self.remaining = [(job["id"], mode, batch) for job in jobs for mode, batch in job["points"]]
        self.start()

    def start(self):
        """Start a child for the points that have no row."""
        self.under_way, self.prepared, self.since = None, False, time.monotonic()
        left = [
            dict(job, points=[p for p in job["points"] if (job["id"], p[0], p[1]) in self.remaining])
            for job in self.jobs
        ]
        left = [job for job in left if job["points"]]
        self.child = Child(lambda emit: self.work(left, emit))

    def advance(self):
        """Take what the child says; return whether it runs on. At its end a point under way has a row."""
        rows = self.child.rows()
        if rows is not None:
            for row in rows:
                if row["row"] == "prepared":
                    self.prepared = True
                    continue
                point = (row["job"], row["mode"], row["batch_size"])
                self.under_way, self.since = (point if row["row"] == "start" else None), time.monotonic()
                if row["row"] == "point":
                    self.remaining.remove(point)
                self.tell(row)
            return True
        ended = self.child.ended()
        if not self.remaining:
            return False
        point = self.under_way or self.remaining[0]
        killed = ended == "killed by signal 9"  # how Linux ends a process when memory runs out
        row = dict(NOTHING, row="point", job=point[0], mode=point[1], batch_size=point[2])
        row.update(fits=0 if killed else None, reason=(ended + " (out of memory)") if killed else ended)
        self.remaining.remove(point)
        self.tell(row)
        return False


def supervise(groups, start, limit_s, size=1, turn=None):
    """Measure groups of jobs in waves of `size`; start(jobs) returns a Supervisor.

    turn: the file that children lock before they measure, None if they don't; locked here until every child
    of the wave is prepared. Where a child ends early, another measures what it left in the next wave.
    """
    groups, again, running = iter(groups), [], []
    try:
        while True:
            with contextlib.ExitStack() as barrier:
                if turn is not None:
                    file = barrier.enter_context(open(turn))
                    fcntl.flock(file, fcntl.LOCK_EX)
                    barrier.callback(fcntl.flock, file, fcntl.LOCK_UN)  # children have the file open too
                for one in again:
                    one.start()
                running = again + [start(jobs) for jobs in itertools.islice(groups, size - len(again))]
                if not running:
                    break
                again = wave(running, limit_s, barrier)
    except BaseException:
        for one in running:
            one.child.kill("")
        raise


def wave(running, limit_s, barrier):
    """Attend to children, close the barrier when all are prepared; return those that left points."""
    again = []
    while running:
        if all(one.prepared for one in running):
            barrier.close()
        for one in [o for o in running if not (o.prepared and o.under_way is None)]:
            if time.monotonic() - one.since > limit_s and not one.child.killed:
                one.child.kill("no answer within {:.0f} s".format(limit_s))
        ready = select.select([one.child.read for one in running], [], [], 1.0)[0]
        for one in [o for o in running if o.child.read in ready]:
            if not one.advance():
                running.remove(one)
                again += [one] if one.remaining else []
    return again


def groups_of(jobs):
    """Yield lists of successive jobs with one build."""
    group = []
    for job in jobs:
        if group and group[0]["build"] != job["build"]:
            yield group
            group = []
        group.append(job)
    if group:
        yield group


def jobs_of(path):
    """Yield the jobs of a file, one JSON object a line."""
    with sys.stdin if path == "-" else open(path) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    job = json.loads(line)
                    job["id"], job["build"], job["inputs" if "inputs" in job else "input_size"]
                    job["points"] = [(str(mode), int(batch)) for mode, batch in job["points"]]
                except (ValueError, KeyError, TypeError) as error:
                    sys.exit("training_probe: line {} is not a job: {!r}".format(number, error))
                yield job


def main():
    """Read jobs, measure, write rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("jobs", help="file with one job a line; - reads standard input")
    parser.add_argument("--out", help="file to append rows to (default: standard output)")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if there is a GPU")
    parser.add_argument("--time-limit", type=float, default=600.0, help="limit of seconds per point")
    parser.add_argument("--wave", type=int, default=1, help="networks prepared side by side, then measured")
    parser.add_argument("--hurry", action="store_true", help="fewer steps: at least 2 to warm up, 4 timed")
    parser.add_argument("--memory", action="store_true", help="memory alone, beside other processes")
    arguments = parser.parse_args()
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # its pool of processes hangs in a fork
    start_mib = meminfo()[0] if os.path.exists("/proc/meminfo") else 0.0
    import torch

    own_mib = status_mib("VmRSS") or 0.0
    for library in LIBRARIES:  # once, not in every child
        with contextlib.suppress(Exception):
            getattr(load(library), "PreTrainedModel", None)
    device = arguments.device or ("cuda" if cuda_there(torch) else "cpu")
    out = open(arguments.out, "a") if arguments.out else sys.stdout
    if arguments.hurry or arguments.memory:
        WARMUP[:], TIMED[:] = FEW if arguments.memory else HURRY

    def tell(row):
        out.write(json.dumps(row) + "\n")
        out.flush()
        if arguments.out:
            os.fsync(out.fileno())

    command = " ".join(["training_probe.py", *[os.path.basename(a) for a in sys.argv[1:]]])
    shared = arguments.wave > 1 or arguments.memory
    ended = forked(lambda emit: emit(environment(device, command, shared)), tell, arguments.time_limit)
    if ended:
        sys.exit("training_probe: cannot start {} ({})".format(device, ended))
    turn = tempfile.NamedTemporaryFile() if arguments.wave > 1 else None
    path = turn.name if turn is not None else None

    def start(jobs):
        # What the system uses now without this process, whose own memory counts as the run's.
        idle = max(meminfo()[0] - own_mib, 0.0) if os.path.exists("/proc/meminfo") else start_mib
        return Supervisor(jobs, lambda part, emit: run_jobs(part, device, idle, emit, path, shared), tell)

    supervise(groups_of(jobs_of(arguments.jobs)), start, arguments.time_limit, arguments.wave, path)


def cuda_there(torch):
    """Return whether CUDA has a device, from a child, since this process must not start CUDA."""
    answers = []
    forked(lambda emit: emit(torch.cuda.is_available()), answers.append, 120.0)
    return bool(answers and answers[0])


if __name__ == "__main__":
    main()
