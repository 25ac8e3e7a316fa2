"""Bundles that were damaged, changed or made to harm: each is refused in one line, none is run."""

import hashlib
import json
import os
import shutil

import numpy as np
import pytest

import torchedge
from torchedge.bundles.manifests import MANIFEST, MANIFESTS, digest_of
from torchedge.bundles.sources import Source
from torchedge.errors import InputError, ProfileError
from torchedge.storage.codecs import Codec
from torchedge.storage.documents import read_json
from torchedge.storage.tensors import read_tensors, write_tensors
from torchedge.textures.coefficients import DEFAULTS, KernelCoefficients

REFUSED = (InputError, ProfileError)


def refused(folder, message):
    with pytest.raises(REFUSED, match=message) as caught:
        torchedge.load_bundle(folder)
    assert "\n" not in str(caught.value)


def files_of(folder):
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def test_every_changed_file_is_noticed(copied):
    for name in files_of(copied):
        path = copied / name
        data = path.read_bytes()
        for damaged in (data[:-1], data + b" ", b"", bytes([data[0] ^ 1]) + data[1:]):
            if name == "manifest.json" and damaged.strip() == data.strip():
                continue
            path.write_bytes(damaged)
            refused(copied, name.split("/")[-1])
        path.unlink()
        refused(copied, name)
        path.write_bytes(data)
    torchedge.load_bundle(copied)


def test_what_is_no_bundle(tmp_path):
    refused(tmp_path, "is no bundle; expected a folder with a manifest.json")
    refused(tmp_path / "nothing", "is no bundle")
    (tmp_path / "file").write_text("")
    refused(tmp_path / "file", "is no bundle")
    (tmp_path / "manifest.json").mkdir()
    refused(tmp_path, r"manifest\.json")


def test_links_out_of_the_folder_are_refused(copied, tmp_path):
    outside = tmp_path / "outside.json"
    shutil.move(copied / "program.json", outside)
    (copied / "program.json").symlink_to(outside)
    refused(copied, "leads out of its folder")
    (copied / "program.json").unlink()
    shutil.move(outside, copied / "program.json")
    shutil.move(copied / "kernels", tmp_path / "kernels")
    (copied / "kernels").symlink_to(tmp_path / "kernels")
    refused(copied, "leads out of its folder")


def test_a_pipe_is_not_waited_for(copied):
    (copied / "weights.safetensors").unlink()
    os.mkfifo(copied / "weights.safetensors")
    refused(copied, "is not a regular file")


def listed(document, name):
    document["files"][name] = document["files"]["program.json"]


