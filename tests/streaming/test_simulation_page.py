"""docs/streaming.md: what it shows of simulation and of queues runs."""

import re

import pytest

pytest.importorskip("matplotlib")


@pytest.mark.parametrize(("word", "pictures"), [("simulate_plan", 2), ("simulate_queue", 1)])
def test_the_snippet_runs(checkout, tmp_path, monkeypatch, word, pictures):
    text = (checkout / "docs" / "streaming.md").read_text(encoding="utf-8")
    instance, plan = re.findall(r"^```json\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)[:2]
    (tmp_path / "instance.json").write_text(instance, encoding="utf-8")
    (tmp_path / "plan.json").write_text(plan, encoding="utf-8")
    snippets = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(next(s for s in snippets if word in s), names)
    assert names["run"].latency_ms > 0
    assert len(list(tmp_path.glob("*.png"))) == pictures
