"""Small functions drawn at random, to hold `torch.compile` against eager PyTorch.

A function applies operators in and out of place, and views, to inputs that may be views, share a storage, or
be passed twice, and returns some of what it made: inputs, views of them, one tensor twice, numbers and None.
"""

from __future__ import annotations

import random
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch.utils._pytree import tree_leaves

CONTEXTS = {"grad": nullcontext, "no_grad": torch.no_grad, "inference": torch.inference_mode}


VIEWS = {
    "transpose": lambda x: x.transpose(0, -1) if x.dim() > 1 else x.unsqueeze(-1),
    "flat": lambda x: x.reshape(-1),
    "rest": lambda x: x[1:] if x.dim() and x.shape[0] > 1 else x.unsqueeze(0),
    "first": lambda x: x[0] if x.dim() and x.shape[0] else x.unsqueeze(0),
    "expand": lambda x: x.unsqueeze(0).expand(3, *x.shape) if x.dim() < 3 else x.squeeze(),
    "split": lambda x: x.split(1)[-1] if x.dim() and x.shape[0] else x.unsqueeze(0),
    "diagonal": lambda x: x.diagonal() if x.dim() > 1 else x.unsqueeze(-1),
    "every": lambda x: x[::2] if x.dim() else x.view(1),
    "same": lambda x: x.view(x.shape),
    "detach": lambda x: x.detach(),
    "windows": lambda x: x.unfold(0, 2, 1) if x.dim() == 1 and x.shape[0] > 2 else x.unsqueeze(0),
}
MADE = {
    "double": lambda x, y: x * 2,
    "add": lambda x, y: x + y.sum(),
    "relu": lambda x, y: x.relu(),
    "square": lambda x, y: x * x,
    "sum": lambda x, y: x.sum(),
    "rows": lambda x, y: x.sum(0) if x.dim() else x + 1,
    "mean": lambda x, y: x.mean() if x.numel() else x.sum(),
    "clone": lambda x, y: x.clone(),
    "contiguous": lambda x, y: x.contiguous(),
    "positive": lambda x, y: x > 0,
    "whole": lambda x, y: (4 * x).long(),
    "zeros": lambda x, y: torch.zeros(2, 3),
    "ones": lambda x, y: torch.ones(2).expand(3, 2),
    "cat": lambda x, y: torch.cat([x.reshape(-1), y.reshape(-1)]),
    "both": lambda x, y: torch.stack([x, x]) if x.dim() < 3 else x - 1,
}
WRITES = {
    "mul_": lambda x: x.mul_(2),
    "add_": lambda x: x.add_(1),
    "fill": lambda x: x.reshape(-1)[:1].fill_(3.0),
    "set": lambda x: x.copy_(x * 0.5),
}
SHAPES = ((3, 4), (4,), (), (2, 3, 2), (1, 4), (0, 4), (3, 3))


@dataclass
class Drawn:
    """A function as data.

    inputs: shape, form and whether it learns, of each. steps: (kind, operator, tensors).
    """

    seed: int
    inputs: list[tuple[tuple[int, ...], str, bool]] = field(default_factory=list)
    steps: list[tuple[str, str, tuple[int, int]]] = field(default_factory=list)
    returned: list[int | None] = field(default_factory=list)
    twice: bool = False
    breaks: int = -1
    context: str = "grad"
    dynamic: bool | None = None

    def __call__(self, *tensors):
        known = list(tensors)
        for place, (kind, name, (one, other)) in enumerate(self.steps):
            if place == self.breaks:
                torch._dynamo.graph_break()
            x, y = known[one], known[other]
            x, y = (t if t.is_floating_point() else t.float() for t in (x, y))
            if kind == "view":
                known.append(VIEWS[name](x))
            elif kind == "made":
                known.append(MADE[name](x, y))
            else:
                known.append(WRITES[name](x))
        return [place if place is None else known[place] for place in self.returned]

    def arguments(self):
        """Return the inputs, with new storages: the same numbers each time."""
        numbers = torch.Generator().manual_seed(self.seed)
        tensors = []
        for shape, form, learns in self.inputs:
            if form == "shared" and tensors and tensors[-1].numel():
                tensors.append(tensors[-1].detach()[..., :1] if tensors[-1].dim() else tensors[-1].detach())
                continue
            x = torch.randn(shape, generator=numbers)
            if form == "transposed" and x.dim() > 1:
                x = torch.randn(shape[::-1], generator=numbers).permute(*reversed(range(x.dim())))
            elif form == "part":
                x = torch.randn((2, *shape), generator=numbers)[1]
            elif form == "expanded":
                x = torch.randn((*shape[:-1], 1) if shape else (), generator=numbers).expand(shape)
            tensors.append(x.requires_grad_(learns))
        return [*tensors, tensors[0]] if self.twice else tensors


