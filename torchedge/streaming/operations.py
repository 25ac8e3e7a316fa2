"""The inference graph that streaming plans for: operations in execution order, and the weights they read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torchedge.streaming.instances import LoadClassName

__all__ = ["InferenceGraph", "Operation", "StoredWeight"]


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A parameter or buffer that inference reads, with its bytes in the planned precision."""

    name: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Operation:
    """One operator that becomes a kernel; views, dropout and other free operators are none.

    `kind` is the ATen base name (of a fused one, those of its parts joined by "+"). `flops` counts a
    multiply-add as two; `bytes_moved` is what it reads and writes at least, weights included. `weights` names
    the weights it reads, `inputs` the positions (from 0) of the operations whose results it reads, directly
    or through views. `output_bytes` is the size of its result. `parts` are what a fused operation is made of.
    """

    name: str
    kind: str
    load_class: LoadClassName
    flops: int
    bytes_moved: int
    weights: tuple[str, ...]
    inputs: tuple[int, ...]
    output_bytes: int
    parts: tuple[Operation, ...] = ()


@dataclass(frozen=True)
class InferenceGraph:
    """A forward pass at one batch size, in fixed execution order, in one precision.

    `input_bytes` is what the model is fed, `outputs` the positions of operations whose results it returns.
    """

    name: str
    operations: tuple[Operation, ...]
    weights: tuple[StoredWeight, ...]
    input_bytes: int
    outputs: tuple[int, ...]
    precision: str = "float16"
    notes: tuple[str, ...] = ()

    @cached_property
    def uses(self) -> dict[str, tuple[int, int]]:
        """First and last layer (from 1) that reads each weight; tied weights are one weight."""
        found: dict[str, tuple[int, int]] = {}
        for layer, operation in enumerate(self.operations, 1):
            for name in operation.weights:
                found[name] = (found.get(name, (layer, layer))[0], layer)
        return found

    @cached_property
    def activation_bytes(self) -> tuple[int, ...]:
        """Bytes of inputs and intermediate results that are alive while each operation runs."""
        count = len(self.operations)
        last = [place for place in range(count)]
        for place, operation in enumerate(self.operations):
            for source in operation.inputs:
                last[source] = max(last[source], place)
        for place in self.outputs:
            last[place] = count - 1
        change = [0] * (count + 1)
        for place, operation in enumerate(self.operations):
            change[place] += operation.output_bytes
            change[last[place] + 1] -= operation.output_bytes
        alive, total = [], self.input_bytes
        for place in range(count):
            total += change[place]
            alive.append(total)
        return tuple(alive)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return sum(w.nbytes for w in self.weights)
