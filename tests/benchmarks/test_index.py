"""The index names every script, and nothing that is not there."""

import re


def test_the_index_names_every_script(checkout):
    text = (checkout / "benchmarks" / "README.md").read_text(encoding="utf-8")
    named = {name.rpartition("/")[2] for name in re.findall(r"`((?:accuracy/)?\w+\.py)", text)}
    assert named == {path.name for path in (checkout / "benchmarks").rglob("*.py")}
