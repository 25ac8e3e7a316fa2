"""From a model to its streaming plan, with adaptive fusion (FlashMem, section 4.3).

A product into which element-wise values are fused loads as much as a product may, 20 % of its latency by the
thresholds; an element-wise kernel of its own may load 300 %. Values are kept apart where that pays.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, get_args

from torchedge.devices import Device
from torchedge.errors import check_choice
from torchedge.lowering.assembly import Lowered
from torchedge.lowering.inference import lower_fused
from torchedge.lowering.targets import Target
from torchedge.streaming.planning import plan_program
from torchedge.streaming.streaming_plans import StreamingPlan
from torchedge.tracing.steps import CapturedStep

Fusion = Literal["all", "adaptive"]


def plan_model(
    captured: CapturedStep,
    target: Target,
    device: Device,
    *,
    fusion: Fusion = "all",
    **options: Any,  # noqa: ANN401 - those of plan_program
) -> StreamingPlan:
    """Lower and plan a captured model. The options are those of `torchedge.plan` and `plan_program`.

    With adaptive fusion the last value of each launch that fuses any is kept apart, if that pays
    (`price_ms`); else of half of the launches, those that store most, and so on. Nothing is lowered again
    where no weight is preloaded for want of capacity.
    """
    check_choice("fusion", fusion, get_args(Fusion))
    lowered = lower_fused(captured, target)
    best = plan_program(lowered.program, device, **options)
    names = _candidates(lowered) if fusion == "adaptive" and _lacks_capacity(best) else []
    while names:
        apart = frozenset(names)
        trial = plan_program(lower_fused(captured, target, apart).program, device, **options)
        if price_ms(trial) < price_ms(best):
            return replace(trial, apart=apart)
        names = names[: len(names) // 2]
    return best


def _candidates(lowered: Lowered) -> list[str]:
    """Return the last value of each launch that fuses any, those of the largest results first."""
    program = lowered.program

    def stored(launch: int) -> int:
        return max(program.tensors[index].nbytes for index in program.launches[launch].tensors[:1])

    ordered = sorted(lowered.fused, key=lambda fused: -stored(fused.launch))
    return list(dict.fromkeys(fused.values[-1] for fused in ordered))


def _lacks_capacity(plan: StreamingPlan) -> bool:
    """Whether a layer exceeds its capacity, or a weight is preloaded that an earlier layer could load."""
    first = {weight.name for weight in plan.instance.weights if weight.first_use == 1}
    return plan.relaxation > 1 or not first.issuperset(plan.plan.preload)


def price_ms(plan: StreamingPlan) -> float:
    """Return the price of a plan: the latencies of its layers, and the time to read its objective's chunks.

    The objective counts preloaded chunks and loading distances (`Instance`); where layers exceed their
    capacities it counts as many times. So a split pays if it saves more than the launches that it adds take.
    """
    layers = sum(layer.latency_ms for layer in plan.instance.layers)
    chunks = plan.relaxation * (plan.plan.objective or 0.0)
    return layers + chunks * plan.rates.read_ms(plan.instance.chunk_bytes)
