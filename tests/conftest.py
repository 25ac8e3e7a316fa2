"""Fixtures that every test may use."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from torchedge.opencl.contexts import DeviceContext
from torchedge.opencl.probes import NO_TIMES, remark_of

# Every run draws the same examples, and none is judged by the clock: a slow machine is no failure.
# HYPOTHESIS_PROFILE=explore draws new ones.
UNTIMED = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]
settings.register_profile("suite", derandomize=True, deadline=None, suppress_health_check=UNTIMED)
settings.register_profile("explore", deadline=None, suppress_health_check=UNTIMED)
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "suite")
settings.load_profile(PROFILE)

CHECKOUT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def checkout() -> Path:
    """The root of the checkout."""
    return CHECKOUT


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of measured data: $TORCHEDGE_DATA, else ../shared/data beside the checkout; absent: skip."""
    given = os.environ.get("TORCHEDGE_DATA")
    folder = Path(given) if given else CHECKOUT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no measured data at {folder}: set TORCHEDGE_DATA to the folder that holds jetson-tx2/")
    return folder


def pytest_configure(config: pytest.Config) -> None:
    """Give each of several workers one core; without the slow tests, let PoCL compile without optimizing.

    Kernels compile in less than half the time so, and lie in caches of their own, where no user's program
    finds them. `make test-all` compiles as users do.
    """
    if "PYTEST_XDIST_WORKER" in os.environ:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    if config.option.markexpr == "not slow":
        cache = getattr(config, "cache", None)  # -p no:cacheprovider: there is none
        folder = Path(tempfile.mkdtemp()) if cache is None else cache.mkdir("kernels")
        if cache is None:
            config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
        os.environ["POCL_EXTRA_BUILD_FLAGS"] = "-cl-opt-disable"
        for variable, name in (("POCL_CACHE_DIR", "pocl"), ("TORCHEDGE_CACHE", "torchedge")):
            (folder / name).mkdir(exist_ok=True)
            os.environ[variable] = str(folder / name)


def pytest_collectstart() -> None:
    """Load the profile again: importing PyTorch's own test utilities loads another one."""
    settings.load_profile(PROFILE)


def pytest_collection_finish() -> None:
    """Load the profile again, after the last module."""
    settings.load_profile(PROFILE)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow the cases of a test that its mark `sampled(n)` leaves to `make test-all`.

    The n cases that stay are drawn by the name of the test: the same ones in every run.
    """
    cases: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled"):
            name = getattr(item, "originalname", item.name)
            cases.setdefault((item.nodeid.split("::")[0], name), []).append(item)
    for (_, name), group in cases.items():
        mark = group[0].get_closest_marker("sampled")
        assert mark is not None
        stay = random.Random(name).sample(group, min(mark.args[0], len(group)))
        for item in group:
            if item not in stay:
                item.add_marker(pytest.mark.slow)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --update-golden."""
    parser.addoption("--update-golden", action="store_true", help="write export/schemas anew")


@pytest.fixture(scope="session", autouse=True)
def measured_commands() -> Iterator[None]:
    """Skip a test that measures on a device whose driver has no times of commands."""
    new_queue = DeviceContext.new_queue

    def checked(self: DeviceContext, profile: bool, *, own: bool = False) -> object:
        if profile and NO_TIMES in (remark := remark_of(self.device)):
            pytest.skip(remark)
        return new_queue(self, profile, own=own)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeviceContext, "new_queue", checked)
        yield
