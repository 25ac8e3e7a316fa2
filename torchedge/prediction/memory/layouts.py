"""Strides of a graph's values, computed on demand: they decide where a reshape has to copy."""

from __future__ import annotations

from collections.abc import Sequence

from torchedge.graphs import Op, Value
from torchedge.graphs.sizes import symbolic
from torchedge.ops import spec_of
from torchedge.ops.strides import Sizes, Strided, as_input, broadcasted, contiguous_strides, filled, permuted


class Layouts:
    """Strides of the values of a graph, in elements, with `symbolic` batch size."""

    def __init__(
        self, values: Sequence[Value], ops: Sequence[Op], fused_attention: bool = False, on_cuda: bool = True
    ) -> None:
        self._values = values
        self._fused, self._on_cuda = fused_attention, on_cuda
        self._producers = {index: op for op in ops for index in op.outputs}
        self._strides: dict[int, Sizes] = {}

    def shape(self, index: int) -> Sizes:
        """Return the symbolic shape of a value."""
        return symbolic(self._values[index].shape)

    def of(self, index: int) -> Sizes:
        """Return the strides of a value."""
        chain = []
        while index not in self._strides:
            chain.append(index)
            op = self._producers.get(index)
            if op is None or not op.inputs or op.inputs[0] is None:
                break
            index = op.inputs[0]
        for item in reversed(chain):
            self._strides[item] = self._derive(item)
        return self._strides[chain[0] if chain else index]

    def _derive(self, index: int) -> Sizes:
        shape, op = self.shape(index), self._producers.get(index)
        source = op.inputs[0] if op is not None and op.inputs else None
        if op is None or source is None:
            return contiguous_strides(shape)
        old_shape = self.shape(source)
        old = self._strides.get(source) or contiguous_strides(old_shape)
        spec, aliased = spec_of(op.kind), self._values[index].alias is not None
        if spec.composite == "attention" and self._fused and len(shape) == 4:
            if self._on_cuda and self._values[source].dtype == "float32":
                # memory-efficient attention writes (N, L, H, E)
                return permuted(contiguous_strides([shape[i] for i in (0, 2, 1, 3)]), (0, 2, 1, 3))
            return filled(shape, old)  # flash attention keeps the query's order of dimensions
        if aliased and op.inplace:
            return old
        tensors = [i for i in op.inputs if i is not None]
        if len(tensors) > 1 and not aliased and (spec.broadcasts or spec.strides is as_input):
            return broadcasted(shape, [(self.shape(i), self.of(i)) for i in tensors])
        if spec.strides is None or spec.view != aliased:
            return contiguous_strides(shape)
        return spec.strides(Strided(old_shape, old, shape, op.attrs)) or contiguous_strides(shape)
