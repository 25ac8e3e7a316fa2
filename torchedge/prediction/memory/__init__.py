"""What a training or inference step holds in memory, when, and why: a simulation, nothing fitted."""
