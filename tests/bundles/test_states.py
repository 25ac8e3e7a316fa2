"""States of an inference: buffers that a model writes to stay on the device from run to run."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import torchedge
from torchedge.errors import InputError

pytest.importorskip("pyopencl")


class Attention(nn.Module):
    """One head over a cache of keys, and the number of tokens so far."""

    def __init__(self):
        super().__init__()
        self.project = nn.Sequential(
            nn.Linear(8, 256), *[nn.Linear(256, 256) for _ in range(4)], nn.Linear(256, 8)
        )
        self.register_buffer("keys", torch.zeros(2, 16, 8))
        self.register_buffer("seen", torch.full((1,), 3))
        self.register_buffer("unused", torch.ones(1))

    def forward(self, x, position):
        self.keys.index_copy_(1, position, self.project(x))
        self.seen += 1
        weights = torch.softmax(x @ self.keys.transpose(1, 2) + self.unused, -1)
        return weights @ self.keys, self.seen * 2


class Sliced(Attention):
    """Writes to a fixed place, and into a slice."""

    def forward(self, x, position):
        self.keys[:, 1:3] += self.project(x)
        self.keys.mul_(position)
        return (x @ self.keys.transpose(1, 2),)


@pytest.fixture(params=[Attention, Sliced])
def model(request):
    torch.manual_seed(0)
    return request.param().eval()


def example(number):
    generator = torch.Generator().manual_seed(number)
    return torch.randn(2, 1, 8, generator=generator), torch.tensor([number])


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("device", "limit"), [("local-cpu", None), ("adreno-740", None), ("local-cpu", 0.6)])
def test_states_are_those_of_pytorch(model, tmp_path, device, limit):
    before = copy.deepcopy(model.state_dict())
    bundle = torchedge.export(model, example(3), device, out=tmp_path / "bundle", memory_limit=limit)
    for name, held in model.state_dict().items():
        assert torch.equal(held, before[name])
    expected = {"keys"} if isinstance(model, Sliced) else {"keys", "seen"}
    assert {port.name for port in bundle.states} == expected
    assert "keys" not in bundle.header.entries  # it begins with zeros
    assert (limit is None) == (bundle.schedule is None or not bundle.schedule.streamed)
    runs = []
    for _ in range(2):
        eager = copy.deepcopy(model)
        for number in (1, 2, 5):
            found = bundle.run(*example(number))
            with torch.no_grad():
                wanted = eager(*example(number))
            for one, other in zip(found, wanted, strict=True):
                np.testing.assert_allclose(one, other.numpy(), rtol=1e-5, atol=1e-5)
        for name in expected:
            np.testing.assert_allclose(bundle.runner.read(name), getattr(eager, name), rtol=1e-5, atol=1e-5)
            np.testing.assert_array_equal(bundle.state_dict()[name], bundle.runner.read(name))
        runs.append(found)
        bundle.runner.reset()
    np.testing.assert_array_equal(runs[0][0], runs[1][0])
    bundle.runner.write("keys", np.ones((2, 16, 8), np.float32))
    bundle.runner.reset("keys")
    assert not bundle.runner.read("keys").any()
    with pytest.raises(InputError, match="has no state 'kies'; did you mean"):
        bundle.runner.reset("kies")


def test_a_state_that_positions_are_read_from_is_held_in_range(tmp_path):
    class Rolling(nn.Module):
        """Writes each input to the next place."""

        def __init__(self):
            super().__init__()
            self.register_buffer("kept", torch.zeros(3, 4))
            self.register_buffer("place", torch.zeros(1, dtype=torch.int64))

        def forward(self, x):
            self.kept[self.place] = x
            self.place += 1
            return self.kept.sum(0)

    bundle = torchedge.export(Rolling(), torch.ones(1, 4), "local-cpu", out=tmp_path / "bundle")
    for number in range(3):
        (total,) = bundle.run(np.ones((1, 4), np.float32))
        assert total.tolist() == [number + 1.0] * 4
    with pytest.raises(torchedge.errors.IndexRangeError, match="updated nothing"):
        bundle.run(np.ones((1, 4), np.float32))
    assert bundle.runner.read("place").tolist() == [3]