def draw(seed: int) -> Drawn:
    """Return the function of a seed."""
    choice = random.Random(seed)
    drawn = Drawn(seed, context=choice.choice(["grad", "grad", "grad", "no_grad", "inference"]))
    learning = drawn.context == "grad" and choice.random() < 0.8
    forms = ("plain", "plain", "plain", "transposed", "part", "expanded", "shared")
    for place in range(choice.randint(1, 3)):
        form = choice.choice(forms) if place else choice.choice(forms[:-1])
        learns = learning and form != "shared" and choice.random() < 0.7
        drawn.inputs.append((choice.choice(SHAPES), form, learns))
    drawn.twice = choice.random() < 0.15
    count = len(drawn.inputs) + drawn.twice
    for _ in range(choice.randint(1, 6)):
        kind = choice.choices(["view", "made", "write"], [4, 4, 1])[0]
        names = {"view": VIEWS, "made": MADE, "write": WRITES}[kind]
        drawn.steps.append(
            (kind, choice.choice(sorted(names)), (choice.randrange(count), choice.randrange(count)))
        )
        count += 1
    drawn.returned = [
        choice.choice([*range(count), count - 1, count - 1]) for _ in range(choice.randint(1, 4))
    ]
    if choice.random() < 0.1:
        drawn.returned.append(None)
    drawn.breaks = choice.randrange(len(drawn.steps)) if choice.random() < 0.2 else -1
    drawn.dynamic = choice.choice([None, None, None, True])
    return drawn


@dataclass
class Observed:
    """What a call did: its results, its inputs afterwards, their gradients."""

    inputs: list[torch.Tensor]
    results: list[object]
    gradients: list[torch.Tensor | None]


def observe(drawn: Drawn, backend: str | None) -> Observed:
    """Call a function, compiled for a backend or (None) eager, and its backward twice over new inputs."""
    call = drawn if backend is None else torch.compile(drawn.__call__, backend=backend, dynamic=drawn.dynamic)
    for _ in range(2 if backend else 1):
        with CONTEXTS[drawn.context]():
            inputs = drawn.arguments()
            results = call(*inputs)
        learning = [r for r in tree_leaves(results) if isinstance(r, torch.Tensor) and r.requires_grad]
        learning = [r for r in learning if r.is_floating_point()]
        if learning:
            weighted = [(r * (n + 1)).sum() if n % 2 else r.sum() for n, r in enumerate(learning)]
            torch.stack(weighted).sum().backward()
    return Observed(inputs, results, [x.grad for x in inputs])


def differences(found: Observed, wanted: Observed) -> list[str]:
    """Return in what two calls differ: in words, none if they are alike."""
    wrong = []
    for what in ("results", "inputs", "gradients"):
        for place, (mine, theirs) in enumerate(zip(getattr(found, what), getattr(wanted, what), strict=True)):
            wrong += [f"{what}[{place}]: {reason}" for reason in _unlike(mine, theirs, what)]
    if _aliases(found) != _aliases(wanted):
        wrong.append(f"aliases are {_aliases(found)}, not {_aliases(wanted)}")
    return wrong


def _unlike(mine, theirs, what):
    if not isinstance(theirs, torch.Tensor) or not isinstance(mine, torch.Tensor):
        return [] if mine is None and theirs is None else [f"is {mine}, not {theirs}"] * (mine is not theirs)
    forms = [(t.shape, t.dtype, t.requires_grad, t.is_inference()) for t in (mine, theirs)]
    if forms[0] != forms[1]:
        return [f"is {forms[0]}, not {forms[1]}"]
    wrong = []
    if what == "results" and mine.numel() and mine.stride() != theirs.stride():
        wrong.append(f"has strides {mine.stride()}, not {theirs.stride()}")
    if not torch.allclose(mine, theirs, rtol=1e-4, atol=1e-5):
        wrong.append(f"is {mine}, not {theirs}")
    return wrong


def _aliases(observed: Observed) -> list[tuple[int, int, str]]:
    """Return the pairs of inputs and results that are one object, or share a storage."""
    tensors = [t for t in (*observed.inputs, *observed.results) if isinstance(t, torch.Tensor)]
    pairs = []
    for b, other in enumerate(tensors):
        for a, one in enumerate(tensors[:b]):
            if one is other:
                pairs.append((a, b, "same"))
            elif one.numel() and other.numel() and _place(one) == _place(other):
                pairs.append((a, b, "shared"))
    return pairs


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
