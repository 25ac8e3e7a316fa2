"""Every case that fuzzing found, and every seed: a result, or an error of torchedge in one line."""

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
pytest.importorskip("onnx")

import formats  # noqa: E402
import mutations  # noqa: E402
import run  # noqa: E402

CASES = sorted(path for path in (HERE / "corpus").glob("*/*") if path.is_file())


def test_every_format_is_fuzzed():
    assert tuple(formats.FORMATS) == run.NAMES


@pytest.mark.parametrize("case", CASES, ids=lambda path: f"{path.parent.name}-{path.name[:20]}")
def test_what_was_found_stays_mended(case):
    formats.survives(case.parent.name, case.read_bytes())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", formats.FORMATS)
def test_seeds_are_accepted_and_some_mutations_survive(name):
    import random

    form = formats.FORMATS[name]
    for number, seed in enumerate(form.seeds()):
        assert formats.survives(name, seed) or name == "journals"
        mutants = [run._mutated(form.form, seed, random.Random(100 * number + n)) for n in range(3)]
        assert any(data != seed for data in mutants)
        for data in mutants:
            formats.survives(name, data)


def test_mutations_repeat_and_change_a_little():
    import random

    document = {"a": [1, 2.5, "text", {"b": None}], "c": True}
    changed = [mutations.mutate_json(document, random.Random(seed)) for seed in range(200)]
    assert changed == [mutations.mutate_json(document, random.Random(seed)) for seed in range(200)]
    assert document == {"a": [1, 2.5, "text", {"b": None}], "c": True}
    assert sum(item != document for item in changed) > 150
