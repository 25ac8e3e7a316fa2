"""Fuzz every file of a bundle that the native runner reads, with libFuzzer and the sanitizers of clang.

    CXX=clang++ cmake -S export/runner -B build/fuzz -D TORCHEDGE_FUZZ=ON && cmake --build build/fuzz
    python benchmarks/bundle_fuzzing.py --inputs 1000000 --record build/fuzzed

Five small bundles of bundle_mutations.py are exported: a streaming one, a training step with accumulation,
two methods, and two more methods and a training step that stream; the first has a check.json. Each of their
files is replaced by inputs in turn, all digests are computed anew, and the bundle is opened. Kernels' texts,
which the runner trusts, and source.json, which it only hashes, stay.
The table has the inputs of each file, with those of earlier calls, and reports of sanitizers, memory that
leaks or runs out, and inputs that take over ten minutes. --record: a folder of inputs that reached new code,
counts, and inputs that failed; a later call continues it.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import tempfile
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bundle_mutations import export_all
from harness import CHECKOUT, options_of, print_rows, read_rows

FUZZED = ("streaming", "accumulation", "methods", "streams", "learns")
ROUND = 5_000
"""Inputs of a process: the folder of inputs is read again after it."""
# Short traces and a small quarantine: a third of the time went there, on memory that one input takes.
SANITIZERS = "malloc_context_size=4:quarantine_size_mb=8"


def fuzz(fuzzer: Path, bundle: Path, file: str, record: Path, count: int, scratch: Path) -> tuple[int, str]:
    """Run a round; return the number of inputs, and a report, empty where there is none."""
    corpus = record / f"{bundle.name}-{file.replace('/', '-')}"
    if not corpus.exists():
        corpus.mkdir(parents=True)
        shutil.copy(bundle / file, corpus / "seed")
    size = (bundle / file).stat().st_size
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        shutil.copytree(bundle, Path(folder) / "bundle")
        words = [fuzzer, corpus, f"-runs={count}", f"-max_len={size * 5 // 4 + 200}", "-timeout=600"]
        words += ["-entropic=0", "-print_final_stats=1", f"-artifact_prefix={record}/failed-{corpus.name}-"]
        names = {"TORCHEDGE_FUZZ_BUNDLE": f"{folder}/bundle", "TORCHEDGE_FUZZ_FILE": file}
        done = subprocess.run(
            [str(word) for word in words], env={**os.environ, "ASAN_OPTIONS": SANITIZERS, **names},
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace", check=False,
        )  # fmt: skip
    lines = done.stderr.splitlines()
    executed = [int(line.split()[1]) for line in lines if line.startswith("stat::number_of_executed_units")]
    reports = [line for line in lines if "ERROR" in line or "runtime error" in line]
    return sum(executed), " ".join(reports)[:300] if done.returncode else ""


def main() -> int:
    """Fuzz in rounds of all files, and print the counts; 1 where something was reported."""
    parser = options_of(__doc__)
    parser.add_argument("--inputs", type=int, default=1_000_000, help="of all files, with earlier calls")
    parser.add_argument("--record", type=Path, default=CHECKOUT / "build" / "fuzzed")
    parser.add_argument("--fuzzer", type=Path, default=CHECKOUT / "build" / "fuzz" / "torchedge-fuzz")
    parser.add_argument("--children", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    options.record.mkdir(parents=True, exist_ok=True)
    log, lock = options.record / "counts.jsonl", threading.Lock()
    memory = Path("/dev/shm")  # a disk takes longer to write a file than the runner to read a bundle
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as scratch:
        bundles = export_all(Path(scratch))
        targets = [
            (name, file)
            for name in FUZZED
            for file in ["manifest.json", *json.loads((bundles[name] / "manifest.json").read_text())["files"]]
            if file != "source.json" and not file.endswith(".cl")
        ]
        before = Counter({(row["bundle"], row["file"]): 0 for row in read_rows(log)})
        for row in read_rows(log):
            before[row["bundle"], row["file"]] += row["inputs"]
        share = -(-options.inputs // len(targets))
        rounds = [(begin, target) for target in targets for begin in range(before[target], share, ROUND)]

        def work(item: tuple[int, tuple[str, str]]) -> None:
            begin, (name, file) = item
            count = min(ROUND, share - begin)
            inputs, report = fuzz(options.fuzzer, bundles[name], file, options.record, count, Path(scratch))
            with lock, log.open("a") as rows:
                row = {"bundle": name, "file": file, "inputs": inputs, "report": report}
                rows.write(json.dumps(row) + "\n")

        with ThreadPoolExecutor(options.children) as pool:
            list(pool.map(work, sorted(rounds, key=lambda item: item[0])))
    rows = read_rows(log)
    counts = {
        target: sum(r["inputs"] for r in rows if (r["bundle"], r["file"]) == target) for target in targets
    }
    print_rows(["bundle", "file", "inputs"], [(*target, f"{count:,}") for target, count in counts.items()])
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    reports = [row["report"] for row in rows if row["report"]]
    seconds = spent.ru_utime + spent.ru_stime
    print(f"{sum(counts.values()):,} inputs; {seconds:,.0f} s of processors in this call")
    print(f"{len(reports)} reports", *reports, sep="\n")
    return int(bool(reports))


if __name__ == "__main__":
    raise SystemExit(main())
