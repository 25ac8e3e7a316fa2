"""Memory and latency of a step, predicted from a graph: features, simulation, time model, forests."""

from torchedge.prediction.results import Estimate, Prediction, Predictions

__all__ = ["Estimate", "Prediction", "Predictions"]
