"""What a training step needs, predicted from a Graph: features, memory simulation, time model, forests."""

from torchedge.prediction.results import Estimate, Prediction, Predictions

__all__ = ["Estimate", "Prediction", "Predictions"]
