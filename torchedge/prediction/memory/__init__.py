"""The memory of a training or inference step over time: a simulation, nothing fitted."""
