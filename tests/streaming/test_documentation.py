"""Pages about streaming: the example reads, is what it says, and the tables name every entry."""

import re
from fractions import Fraction

import pytest
from oracles.exhaustive_plans import best_plan

from torchedge.storage.documents import parse_json
from torchedge.streaming.instances import INSTANCES
from torchedge.streaming.plans import PLANS
from torchedge.streaming.verification import check_plan


@pytest.fixture
def text(checkout):
    pages = ("streaming", "streaming-how", "streaming-files")
    return "\n".join((checkout / "docs" / f"{page}.md").read_text(encoding="utf-8") for page in pages)


@pytest.fixture
def example(text):
    """The instance and the plan of the file format's section, as JSON text."""
    return re.findall(r"^```json\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)[:2]


def test_the_example_is_an_optimal_plan(example):
    instance = INSTANCES.parse("docs", parse_json("docs", example[0].encode()))
    plan = PLANS.parse("docs", parse_json("docs", example[1].encode()))
    found = check_plan(instance, plan)
    assert found.objective == Fraction(4) and found.resident_chunks == (1, 3, 2, 3, 1)
    assert plan.status == "OPTIMAL" and best_plan(instance).objective == pytest.approx(4)


def test_every_entry_is_in_a_table(example, text):
    documents = [parse_json("docs", made.encode()) for made in example]
    instance = INSTANCES.parse("docs", documents[0])
    assert INSTANCES.document(instance) == documents[0]
    assert PLANS.document(PLANS.parse("docs", documents[1])) == documents[1]
    keys = {key for document in documents for key in document}
    keys |= {"memory_chunks", "residency", "distance", "program", *documents[1]["loads"][0]}
    keys |= {*documents[0]["layers"][0], *documents[0]["weights"][0]}
    rows = "\n".join(line for line in text.splitlines() if line.startswith("|"))
    assert not [key for key in keys if not re.search(rf"`(\w+\[\]\.)?{key}`", rows)]


def test_the_snippet_of_the_verifier_runs(example, text, tmp_path, monkeypatch):
    (tmp_path / "instance.json").write_text(example[0])
    (tmp_path / "plan.json").write_text(example[1])
    snippet = next(s for s in re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S) if "verify_plan" in s)
    shown = re.findall(r"^(found\..*?)  # (.*)$", snippet, re.MULTILINE)
    names = {}
    monkeypatch.chdir(tmp_path)
    exec(snippet, names)
    assert len(shown) == 2
    for left, right in shown:
        assert repr(eval(left, names)) == f"({right})"


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("word", "pictures"), [("simulate_plan", 2), ("plan_queue", 2)])
def test_the_snippets_of_predictions_run(example, text, tmp_path, monkeypatch, word, pictures):
    for package in ("matplotlib", "scipy"):
        pytest.importorskip(package)
    (tmp_path / "instance.json").write_text(example[0], encoding="utf-8")
    (tmp_path / "plan.json").write_text(example[1], encoding="utf-8")
    snippets = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names = {}
    if word == "plan_queue":
        exec(next(s for s in snippets if "torchedge.plan(" in s), names)
    exec(next(s for s in snippets if word in s), names)
    assert names["run" if word == "simulate_plan" else "queue"].latency_ms > 0
    assert len(list(tmp_path.glob("*.png"))) == pictures
