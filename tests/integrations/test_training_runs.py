"""Training runs of transformers, Lightning and accelerate are checked before their first step."""

import random
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import torchedge
from torchedge.errors import InputError, LimitError, TorchedgeError, TorchedgeWarning
from torchedge.integrations.training_runs import TrainingRun, harmless, largest_batch
from torchedge.tracing.vision import prepare_torchvision

H200 = {"device": "nvidia-h200"}


@pytest.fixture(autouse=True)
def torchvision_imports():
    """Lightning imports torchvision, which PyTorch's build for processors alone refuses as it is."""
    prepare_torchvision()


class Sequences(Dataset):
    """Token sequences of growing length."""

    def __len__(self):
        return 40

    def __getitem__(self, place):
        random.random(), np.random.rand(), torch.rand(1)
        ids = [1] * (8 + place % 25)
        return {"input_ids": ids, "labels": ids}


def padded(samples):
    longest = max(len(sample["input_ids"]) for sample in samples)
    rows = [sample["input_ids"] + [0] * (longest - len(sample["input_ids"])) for sample in samples]
    return {"input_ids": torch.tensor(rows), "labels": torch.tensor(rows)}


def network():
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 64), nn.ReLU(), nn.Linear(64, 10))


# what all share ---------------------------------------------------------------------------------------------


def test_the_example_is_of_the_largest_samples_and_randomness_stays():
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    batch = largest_batch(Sequences(), padded, 4)
    assert batch["input_ids"].shape == (4, 32)
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before


def test_streams_need_an_example():
    class Stream(IterableDataset):
        def __iter__(self):
            yield from range(3)

    with pytest.raises(TorchedgeError, match="pass example="):
        largest_batch(Stream(), list, 2)


def test_a_run_that_fits_is_predicted_as_predict_does():
    model, x = network(), torch.zeros(8, 3, 32, 32)
    run = TrainingRun(**H200)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prediction = run.check(model, x, 8, optimizer="adamw")
    assert prediction.memory == torchedge.predict(model, 8, example=x, optimizer="adamw", **H200).memory


@pytest.mark.slow
@pytest.mark.parametrize("misfit", ["warn", "raise"])
def test_a_run_that_does_not_fit_is_refused_or_announced_with_what_would_fit(misfit):
    model, x = nn.Sequential(*[nn.Linear(512, 512) for _ in range(6)]), torch.zeros(1 << 16, 512)
    limit = torchedge.predict(model, 1 << 14, example=x, **H200).needed_mib()
    run = TrainingRun(memory_limit=limit, misfit=misfit, **H200)
    expected = "will not fit on nvidia-h200.*would fit: .*accumulation"
    if misfit == "raise":
        with pytest.raises(LimitError, match=expected):
            run.check(model, x, 1 << 16, optimizer="sgd")
    else:
        with pytest.warns(TorchedgeWarning, match=expected):
            assert run.check(model, x, 1 << 16, optimizer="sgd") is not None
    assert run.advice.fits


def test_a_model_that_cannot_be_predicted_does_not_stop_the_training():
    class Odd(nn.Linear):
        def forward(self, x):
            return super().forward(x) if x.sum().item() > 0 else x.tolist()

    run = TrainingRun(**H200)
    with pytest.warns(TorchedgeWarning, match="does not predict this run"):
        assert run.check(Odd(4, 4), torch.zeros(2, 4), 2) is None
    run.finish()


def test_the_comparison_has_prediction_and_measurement_side_by_side(monkeypatch):
    reports, clock = [], iter(range(10))
    run = TrainingRun(report=reports.append, **H200)
    run.check(network(), torch.zeros(8, 3, 32, 32), 8, optimizer="sgd", accumulation=2)
    monkeypatch.setattr("time.perf_counter", lambda: float(next(clock)))
    for _ in range(7):
        run.updated()
    assert run.measured()["an update"] == pytest.approx(1000.0)  # one second each, after three
    run.finish()
    (text,) = reports
    assert "batch 2 x 8 on nvidia-h200" in text and "an update" in text and "1,000 ms" in text
    assert f" {run.prediction.latency.value:.1f} ms " in text  # of both micro-batches


def test_whatever_fails_is_a_warning():
    class Broken(Sequences):
        def __getitem__(self, place):
            raise KeyError("broken sample")

    run = TrainingRun(report=lambda text: 1 / 0, **H200)
    with pytest.warns(TorchedgeWarning, match="does not predict this run: KeyError: 'broken sample'"):
        assert harmless(run.batch)(DataLoader(Broken(), 4)) is None
    with pytest.warns(TorchedgeWarning, match="the data loader is a dict without a batch size; .* example="):
        harmless(run.batch)({"a": 1})
    run.check(network(), torch.zeros(8, 3, 32, 32), 8)
    with pytest.warns(TorchedgeWarning, match="ZeroDivisionError"):
        run.finish()
    with pytest.warns(TorchedgeWarning, match="device 'nowhere' is unknown"):
        assert TrainingRun(device="nowhere").check(network(), torch.zeros(8, 3, 32, 32), 8) is None
    with pytest.raises(KeyboardInterrupt):
        harmless(lambda: (_ for _ in ()).throw(KeyboardInterrupt))()