WRONG = [
    (lambda d: d.pop("mode"), "has no 'mode'"),
    (lambda d: d.update(extra=1), "unknown key 'extra'"),
    (lambda d: d.update(schema="torchedge-bundle-9"), "schema is 'torchedge-bundle-9'"),
    (lambda d: d.update(mode="trian"), "mode is 'trian'; expected one of train, infer"),
    (lambda d: d.update(mode="train"), "gives no loss or updates no weights"),
    (lambda d: d["device"].update({"class": "gpu"}), "have different class"),
    (lambda d: d["device"].update(fingerprint="x"), "64 hexadecimal digits"),
    (lambda d: d["inputs"].clear(), "have different inputs"),
    (lambda d: d["inputs"][0].update(shape=[2, 3, 8, 9]), "have different inputs"),
    (lambda d: d["inputs"][0].update(dtype="float99"), "dtype is 'float99'"),
    (lambda d: d["outputs"].append(d["outputs"][0]), "have different outputs"),
    (lambda d: d["hyperparameters"].update(lr=1), "have different hyperparameters"),
    (lambda d: d["memory"].update(arena_bytes=1), r"memory.total_bytes is .* computed from"),
    (lambda d: d["memory"].update(live_bytes=1), "have different memory"),
    (lambda d: d["onnx"].update(a=[1]), r"onnx.a is \[1\]; expected true or false or a number or"),
    (lambda d: d["files"].pop("weights.safetensors"), "files has no 'weights.safetensors'"),
    (lambda d: d["files"].pop(next(n for n in d["files"] if n.startswith("kernels"))), "there is no text"),
    (lambda d: listed(d, "../x"), "lists the file '../x'"),
    (lambda d: listed(d, "/etc/passwd"), "lists the file '/etc/passwd'"),
    (lambda d: listed(d, "kernels/../program.cl"), "lists the file"),
    (lambda d: listed(d, "kernels/...cl"), "cannot be read"),
    (lambda d: d["files"]["program.json"].update(sha256="0" * 64), "another SHA-256"),
    (lambda d: d["files"]["program.json"].update(bytes=3), "holds .* bytes, expected at most 3"),
    (lambda d: d["files"]["program.json"].update(bytes=-1), r"files.program.json.bytes is -1"),
    (lambda d: d.update(notes=["\x1b[31m"]), r"notes\[0\] is .* expected printable text of up to 1000 char"),
    (lambda d: d["files"].update({"\n": 1}), "files has the key"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_what_is_wrong_in_a_manifest_is_named(copied, manifest, change, message):
    manifest(copied, change)
    refused(copied, message)


def test_a_resealed_kernel_is_still_checked(copied, reseal):
    name = next(name for name in files_of(copied) if name.endswith(".cl"))
    path = copied / name
    text = path.read_text()
    document = json.loads((copied / "program.json").read_text())
    kernel = next(kernel for kernel in document["kernels"] if f"kernels/{kernel['name']}.cl" == name)
    path.write_text(text + "\n")
    reseal(copied, name)
    refused(copied, r"sha256 is .* computed from the other entries")
    for changed, message in (
        ("// " + text[text.index("__kernel") :].replace("\n", " "), "its text has '//'"),
        (text + text, "does not define exactly one"),
        (f'#include "/etc/passwd"\n{text}', "its text has '#'"),
        ("\xff", "its text has '.xff'|its text has"),
    ):
        path.write_text(changed)
        kernel["sha256"] = hashlib.sha256(changed.encode()).hexdigest()
        (copied / "program.json").write_text(json.dumps(document))
        reseal(copied, name)
        reseal(copied, "program.json")
        refused(copied, message)
    path.write_bytes(b"\xff\xfe")
    reseal(copied, name)
    refused(copied, "is not UTF-8 text")


def test_resealed_weights_are_still_checked(copied, reseal):
    path = copied / "weights.safetensors"
    data = path.read_bytes()
    tensors, metadata = read_tensors(path)
    names = sorted(name for name in tensors if not name.startswith("~"))
    first = names[0]
    for changed, message in (
        ({k: v for k, v in tensors.items() if k != first}, f"holds no .* {first}"),
        ({**tensors, "more": np.zeros(3)}, "holds 'more', which the program does not keep"),
        ({**tensors, first: tensors[first].astype(np.float64)}, "the program keeps it as"),
        ({**tensors, first: tensors[first][:1]}, "the program keeps it as"),
    ):
        write_tensors(path, changed, metadata)
        reseal(copied, "weights.safetensors")
        refused(copied, message)
    write_tensors(path, tensors, {"schema": "other"})
    reseal(copied, "weights.safetensors")
    refused(copied, "schema is 'other'")
    for cut in (data[:-1], data[:100], data[:4], b"", data + b"x"):
        path.write_bytes(cut)
        reseal(copied, "weights.safetensors")
        refused(copied, "weights.safetensors")


def test_weights_that_shrink_after_the_check_are_an_error(copied):
    pytest.importorskip("pyopencl")
    bundle = torchedge.load_bundle(copied)
    path = copied / "weights.safetensors"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ProfileError, match="ends before byte"):
        bundle.weights()
    with pytest.raises(ProfileError, match="ends before byte"):
        bundle.place()


def test_a_changed_bit_of_the_manifest_is_noticed(copied):
    path = copied / "manifest.json"
    text = path.read_text()
    assert '"torch"' in text
    for before, after in (('"torchedge": "', '"torchedge": "1'), ('"left_out": "on', '"left_out": "at')):
        assert before in text
        path.write_text(text.replace(before, after))
        refused(copied, "manifest.json: has another SHA-256 than it says")


def test_a_manifest_outside_the_folder_is_refused(copied, tmp_path):
    shutil.move(copied / "manifest.json", tmp_path / "manifest.json")
    (copied / "manifest.json").symlink_to(tmp_path / "manifest.json")
    refused(copied, "leads out of its folder")


def test_what_was_checked_is_what_is_used(copied):
    """A bit of the weights that changed after the check gave outputs of 6e35."""
    pytest.importorskip("pyopencl")
    bundle = torchedge.load_bundle(copied)
    path = copied / "weights.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 0x40
    path.write_bytes(data)
    for use in (bundle.place, bundle.weights):
        with pytest.raises(ProfileError, match="was changed after it was checked"):
            use()
    with pytest.raises(ProfileError, match="was changed after it was checked"):
        bundle.open_source()


def edit(folder, name, reseal, change):
    """Change a document of a bundle by a function, and all hashes with it."""
    path = folder / name
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    reseal(folder, name)


def other_tensor(document):
    """Swap two tensors of a launch that have the same dtype, layout and access."""
    for launch in document["launches"]:
        access = document["kernels"][launch["kernel"]]["access"]
        read = [place for place, how in enumerate(access) if how == "read"]
        kinds = [document["tensors"][launch["tensors"][place]] for place in read]
        for one in range(len(read)):
            for two in range(one):
                if (kinds[one]["dtype"], kinds[one]["role"]) == (kinds[two]["dtype"], kinds[two]["role"]):
                    first, second = launch["tensors"][read[one]], launch["tensors"][read[two]]
                    launch["tensors"][read[one]], launch["tensors"][read[two]] = second, first
                    return
    raise AssertionError("no launch has two such tensors")


PROGRAMS = [
    (other_tensor, "is lowered to other launches"),
    (lambda d: d["launches"][0]["sizes"].__setitem__(0, d["launches"][0]["sizes"][0] + 1), "other launches"),
    (lambda d: d["launches"][-1].update(scope="x"), "other launches"),
    (lambda d: d["launches"][0].update(global_size=[2**40, 1, 1]), "expected at most"),
    (lambda d: d["tensors"][0].update(name="other"), "have different inputs|other tensors"),
    (lambda d: d.update(name="other"), "other name"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), PROGRAMS)
def test_a_program_that_is_not_its_source_s_is_refused(copied, reseal, change, message):
    """With every hash computed anew. A tensor of a launch swapped, or a size changed, ended in a signal."""
    edit(copied, "program.json", reseal, change)
    refused(copied, message)


def test_a_kernel_that_is_not_its_source_s_is_refused_unless_trusted(copied, reseal):
    def change(document):
        kernel = document["kernels"][0]
        path = copied / f"kernels/{kernel['name']}.cl"
        text = path.read_text()
        path.write_text(text.replace("0.0f", "1.0f") if "0.0f" in text else text + "\n")
        kernel["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
        reseal(copied, f"kernels/{kernel['name']}.cl")

    edit(copied, "program.json", reseal, change)
    refused(copied, "is lowered to other kernels than Small has: .* pass trust=True")
    torchedge.load_bundle(copied, trust=True)


def test_a_bundle_is_lowered_once_unless_a_proof_is_asked_for(inference, monkeypatch):
    lowered = []
    monkeypatch.setattr(Source, "lower", lambda self, lower=Source.lower: lowered.append(1) or lower(self))
    torchedge.load_bundle(inference)
    lowered.clear()
    torchedge.load_bundle(inference)
    assert not lowered
    torchedge.load_bundle(inference, prove=True)
    assert lowered
    with pytest.raises(REFUSED, match="expected one"):
        torchedge.load_bundle(inference, prove=True, trust=True)


SOURCES = [
    (lambda d: d.update(others=[d["step"]]), "is lowered to other .* than"),
    (lambda d: d["step"]["ops"][0].update(kind="exec"), "aten.exec"),
    (lambda d: d["step"]["ops"][0]["attrs"].update(padding=[9, 9]), "conv|lowered to other|PyTorch makes"),
    (lambda d: d["step"]["ops"][0]["attrs"].update(input={"input": 99}), "an attribute is"),
    (lambda d: d["step"]["ops"][0].update(inputs=[999]), "names value 999"),
    (lambda d: d["step"]["values"][0].update(shape=[2**40, 2**40]), "elements"),
    (lambda d: d["step"]["values"][-1].update(shape=[5]), "PyTorch makes|reshaped|other|broadcast"),
    (lambda d: d.update({"class": "gpu"}), "unknown key"),
    (lambda d: d.update(device_class="gpu"), "is lowered to other"),
]


def test_coefficients_that_the_tuner_could_not_walk_through_are_refused(copied, reseal):
    """A warp of 2^31 work-items took 16 GiB and did not end."""
    document = Codec(KernelCoefficients, "Coefficients").document(DEFAULTS["gpu"])
    edit(copied, "source.json", reseal, lambda d: d.update(coefficients={**document, "warp": 2**31 - 1}))
    refused(copied, "coefficients.warp is 2147483647; expected a whole number from 1 to 1,024")


@pytest.mark.parametrize(("change", "message"), SOURCES)
def test_a_source_of_another_program_is_refused(copied, reseal, change, message):
    edit(copied, "source.json", reseal, change)
    refused(copied, message)


def test_a_proof_is_noted_and_bound_to_every_byte(copied, reseal, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHEDGE_CACHE", str(tmp_path / "cache"))
    lowered = []
    monkeypatch.setattr(Source, "lower", lambda self, lower=Source.lower: lowered.append(1) or lower(self))
    for _ in range(3):
        torchedge.load_bundle(copied)
    assert len(lowered) == 1
    edit(copied, "program.json", reseal, lambda document: document["launches"][0].update(flops=1))
    refused(copied, "is lowered to other launches")


def test_texts_of_kernels_have_a_limit_together(copied):
    manifest = read_json(copied / MANIFEST)
    name = next(name for name in manifest["files"] if name.startswith("kernels/"))
    manifest["files"] |= {f"kernels/k{n}.cl": {**manifest["files"][name], "bytes": 2**20} for n in range(65)}
    manifest["sha256"] = digest_of(manifest)
    with pytest.raises(InputError, match=r"the kernels' texts have \d+ bytes; expected at most 67108864"):
        MANIFESTS.parse("manifest.json", manifest)
