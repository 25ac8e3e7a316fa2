"""Bundles that were damaged or made to harm: what Python refuses, the native runner refuses in one line.

All digests are computed anew, so that the change itself is what both sides see.
"""

import json
import os
import shutil

import pytest
from bundles.test_hostile_bundles import REFUSED, WRONG, edit, files_of
from runner.conftest import SANITIZERS

import torchedge

pytest.importorskip("pyopencl")


@pytest.fixture(scope="module")
def both(started):
    """Hold both sides against a bundle that neither may run; the runner is built with some options."""

    def made(*options):
        runner = started(*options)

        def call(folder):
            with pytest.raises(REFUSED):
                torchedge.load_bundle(folder, trust=True)
            return runner.refusal(folder, "--device", runner.device)

        return call

    return made


@pytest.fixture(
    scope="module", params=[(), pytest.param(SANITIZERS, marks=pytest.mark.slow)], ids=["", "sanitized"]
)
def refused(request, both):
    return both(*request.param)


def first(document, key, role=None, **wanted):
    """Return the first entry of a list with these values."""
    wanted |= {"role": role} if role else {}
    return next(entry for entry in document[key] if all(entry.get(k) == v for k, v in wanted.items()))


def index_of(document, role):
    """Return the place of the first tensor of a role."""
    return document["tensors"].index(first(document, "tensors", role))


def placed(document, place):
    """Return the pair of the arena's tensor in this place."""
    return document["arena"]["offsets"][place]


def rename(document):
    """Give an input the name of a parameter."""
    first(document, "tensors", "input").update(name=first(document, "tensors", "parameter")["name"])


DEEP = {"x": 1}
for _ in range(200):
    DEEP = {"x": DEEP}
HUGE = 2**40

PROGRAMS = {
    "kernel out of range": lambda d: d["launches"][0].update(kernel=99),
    "kernel below zero": lambda d: d["launches"][0].update(kernel=-1),
    "tensor out of range": lambda d: d["launches"][0]["tensors"].__setitem__(0, len(d["tensors"])),
    "tensor far out of range": lambda d: d["launches"][0]["tensors"].__setitem__(0, 2**63),
    "too few tensors": lambda d: d["launches"][0]["tensors"].pop(),
    "too many sizes": lambda d: d["launches"][0].update(sizes=[1] * 255),
    "a size beyond int": lambda d: d["launches"][0].update(sizes=[2**31]),
    "no work-items": lambda d: d["launches"][0].update(global_size=[]),
    "a side of zero": lambda d: d["launches"][0].update(global_size=[0]),
    "endless work": lambda d: d["launches"][0].update(global_size=[HUGE, HUGE, HUGE], local_size=None),
    "four dimensions": lambda d: d["launches"][0].update(global_size=[1, 1, 1, 1]),
    "text as a number": lambda d: d["launches"][0].update(kernel="0"),
    "a fraction as an index": lambda d: d["launches"][0].update(kernel=0.5),
    "null launches": lambda d: d.update(launches=None),
    "huge shape": lambda d: d["tensors"][0].update(shape=[HUGE] * len(d["tensors"][0]["shape"])),
    "negative shape": lambda d: d["tensors"][0].update(shape=[-1] * len(d["tensors"][0]["shape"])),
    "shape of NaN": lambda d: d["tensors"][0].update(shape=[float("nan")]),
    "shape of infinity": lambda d: d["tensors"][0].update(shape=[float("inf")]),
    "order of another rank": lambda d: d["tensors"][0]["layout"].update(order=[0, 0]),
    "order out of range": lambda d: d["tensors"][0]["layout"].update(order=[15]),
    "split of a buffer": lambda d: d["tensors"][0]["layout"].update(split=1),
    "unknown storage": lambda d: d["tensors"][0]["layout"].update(storage="pipe"),
    "unknown dtype": lambda d: d["tensors"][0].update(dtype="float99"),
    "unknown role": lambda d: d["tensors"][0].update(role="root"),
    "unknown key": lambda d: d["tensors"][0].update(more=1),
    "deep document": lambda d: d.update(notes=[DEEP]),
    "arena too small": lambda d: d["arena"].update(nbytes=1),
    "arena in other pieces": lambda d: d["arena"].update(pieces=[1, 2]),
    "place beyond the arena": lambda d: placed(d, 0).__setitem__(1, d["arena"]["nbytes"]),
    "place of no tensor": lambda d: placed(d, 0).__setitem__(0, 60_000),
    "place of a parameter": lambda d: placed(d, 0).__setitem__(0, index_of(d, "parameter")),
    "no place": lambda d: d["arena"]["offsets"].pop(0),
    "two places": lambda d: d["arena"]["offsets"].append(placed(d, 0)),
    "overwritten": lambda d: [pair.__setitem__(1, 0) for pair in d["arena"]["offsets"]],
    "a slot that is not there": lambda d: d["arena"]["slot_of"].append([0, 7]),
    "output of an intermediate": lambda d: d.update(outputs=[index_of(d, "intermediate")]),
    "input of another role": lambda d: d.update(inputs=[index_of(d, "parameter")]),
    "input twice": lambda d: d.update(inputs=d["inputs"] * 2),
    "hyperparameter of a tensor": lambda d: d.update(hyperparameters={"lr": d["inputs"][0]}),
    "two tensors of a name": rename,
    "kernel of another text": lambda d: d["kernels"][0].update(sha256="0" * 64),
    "kernel of no text": lambda d: d["kernels"][0].update(name="../../x"),
    "local memory beyond all": lambda d: d["kernels"][0].update(local_bytes=HUGE),
    "writes an input": lambda d: [t.update(role="constant") for t in d["tensors"] if t["role"] == "output"],
    "schema": lambda d: d.update(schema="torchedge-program-9"),
    "no arena": lambda d: d.pop("arena"),
}  # fmt: skip


