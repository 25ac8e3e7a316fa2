"""NaN, infinities and ties through operators that compare, order, sum, look up and pool: as in eager PyTorch.

Not hardshrink: torch.compile decomposes it before any backend, and its gradient at NaN is another one. Not
where eager's own kernel loses NaN: docs/kernel-figures.md names those operators.
"""

from functools import partial

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

pytest.importorskip("pyopencl")
NAN, INF = float("nan"), float("inf")
SPECIAL = [NAN, INF, -INF, 0.0, -0.0, 1.0, 1.0, -1.0, 0.5, 2.0, -3.0]
LABELS = torch.tensor([0, 2, 5, 1])
FEWER_NANS = ("prod", "cumprod", "soft_margin_loss")
"""Gradients at infinities are numbers; PyTorch divides infinities, such as the product by a factor."""
RUNS = 12
"""Draws of operands that each program runs on; the first few are of one number."""
DIFFERENTIATES_AMINMAX = tuple(map(int, torch.__version__.split(".")[:2])) > (2, 11)
"""Whether PyTorch has the derivative."""


def each_dim(name, **options):
    return lambda x, y, t: getattr(torch, name)(x, dim=1, **options)


def dims(*names):
    return {name: each_dim(name) for name in names}


def of_both(module, *names):
    return {name: lambda x, y, t, name=name: getattr(module, name)(x, y) for name in names}


def spread(target):
    """Return labels as indices of all elements of four rows."""
    return target.unsqueeze(1).expand(-1, 6)


def sampled(x):
    places = torch.linspace(-1.3, 1.3, 64, dtype=x.dtype).reshape(2, 4, 4, 2)
    return F.grid_sample(x, places, align_corners=False)


