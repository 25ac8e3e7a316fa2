"""Training within a memory limit: frozen weights come from a file, twice a step, and nothing else changes."""

import copy

import pytest
import torch

import torchedge
from torchedge.errors import InputError, LimitError

pytest.importorskip("pyopencl")

WIDTH, DEPTH = 64, 6


class Adapted(torch.nn.Module):
    """A frozen layer with an adapter of low rank."""

    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = torch.nn.Linear(WIDTH, 4, bias=False)
        self.up = torch.nn.Linear(4, WIDTH, bias=False)

    def forward(self, x):
        return x + torch.tanh(self.base(x) + self.up(self.down(x)))


def network(form=None):
    torch.manual_seed(0)
    base = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)])
    if form is not None:
        base = torchedge.quantize(base, form, group=32)
    return torch.nn.Sequential(*[Adapted(layer) for layer in base])


def batches(count, rows=8):
    draw = torch.Generator().manual_seed(0)
    return [tuple(torch.randn(rows, WIDTH, generator=draw) for _ in range(2)) for _ in range(count)]


def trainer_of(model, **options):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    x, y = batches(1)[0]
    loss = torch.nn.functional.mse_loss
    return torchedge.Trainer(model, x, y, loss=loss, optimizer=optimizer, **options)


def least_limit(model, **options):
    with pytest.raises(LimitError, match="smallest memory limit that works") as raised:
        trainer_of(model, memory_limit="1KiB", **options)
    return raised.value.works_bytes


def allocated(trainer):
    """Bytes of all memory objects on the device, each counted once, and of the staging memory."""
    sizes = {}
    for executor in trainer._executors():
        made = [held.memory for held in executor._tensors.values()]
        for memory in (*made, *executor._arena.buffers, *executor._arena.images):
            sizes[memory.int_ptr] = memory.size
    return sum(sizes.values()) + trainer._executors()[0]._store.staging_bytes


@pytest.mark.slow
@pytest.mark.parametrize(("form", "accumulation"), [(None, 1), ("int4", 2)])
def test_a_step_that_streams_frozen_weights_has_the_bits_of_one_that_holds_them(form, accumulation):
    model = network(form)
    steps, results = batches(4), []
    limit = least_limit(copy.deepcopy(model), accumulation=accumulation)
    for within in ({}, {"memory_limit": f"{limit}B"}):
        tuned = copy.deepcopy(model)
        with trainer_of(tuned, accumulation=accumulation, **within) as trainer:
            losses = [trainer.step(*batch) for batch in steps]
            if within:
                assert allocated(trainer) == trainer.memory.total <= limit
                first = trainer._executors()[0]
                streamed = [first.program.tensors[index].name for index in first.schedule.streamed]
                assert any(name.endswith("~part2") for name in streamed)  # forward and backward
                losses.append(trainer.evaluate(*steps[0]))
                assert allocated(trainer) == trainer.memory.total <= limit
            else:
                whole = trainer.memory.total
                losses.append(trainer.evaluate(*steps[0]))
        results.append((losses, tuned.state_dict()))
    (losses, weights), (streamed_losses, streamed_weights) = results
    assert losses == streamed_losses
    assert all(torch.equal(value, streamed_weights[name]) for name, value in weights.items())
    assert limit < whole or form is not None


@pytest.mark.slow
def test_the_limit_holds_for_batches_that_come_later():
    model = network()
    with trainer_of(model, memory_limit=f"{least_limit(copy.deepcopy(model))}B") as trainer:
        small, large = batches(1, rows=2)[0], batches(1, rows=512)[0]
        assert trainer.step(*small) > 0
        with pytest.raises(LimitError, match="give the largest batch as the example"):
            trainer.step(*large)
        assert trainer.step(*small) > 0


def test_a_streamed_weight_that_changes_is_named():
    model = network()
    with trainer_of(model, memory_limit=f"{least_limit(copy.deepcopy(model))}B") as trainer:
        trainer.load()
        with torch.no_grad():
            model[2].base.weight.add_(1)
        with pytest.raises(InputError, match=r"2\.base\.weight has changed, and it is streamed"):
            trainer.load()


def test_all_stays_within_a_large_limit():
    model = network()
    with trainer_of(copy.deepcopy(model)) as whole, trainer_of(model, memory_limit="1GiB") as trainer:
        assert not trainer._executors()[0].schedule.streamed
        batch = batches(1)[0]
        assert trainer.step(*batch) == whole.step(*batch)
