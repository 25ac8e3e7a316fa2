import numpy as np
import pytest
import torch

pytest.importorskip("pyopencl")
pytest.importorskip("expecttest", reason="PyTorch's operator samples import it")

from oracles.operator_samples import Call, all_entries, check_entry, compare, title_of

ENTRIES = {title_of(entry): entry for entry in all_entries()}
FAST = (
    *("add", "atan2", "clamp", "where", "nn.functional.gelu", "sum", "var", "amax", "cumsum"),
    *("softmax", "nn.functional.layer_norm", "nn.functional.batch_norm"),
    *("bmm", "nn.functional.linear", "nn.functional.conv2d", "nn.functional.conv_transpose2d"),
    *("nn.functional.max_pool2d", "nn.functional.avg_pool2d", "nn.functional.cross_entropy"),
    *("cat", "permute", "slice", "nn.functional.pad.constant"),
)
"""One or two entries a family of rules."""


def outcomes(tally, *verdicts):
    return [(o.verdict, o.reason) for o in tally.outcomes if o.verdict in verdicts]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("title", FAST)
def test_samples_of_every_family_come_out_right(title):
    tally = check_entry(ENTRIES[title], samples=2)
    assert tally.count("passed") == len(tally.outcomes) > 0, outcomes(
        tally, "failed", "refused", "foreign", "random", "none"
    )


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_nearly_all_samples_of_supported_operators_come_out_right(part):
    tallies = [check_entry(entry, samples=2) for entry in list(ENTRIES.values())[part::8]]
    counted = sum(tally.counted for tally in tallies)
    wrong = [(t.title, *o) for t in tallies for o in outcomes(t, "failed", "refused")]
    assert len(wrong) <= 0.05 * counted, wrong


def test_a_wrong_number_is_found_and_float32_rounding_is_not():
    call = Call(lambda x: [x.sum()], [torch.tensor([1e8, 1.0, -1e8])], ())
    exact = [torch.tensor(1.0, dtype=torch.float64)]
    assert compare(call, [np.array(0.0, np.float32)], exact) == ""
    assert compare(call, [np.array(9.0, np.float32)], exact) == "output 0 is off by 8.0e+00"


def test_a_wrong_shape_and_a_wrong_infinity_are_found():
    call = Call(lambda x: [x.exp()], [torch.tensor([1e3, 0.0])], ())
    exact = [torch.tensor([float("inf"), 1.0], dtype=torch.float64)]
    assert compare(call, [np.array([np.inf, 1.0], np.float32)], exact) == ""
    assert "inf" in compare(call, [np.array([3.4e38, 1.0], np.float32)], exact)
    assert compare(call, [np.array([1.0], np.float32)], exact) == "output 0 is of shape (1,); expected (2,)"


def test_an_entry_without_a_rule_does_not_count():
    tally = check_entry(ENTRIES["linalg.svd"], samples=2)
    assert tally.counted == 0 and {o.verdict for o in tally.outcomes} <= {"foreign", "none"}
