"""A feature outside the fitted range is a sentence that a user can act on, never a name from the code."""

from torchedge.prediction.latency.model import SHARE_NAMES
from torchedge.prediction.memory.model import MEMORY_FEATURES
from torchedge.prediction.range_remarks import range_remark


def test_every_feature_of_our_forests_has_words_of_its_own():
    for name in (*SHARE_NAMES, *MEMORY_FEATURES):
        text = range_remark([name])
        assert name == "batch" or (name not in text and "sizes of layers and tensors" not in text)


def test_one_sentence_names_each_reason_once():
    text = range_remark(["batch", "share_fan", "log2_batch", "mem_w", "mem_ifm"])
    assert text.count("the batch size") == 1 and text.count("sizes of layers") == 1 and "_" not in text
    assert "extrapolated" in text and range_remark([]) == ""
