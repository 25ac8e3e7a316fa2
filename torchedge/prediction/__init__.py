"""The needs of a training step, predicted from a graph: features, memory simulation, time model, forests."""

from torchedge.prediction.results import Estimate, Prediction, Predictions

__all__ = ["Estimate", "Prediction", "Predictions"]
