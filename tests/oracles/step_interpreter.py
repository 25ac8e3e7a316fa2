"""Runs a Step with PyTorch's own ATen operators: the meaning that a lowered program is held against."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from torchedge.graphs.steps import Input, Step

Uniform = Callable[[int, int, int, tuple[int, ...]], torch.Tensor]
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_WORD = np.uint64(0xFFFFFFFF)


def philox_uniform(seed: int, counter: int, offset: int, shape: tuple[int, ...]) -> torch.Tensor:
    """What `random_uniform` draws: the first word of Philox 4x32-10, its upper 24 bits as a fraction."""
    count = int(np.prod(shape, dtype=np.int64))
    words = [np.arange(count, dtype=np.uint64) & _WORD]
    words += [np.full(count, w & 0xFFFFFFFF, dtype=np.uint64) for w in (offset, counter, 0)]
    keys = [seed & 0xFFFFFFFF, 0]
    for _ in range(10):
        first = words[0] * np.uint64(_MULTIPLIERS[0])
        second = words[2] * np.uint64(_MULTIPLIERS[1])
        words = [
            (second >> np.uint64(32)) ^ words[1] ^ np.uint64(keys[0]),
            second & _WORD,
            (first >> np.uint64(32)) ^ words[3] ^ np.uint64(keys[1]),
            first & _WORD,
        ]
        keys = [(key + weyl) & 0xFFFFFFFF for key, weyl in zip(keys, _WEYL, strict=True)]
    numbers = (words[0] >> np.uint64(8)).astype(np.float64) * 2.0**-24
    return torch.from_numpy(numbers.astype(np.float32)).reshape(shape)


def call_aten(kind: str, given: Mapping[str, Any]) -> Any:
    """Call the overload of an ATen operator whose schema fits arguments given by name."""
    packet = getattr(torch.ops.aten, kind)
    reasons = []
    for name in packet.overloads():
        overload = getattr(packet, name)
        arguments = overload._schema.arguments
        bound = {("input" if a.name == "self" else a.name): a for a in arguments}
        if overload._schema.is_mutable or not set(given) <= set(bound):
            continue
        rest = {a.name: None for key, a in bound.items() if key not in given and not a.has_default_value()}
        try:
            return overload(**{bound[key].name: item for key, item in given.items()}, **rest)
        except (RuntimeError, TypeError, ValueError) as error:
            reasons.append(f"{overload}: {str(error).splitlines()[0]}")
    raise AssertionError(f"no overload of {kind} takes {list(given)}: {reasons}")


class Interpreter:
    """Holds what a step's values hold between calls, by name, and runs steps on it.

    dtype: another floating dtype to compute in, in place of float32.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        dtype: torch.dtype | None = None,
        uniform: Uniform = philox_uniform,
    ) -> None:
        self.dtype, self.uniform = dtype, uniform
        self.held = {name: self._cast(tensor.detach().clone()) for name, tensor in tensors.items()}

    def run(self, step: Step, *inputs: torch.Tensor) -> list[torch.Tensor]:
        """Run a step once and write its updates back; returns its outputs."""
        values: dict[int, torch.Tensor] = {}
        for index, value in enumerate(step.values):
            if value.role == "state" and value.name not in self.held:
                fill = step.initial.get(index, 0.0)
                self.held[value.name] = torch.full(value.shape, fill, dtype=self._dtype(value.dtype))
            if value.role != "activation" and value.name in self.held:
                values[index] = self.held[value.name]
        assert len(inputs) == len(step.inputs)
        values.update(zip(step.inputs, map(self._cast, inputs), strict=True))
        for op in step.ops:
            made = self._call(op.kind, [values[i] for i in op.inputs], op.attrs)
            for index, tensor in zip(op.outputs, made, strict=True):
                value = step.values[index]
                assert tuple(tensor.shape) == value.shape, (op.kind, op.attrs, tensor.shape, value)
                dtype = self._dtype(value.dtype)
                mixed = tensor.is_floating_point() and dtype.is_floating_point  # as kernels under autocast do
                assert tensor.dtype == dtype or mixed, (op.kind, op.attrs, tensor.dtype, value)
                values[index] = tensor.to(dtype)
        written = {step.values[old].name: values[new] for old, new in step.updates}
        self.held.update({name: tensor.clone() for name, tensor in written.items()})
        return [values[i] for i in step.outputs]

    def _dtype(self, name: str) -> torch.dtype:
        dtype = getattr(torch, name)
        return self.dtype if self.dtype is not None and dtype is torch.float32 else dtype

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._dtype(str(tensor.dtype).removeprefix("torch.")))

    def _call(self, kind: str, read: list[torch.Tensor], attrs: Mapping[str, Any]) -> Sequence[torch.Tensor]:
        given = {key: self._plain(item, read) for key, item in attrs.items()}
        for key in ("dtype", "input_dtype"):
            if key in given:
                given[key] = self._dtype(given[key])
        if kind == "random_uniform":
            drawn = self.uniform(int(given["seed"]), int(given["counter"]), given["offset"], attrs["shape"])
            return [self._cast(drawn)]
        made = read[0].reshape(attrs["size"]) if kind == "view" else call_aten(kind, given)
        if isinstance(made, torch.Tensor):
            return [made]
        mask = attrs.get("output_mask", (True,) * len(made))
        return [tensor for tensor, wanted in zip(made, mask, strict=True) if wanted]

    def _plain(self, item: Any, read: list[torch.Tensor]) -> Any:
        if isinstance(item, Input):
            return read[item.position]
        return [self._plain(entry, read) for entry in item] if isinstance(item, tuple) else item
