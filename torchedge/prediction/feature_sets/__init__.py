"""Prediction features: one registry of functions, named sets of them, and `features` to compute them."""

from torchedge.prediction.feature_sets.convolutions import BatchAmount, ConvolutionCall
from torchedge.prediction.feature_sets.extraction import checked_batches, feature_plan, feature_rows, features
from torchedge.prediction.feature_sets.perf4sight import INFERENCE, TRAINING
from torchedge.prediction.feature_sets.registry import (
    FeatureInputs,
    add_feature_set,
    feature,
    find_feature_set,
    list_feature_sets,
    set_of_names,
)

__all__ = [
    "INFERENCE",
    "TRAINING",
    "BatchAmount",
    "ConvolutionCall",
    "FeatureInputs",
    "add_feature_set",
    "checked_batches",
    "feature",
    "feature_plan",
    "feature_rows",
    "features",
    "find_feature_set",
    "list_feature_sets",
    "set_of_names",
]