attention = F.scaled_dot_product_attention
IMAGE, ROWS = (2, 2, 6, 6), (4, 6)
LATER = torch.ones(7, 7).triu(1).bool()
GROUPS = {
    "pooling": (
        IMAGE,
        {
            "max_pool2d": lambda x, y, t: F.max_pool2d(x, 2),
            "max_pool2d overlapping": lambda x, y, t: F.max_pool2d(x, 3, 2, 1),
            "max_pool2d dilated": lambda x, y, t: F.max_pool2d(x, 2, 1, 0, 2),
            "max_pool2d indices": lambda x, y, t: F.max_pool2d(x, 3, 1, return_indices=True),
            "max_pool1d": lambda x, y, t: F.max_pool1d(x[0], 3, 2),
            "max_pool3d": lambda x, y, t: F.max_pool3d(x[None], 2),
            "avg_pool2d": lambda x, y, t: F.avg_pool2d(x, 3, 2, 1),
            "avg_pool2d inside": lambda x, y, t: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
            "adaptive_max_pool2d": lambda x, y, t: F.adaptive_max_pool2d(x, 4),
            "adaptive_avg_pool2d": lambda x, y, t: F.adaptive_avg_pool2d(x, 4),
            "adaptive_avg_pool2d to 1": lambda x, y, t: F.adaptive_avg_pool2d(x, 1),
            "lp_pool2d": lambda x, y, t: F.lp_pool2d(x, 2.0, 2),
        },
    ),
    "order": (
        ROWS,
        {
            "sort": each_dim("sort", stable=True),
            "sort descending": each_dim("sort", descending=True, stable=True),
            "argsort": each_dim("argsort", stable=True),
            "topk": lambda x, y, t: x.detach().topk(3, 1)[0],
            "topk smallest": lambda x, y, t: x.detach().topk(3, 1, largest=False)[0],
            "kthvalue": lambda x, y, t: x.detach().kthvalue(2, 1)[0],
            "median": lambda x, y, t: x.median(1)[0],
            "median of all": lambda x, y, t: x.median(),
            **dims("argmax", "argmin", "max", "min"),
            "argmax of all": lambda x, y, t: x.argmax(),
            "searchsorted": lambda x, y, t: torch.searchsorted(torch.arange(6.0), x),
            "msort": lambda x, y, t: x.msort(),
        },
    ),
    "extremes": (
        ROWS,
        {
            **dims("amax", "amin"),
            **of_both(torch, "maximum", "minimum", "fmax", "fmin"),
            "amax of all": lambda x, y, t: x.amax(),
            "max of all": lambda x, y, t: x.max(),
            "min of all": lambda x, y, t: x.min(),
            **({"aminmax": lambda x, y, t: torch.aminmax(x, dim=1)} if DIFFERENTIATES_AMINMAX else {}),
            "clamp": lambda x, y, t: x.clamp(-0.5, 1.0),
            "clamp by tensors": lambda x, y, t: x.clamp(y, y + 1),
            "where": lambda x, y, t: torch.where(x > y, x * 2, y),
            "masked_fill": lambda x, y, t: x.masked_fill(y > 0, 3.0),
            "nan_to_num": lambda x, y, t: x.nan_to_num(7.0),
            "comparisons": lambda x, y, t: (x < y, x <= y, x > y, x >= y, x == y, x != y),
            "isclose": lambda x, y, t: torch.isclose(x, y, equal_nan=True),
            "any": lambda x, y, t: (x.bool().any(1), x.bool().all(1), x.isnan().any()),
            "sign": lambda x, y, t: (x.sign(), x.signbit(), x.detach().heaviside(y.detach())),
            "count_nonzero": lambda x, y, t: x.count_nonzero(1),
        },
    ),
    "running": (
        ROWS,
        {
            **dims("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp"),
            "diff": lambda x, y, t: x.diff(dim=1),
        },
    ),
    "sums": (
        ROWS,
        {
            **dims(
                "sum", "mean", "prod", "nansum", "nanmean", "var", "std",
                "logsumexp", "softmax", "log_softmax",
            ),
            "softmin": lambda x, y, t: F.softmin(x, 1),
            "norm 2": lambda x, y, t: torch.linalg.vector_norm(x, 2.0, 1),
            "norm 1": lambda x, y, t: torch.linalg.vector_norm(x, 1.0, 1),
            "norm 3": lambda x, y, t: torch.linalg.vector_norm(x, 3.0, 1),
            "norm inf": lambda x, y, t: torch.linalg.vector_norm(x, INF, 1),
            "norm -inf": lambda x, y, t: torch.linalg.vector_norm(x, -INF, 1),
            "norm 0": lambda x, y, t: torch.linalg.vector_norm(x, 0.0, 1),
            "normalize": lambda x, y, t: F.normalize(x, dim=1),
            "cosine_similarity": lambda x, y, t: F.cosine_similarity(x, y, 1),
            "rms_norm": lambda x, y, t: F.rms_norm(x, (6,)),
            "pairwise_distance": lambda x, y, t: F.pairwise_distance(x, y),
            "layer_norm": lambda x, y, t: F.layer_norm(x, (6,), y[0].nan_to_num(1.0, 1.0, 1.0), y[1]),
            "group_norm": lambda x, y, t: F.group_norm(x, 2),
            "batch_norm": lambda x, y, t: F.batch_norm(x, None, None, training=True),
        },
    ),
    "long sums": (
        (3, 2500),
        {
            "of all": lambda x, y, t: (x.sum(), x.mean(), x.square().mean()),
            "of rows": lambda x, y, t: (x.sum(1), x.exp().mean(1), x.logsumexp(1)),
            "of columns": lambda x, y, t: (x.t().sum(0), x.t().logsumexp(0)),
            "softmax": lambda x, y, t: x.softmax(1),
            "norm": lambda x, y, t: torch.linalg.vector_norm(x, 2.0, 1),
        },
    ),
    "losses": (
        ROWS,
        {
            **of_both(F, "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "poisson_nll_loss"),
            "smooth_l1_loss each": lambda x, y, t: F.smooth_l1_loss(x, y, reduction="none", beta=0.5),
            "huber_loss each": lambda x, y, t: F.huber_loss(x, y, reduction="none", delta=0.5),
            "cross_entropy": lambda x, y, t: F.cross_entropy(x, t),
            "cross_entropy smoothed": lambda x, y, t: F.cross_entropy(x, t, label_smoothing=0.1),
            "cross_entropy ignoring": lambda x, y, t: F.cross_entropy(x, t, ignore_index=2),
            "cross_entropy weighted": lambda x, y, t: F.cross_entropy(x, t, x.new_ones(6).cumsum(0)),
            "cross_entropy of shares": lambda x, y, t: F.cross_entropy(x, y.detach()),
            "nll_loss": lambda x, y, t: F.nll_loss(x, t),
            "bce": lambda x, y, t: F.binary_cross_entropy(x.sigmoid().nan_to_num(), (y > 0).to(x.dtype)),
            "bce with logits": lambda x, y, t: F.binary_cross_entropy_with_logits(x, y),
            "bce weighted": lambda x, y, t: F.binary_cross_entropy_with_logits(x, y, pos_weight=t[2]),
            "kl_div of logs": lambda x, y, t: F.kl_div(x, y, log_target=True, reduction="batchmean"),
            "hinge_embedding_loss": lambda x, y, t: F.hinge_embedding_loss(x, y.detach().sign()),
            "margin_ranking_loss": lambda x, y, t: F.margin_ranking_loss(x, y, y.detach().sign(), 0.5),
            "soft_margin_loss": lambda x, y, t: F.soft_margin_loss(x, y.detach()),
            "triplet_margin_loss": lambda x, y, t: F.triplet_margin_loss(x, y, x.flip(0)),
            "multilabel_soft_margin_loss": lambda x, y, t: F.multilabel_soft_margin_loss(x, y.detach()),
        },
    ),
    "rows": (
        (7, 6),
        {
            "embedding": lambda x, y, t: F.embedding(t, x, padding_idx=2),
            "embedding_bag": lambda x, y, t: F.embedding_bag(t[None], x, mode="mean"),
            "gather": lambda x, y, t: x.gather(1, t[:, None]),
            "index_add": lambda x, y, t: x.index_add(0, t, y[:4]),
            "index_put": lambda x, y, t: x.index_put((t,), y[:4], accumulate=True),
            "scatter": lambda x, y, t: x.scatter(0, spread(t), y[:4]),
            "scatter_add": lambda x, y, t: x.scatter_add(0, spread(t), y[:4]),
            "scatter mean": lambda x, y, t: x.scatter_reduce(0, spread(t), y[:4], "mean"),
            "scatter amax": lambda x, y, t: x.detach().scatter_reduce(0, spread(t), y[:4].detach(), "amax"),
            "one_hot": lambda x, y, t: x[:4] * F.one_hot(t, 6),
            "triangles": lambda x, y, t: (x.tril(), y.triu()),
            "cdist": lambda x, y, t: (torch.cdist(x, y, 1.0), torch.cdist(x, y, 3.0)),
            "powers": lambda x, y, t: (x**2, x**3, x**0.5, x**-1, x**0, 2.0**x),
            "blends": lambda x, y, t: (x.lerp(y, 0.3), torch.addcmul(x, x, y), torch.addcdiv(x, x, y)),
            "products": lambda x, y, t: (F.linear(x, y, x[:, 0]), x.t() @ y, torch.outer(x[0], y[1])),
            "gram": lambda x, y, t: torch.einsum("ij,kj->ik", x, y).relu().mean(0),
            "attention": lambda x, y, t: attention(x[None], y[None], x[None]),
            "causal": lambda x, y, t: attention(x[None], y[None], y[None], is_causal=True),
            "masked": lambda x, y, t: (x @ y.t()).masked_fill(LATER, -INF).softmax(1) @ y,
            "double softmax": lambda x, y, t: x.softmax(1).softmax(0),
        },
    ),
    "pictures": (
        IMAGE,
        {
            "conv": lambda x, y, t: F.conv2d(x, y.clamp(-2, 2).nan_to_num()[..., :3, :3], padding=1),
            "bilinear": lambda x, y, t: F.interpolate(x, (9, 4), mode="bilinear"),
            "grid_sample": lambda x, y, t: sampled(x),
            # Without gradients: eager ends the process there.
            "grid_sample at special places": lambda x, y, t: F.grid_sample(
                x.detach().nan_to_num(), y.detach().permute(0, 2, 3, 1), "bilinear", "border", True
            ),
            "softmax": lambda x, y, t: (x.softmax(1), x.logsumexp(1), x.amax((2, 3)), x.mean((2, 3))),
            "unpool": lambda x, y, t: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2),
            "cross_entropy": lambda x, y, t: F.cross_entropy(x, torch.arange(72).reshape(2, 6, 6) % 2),
        },
    ),
    "activations": (
        (16, 8),  # whole vectors: PyTorch's scalar code has other gradients at NaN
        {
            name: lambda x, y, t, name=name: getattr(F, name)(x)
            for name in (
                "relu", "relu6", "elu", "selu", "celu", "leaky_relu", "gelu", "silu", "mish", "hardtanh",
                "hardswish", "hardsigmoid", "softshrink", "tanhshrink", "softsign", "softplus",
                "logsigmoid", "sigmoid", "tanh", "glu",
            )
        }
        | {
            "threshold": lambda x, y, t: F.threshold(x, 0.5, 0.1),
            "prelu": lambda x, y, t: F.prelu(x, y[0, 0]),
            "gelu tanh": lambda x, y, t: F.gelu(x, approximate="tanh"),
        },
    ),
}  # fmt: skip


