"""Threads that share a trainer, an executor or a bundle, and forks of a process that uses OpenCL."""

import os
import sys
import warnings
from itertools import chain
from queue import SimpleQueue
from threading import Thread

import numpy as np
import pytest
import torch
from oracles.children import python
from oracles.crews import THREADS, together
from oracles.spoiled_drivers import spoiled
from torch import nn
from torch.nn import functional as F

import torchedge
from torchedge.opencl import compile_kernels, open_context
from torchedge.runtime import backends
from torchedge.runtime.backends import open_device
from torchedge.tracing.joint_graphs import tracing

pytest.importorskip("pyopencl")

STEPS = 6


def trainer_of(seed=0, **options):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batch = torch.randn(8, 6), torch.randint(4, (8,))
    trainer = torchedge.Trainer(model, *batch, loss=F.cross_entropy, optimizer=optimizer, **options)
    return trainer, model, batch


def weights_of(trainer, model):
    trainer.sync()
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(weights, expected):
    return all(torch.equal(weights[name], tensor) for name, tensor in expected.items())


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [1, 3])
def test_threads_that_share_a_trainer_take_turns(accumulation):
    one, model, batch = trainer_of(accumulation=accumulation)
    losses = sorted(one.step(*batch) for _ in range(THREADS * STEPS))
    expected = weights_of(one, model)

    shared, model, batch = trainer_of(accumulation=accumulation)
    seen = together(lambda number: [shared.step(*batch) for _ in range(STEPS)])
    assert shared.batches == THREADS * STEPS
    assert same(weights_of(shared, model), expected)
    assert sorted(chain(*seen)) == losses


@pytest.mark.slow
def test_weights_that_are_read_belong_to_one_step():
    one, model, batch = trainer_of()
    states = [weights_of(one, model)]
    for _ in range(2 * STEPS):
        one.step(*batch)
        states.append(weights_of(one, model))
    outputs = []
    one, model, batch = trainer_of()
    for _ in range(2 * STEPS + 1):
        outputs.append(one.predict(batch[0]))
        one.step(*batch)

    shared, model, batch = trainer_of()

    def work(number):
        if number == 0:
            return [shared.step(*batch) for _ in range(2 * STEPS)]
        if number == 1:
            return [weights_of(shared, model) for _ in range(STEPS)]
        return [shared.predict(batch[0]) for _ in range(STEPS)]

    _, read, *predicted = together(work)
    assert all(any(same(weights, state) for state in states) for weights in read)
    assert all(any(torch.equal(p, output) for output in outputs) for p in chain(*predicted))


@pytest.mark.slow
def test_trainers_of_their_own_do_not_meet():
    expected = []
    for seed in range(THREADS):
        trainer, model, batch = trainer_of(seed)
        losses = [trainer.step(*batch) for _ in range(STEPS)]
        expected.append((losses, weights_of(trainer, model)))
    trainers = [trainer_of(seed) for seed in range(THREADS)]

    def work(number):
        trainer, model, batch = trainers[number]
        return [trainer.step(*batch) for _ in range(STEPS)], weights_of(trainer, model)

    for (losses, weights), (wanted, state) in zip(together(work), expected, strict=True):
        assert losses == wanted and same(weights, state)


def test_threads_share_one_context_of_a_device(monkeypatch):
    from torchedge.opencl import contexts

    monkeypatch.setattr(contexts, "_open", {})
    monkeypatch.setattr(backends, "_open", {})
    devices = together(lambda number: open_device())
    assert len({id(device) for device in devices}) == len({id(d.context) for d in devices}) == 1


@pytest.mark.slow
def test_builds_leave_the_filters_of_warnings():
    context = open_context()
    text = "__kernel void k{0}(__global int *a) {{ int unused; a[get_global_id(0)] = {0}; }}"
    before = list(warnings.filters)

    def build(number):
        for each in range(STEPS):
            name = 100 * number + each
            compile_kernels(context, {f"k{name}": text.format(name)}, cache=None)

    together(build)
    assert list(warnings.filters) == before


FORK = """
import os, sys
from torchedge.errors import OpenCLError
from runtime.test_threads import trainer_of
trainer, model, batch = trainer_of()
trainer.step(*batch)
calls = [lambda: trainer.step(*batch), trainer.sync, trainer.close, trainer_of]
trainer._lock.acquire()  # as a thread of the parent may
child = os.fork()
if not child:
    for call in calls:
        try:
            call()
        except OpenCLError as error:
            print(error, flush=True)
    del trainer, calls
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
trainer._lock.release()
trainer.step(*batch)
print("the parent goes on")
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_is_refused_what_the_parent_has_open():
    done = python("-W", "ignore", "-c", FORK)
    assert done.stdout.count("OpenCL was used by process") == 4, done.stderr
    assert "the parent goes on" in done.stdout, done.stderr


FORK_THAT_ENDS = """
import ctypes, gc, os, sys, weakref
import numpy as np
process = ctypes.CDLL(None)
# A driver's end of the process that must not run.
process.on_exit(ctypes.cast(process.abort, ctypes.c_void_p), None)
from oracles.small_programs import vector_add
from torchedge.runtime import Executor
executor = Executor(vector_add(8))
executor.run(np.ones(8, np.float32), np.ones(8, np.float32))
child = os.fork()
if not child:
    reference = weakref.ref(executor)
    del executor
    gc.collect()
    assert reference() is not None  # its release would take the driver's locks
    sys.exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
