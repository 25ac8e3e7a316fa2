"""A test as you would write it for your own model: run it with `pytest examples/test_features_example.py`.

No device is needed: features are counted from the model's layers alone.
"""

from torch import nn

from torchedge.testing import ConvLayer, assert_features, conv_layers, reference_features

SIDE = 32


def small_network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        nn.Conv2d(16, 16, 3, padding=1, groups=16),
        nn.Conv2d(16, 24, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(24, 10),
    )


def test_sizes_worked_out_by_hand() -> None:
    batch = 8
    expected = {
        "mem_w": 16 * 3 * 9 + 16 * 9 + 24 * 16,
        "mem_ifm": 2 * batch * (3 * 32 * 32 + 16 * 16 * 16 + 16 * 16 * 16),
        "mem_ofm": 2 * batch * (16 * 16 * 16 + 16 * 16 * 16 + 24 * 16 * 16),
        "ops_mm_fwd": batch * 16 * 16 * (16 * 3 * 9 + 16 * 9 + 24 * 16),
    }
    assert_features(small_network(), batch, expected, input_size=(3, SIDE, SIDE))


def test_layers_are_what_the_design_says() -> None:
    assert conv_layers(small_network(), (3, SIDE, SIDE)) == [
        ConvLayer(n=16, m=3, kernel=(3, 3), ip=(32, 32), op=(16, 16)),
        ConvLayer(n=16, m=16, kernel=(3, 3), ip=(16, 16), op=(16, 16), groups=16),
        ConvLayer(n=24, m=16, kernel=(1, 1), ip=(16, 16), op=(16, 16)),
    ]


def test_every_feature_against_the_plain_reference() -> None:
    model = small_network()
    layers = conv_layers(model, (3, SIDE, SIDE))
    for batch in (1, 2, 100):
        expected = reference_features(layers, batch)
        assert_features(model, batch, expected, input_size=(3, SIDE, SIDE), rtol=1e-12)