def all_of(functions, xs, ys, labels):
    """Return what each function makes of operands of its own, in one list."""
    outputs = []
    for place, function in enumerate(functions.values()):
        made = function(xs[place], ys[place], labels)
        outputs += [*made] if isinstance(made, tuple) else [made]
    return outputs


def observe(call, operands, count, dtype=torch.float32):
    """Return a call's outputs, and the gradients by the operands, of which each function has its own."""
    x, y, labels = operands
    leaves = [tensor.to(dtype).expand(count, *tensor.shape).clone().requires_grad_() for tensor in (x, y)]
    outputs = call(*leaves, labels)
    floats = [part for part in outputs if part.requires_grad]
    torch.autograd.backward(floats, [torch.full_like(part, 2.0) for part in floats])
    gradients = [torch.zeros(count, 1) if leaf.grad is None else leaf.grad for leaf in leaves]
    return [part.detach().numpy() for part in (*outputs, *gradients)]


def draw(shape, seed):
    """Return two operands, of one number first, then of special and other numbers; and labels."""
    rng = np.random.default_rng(seed)
    if seed < 3:
        return [torch.full(shape, SPECIAL[seed]), torch.full(shape, 1.0), LABELS]
    pool = rng.choice(SPECIAL, rng.integers(2, len(SPECIAL)))
    tensors = []
    for _ in range(2):
        plain = rng.integers(-6, 6, shape) / 2
        chosen = rng.random(shape) < rng.choice([0.05, 0.2, 0.6])
        tensors.append(torch.tensor(np.where(chosen, rng.choice(pool, shape), plain), dtype=torch.float32))
    return [*tensors, LABELS]


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("group", GROUPS)
def test_special_numbers_go_through_as_in_eager(group):
    shape, functions = GROUPS[group]
    call, count = partial(all_of, functions), len(functions)
    compiled = torch.compile(call, backend="torchedge", dynamic=False, fullgraph=True)
    names = list(functions)
    outputs = [name for name, function in functions.items() for _ in range(outputs_of(function, shape))]
    wrong = {}
    for seed in range(RUNS):
        operands = draw(shape, seed)
        with sdpa_kernel(SDPBackend.MATH):  # the CPU's other kernel has 0 for a row of NaN
            found, wanted = observe(compiled, operands, count), observe(call, operands, count)
        exact = observe(call, operands, count, torch.float64)
        for place, (here, expected, double) in enumerate(zip(found, wanted, exact, strict=True)):
            differs = ~np.isclose(here, expected, rtol=2e-5, atol=2e-5, equal_nan=True)
            # In single precision PyTorch's vectors have NaN at infinities where float64 has a number.
            differs &= ~(np.isnan(expected) & np.isclose(here, double, rtol=2e-5, equal_nan=True))
            if place < len(outputs):
                parts = [(f"{outputs[place]}, output {place - outputs.index(outputs[place])}", ...)]
            else:
                parts = [(f"{name}, gradient {place - len(outputs)}", k) for k, name in enumerate(names)]
                for k, name in enumerate(names):
                    differs[k] &= name not in FEWER_NANS or all(
                        bool(x.isfinite().all()) for x in operands[:2]
                    )
            for name, part in parts:
                if differs[part].any():
                    case = [array[part][differs[part]][:4].tolist() for array in (here, expected, double)]
                    wrong.setdefault(name, (seed, *case))
    assert not wrong, "\n".join(f"{name}: (seed, found, eager, float64) {wrong[name]}" for name in wrong)


def outputs_of(function, shape):
    made = function(*draw(shape, RUNS))
    return len(made) if isinstance(made, tuple) else 1
