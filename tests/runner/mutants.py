"""Bundles changed at random, with every digest computed anew, for a program that reads them."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import subprocess
from collections import Counter
from pathlib import Path

from fuzzing.mutations import mutate_json, mutate_tensors

from torchedge.bundles.manifests import digest_of


def changed_file(name: str, data: bytes, rng: random.Random) -> bytes:
    """Return a file of a bundle with some of its values or bytes changed."""
    if name.endswith(".safetensors"):
        return mutate_tensors(data, rng)
    if name.endswith(".json") and rng.random() < 0.9:
        return json.dumps(mutate_json(json.loads(data), rng)).encode("utf-8", "surrogatepass")
    content = bytearray(data)
    for _ in range(rng.choice((1, 1, 4))):
        content[rng.randrange(len(content))] = rng.randrange(256)
    return bytes(content[: rng.randrange(len(content))] if rng.random() < 0.1 else content)


def open_mutants(opener: Path, bundle: Path, scratch: Path, count: int, seed: int) -> Counter[str]:
    """Let `torchedge-open` read mutants of a bundle; return how many it read and refused.

    Raises:
        AssertionError: it ended, or said more than a line of a mutant; the mutant stays in `scratch`.
    """
    folder = shutil.copytree(bundle, scratch / "mutant")
    manifest = json.loads((folder / "manifest.json").read_text())
    names = [
        "manifest.json",
        "program.json",
        "weights.safetensors",
        *filter(lambda n: ".cl" in n, manifest["files"]),
    ]
    weights = [4, 6, 2, *([1 / len(names)] * (len(names) - 3))]
    whole = {name: (folder / name).read_bytes() for name in names}
    results: Counter[str] = Counter()
    with subprocess.Popen(
        [opener], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        for number in range(count):
            rng = random.Random(f"{seed} {number}")
            name = rng.choices(names, weights)[0]
            content = changed_file(name, whole[name], rng)
            (folder / name).write_bytes(content)
            document = json.loads(content) if name == "manifest.json" and _is_object(content) else manifest
            if name != "manifest.json":
                entry = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
                document = {**manifest, "files": {**manifest["files"], name: entry}}
            if name != "manifest.json" or document is not manifest:
                text = json.dumps({**document, "sha256": digest_of(document)})
                (folder / "manifest.json").write_bytes(text.encode("utf-8", "surrogatepass"))
            process.stdin.write(f"{folder}\n".encode())
            process.stdin.flush()
            answer = process.stdout.readline()
            assert answer.endswith(b"\n"), f"mutant {number} of seed {seed}: {process.stderr.read().decode()}"
            results["refused" if answer.strip() else "read"] += 1
            for each in {name, "manifest.json"}:
                (folder / each).write_bytes(whole[each])
        process.stdin.close()
        errors = process.stderr.read().decode()
        assert process.wait() == 0 and not errors, errors
    shutil.rmtree(folder)
    return results


def _is_object(content: bytes) -> bool:
    try:
        return isinstance(json.loads(content), dict)
    except (ValueError, RecursionError):
        return False
