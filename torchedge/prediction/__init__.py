"""What a training step needs, predicted from a Graph: features, memory simulation, forests."""
