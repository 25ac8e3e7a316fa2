"""Functions around gamma and erf, against PyTorch; their text in single precision on a device."""

import pytest
import torch

from torchedge.errors import LoweringError
from torchedge.lowering.nodes import Stored
from torchedge.lowering.rules.registry import Result, apply_rule

aten = torch.ops.aten


def test_single_precision_is_said():
    with pytest.raises(LoweringError, match="single precision"):
        apply_rule("erfinv", Result(((3,),), ("float64",)), {"input": Stored((3,), "float64", "x", 0)})
