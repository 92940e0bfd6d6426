"""Fresh seeds for every test, printed when it fails; tests marked gpu are skipped without a card,
visibly, those marked llama_cpp without llama-cpp-python, and those marked browser without Chromium.

Where several processes share the tests (``pytest -n``), all have the seed of the first, and of the
cores one each.
"""

import importlib.metadata
import os
import random
import shutil
import sys
import zlib
from importlib.util import find_spec

os.environ.setdefault(
    "TRITON_INTERPRET", "0" if os.path.exists("/dev/nvidiactl") else "1"
)  # before any import of Triton

import numpy as np
import pytest
import torch


def pytest_addoption(parser):
    parser.addoption("--seed", type=int, default=None, help="repeat a run's random inputs")
    parser.addoption(
        "--sample", action="store_true", help="of tests with many cases run some, by the seed"
    )


def pytest_configure(config):
    sharing = getattr(config, "workerinput", None)
    if sharing is None:
        config.run_seed = config.getoption("--seed") or random.SystemRandom().randrange(2**31)
    else:
        config.run_seed = sharing["run_seed"]
        torch.set_num_threads(1)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    node.workerinput["run_seed"] = node.config.run_seed


def pytest_report_header(config):
    card = (
        torch.cuda.get_device_name(0)
        if torch.cuda.is_available()
        else "none (tests marked gpu are skipped)"
    )
    reader = (
        llama_cpp_version()
        or "none (tests marked llama_cpp are skipped; exports are proved without it)"
    )
    return [
        f"seed: {config.run_seed} (repeat with --seed)",
        f"card: {card}",
        f"llama.cpp: {reader}",
    ]


def llama_cpp_version():
    """Version of llama-cpp-python, or None where it is not installed."""
    try:
        return importlib.metadata.version("llama-cpp-python")
    except importlib.metadata.PackageNotFoundError:
        return None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    if config.getoption("--sample"):
        kept = sample(items, config.run_seed)
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]
    if not torch.cuda.is_available():
        skip(items, "gpu", "needs a CUDA device")
    if llama_cpp_version() is None:
        skip(items, "llama_cpp", "needs llama-cpp-python")
    if shutil.which("chromium") is None or find_spec("playwright") is None:
        skip(items, "browser", "needs chromium and playwright")


def skip(items, marker, reason):
    """Skip the tests that have a marker, with a reason that pytest's summary shows."""
    for item in items:
        if item.get_closest_marker(marker):
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish(session):
    """Reports have no curves, which take longer to draw than most tests' runs to train."""
    if (report := sys.modules.get(REPORT)) is not None:
        session.config.draws = report._figure
        report._figure = lambda metrics: b"<svg/>"


REPORT = "chronicals.training.run.report"


@pytest.fixture(autouse=True)
def curves(request):
    """Of a test with the mark ``draws`` reports have their curves. With patches of its own:
    those of a test are undone before what other fixtures changed."""
    with pytest.MonkeyPatch.context() as patch:
        if request.node.get_closest_marker("draws"):
            patch.setattr(sys.modules[REPORT], "_figure", request.config.draws)
        yield


FEW = 1
SHARE = 0.06
"""Of a test with more cases than FEW a sample is this share of them, and at least FEW."""

SLOW_SHARE = 1 / 12
"""Of the tests with the mark ``slow`` a sample is this share."""

WHOLE = ("", "config")
"""Folders whose tests take no time: all of their cases run."""


def sample(items, run_seed):
    """Return the cases of each test that ``make test`` runs, drawn by the seed.

    ``@pytest.mark.sample(n)`` says how many. Where a file says so by ``pytest.mark.of_file(n)``,
    its tests are the cases. Of tests with the mark ``slow``, or files with it, one in twelve runs.
    """
    cases: dict[str, list] = {}
    for item in items:
        cases.setdefault(
            item.nodeid.partition("::" if item.get_closest_marker("of_file") else "[")[0], []
        ).append(item)
    kept = set()
    for name, some in cases.items():
        folder = "/".join(name.partition("::")[0].split("/")[1:-1])
        marker = some[0].get_closest_marker("of_file") or some[0].get_closest_marker("sample")
        count = len(some) if folder in WHOLE else max(FEW, round(SHARE * len(some)))
        count = min(len(some), marker.args[0] if marker else count)
        drawn = random.Random(f"{run_seed} {name}")
        if some[0].get_closest_marker("slow") and drawn.random() > SLOW_SHARE:
            continue
        kept.update(drawn.sample(some, count))
    return kept


@pytest.fixture(autouse=True)
def seed(request):
    """Seeds python, numpy and torch from the run's seed and the test's name; also given to the
    test.
    """
    value = (request.config.run_seed + zlib.crc32(request.node.nodeid.encode())) % 2**31
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)
    return value


@pytest.fixture
def set_constants(monkeypatch):
    """Give constants of a module other values for a test: ``set_constants(module, SIZE=8)``.

    So small inputs reach what only large ones would, and waiting takes no time.
    """

    def change(module, **values):
        for name, value in values.items():
            assert name.isupper() and hasattr(module, name), f"{module.__name__} has no {name}"
            monkeypatch.setattr(module, name, value)

    return change


@pytest.fixture
def let_return(monkeypatch):
    """Let functions return a value whatever they are given: ``let_return(module, size=8)``."""

    def change(owner, **values):
        for name, value in values.items():
            monkeypatch.setattr(owner, name, lambda *_, value=value, **__: value)

    return change


@pytest.fixture
def let_raise(monkeypatch):
    """Let functions raise an error: ``let_raise(module, read=OSError("no such file"))``."""

    def change(owner, **errors):
        for name, error in errors.items():

            def failing(*_, error=error, **__):
                raise error

            monkeypatch.setattr(owner, name, failing)

    return change


@pytest.fixture
def plant(monkeypatch):
    """Let a function do something wrong: ``plant(module, "f", lambda right, *given: -right(*given))``.

    The owner is a module, a class or a dictionary. The wrong function is given the right one, then
    the arguments of the call.
    """

    def change(owner, name, wrong):
        is_mapping = isinstance(owner, dict)
        right = owner[name] if is_mapping else getattr(owner, name)
        replace = monkeypatch.setitem if is_mapping else monkeypatch.setattr
        replace(owner, name, lambda *given, **named: wrong(right, *given, **named))

    return change


@pytest.fixture
def must_not_call(monkeypatch):
    """Let a test fail if a function is called: ``must_not_call(module, "compute", "why")``."""

    def forbid(owner, name, why):
        monkeypatch.setattr(owner, name, lambda *_, **__: pytest.fail(why))

    return forbid


@pytest.fixture
def record_calls(monkeypatch):
    """Record the calls of a function that goes on as before: ``calls = record_calls(module, "f")``.

    Each call is the tuple of its positional arguments.
    """

    def record(owner, name):
        function = getattr(owner, name)
        calls = []

        def recorded(*arguments, **named):
            calls.append(arguments)
            return function(*arguments, **named)

        monkeypatch.setattr(owner, name, recorded)
        return calls

    return record


@pytest.fixture
def device():
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