@pytest.mark.parametrize("change", PROGRAMS.values(), ids=PROGRAMS)
def test_programs(copied, reseal, refused, change):
    edit(copied, "program.json", reseal, change)
    refused(copied)


@pytest.mark.parametrize("change", [change for change, _ in WRONG], ids=[message for _, message in WRONG])
def test_manifests(copied, both, change):
    from torchedge.bundles.manifests import digest_of

    path = copied / "manifest.json"
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps({**document, "sha256": digest_of(document)}))
    both()(copied)


TEXTS = {
    "not JSON": "{",
    "empty": "",
    "a list": "[]",
    "a million deep": "[" * 1_000_000,
    "a key twice": '{"schema": "torchedge-program-1", "schema": "torchedge-program-1"}',
    "an endless number": '{"schema": 1' + "0" * 400 + "}",
    "no UTF-8": b'{"schema": "\xff"}',
    "a half of a character": '{"schema": "\\ud800"}',
    "a zero byte": b'{"schema": "\0"}',
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize("name", ["program.json", "manifest.json"])
def test_texts(copied, reseal, refused, name, text):
    (copied / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    if name != "manifest.json":
        reseal(copied, name)
    refused(copied)


def test_changed_bytes_and_missing_files(copied, refused):
    for name in files_of(copied):
        path = copied / name
        data = path.read_bytes()
        for damaged in (
            data[:-1],
            b"",
            bytes([data[0] ^ 1]) + data[1:],
            data[:-2] + bytes([data[-2] ^ 1, data[-1]]),
        ):
            path.write_bytes(damaged)
            if name != "manifest.json" or json.loads(data) != _loaded(damaged):
                refused(copied)
        path.unlink()
        assert name in refused(copied)
        path.write_bytes(data)


def _loaded(data):
    try:
        return json.loads(data)
    except ValueError:
        return None


def test_links_pipes_and_folders(copied, refused, tmp_path):
    for name in ("program.json", "weights.safetensors", "manifest.json", "kernels"):
        shutil.move(copied / name, tmp_path / name)
        (copied / name).symlink_to(tmp_path / name)
        assert "link" in refused(copied)
        (copied / name).unlink()
        if name != "kernels":
            os.mkfifo(copied / name)
            assert "regular file" in refused(copied)
            (copied / name).unlink()
            (copied / name).mkdir()
            refused(copied)
            (copied / name).rmdir()
        shutil.move(tmp_path / name, copied / name)
    refused(tmp_path / "nothing")


def weights(change):
    """Return a function that changes the header of a weights file, of the same length if it can."""

    def call(data):
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        change(header)
        text = json.dumps(header).encode().ljust(length)
        return len(text).to_bytes(8, "little") + text + data[8 + length :]

    return call


def _tensor(header):
    return next(entry for name, entry in header.items() if name[0] not in "_~")


WEIGHTS = {
    "cut off": lambda data: data[:-1],
    "longer": lambda data: data + b"x",
    "four bytes": lambda data: data[:4],
    "an endless header": lambda data: b"\xff" * 8 + data[8:],
    "another dtype": weights(lambda h: _tensor(h).update(dtype="F16")),
    "a huge shape": weights(lambda h: _tensor(h).update(shape=[2**62, 2**62])),
    "an empty shape of overflow": weights(lambda h: _tensor(h).update(shape=[2**39, 2**39, 0])),
    "offsets backwards": weights(lambda h: _tensor(h)["data_offsets"].reverse()),
    "offsets beyond": weights(lambda h: _tensor(h).update(data_offsets=[2**62, 2**63])),
    "an offset below zero": weights(lambda h: _tensor(h).update(data_offsets=[-4, 0])),
    "another name": weights(lambda h: h.update(other=h.pop(next(n for n in h if n[0] not in "_~")))),
    "no schema": weights(lambda h: h.pop("__metadata__")),
}


@pytest.mark.parametrize("change", WEIGHTS.values(), ids=WEIGHTS)
def test_weights(copied, reseal, refused, change):
    path = copied / "weights.safetensors"
    path.write_bytes(change(path.read_bytes()))
    reseal(copied, path.name)
    refused(copied)
