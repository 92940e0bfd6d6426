"""Fresh seeds for every test, printed when it fails; tests marked gpu are skipped without a card, visibly.

Where several processes share the tests (``pytest -n``), all have the seed of the first, and of the cores one each.
"""

import os
import random
import zlib

os.environ.setdefault("TRITON_INTERPRET", "0" if os.path.exists("/dev/nvidiactl") else "1")  # before any import of Triton

import numpy as np
import pytest
import torch


def pytest_addoption(parser):
    parser.addoption("--seed", type=int, default=None, help="repeat a run's random inputs")


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
    card = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none (tests marked gpu are skipped)"
    return [f"seed: {config.run_seed} (repeat with --seed)", f"card: {card}"]


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def seed(request):
    """Seeds python, numpy and torch from the run's seed and the test's name; also given to the test."""
    value = (request.config.run_seed + zlib.crc32(request.node.nodeid.encode())) % 2**31
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)
    return value


@pytest.fixture
def device():
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