os._exit(0)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="on_exit of glibc")
def test_a_fork_ends_without_the_driver():
    """Intel's runtime waited there for threads of the parent that launched at the moment of the fork."""
    done = python("-W", "ignore", "-c", FORK_THAT_ENDS)
    assert done.stdout == "7\n", done.stderr
    assert "leak" not in done.stderr


FORK_THAT_CLEARS = """
import gc, os, sys
import torch
from oracles.small_programs import vector_add
from runtime.test_threads import trainer_of
from torchedge.opencl import compile_kernels, open_context
trainer, model, batch = trainer_of()
trainer.step(*batch), trainer.predict(batch[0])
compiled = torch.compile(torch.nn.Conv2d(3, 4, 3), backend="torchedge", dynamic=False)
picture = torch.randn(2, 5, 7, 3).permute(0, 3, 1, 2)
for _ in range(2):
    compiled(picture).sum().backward()
kernel = compile_kernels(open_context(), {"k": "__kernel void k(__global int *a) { a[0] = 1; }"}).kernel("k")
child = os.fork()
if not child:
    model = compiled = picture = kernel = None
    gc.collect()
    sys.exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the loader of another system")
def test_a_fork_releases_nothing_of_the_driver(tmp_path):
    """PoCL waited there for the lock of an event that another thread of the parent had."""
    done = python("-W", "ignore", "-c", FORK_THAT_CLEARS, **spoiled("fork", tmp_path))
    assert done.stdout == "7\n", done.stderr


FORK_OF_CAPTURES = """
import os, signal, sys, threading
import torch, torchedge
inside, rest = threading.Event(), threading.Event()

def predict():
    return torchedge.predict(torch.nn.Linear(3, 2), 2, device="jetson-tx2", input_size=(3,)).memory.value

def stop(frame, event, argument):
    if event == "call" and frame.f_code.co_name == sys.argv[1]:
        inside.set()
        rest.wait()

def run():
    sys.setprofile(stop)
    predict()

value = predict()
threading.Thread(target=run, daemon=True).start()
inside.wait()
child = os.fork()
if not child:
    signal.alarm(30)
    assert predict() == value
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize("function", ["_replace", "_amounts"])
def test_a_fork_predicts_whatever_another_thread_was_in(function):
    """_replace: PyTorch's answers about devices are exchanged. _amounts: a property that is computed once."""
    python("-W", "ignore", "-c", FORK_OF_CAPTURES, function)


def test_arrays_of_one_executor_are_its_callers_own():
    trainer, *_ = trainer_of()
    inputs = [torch.randn(8, 6, generator=torch.Generator().manual_seed(number)) for number in range(THREADS)]
    alone = [trainer.predict(x) for x in inputs]
    for outputs in together(lambda number: [trainer.predict(inputs[number]) for _ in range(STEPS)]):
        number = next(n for n, wanted in enumerate(alone) if torch.equal(outputs[0], wanted))
        assert all(np.array_equal(output, alone[number]) for output in outputs)


def test_compiled_functions_run_while_another_thread_captures_a_step():
    model = nn.Linear(6, 4)
    compiled = torch.compile(model, backend="torchedge", dynamic=False)
    x = torch.ones(2, 6)
    with torch.no_grad():
        expected = compiled(x)
    answers, finished = SimpleQueue(), SimpleQueue()  # no state of Python that a capture looks at

    class Captured(nn.Module):
        """Calls the compiled function in another thread at the very moment of its own capture."""

        def forward(self, x):
            def call():
                with torch.no_grad():
                    answers.put(compiled(torch.ones(2, 6)))
                finished.put(True)

            thread = Thread(target=call)
            thread.start()
            thread.join()
            return self.inner(x)

    captured = Captured()
    captured.inner = nn.Linear(6, 4)
    optimizer = torch.optim.SGD(captured.parameters(), lr=0.1)
    torchedge.Trainer(captured, x, torch.zeros(2, 4), loss=F.mse_loss, optimizer=optimizer).close()
    calls = answers.qsize()
    assert calls and finished.qsize() == calls
    assert all(torch.equal(answers.get(), expected) for _ in range(calls))
    assert not torch.compiler.is_compiling()


def test_traces_that_overlap_leave_pytorch_as_it_was(monkeypatch):
    before, compiled = torch.compiler.is_compiling, torch.compile(nn.Linear(6, 4), backend="torchedge")
    x = torch.ones(2, 6)
    with torch.no_grad():
        expected = compiled(x)
        first, second = tracing(seen=False), tracing(seen=True)
        first.__enter__()
        assert not torch.compiler.is_compiling()
        with monkeypatch.context() as patched:
            patched.setattr(torch.fx._symbolic_trace, "_is_fx_tracing_flag", True)
            assert torch.equal(compiled(x), expected)
        second.__enter__()
        assert torch.compiler.is_compiling()
        assert together(lambda number: torch.compiler.is_compiling()) == [False] * THREADS
        first.__exit__(None, None, None)
        assert torch.compiler.is_compiling()
        second.__exit__(None, None, None)
    assert torch.compiler.is_compiling is before
