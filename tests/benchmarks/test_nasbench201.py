"""NAS-Bench-201's cells: which compute the same, which edges run, and what the networks take."""

import pytest
from nasbench201 import CellNetwork, cell_function, parse_architecture, running_edges

from torchedge.errors import ProfileError

CONV3 = "|nor_conv_3x3~0|+|nor_conv_3x3~0|nor_conv_3x3~1|+|nor_conv_3x3~0|nor_conv_3x3~1|nor_conv_3x3~2|"
SKIPS = "|skip_connect~0|+|none~0|none~1|+|none~0|skip_connect~1|none~2|"
STRAIGHT = "|none~0|+|none~0|none~1|+|skip_connect~0|none~1|none~2|"
EMPTY = "|none~0|+|none~0|none~1|+|none~0|none~1|none~2|"
DEAD = "|none~0|+|nor_conv_1x1~0|nor_conv_3x3~1|+|none~0|none~1|avg_pool_3x3~2|"


def test_parameters_in_closed_form():
    # Six 3 x 3 convolutions with batch norm a cell, at 16, 32 and 64 channels; the rest with skips alone.
    rest = sum(p.numel() for p in CellNetwork(STRAIGHT).parameters())
    cells = sum(5 * 6 * (9 * c * c + 2 * c) for c in (16, 32, 64))
    assert sum(p.numel() for p in CellNetwork(CONV3).parameters()) == rest + cells
    stem, head = 3 * 16 * 9 + 2 * 16, 2 * 64 + 64 * 10 + 10
    blocks = sum(c * 2 * c * 9 + 4 * c + 4 * c * c * 9 + 4 * c + 2 * c * c for c in (16, 32))
    assert rest == stem + head + blocks


def test_equal_functions_have_one_name():
    assert cell_function(parse_architecture(SKIPS)) == cell_function(parse_architecture(STRAIGHT)) == "x"
    assert cell_function(parse_architecture(EMPTY)) == "0"
    assert cell_function(parse_architecture(DEAD)) == "avg_pool_3x3[nor_conv_1x1[x]]"


def test_folded_cells_compute_what_unfolded_ones_do_but_for_biases():
    cell = parse_architecture(DEAD)
    assert running_edges(cell) == [(0, 2), (2, 3)]
    assert running_edges(cell, folded=False) == [(0, 2), (1, 2), (2, 3)]
    assert running_edges(parse_architecture(EMPTY)) == []


@pytest.mark.parametrize("text", ["", "conv", CONV3 + "x|a~0|", CONV3.replace("3x3", "5x5"), "|none~0|" * 40])
def test_other_texts_are_refused(text):
    with pytest.raises(ProfileError, match="NAS-Bench-201 string"):
        parse_architecture(text)
