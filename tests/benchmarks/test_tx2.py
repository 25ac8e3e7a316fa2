"""The TX2 script on a small dataset: two networks, so that the protocol of the basis has no rows."""

import pytest
import tx2
from oracles.small_datasets import write_small_dataset

from torchedge.devices import find_device

pytest.importorskip("sklearn")


@pytest.mark.slow
def test_accuracy_as_tables(tmp_path, capsys):
    folder = write_small_dataset(tmp_path / "jetson-tx2")
    report = tx2.score_dataset(folder, find_device("jetson-tx2"), ablation=True)
    assert {key for key in report.ours if key[1] != "simulated"} == set(report.published)
    for protocol in ("own", "levels"):
        assert set(report.ours["gamma", protocol].error) == {"one", "two"}
    assert any("basis" in problem for problem in report.problems)
    assert {name for name, _ in report.ablation} >= {"ours", "ours without forest"}
    assert report.verdicts
    tx2.print_report(report)
    out = capsys.readouterr().out
    assert all(word in out for word in ("Γ, training memory", "Φ, training latency", "requirements", "publ."))
    assert "what each part contributes" in out
    assert max(map(len, out.splitlines())) <= 80
