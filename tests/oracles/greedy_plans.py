"""A simple planner: each weight, by first use, as late as there is room; without room it is preloaded."""

from torchedge.streaming.plans import ChunkLoad, OverlapPlan


def plan_late(instance):
    """A valid plan of an instance without M_peak; INFEASIBLE where its preload exceeds `memory_chunks`."""
    room = [0, *(layer.capacity_chunks for layer in instance.layers)]
    preload, loads, preloaded, distance = [], [], 0, 0
    for weight in sorted(instance.weights, key=lambda w: (w.first_use, w.chunks, w.name)):
        left, taken = weight.chunks, []
        for layer in range(weight.first_use - 1, 0, -1):
            if left and room[layer]:
                taken.append((layer, min(left, room[layer])))
                left -= taken[-1][1]
        if left:
            preload.append(weight.name)
            preloaded += weight.chunks
            continue
        first_chunk = 0
        for layer, chunks in reversed(taken):
            room[layer] -= chunks
            loads.append(ChunkLoad(weight.name, layer, chunks, first_chunk))
            first_chunk += chunks
        distance += weight.first_use - taken[-1][0]
    if instance.memory_chunks is not None and preloaded > instance.memory_chunks:
        return OverlapPlan(
            "INFEASIBLE", None, None, (), (), 0, {"reason": "the preloaded weights alone are too many"}
        )
    price, late, unit = instance.prices
    objective = (price * preloaded + late * distance) / unit
    peak = max(
        (
            sum(
                load.chunks
                for load in loads
                for weight in instance.weights
                if weight.name == load.weight and load.layer <= layer <= weight.last_use
            )
            for layer in range(1, len(instance.layers) + 1)
        ),
        default=0,
    )
    return OverlapPlan("FEASIBLE", objective, 0.0, tuple(preload), tuple(loads), peak, {"strategy": "late"})
