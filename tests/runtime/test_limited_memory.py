"""Training within a memory limit: frozen weights come from a file, twice a step, and nothing else changes."""

import copy

import pytest
import torch

import torchedge
from torchedge.errors import IndexRangeError, InputError, LimitError, TorchedgeWarning
from torchedge.tracing.vision import prepare_torchvision

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


def network(form=None, depth=DEPTH):
    torch.manual_seed(0)
    base = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(depth)])
    if form is not None:
        base = torchedge.quantize(base, form, group=32)
    return torch.nn.Sequential(*[Adapted(layer) for layer in base])


def batches(count, rows=8, samples=1):
    draw = torch.Generator().manual_seed(0)
    shape = (samples, rows, WIDTH)
    return [tuple(torch.randn(shape, generator=draw) for _ in range(2)) for _ in range(count)]


def optimizer_of(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


def trainer_of(model, samples=1, **options):
    x, y = batches(1, samples=samples)[0]
    loss = torch.nn.functional.mse_loss
    return torchedge.Trainer(model, x, y, loss=loss, optimizer=optimizer_of(model), **options)


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


def cut_trainer(model, samples, accumulation=1):
    """A trainer that takes a batch in parts, as it has little more than what one sample needs."""
    limit = 1.1 * least_limit(copy.deepcopy(model), samples=samples, accumulation=accumulation)
    with pytest.warns(TorchedgeWarning, match=f"batch of {samples} runs in . parts of"):
        trainer = trainer_of(model, samples, accumulation=accumulation, memory_limit=f"{int(limit)}B")
    assert 1 < trainer.parts <= samples and samples % trainer.parts == 0
    assert allocated(trainer) == trainer.memory.total <= limit
    return trainer


@pytest.mark.sampled(1)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_batch_that_is_too_large_runs_in_parts_and_trains_as_pytorch_does(accumulation):
    model = network(depth=2)
    eager = copy.deepcopy(model)
    optimizer, losses = optimizer_of(eager), []
    with cut_trainer(model, 6, accumulation) as trainer:
        for number, (x, y) in enumerate(batches(4, samples=6), 1):
            losses.append(torch.nn.functional.mse_loss(eager(x), y))
            (losses[-1] / accumulation).backward()
            if number % accumulation == 0:
                optimizer.step()
                optimizer.zero_grad()
            assert trainer.step(x, y) == pytest.approx(losses[-1].item(), rel=1e-5)
            assert (trainer.batches, trainer.steps) == (number, number // accumulation)
        with pytest.raises(InputError, match="has 5 samples, and the memory limit cuts batches into"):
            trainer.step(*batches(1, samples=5)[0])
    for name, value in eager.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_adapters_train_in_streamed_parts():
    """Masks and positions are constants of each program; they count within the limit as well."""
    prepare_torchvision()
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, vocab_size=128
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear")).train()
    ids = torch.randint(0, 128, (4, 64))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    tuned = copy.deepcopy(model)
    with torchedge.Trainer(tuned, batch, optimizer=optimizer_of(tuned)) as trainer:
        losses, whole = [trainer.step(batch) for _ in range(3)], trainer.memory.total
    limit = whole // 4
    with (
        pytest.warns(TorchedgeWarning, match="batch of 4 runs in"),
        torchedge.Trainer(model, batch, optimizer=optimizer_of(model), memory_limit=f"{limit}B") as trainer,
    ):
        assert [trainer.step(batch) for _ in range(3)] == pytest.approx(losses, rel=1e-5)
        assert allocated(trainer) == trainer.memory.total <= limit


@pytest.mark.parametrize("first", ["time", pytest.param("batch", marks=pytest.mark.slow)])
def test_a_batch_is_cut_only_where_samples_are_apart(first):
    """The first dimension of a recurrent network's input may be time."""
    torch.manual_seed(0)
    model = torch.nn.LSTM(8, 16, batch_first=first == "batch")
    x, target = torch.randn(4, 4, 8), torch.randn(4, 4, 16)

    def loss(outputs, target):
        return torch.nn.functional.mse_loss(outputs[0], target)

    def make(limit):
        optimizer = optimizer_of(model)
        return torchedge.Trainer(model, x, target, loss=loss, optimizer=optimizer, memory_limit=limit)

    if first == "time":
        with pytest.raises(LimitError, match="batch of 4 is not cut into parts"):
            make("1KiB")
        return
    with pytest.raises(LimitError) as raised:
        make("1KiB")
    with pytest.warns(TorchedgeWarning, match="parts of"), make(f"{raised.value.works_bytes}B") as trainer:
        assert trainer.step(x, target) == pytest.approx(loss(model(x), target).item(), rel=1e-5)


class Looked(torch.nn.Module):
    """Rows of a frozen table, by numbers that may be out of range, through a layer that learns."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(10, WIDTH).requires_grad_(False)
        self.layer = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.layer(torch.tanh(self.layer(self.table(x))))


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("place", [0, 3])
def test_a_part_that_raises_takes_back_the_parts_before_it(place, accumulation):
    """Without it the next update would have gradients of a batch that does not count."""
    torch.manual_seed(0)
    model, results = Looked(), []
    good, target = torch.arange(32).reshape(4, 8) % 10, torch.zeros(4, 8, WIDTH)
    bad = good.clone()
    bad[place, 0] = 99
    for fails in (True, False):
        tuned = copy.deepcopy(model)

        def make(limit, tuned=tuned):
            return torchedge.Trainer(
                tuned, good, target, loss=torch.nn.functional.mse_loss, optimizer=optimizer_of(tuned),
                accumulation=accumulation, memory_limit=limit,
            )  # fmt: skip

        with pytest.raises(LimitError) as raised:
            make("1KiB")
        with pytest.warns(TorchedgeWarning, match="runs in 4 parts of 1"):
            trainer = make(f"{raised.value.works_bytes}B")
        with trainer:
            if fails:
                with pytest.raises(IndexRangeError, match="99"):
                    trainer.step(bad, target)
                assert trainer.batches == 0
            losses = [trainer.step(good, target) for _ in range(2 * accumulation)]
        results.append((losses, tuned.layer.weight))
    (losses, weight), (expected, other) = results
    assert losses == expected and torch.equal(weight, other)


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
