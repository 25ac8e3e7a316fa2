"""`torch.compile(backend="torchedge")` keeps what eager PyTorch promises of values, views and gradients."""

import pytest
import torch
from oracles.compiled_functions import differences, draw, observe

pytest.importorskip("pyopencl")
pytestmark = [pytest.mark.usefixtures("fresh_dynamo"), pytest.mark.filterwarnings("ignore:.*torchedge runs")]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(40))
def test_functions_drawn_at_random(seed):
    function = draw(seed)
    try:
        wanted = observe(function, None)
    except RuntimeError:
        pytest.skip("eager PyTorch refuses this function")
    try:
        found = observe(function, "torchedge")
    except Exception:
        torch._dynamo.reset()
        with pytest.raises(Exception):  # noqa: B017 - whatever PyTorch's own backend raises
            observe(function, "aot_eager")
        return
    assert not differences(found, wanted), function


def both(function, *arguments):
    """Return what a function returns compiled, and in eager PyTorch."""
    return torch.compile(function, backend="torchedge")(*arguments), function(*arguments)


def test_gradients_that_are_one_number_everywhere():
    for function in (torch.sum, torch.mean, lambda x: x.expand(5, 3, 4).sum(), lambda x: x.sum(0).max()):
        x = torch.randn(3, 4, requires_grad=True)
        found, wanted = both(function, x)
        found.backward()
        mine, x.grad = x.grad, None
        wanted.backward()
        torch.testing.assert_close(mine, x.grad)


def test_results_that_are_views_of_one_result_share_it():
    def several(x):
        y = x * 2
        return y, y, y.view(-1), y[1:], *y.split(1)

    with torch.no_grad():
        found, _ = both(several, torch.randn(3, 4))
    assert found[0] is found[1]
    found[0].fill_(7.0)
    assert all(bool((part == 7.0).all()) for part in found)


def test_results_can_be_written_to():
    x = torch.randn(4, 3, requires_grad=True)
    for function in (lambda x: (x * 2).t(), lambda x: x.sum(), lambda x: x.unsqueeze(0) * 2):
        x.grad = None
        found, wanted = both(function, x)
        found.mul_(3).sum().backward()
        mine, x.grad = x.grad, None
        wanted.mul_(3).sum().backward()
        torch.testing.assert_close(mine, x.grad)


def test_operators_that_check_their_results():
    x = (torch.randn(4, 4) + 4 * torch.eye(4)).requires_grad_()
    with pytest.warns(UserWarning, match="in PyTorch"):
        found, wanted = both(torch.linalg.inv, x)
    torch.testing.assert_close(found, wanted)
    found.sum().backward()
    mine, x.grad = x.grad, None
    wanted.sum().backward()
    torch.testing.assert_close(mine, x.grad)
    try:
        torch.compile(torch.linalg.inv, backend="aot_eager")(torch.zeros(4, 4))
    except RuntimeError:
        torch._dynamo.reset()
        with pytest.raises(RuntimeError, match="singular"):
            torch.compile(torch.linalg.inv, backend="torchedge")(torch.zeros(4, 4))
    else:
        pytest.skip("PyTorch's own compiler drops the check: before 2.13")
