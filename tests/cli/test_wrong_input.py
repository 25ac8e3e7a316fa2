"""Whatever is wrong with the input: exit status 2, one line that says what to do, no traceback."""

import os
import re
import shlex
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from oracles.messages import judged

from torchedge.cli import main
from torchedge.errors import TorchedgeWarning
from torchedge.tracing.vision import prepare_torchvision

NETS = """
from torch import nn

def fine():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.LazyLinear(2)) if False else nn.Conv2d(3, 4, 3)

def raises():
    raise RuntimeError("out of\\nideas")

def nothing():
    return None

def needs(width):
    return nn.Linear(width, 2)

def leaves():
    raise SystemExit(7)

async def later():
    return fine()

def lazy():
    return nn.LazyLinear(3)

number = 3

class Unknown(nn.Module):
    def forward(self, x):
        return undefined

class NoForward(nn.Module):
    pass

def fails(encodings):
    return 1 / 0
"""


@pytest.fixture(autouse=True)
def place(monkeypatch, tmp_path):
    """A folder to work in, with factories and a broken one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a torchvision of another build: it comes once a process
        prepare_torchvision()
    monkeypatch.chdir(tmp_path)
    Path("nets.py").write_text(NETS)
    Path("broken.py").write_text("def small(:\n")
    Path("binary.py").write_bytes(b"\x00\xff\x00")
    Path("empty.onnx").write_bytes(b"")
    Path("weights.pth").write_bytes(b"")
    Path("idle.py").write_text("total = 1 + 1\n")
    Path("fails.py").write_text("raise ValueError('no data')\n")
    Path("plan.json").write_text("{}")
    Path("plan.toml").write_text("levels = 3\n")
    Path("config.json").write_text('{"model_type": "gpt9"}')
    Path("half.safetensors").write_bytes(b"12345678")
    Path("null.json").write_text("null")
    Path("notes.txt").write_text("Nothing here.")
    Path("half").mkdir()
    Path("half/measurements.csv").write_text("network\n")
    Path("data").mkdir()
    Path("data/topologies.jsonl").write_text("")
    return tmp_path


LIMITS = "--training-memory 4GiB -d tx2"
MODEL = "nets.py:fine --input-size 3x8x8 --device jetson-tx2"
FINE = f"predict {MODEL}"

WRONG = {
    "unknown command": ("forecast", "forecast"),
    "nearly a command": ("predikt", "Did you mean 'predict'?"),
    "no subcommand": ("plan resnet18", "for example `torchedge plan model resnet18`"),
    "an unknown shell": ("completion csh", "'bash', 'zsh', 'fish'"),
    "no model": ("predict", "MODEL..."),
    "empty model": ("predict '' -d tx2", "no model is named"),
    "unknown device": ("predict nets.py:fine -d jetson-tx3", "did you mean jetson-tx2"),
    "device folder without profile": ("predict nets.py:fine -d ./data", "device.toml"),
    "a size too few": ("predict nets.py:fine -d tx2 --input-size 3x8", "Check that --input-size 3x8 is"),
    "accumulation of an inference": (f"{FINE} --mode infer --accumulation 4", "a training step alone"),
    "factory that raises": ("predict nets.py:raises -d tx2", "out of"),
    "factory that exits": ("predict nets.py:leaves -d tx2", "exit 7"),
    "factory that returns nothing": ("predict nets.py:nothing -d tx2", "returns None"),
    "file that is no text": ("predict binary.py:small -d tx2", "binary.py"),
    "empty ONNX file": ("predict empty.onnx -d tx2", "empty.onnx"),
    "unknown feature set": ("features nets.py:fine --feature-set perf5sight", "perf4sight"),
    "device that is not here": ("profile jetson-tx2", "local-cpu"),
    "unknown device to measure": ("profile qqqqqqq", "torchedge campaign run"),
    "missing dataset": ("fit all nowhere -d tx2 --out new", "nowhere"),
    "dataset without a table": ("fit all data -d tx2 --out new", "measurements.csv"),
    "dataset called after nothing": ("fit all data --out new", "measurements.csv"),
    "output that is there": ("fit all data -d tx2 --out data", "--force"),
    "output that is a file": ("fit all data -d tx2 --out nets.py", "no folder"),
    "output into nowhere": ("fit all data -d tx2 --out nowhere/new", "nowhere"),
    "accuracy without a dataset": ("accuracy nowhere -d tx2", "nowhere"),
    "a script without a step": ("predict idle.py -d tx2", "optimizer.step()"),
    "a script that fails": ("predict fails.py -d tx2", "fails.py:1: ValueError: no data"),
    "an option that the script decides": ("predict idle.py -b 8", "--batch-size"),
    "arguments of a script behind a model": (f"{FINE} -- --epochs 3", "--epochs is no model"),
    "a factory that is awaited": ("predict nets.py:later -d tx2", "returns a coroutine"),
    "a lazy layer": ("predict nets.py:lazy -d tx2", "expected weights"),
    "a folder for a model": ("predict data -d tx2", "it is a folder: did you mean hf:data"),
    "a configuration for a model": ("predict null.json -d tx2", "did you mean hf:null.json?"),
    "an empty configuration": ("predict hf:null.json -d tx2", "holds null, expected a JSON object"),
    "a name of the Hub alone": ("predict bert-base-uncased -d tx2", "name hf:FOLDER, which AutoConfig"),
    "a notebook": ("predict train.ipynb -d tx2", "run `with torchedge.watch() as step:`"),
    "timm without a name": ("predict timm: -d tx2", "such as timm:convnext_tiny"),
    "a name of the Hub": ("predict hf:gpt2 -d tx2", "save_pretrained(FOLDER) writes one"),
    "tables of no campaign": ("campaign run me --plan quick --tables-only --out none", "holds no campaign"),
    "a campaign beside other files": (
        "campaign run me --plan quick --out data",
        "data holds other files and no campaign",
    ),
    "a configuration of tomorrow": ("predict hf:config.json -d tx2", "gpt9"),
    "a report without a file": (f"report {MODEL}", "--html"),
    "advice for two batches": (f"advise {MODEL} -b 8,16", "8,16"),
    "a plan that is none": ("plan verify plan.json plan.json", "chunk_bytes"),
    "a problem that is not there": ("plan instance nowhere.json", "nowhere.json"),
    "an export to nowhere": (f"export {MODEL}", "--out"),
    "weights of another kind": (f"export {MODEL} -o b --weights half.safetensors", "header"),
    "a negative rate": (f"export {MODEL} -o b --mode train --lr -1", "--lr is -1.0"),
    "an export without weights": ("export empty.onnx -o b -d tx2", "file.py:factory"),
    "no bundle": ("run nowhere", "manifest.json"),
    "a folder in place of a bundle": ("run data", "manifest.json"),
    "an unknown plan": ("campaign show bigger", "standard, "),
    "half a plan": ("campaign show plan.toml", "levels is 3; expected a list"),
    "an unknown way": ("campaign run me --plan quick --over ftp://x", "ssh://"),
    "sampling of no text": ("run b --temperature 0.5", "--temperature is given without --prompt-ids"),
    "a text that saves": ("run b --prompt-ids 1 --save w.safetensors", "--save is given with --prompt-ids"),
    "a campaign without a name": ("campaign run", "NAME"),
    "points without a base": ("fit all data -d tx2 -o new --points 5", "--base"),
    "an unknown base": ("fit all data -d tx2 -o new --base tx9", "jetson-tx2"),
    "loads without a file": ("profile --streaming", "--out FILE"),
    "an argument too many": ("doctor now", "now"),
    "a kernel without sizes": ("explain-kernel Linear", "SIZES"),
    "a name with a capital": (f"{FINE} --optimizer Adam", "did you mean adam? Run `torchedge predict"),
    "a word of another library": (f"{FINE} --mode inference", "did you mean infer?"),
    "a name with an underscore": (f"{FINE} --optimizer sgd_momentum", "did you mean sgd-momentum?"),
    "a protocol": ("accuracy jetson-tx2 --protocol left_out", "did you mean left-out?"),
    "a module without forward": (
        "predict nets.py:NoForward -d tx2 --input-size 3x8x8",
        'missing the required "forward" function: correct the model',
    ),
    "a text for a model": ("predict notes.txt -d tx2", "a file of another kind: correct the name"),
    "a missing GGUF file": ("predict nowhere.gguf -d tx2", "there is no such file"),
    "an option of the script": (
        "predict idle.py --epochs 3",
        "behind --: torchedge predict idle.py -- --epochs",
    ),
    "a score that fails": (
        f"search ofa-resnet50 {LIMITS} --population 2 --score nets.py:fails",
        "nets.py:35: ZeroDivisionError: division by zero; correct the file",
    ),
    "nothing to round": (
        f"search ofa-resnet50 {LIMITS} --round-to 16",
        "--round-to is given with ofa-resnet50, which is no model to prune",
    ),
    "an OpenCL device without a runner": (
        "campaign run me --plan quick --opencl gpu",
        "--opencl is given without --runner",
    ),
    "measurements without networks": (
        "fit all half -d tx2 -o new",
        "holds no networks.jsonl; expected it, or topologies.jsonl, beside measurements.csv",
    ),
    "a function for a command": ("watch train.py", "`torchedge predict train.py` predicts the step"),
    "an option without a value": ("report idle.py --html", "run `torchedge report --help`"),
    "no such part of a fit": ("fit memory data", "for example `torchedge fit all data`"),
    "a model for a part of plan": ("plan resnet18 -d tx2", "for example `torchedge plan model resnet18`"),
    "no such part of a campaign": ("campaign status", "expected one of show, run"),
    "a plan of a text": (
        "plan lm notes.txt --max-length 64 -d tx2",
        "a file of another kind: correct the name",
    ),
    "a plan of no length": ("plan lm gpt2", "Missing option '--max-length'; run `torchedge plan lm"),
    "a plan of one token": ("plan lm gpt2 --max-length 1", "expected a whole number from 2"),
    "a plan of a folder": ("plan lm data --max-length 64 -d tx2", "it is a folder: did you mean hf:data"),
    "an export into a file": (f"export {MODEL} -o notes.txt", "expected the name of a folder"),
    "no step": (f"export {MODEL} -o b --batch-size 0", "0 is too small; expected a whole"),
    "a report as text": (f"report {MODEL} --html o.txt", "ends in .html"),
    "two bundles to verify": ("verify b c", "unexpected extra argument (c)"),
    "a text to verify": ("verify notes.txt", "is no bundle; expected a folder"),
    "a phone without a runner": ("run b --over adb", "is given without --runner"),
    "words for tokens": ("run b --prompt-ids a,b", "manifest.json"),
    "a shell without completion": ("completion tcsh", "is not one of 'bash', 'zsh', 'fish'"),
    "no benchmark": ("bench nothing", "expected one of kernels"),
    "a file for a campaign": ("fit all notes.txt", "expected a folder"),
    "a processor": ("campaign run n --plan quick --processor tpu -o c", "is not one of 'cuda', 'cpu'"),
    "a text for kernels": (
        "fit kernels notes.txt -d tx2 -o new",
        "is no journal of torchedge; expected rows that it wrote",
    ),
}


@pytest.mark.sampled(26)
@pytest.mark.parametrize("case", WRONG)
def test_refused_in_one_line(case, refused):
    """Each is told what was given, what was expected and what to do."""
    words, expected = WRONG[case]
    line = judged(refused(*shlex.split(words)))
    assert expected in line, line


@pytest.mark.sampled(1)
@pytest.mark.parametrize("size", ["3x8", "8", "1x3x8x8"])
def test_an_input_size_that_does_not_suit_is_told_in_the_users_sizes(size, refused):
    """Not in those that stand for the batch size while a model is captured."""
    line = refused("predict", "nets.py:fine", "-d", "tx2", "--input-size", size)
    sizes = {int(number) for text in re.findall(r"\[([\d, ]+)\]", line) for number in text.split(",")}
    assert sizes <= {1, 3, 4, 8} and not re.search(r"\bs\d+\b", line), line


PLACES = {
    "bundle": lambda path: ("export", *MODEL.split(), "--out", path),
    "weights": lambda path: ("export", *MODEL.split(), "--out", "new", "--weights", path),
    "model": lambda path: ("predict", f"{path}.py:fine"),
    "model file": lambda path: ("predict", f"{path}.onnx"),
    "configuration": lambda path: ("predict", f"hf:{path}.json"),
    "device": lambda path: ("predict", "nets.py:fine", "-d", f"./{path}"),
    "device's name": lambda path: ("devices", path),
    "picture": lambda path: ("simulate", *MODEL.split(), "--plot", f"{path}.png"),
    "search": lambda path: ("search", "nets.py:fine", *LIMITS.split(), "--out", path),
    "score": lambda path: ("search", "nets.py:fine", *LIMITS.split(), "--score", f"{path}.py:fine"),
    "plan": lambda path: ("plan", "model", *MODEL.split(), "--out", f"{path}.json"),
    "instance": lambda path: ("plan", "instance", path),
    "bundle to run": lambda path: ("run", path),
    "campaign plan": lambda path: ("campaign", "show", path),
    "campaign": lambda path: ("campaign", "run", "me", "--plan", "quick", "--tables-only", "--out", path),
    "dataset": lambda path: ("fit", "all", path, "-d", "tx2", "--out", "new"),
    "profile": lambda path: ("fit", "all", "data", "-d", "tx2", "--out", path),
    "source of accuracy": lambda path: ("accuracy", path),
}


@pytest.mark.parametrize("path", ["x" * 300, "é" * 200, "/".join(["x" * 200] * 25), "a\0b"])
@pytest.mark.parametrize("use", PLACES)
def test_a_path_that_can_be_none_is_refused(use, path, refused):
    names = {*os.listdir(), "__pycache__"}  # which Python writes beside a module of the user's
    refused(*PLACES[use](path))
    assert {*os.listdir(), "__pycache__"} == names


@pytest.mark.parametrize("use", ["plan", "picture"])
def test_an_output_in_place_of_a_pipe_is_refused(use, refused):
    pipes = Path("pipe.json"), Path("pipe.png")
    for pipe in pipes:
        os.mkfifo(pipe)
    refused(*PLACES[use]("pipe"))
    assert all(pipe.is_fifo() for pipe in pipes)


def test_a_plan_takes_the_place_of_no_other_file(refused):
    assert ".json or .json.gz" in refused("plan", "model", *MODEL.split(), "--out", "nets.py")
    assert Path("nets.py").read_text() == NETS


def test_a_campaign_plan_that_is_no_text(refused):
    line = refused("campaign", "show", "binary.py")
    assert "binary.py: is not UTF-8 text (byte 1), expected a campaign plan as TOML" in line


def test_an_unreadable_factory_file(refused):
    Path("nets.py").chmod(0)
    if os.access("nets.py", os.R_OK):
        pytest.skip("this user reads everything")
    assert "nets.py" in refused(*FINE.split())


# errors nobody foresaw --------------------------------------------------------------------------------------


def test_an_unforeseen_error_is_one_line_too(monkeypatch, capsys):
    def fails(*_):
        raise ZeroDivisionError("two\nlines")

    monkeypatch.setattr("torchedge.devices.scan_profiles", fails)
    assert main(["devices"]) == 1
    err = capsys.readouterr().err
    assert (
        err
        == "torchedge: error: ZeroDivisionError: two lines; run with TORCHEDGE_DEBUG=1 for the traceback\n"
    )
    monkeypatch.setenv("TORCHEDGE_DEBUG", "1")
    assert main(["devices"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_full_disk_under_the_output(monkeypatch, capsys):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        status = main(["devices", "tx2"])
        monkeypatch.undo()
    assert (status, capsys.readouterr().err) == (
        2,
        "torchedge: error: the output cannot be written (No space left on device); free some space, or send "
        "it to another place\n",
    )


def test_a_system_error_of_a_file_names_it(monkeypatch, refused):
    def fails(*_):
        raise PermissionError(13, "Permission denied", "profiles/x")

    monkeypatch.setattr("torchedge.devices.scan_profiles", fails)
    assert "profiles/x: Permission denied; expected a path" in refused("devices")


def test_streams_that_the_shell_closed(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    assert main(["devices", "tx2"]) == 0 and main(["devices", "tx9"]) == 2


def test_an_interrupt(monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("torchedge.devices.scan_profiles", interrupted)
    assert main(["devices"]) == 130
    assert capsys.readouterr().err == "torchedge: interrupted\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_command_in_order(number, monkeypatch, capsys):
    ended = []

    def ends(*_):
        try:
            os.kill(os.getpid(), number)
        finally:
            ended.append(True)

    monkeypatch.setattr("torchedge.devices.scan_profiles", ends)
    before = signal.signal(number, signal.SIG_DFL)  # nohup ignores SIGHUP, and a command keeps to that
    try:
        assert main(["devices"]) == 128 + number and ended
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)
    assert capsys.readouterr().err == f"torchedge: ended by {number.name}\n"


def test_a_reader_that_has_gone():
    command = [sys.executable, "-m", "torchedge", "devices", "tx2"]
    root = Path(__file__).resolve().parents[2]
    read, write = os.pipe()
    os.close(read)
    environment = {**os.environ, "PYTHONPATH": str(root)}
    try:
        done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, env=environment, check=False)
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


def test_warnings_of_others_are_silent_and_ours_are_said_once(monkeypatch, capsys):
    import logging
    import warnings

    def warns(*_):
        warnings.warn("from below", stacklevel=2)
        for _ in range(2):
            warnings.warn("of ours", TorchedgeWarning, stacklevel=2)
        logging.getLogger("torch.below").warning("from below")
        from torchedge.devices import Profiles

        return Profiles((), ())

    monkeypatch.setattr("torchedge.devices.scan_profiles", warns)
    filters, disabled = list(warnings.filters), logging.root.manager.disable
    assert main(["devices"]) == 0
    assert capsys.readouterr().err == "torchedge: warning: of ours\n"
    assert (warnings.filters, logging.root.manager.disable) == (filters, disabled)
