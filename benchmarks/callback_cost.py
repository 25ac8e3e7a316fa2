"""What the callback adds to a training script of transformers: `python benchmarks/callback_cost.py`.

A Trainer of GPT-2-small (random weights, sequences of 64, AdamW, on the GPU if there is one) trains for two
steps with the callback. Printed are seconds of importing it, of its work before the first step and at the
end, with and without a run that does not fit (for which it looks for other settings), and the MiB that
PyTorch's allocator holds more at the peak of its work than before it.
"""

from __future__ import annotations

import tempfile
import time
import warnings
from typing import Any

import torch

from torchedge.tracing.vision import prepare_torchvision

prepare_torchvision()  # which transformers imports
import transformers  # noqa: E402 - after torchvision's operators


class Data(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Sequences of 64 tokens."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, place: int) -> dict[str, Any]:
        return {"input_ids": torch.zeros(64, dtype=torch.int64), "labels": torch.zeros(64, dtype=torch.int64)}


def main() -> None:
    """Train with the callback, and print what it took."""
    warnings.simplefilter("ignore")
    assert transformers.Trainer  # loaded before, as in any such script
    began = time.perf_counter()
    from torchedge.integrations.transformers import PredictionCallback

    print(f"{'importing the callback':<44}{time.perf_counter() - began:8.2f} s")
    cuda = torch.cuda.is_available()

    class Timed(PredictionCallback):
        """The callback with clocks."""

        begun = ended = mib = 0.0

        def on_train_begin(self, *args: object, **parts: object) -> None:
            """Time the prediction."""
            held = torch.cuda.memory_allocated() if cuda else 0
            if cuda:
                torch.cuda.reset_peak_memory_stats()
            started = time.perf_counter()
            super().on_train_begin(*args, **parts)
            self.begun = time.perf_counter() - started
            self.mib = (torch.cuda.max_memory_allocated() - held) / 2**20 if cuda else 0.0

        def on_train_end(self, *args: object, **parts: object) -> None:
            """Time the comparison."""
            started = time.perf_counter()
            super().on_train_end(*args, **parts)
            self.ended = time.perf_counter() - started

    for what, limit in (("a run that fits", 1e6), ("a run that does not fit", 1024.0)):
        callback = Timed(device="nvidia-h200", memory_limit=limit, report=str)
        with tempfile.TemporaryDirectory() as folder:
            arguments = transformers.TrainingArguments(
                folder,
                per_device_train_batch_size=2,
                max_steps=2,
                report_to=[],
                save_strategy="no",
                logging_strategy="no",
                disable_tqdm=True,
            )
            model = transformers.GPT2LMHeadModel(transformers.GPT2Config())
            transformers.Trainer(model, arguments, train_dataset=Data(), callbacks=[callback]).train()
        assert callback.run.prediction is not None
        print(f"{what + ', before the first step':<44}{callback.begun:8.2f} s")
        print(f"{what + ', at the end':<44}{callback.ended:8.2f} s")
        taken = f"{callback.mib:8.2f} MiB" if cuda else "       - (no GPU)"
        print(f"{'memory of the GPU':<44}{taken}")


if __name__ == "__main__":
    main()
