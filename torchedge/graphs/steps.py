"""A step: a functional graph of ATen operators with what it writes back, ready to be lowered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torchedge.errors import CaptureError
from torchedge.graphs.graph import Graph


@dataclass(frozen=True, slots=True)
class Input:
    """Stands in an operator's attributes for a tensor: its position among the operator's inputs."""

    position: int


@dataclass(frozen=True, eq=False)
class Step:
    """One call of a program: a forward pass, or a whole training step (forward, backward, update).

    graph: concrete shapes (`fixed_batch`), no operator in place. An operator's attributes are its arguments
    by the names of the ATen schema (`self` is called `input`); tensors among them are `Input`s, also within
    lists. updates: (value at the start of the step, value that takes its place at the end): parameters,
    buffers, optimizer state. hyperparameters: names (`lr`, ...) of 0-d inputs that change between steps.
    initial: what values of role "state" hold before the first step, one number each (zero where absent).
    """

    graph: Graph
    updates: tuple[tuple[int, int], ...] = ()
    hyperparameters: Mapping[str, int] = field(default_factory=dict)
    initial: Mapping[int, float] = field(default_factory=dict)

    def verify(self) -> None:
        """Check the graph and the updates; raises CaptureError that names the first fault."""
        values = self.graph.values
        self.graph.verify()
        if any(op.inplace for op in self.graph.ops):
            raise CaptureError("a step holds an operator in place; expected a functional graph")
        written = [before for before, _ in self.updates]
        if len(set(written)) != len(written):
            raise CaptureError("a step updates one value twice; expected one update a value")
        for before, after in self.updates:
            old, new = values[before], values[after]
            if (old.shape, old.dtype) != (new.shape, new.dtype):
                raise CaptureError(
                    f"{old.name} is {old.dtype}{list(old.shape)}, its update {new.dtype}{list(new.shape)}; "
                    "expected the same shape and dtype"
                )
