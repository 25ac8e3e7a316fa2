"""Settings of a step: all that its memory depends on beside the model and the batch size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from torchedge.devices import Device
from torchedge.prediction.memory.workspaces import WorkspaceModel

if TYPE_CHECKING:
    from torchedge.tracing.optimizer_replays import OptimizerReplay


@dataclass(frozen=True, slots=True)
class StepSettings:
    """Settings of one simulated step, which users set as a `TrainingStep` and a profile's `[runtime]`.

    optimizer: a name of `OPTIMIZERS`, with weight_decay as a number ("none": forward and backward only); or
    an `OptimizerReplay` of any optimizer, which has its own options.
    foreach: the optimizer's multi-tensor implementation, PyTorch's default on CUDA: faster, with temporaries
    as large as the parameters; False is the for-loop of CPU and of old releases.
    amp: autocast dtype, or None. accumulation: micro-batches a gradient is accumulated over before the
    optimizer steps.
    zero_grad: "set_to_none" (default since PyTorch 2.0) frees gradients between steps, "zero" keeps them.
    sum_in_place: gradients that meet are added in place (False: PyTorch up to 1.6).
    clamp_keeps: kept by an in-place hardtanh or relu6: "copy" of its input, or its "output" (PyTorch
    up to 1.6).
    backend: "cuda" or "cpu", which library's kernels run.
    attention: how attention runs: a "fused" kernel, or its "math" (as on meta tensors).
    winograd_tile: output tile of the non-fused Winograd algorithm that the convolution library runs for
    weight gradients of dense 3×3 convolutions with stride 1, whose workspace comes out of PyTorch's allocator
    (2 or 4; 0: none).
    workspaces: workspaces of the device's libraries (None: unknown).
    blas_workspace_mib: memory that cuBLAS keeps from the allocator once a training step has multiplied
    matrices (64 on Hopper): half of it for the forward pass, half for the thread that runs the backward one.
    others: the further optimizers of a whole step (`ForwardGraph.is_whole_step`), in its order.
    """

    optimizer: str | OptimizerReplay = "sgd-momentum"
    weight_decay: float = 0.0
    foreach: bool = True
    amp: str | None = None
    accumulation: int = 1
    zero_grad: Literal["set_to_none", "zero"] = "set_to_none"
    sum_in_place: bool = True
    clamp_keeps: Literal["copy", "output"] = "copy"
    backend: Literal["cuda", "cpu"] = "cuda"
    attention: Literal["fused", "math"] = "fused"
    winograd_tile: int = 0
    blas_workspace_mib: float = 0.0
    workspaces: WorkspaceModel | None = None
    others: tuple[OptimizerReplay, ...] = ()

    @property
    def replay(self) -> OptimizerReplay:
        """What replays the optimizer's steps."""
        from torchedge.tracing.optimizer_replays import OptimizerReplay

        if not isinstance(self.optimizer, str):
            return self.optimizer
        options = (("weight_decay", self.weight_decay),) if self.weight_decay else ()
        return OptimizerReplay(self.optimizer, options)

    @property
    def replays(self) -> tuple[OptimizerReplay, ...]:
        """What replays the steps of all optimizers."""
        return (self.replay, *self.others)

    def timed_on(self, device: Device) -> StepSettings:
        """Return the settings of a step's time: autocast to a dtype that a device emulates takes float32's.

        PyTorch casts there and computes in float32, or refuses.
        """
        return self if self.amp is None or self.amp in device.native_dtypes else replace(self, amp=None)

    def under(self, runtime: Mapping[str, Any]) -> StepSettings:
        """Return these settings with the switches of a device's framework (`[runtime]` of device.toml)."""
        own = {field.name for field in fields(self)}
        return replace(self, **{name: switch for name, switch in runtime.items() if name in own})
