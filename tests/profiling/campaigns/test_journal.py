"""The journal survives a torn last line at any byte, and refuses damage in the middle."""

from pathlib import Path

import pytest

from torchedge.errors import ProfileError
from torchedge.profiling.campaigns.recording import FILE, CampaignJournal

ROWS = [
    {"row": "session", "device": "board", "boot": "a"},
    {"row": "environment", "machine": "m"},
    *[
        {"row": kind, "job": f"net{i}", "mode": "train", "batch_size": 2**i, **rest}
        for i in range(3)
        for kind, rest in (("start", {}), ("point", {"fits": 1, "reason": "Γ"}))
    ],
]


def written(folder: Path) -> bytes:
    with CampaignJournal(folder) as journal:
        for row in ROWS:
            journal.append(row)
    return (folder / FILE).read_bytes()


@pytest.mark.parametrize("line", [b"garbage\n", b'{"row": "point"}\n', b"[]\n", b"\x00\x00\n", b"\n"])
def test_damage_in_the_middle_is_named(tmp_path, line):
    whole = written(tmp_path)
    (tmp_path / FILE).write_bytes(line + whole)
    with pytest.raises(ProfileError, match="line 1"), CampaignJournal(tmp_path):
        pass


def begin(journal, boot="a"):
    journal.append({"row": "session", "device": "board", "boot": boot})


def point(journal, kind, **rest):
    journal.append({"row": kind, "job": "net", "mode": "train", "batch_size": 1, **rest})


def test_losses_count_in_a_row(tmp_path):
    with CampaignJournal(tmp_path) as journal:
        for _ in range(3):  # killed by somebody: not the point's fault so soon
            begin(journal)
            point(journal, "start")
        assert journal.given_up() == []
        begin(journal)
        point(journal, "start")
        begin(journal)
        assert journal.given_up() == [("net", "train", 1)]
        point(journal, "start")
        point(journal, "point", fits=1)
        assert journal.given_up() == []


@pytest.mark.parametrize("witness", ["lost", "boot"])
def test_losses_that_were_seen_count_twice_only(tmp_path, witness):
    with CampaignJournal(tmp_path) as journal:
        for number in range(2):
            assert journal.given_up() == []
            begin(journal, boot=str(number) if witness == "boot" else "a")
            point(journal, "start")
            if witness == "lost":
                journal.append({"row": "lost"})
        begin(journal, boot="last" if witness == "boot" else "a")
        assert journal.given_up() == [("net", "train", 1)]
