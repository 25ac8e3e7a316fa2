"""Training steps of eager PyTorch, and what both sides of a comparison share."""

import copy

import torch
from oracles.step_interpreter import Interpreter
from torch.nn import functional as F

from torchedge.tracing.steps import capture_step

KEEP = frozenset(
    """
    convolution convolution_backward _native_batch_norm_legit _native_batch_norm_legit_functional
    _native_batch_norm_legit_no_training native_batch_norm_backward native_layer_norm
    native_layer_norm_backward native_group_norm native_group_norm_backward _softmax _safe_softmax
    _softmax_backward_data _log_softmax _log_softmax_backward_data max_pool2d_with_indices
    max_pool2d_with_indices_backward avg_pool2d avg_pool2d_backward _adaptive_avg_pool2d
    _adaptive_avg_pool2d_backward embedding embedding_dense_backward nll_loss_forward nll_loss_backward
    gelu gelu_backward addmm mm bmm index gather scatter
    """.split()  # noqa: SIM905 - read as the list it is
)
TOLERANCE = {"rtol": 1e-9, "atol": 1e-12}
KINDS = KEEP | frozenset(
    """
    _to_copy add addmm bitwise_and bitwise_or cat clamp constant_pad_nd div eq exp expand expm1 full ge gt
    index_put index_select le lt maximum mean mul neg permute pow random_uniform relu rsub select sigmoid
    slice slice_scatter sqrt squeeze sub sum tanh unsqueeze view where
    """.split()  # noqa: SIM905
)
"""What the training steps of torchvision's classification models consist of, those kept whole included."""


def images(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype)


def classes(count=4, of=5):
    return torch.randint(of, (count,))


def feed_classes(side):
    return lambda: ((images(4, 3, side, side),), (classes(),))


def double(network):
    torch.manual_seed(0)
    return network().double()


def held_equals(interpreter, model, optimizer=None, tolerance=TOLERANCE):
    """Parameters, buffers and the optimizer's tensors are what the interpreter holds."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name in interpreter.held:
            torch.testing.assert_close(interpreter.held[name], tensor.detach(), **tolerance, msg=name)
    for name, parameter in model.named_parameters() if optimizer else ():
        for kind, tensor in optimizer.state[parameter].items():
            key = "optimizer.step" if kind == "step" else f"optimizer.{name}.{kind}"
            if kind != "step" or key in interpreter.held:
                found = interpreter.held[key].to(tensor.dtype)
                torch.testing.assert_close(found, tensor, **tolerance, msg=key)


def train(model, optimizer, loss, batch, divisor=1):
    """One eager step (without the update if no optimizer is given)."""
    args, targets = batch
    value = loss(model(*args), *targets)
    (value / divisor).backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()
    return value.detach()


def follow(model, optimizer_of, feed, loss=F.cross_entropy, *, steps=4, tolerance=TOLERANCE, **options):
    """Capture a step, run it and eager PyTorch on the same batches, and hold losses and all state.

    optimizer_of: makes the optimizer of a model. Returns the capture.
    """
    eager = copy.deepcopy(model)
    optimizer = optimizer_of(eager)
    args, targets = feed()
    captured = capture_step(model, args, targets=targets, loss=loss, optimizer=optimizer_of(model), **options)
    interpreter = Interpreter(captured.tensors)
    for _ in range(steps):
        args, targets = feed()
        (found,) = interpreter.run(captured.step, *args, *targets)
        torch.testing.assert_close(found, train(eager, optimizer, loss, (args, targets)), **tolerance)
    held_equals(interpreter, eager, optimizer, tolerance)
    return captured
