"""The rules of the house: names, rooms, lazy imports, and what must not be in the repository."""

from __future__ import annotations

import ast
import pkgutil
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import grimp
import networkx
import pytest
from oracles.children import python

import torchedge

if sys.version_info >= (3, 11):
    pass
else:
    pass

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "torchedge"
MAX_BYTES = 6 << 20

# Functions that users call or will call: no module may take their names, now or when they come.
VERBS = {
    *("capture", "compare", "export", "features", "find_device", "fit", "list_devices", "plan", "predict"),
    *("profile", "run", "search", "simulate", "train"),
}
OPTIONAL = {
    *("diffusers", "matplotlib", "onnx", "ortools", "pyopencl", "scipy", "sklearn", "timm", "torchvision"),
    *("transformers", "vit_pytorch"),
}
PICKLERS = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
RUNNERS = {"Parallel", "delayed", "parallel_config"}
"""Of joblib only what runs tasks: nothing is written to disk with it, nothing read."""
PICKLED = {".pkl", ".pickle", ".joblib", ".pt", ".pth", ".ckpt"}
MACHINE_PATH = re.compile(r"(?<![\w./~$}-])/(?:work|root|opt|home/\w+|Users/\w+)/\w")


@cache
def repository_files() -> tuple[Path, ...]:
    """Files that are tracked or about to be: what git knows and does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return tuple(path for name in listed.split("\0") if name and (path := ROOT / name).is_file())


def text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ""


def relative(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


def module_names() -> dict[str, str]:
    """Dotted path -> last name of every module and subpackage of torchedge."""
    found = pkgutil.walk_packages([str(PACKAGE)], prefix="torchedge.", onerror=lambda _: None)
    return {module.name: module.name.rsplit(".", 1)[-1] for module in found}


@cache
def loaded_after(statement: str) -> frozenset[str]:
    """Top-level names in sys.modules of a fresh interpreter after one statement."""
    code = f"{statement}\nimport sys\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    return frozenset(python("-c", code).stdout.split())


def test_no_module_bears_the_name_of_a_public_function():
    public = VERBS | {name for name in torchedge.__all__ if name.islower()}
    clashes = [path for path, name in module_names().items() if name in public]
    assert not clashes, "rename the module (modules are nouns): importing it would replace the function"


def test_no_package_hides_a_submodule_behind_a_name_of_its_own():
    clashes = []
    for init in PACKAGE.rglob("__init__.py"):
        children = {p.stem for p in init.parent.glob("*.py")} | {
            p.name for p in init.parent.iterdir() if p.is_dir()
        }
        for node in ast.parse(text_of(init)).body:
            if isinstance(node, ast.ImportFrom):
                own = ".".join(init.parent.relative_to(ROOT).parts)
                bound = set() if node.module == own else {alias.asname or alias.name for alias in node.names}
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                bound = {node.name}
            else:
                continue
            clashes += [f"{init.relative_to(ROOT)}: {name}" for name in bound & children]
    assert not clashes


@pytest.mark.slow
def test_rooms_do_not_enter_by_the_front_door():
    """`from torchedge import x` in a lower room would slip past import-linter, as re-exports are lazy."""
    uses = []
    for path in PACKAGE.rglob("*.py"):
        room = path.relative_to(PACKAGE).parts[0]
        if room in {"__init__.py", "__main__.py", "cli", "testing", "testing.py"}:
            continue
        for node in ast.walk(ast.parse(text_of(path))):
            names = [alias.name for alias in getattr(node, "names", []) if isinstance(alias, ast.alias)]
            by_name = isinstance(node, ast.ImportFrom) and node.module == "torchedge"
            lazy = by_name and set(names) & set(torchedge._LAZY)
            if lazy or (isinstance(node, ast.Import) and "torchedge" in names):
                uses.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not uses, "import from the room that defines the name"


@cache
def imports_between_modules() -> frozenset[tuple[str, str]]:
    """(importer, imported) for modules of torchedge: imports in functions and for types alone count too.

    The package's front door is none of them: it re-exports lazily and imports nothing when it is imported.
    """
    graph = grimp.build_graph("torchedge", cache_dir=None)
    pairs = {(a, b) for a in graph.modules for b in graph.find_modules_directly_imported_by(a)}
    return frozenset(pair for pair in pairs if "torchedge" not in pair)


def test_no_module_imports_itself_through_others():
    components = networkx.strongly_connected_components(networkx.DiGraph(imports_between_modules()))
    assert [sorted(modules) for modules in components if len(modules) > 1] == []


def test_every_public_name_is_in_the_lazy_table():
    assert set(torchedge._LAZY) | {"__version__"} == set(torchedge.__all__)


def test_an_unknown_name_says_what_there_is():
    with pytest.raises(AttributeError, match=r"no attribute 'forecast'.*predict"):
        _ = torchedge.forecast


def test_dir_offers_the_public_names():
    assert set(torchedge.__all__) <= set(dir(torchedge))


def test_importing_torchedge_loads_nothing_heavy():
    assert not loaded_after("import torchedge") & (OPTIONAL | {"torch", "numpy", "safetensors"})


@pytest.mark.parametrize("room", ["errors", "storage", "devices", "graphs", "forests.trees"])
def test_lowest_rooms_load_without_torch(room):
    assert not loaded_after(f"import torchedge.{room}") & (OPTIONAL | {"torch"})


@pytest.mark.slow
@pytest.mark.parametrize("room", ["api", "cli", "prediction", "profiling", "tracing"])
def test_rooms_load_without_optional_packages(room):
    assert not loaded_after(f"import torch, torchedge.{room}") & OPTIONAL - loaded_after("import torch")


def test_files_are_light():
    assert not relative([p for p in repository_files() if p.stat().st_size > MAX_BYTES])


def test_no_paths_of_somebodys_machine():
    assert not relative([p for p in repository_files() if MACHINE_PATH.search(text_of(p))])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("see " + "/wo" + "rk/venv", True),
        ('"' + "/ho" + 'me/ann/x"', True),
        ("https://example.org/work/x", False),
        ("framework/work/x", False),
        ("$HOME/work/x", False),
    ],
)
def test_machine_paths_are_recognised(text, expected):
    assert bool(MACHINE_PATH.search(text)) is expected


def pickle_uses(tree: ast.AST) -> list[int]:
    """Lines that import a pickling module, or load with one behind the scenes."""
    lines = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or ""]
            if modules == ["joblib"] and RUNNERS.issuperset(alias.name for alias in node.names):
                continue
        elif isinstance(node, ast.Call):
            options = {k.arg: k.value for k in node.keywords}
            safe = options.get("weights_only")
            trusted = isinstance(safe, ast.Constant) and safe.value is True
            allowed = options.get("allow_pickle")
            unsafe = isinstance(allowed, ast.Constant) and allowed.value is True
            if unsafe or (ast.unparse(node.func) == "torch.load" and not trusted):
                lines.append(node.lineno)
            continue
        else:
            continue
        if any(module.split(".")[0] in PICKLERS for module in modules):
            lines.append(node.lineno)
    return lines


@pytest.mark.slow
def test_no_pickle():
    python_files = [path for path in repository_files() if path.suffix == ".py"]
    uses = [
        f"{p.relative_to(ROOT)}:{line}" for p in python_files for line in pickle_uses(ast.parse(text_of(p)))
    ]
    assert not uses
    assert not relative([p for p in repository_files() if p.suffix in PICKLED])


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import pickle", [1]),
        ("from joblib import load", [1]),
        ("from joblib import Parallel, delayed", []),
        ("from joblib import Parallel, dump", [1]),
        ("x = 1\ntorch.load(path)", [2]),
        ("torch.load(path, weights_only=True)", []),
        ("np.load(path, allow_pickle=True)", [1]),
        ("np.load(path)", []),
    ],
)
def test_pickle_is_recognised(code, expected):
    assert pickle_uses(ast.parse(code)) == expected