def test_an_example_needs_no_loader_with_a_batch_size():
    example = {"x": torch.zeros(6, 4)}
    assert TrainingRun(example=example).batch({"a": 1}) == (example, 6)


def test_evaluations_between_updates_do_not_count(monkeypatch):
    times = iter([0, 1, 2, 3, 4, 25, 26, 27])
    monkeypatch.setattr("time.perf_counter", lambda: float(next(times)))
    run = TrainingRun()
    for _ in range(8):
        run.updated()
    assert run.measured()["an update"] == pytest.approx(1000.0)


def test_an_unknown_choice_is_refused():
    with pytest.raises(InputError, match="misfit is 'stop'; expected"):
        TrainingRun(misfit="stop")


@pytest.mark.parametrize(
    "settings",
    [
        {"memory_limit": -1},
        {"memory_limit": float("nan")},
        {"memory_limit": "5 XB"},
        {"confidence": 2},
        {"report": 5},
    ],
)
def test_settings_that_no_run_can_have_are_refused_before_it(settings):
    with pytest.raises(InputError, match=f"{next(iter(settings))} is .*; expected"):
        TrainingRun(**settings)


# transformers -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_trainer_of_transformers_is_checked_before_its_first_step(tmp_path):
    pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers")
    from torchedge.integrations.transformers import PredictionCallback

    config = transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=2, vocab_size=50, n_positions=64, bos_token_id=0, eos_token_id=0
    )
    model, reports = transformers.GPT2LMHeadModel(config), []
    arguments = transformers.TrainingArguments(
        str(tmp_path), per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=5,
        report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    callback = PredictionCallback(report=reports.append, **H200)
    trainer = transformers.Trainer(
        model, arguments, train_dataset=Sequences(), data_collator=padded, callbacks=[callback]
    )
    trainer.train()
    example = padded([{"input_ids": [1] * 32}] * 4)
    expected = torchedge.predict(model, 4, example=example, optimizer="adamw", accumulation=2, **H200)
    assert callback.run.prediction.allocated.value == pytest.approx(expected.allocated.value, rel=0.01)
    assert len(reports) == 1 and "batch 2 x 4" in reports[0]
    assert callback.run.measured()["an update"] > 0

    strict = PredictionCallback(memory_limit=1, misfit="raise", **H200)
    stopped = transformers.Trainer(
        model, arguments, train_dataset=Sequences(), data_collator=padded, callbacks=[strict]
    )
    with pytest.raises(LimitError, match="GPT2LMHeadModel at batch 4 will not fit"):
        stopped.train()


@pytest.fixture
def train(tmp_path):
    """Train a small GPT-2 for two steps with a callback, and return its prediction."""
    pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers")

    def run(callback, trainer=transformers.Trainer, **arguments):
        config = transformers.GPT2Config(
            n_embd=32, n_layer=1, n_head=2, vocab_size=5000, n_positions=64, bos_token_id=0, eos_token_id=0
        )
        arguments = transformers.TrainingArguments(
            str(tmp_path), per_device_train_batch_size=4, max_steps=2, report_to=[], save_strategy="no",
            use_cpu=True, disable_tqdm=True, **arguments,
        )  # fmt: skip
        trained = trainer(
            transformers.GPT2LMHeadModel(config), arguments, train_dataset=Sequences(),
            data_collator=padded, callbacks=[callback],
        )  # fmt: skip
        trained.train()
        return callback.run.prediction

    return run


@pytest.mark.slow
def test_the_loss_of_a_trainer_is_predicted(train):
    import transformers

    from torchedge.integrations.transformers import PredictionCallback

    plain = train(PredictionCallback(**H200))
    smoothed = train(PredictionCallback(**H200), label_smoothing_factor=0.1)
    logits = 4 * 31 * 5000 * 4 / 2**20  # of 31 tokens: shifted
    assert plain.model == smoothed.model == "GPT2LMHeadModel"
    assert smoothed.allocated.value - plain.allocated.value == pytest.approx(logits, rel=0.1)

    own = PredictionCallback(**H200)

    class WithLoss(transformers.Trainer):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            own.compute_loss = self.compute_loss

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return model(inputs["input_ids"]).logits.mean()

    assert train(own, WithLoss).allocated.value < plain.allocated.value


# Lightning --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lightning():
    return pytest.importorskip("pytorch_lightning")


def lit(lightning):
    class Lit(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.network, self.batch_size = network(), 4

        def training_step(self, batch, place):
            x, y = batch
            loss = nn.functional.cross_entropy(self.network(x), y)
            self.log("loss", loss)
            return {"loss": loss}

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

        def train_dataloader(self):
            data = TensorDataset(torch.zeros(64, 3, 32, 32), torch.zeros(64, dtype=torch.long))
            return DataLoader(data, self.batch_size)

    return Lit()


def trainer(lightning, tmp_path, *callbacks, steps=5):
    return lightning.Trainer(
        max_steps=steps, callbacks=list(callbacks), logger=False, enable_checkpointing=False,
        enable_progress_bar=False, accelerator="cpu", enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_lightning_is_checked_before_its_first_step(lightning, tmp_path):
    from torchedge.integrations.lightning import PredictionCallback

    reports, module = [], lit(lightning)
    callback = PredictionCallback(report=reports.append, **H200)
    trainer(lightning, tmp_path, callback).fit(module)
    expected = torchedge.predict(network(), 4, input_size=(3, 32, 32), optimizer="adamw", **H200)
    assert callback.run.prediction.model == "Lit"
    assert callback.run.prediction.allocated.value == pytest.approx(expected.allocated.value, rel=0.01)
    assert "batch 1 x 4" in reports[0] and callback.run.measured()["an update"] > 0
    with pytest.raises(LimitError, match="Lit at batch 4 will not fit"):
        strict = PredictionCallback(memory_limit=1, misfit="raise", advise=False, **H200)
        trainer(lightning, tmp_path, strict).fit(lit(lightning))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_lightning_gets_the_largest_batch_size_that_fits(lightning, tmp_path):
    from torchedge.integrations.lightning import PredictedBatchSize

    model = network()
    predict = {"input_size": (3, 32, 32), "optimizer": "adamw", **H200}
    limit = torchedge.predict(model, 40, **predict).needed_mib()
    expected = torchedge.predict(model, 1, **predict).max_batch_size(limit, largest=64)
    module = lit(lightning)
    trainer(lightning, tmp_path, PredictedBatchSize(memory_limit=limit, **H200), steps=1).fit(module)
    assert module.batch_size == expected
    with pytest.raises(InputError, match="does not fit at batch size 1"):
        trainer(lightning, tmp_path, PredictedBatchSize(memory_limit=1, **H200), steps=1).fit(lit(lightning))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_step_that_reads_its_trainer_is_predicted_and_logs_nothing(lightning, tmp_path):
    from torchedge.integrations.lightning import PredictionCallback

    class Reading(type(lit(lightning))):
        logged = 0

        def training_step(self, batch, place):
            if self.logger is not None or self.trainer.max_steps != 2:
                raise RuntimeError
            return super().training_step(batch, place)

        def log(self, *args, **options):
            type(self).logged += 1

    callback, module = PredictionCallback(report=str, **H200), Reading()
    trainer(lightning, tmp_path, callback, steps=2).fit(module)
    assert callback.run.prediction.model == "Reading"
    assert Reading.logged == 2


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_steps_that_call_their_optimizers_are_not_predicted(lightning, tmp_path):
    from torchedge.integrations.lightning import PredictedBatchSize, PredictionCallback

    class Adversarial(type(lit(lightning))):
        def __init__(self):
            super().__init__()
            self.automatic_optimization, self.steps = False, 0

        def training_step(self, batch, place):
            self.steps += 1
            for optimizer in self.optimizers():
                optimizer.step()

        def configure_optimizers(self):
            return [torch.optim.Adam(self.parameters()), torch.optim.Adam(self.parameters())]

    module, callback = Adversarial(), PredictionCallback(misfit="raise", **H200)
    with pytest.warns(TorchedgeWarning, match="calls its optimizers itself"):
        trainer(lightning, tmp_path, callback, PredictedBatchSize(**H200), steps=2).fit(module)
    assert callback.run.prediction is None and module.batch_size == 4 and module.steps == 1


def test_a_loader_that_is_passed_has_a_batch_size_of_its_own(lightning, tmp_path):
    from torchedge.integrations.lightning import PredictedBatchSize

    module = lit(lightning)
    with pytest.raises(InputError, match="fit got train_dataloaders"):
        trainer(lightning, tmp_path, PredictedBatchSize(**H200)).fit(module, module.train_dataloader())


# accelerate -------------------------------------------------------------------------------------------------


def test_scripts_with_accelerate_are_checked():
    accelerate = pytest.importorskip("accelerate")
    from torchedge.integrations.accelerate import check_run

    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = network()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    run = check_run(accelerator, model, optimizer, torch.zeros(8, 3, 32, 32), 8, **H200)
    expected = torchedge.predict(
        network(), 8, input_size=(3, 32, 32), optimizer="adamw", accumulation=2, **H200
    )
    assert run.prediction.allocated.value == pytest.approx(expected.allocated.value, rel=0.01)
