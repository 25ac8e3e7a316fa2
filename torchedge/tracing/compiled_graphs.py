"""What `torch.compile` hands to a backend: graphs of ATen operators, with their backward, by AOTAutograd."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.fx import GraphModule

from torchedge.errors import InputError
from torchedge.tracing import fast_paths
from torchedge.tracing.copies import LOCK
from torchedge.tracing.decompositions import decompositions
from torchedge.tracing.joint_graphs import plain_kernels

Part = Literal["forward", "backward", "inference"]
Run = Callable[[list[Any]], list[Any]]
"""Runs a traced graph: from the values of its placeholders, a list that it empties, to its results."""


@dataclass(frozen=True)
class TracedGraph:
    """One graph to run: functional operators of concrete shapes, as in `meta["val"]` of its nodes.

    part: what it is. returned: how many of its results leave it as tensors; the others are kept for the
    backward, which gets them as they were given back.
    """

    module: GraphModule
    part: Part
    returned: int


def compile_with_backward(
    module: GraphModule,
    examples: Sequence[Any],
    make: Callable[[TracedGraph], Run],
    keep: Collection[str] = (),
) -> Callable[..., Any]:
    """Trace what Dynamo captured, and its backward where something requires a gradient; `make` runs each.

    examples: the module's arguments, tensors real or fake. keep: ATen base names of operators to leave whole.
    Returns a function of the module's arguments that takes part in autograd.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    _refuse_other_devices(examples)
    returned: list[int] = []

    def partition(joint: Any, inputs: Any, *, num_fwd_outputs: int, **options: Any) -> Any:
        returned.append(num_fwd_outputs)
        return min_cut_rematerialization_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **options)

    def compiler(part: Part) -> Callable[[GraphModule, Sequence[Any]], Run]:
        def compiled(traced: GraphModule, inputs: Sequence[Any]) -> Run:
            results = len(next(iter(traced.graph.find_nodes(op="output"))).args[0])
            run = make(TracedGraph(traced, part, returned[-1] if part == "forward" else results))

            def boxed(args: list[Any]) -> list[Any]:
                return run(args)

            boxed._boxed_call = True  # type: ignore[attr-defined]
            return boxed

        return compiled

    backend = aot_autograd(
        fw_compiler=compiler("forward"),
        bw_compiler=compiler("backward"),
        inference_compiler=compiler("inference"),
        partition_fn=partition,
        decompositions={**decompositions(keep), **fast_paths.TABLE},
    )
    with LOCK, plain_kernels(), _kept_for_every_backward():
        made: Callable[..., Any] = backend(module, examples)
    return made


def allow_recurrent_modules() -> None:
    """Let Dynamo capture nn.RNN, nn.LSTM and nn.GRU, which it leaves to eager PyTorch by default.

    Dynamo has no such setting for one backend or one compilation: this one holds for the thread, whichever
    backend compiles there.
    """
    import torch._dynamo

    if hasattr(torch._dynamo.config, "allow_rnn"):
        torch._dynamo.config.allow_rnn = True


def is_symbolic(examples: Sequence[Any]) -> bool:
    """Return whether Dynamo left sizes open: arguments that are symbols, or tensors of such shapes."""
    return any(
        isinstance(example, (torch.SymInt, torch.SymFloat, torch.SymBool))
        or (
            isinstance(example, torch.Tensor)
            and any(not isinstance(size, int) for size in (*example.shape, *example.stride()))
        )
        for example in examples
    )


@contextmanager
def fresh_tracing(examples: Sequence[Any]) -> Iterator[list[Any]]:
    """Trace anew, outside of any compilation, for the shapes of real arguments: yields fake ones."""
    from torch._guards import TracingContext, tracing
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with ExitStack() as stack:
        stack.enter_context(tracing(TracingContext(mode)))
        yield [
            mode.from_tensor(e, static_shapes=True) if isinstance(e, torch.Tensor) else e for e in examples
        ]


@contextmanager
def _kept_for_every_backward() -> Iterator[None]:
    """Let `backward(retain_graph=True)` find what the forward kept: no buffer is given away."""
    from torch._functorch import config

    with config.patch(donated_buffer=False):
        yield


def _refuse_other_devices(examples: Sequence[Any]) -> None:
    for example in examples:
        if isinstance(example, torch.Tensor) and example.device.type != "cpu":
            raise InputError(
                f"the model or its input is on {example.device}; the torchedge backend takes tensors in main "
                "memory and keeps its own copies on the OpenCL device: call .cpu() on both"
            )
