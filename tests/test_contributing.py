"""The kernel that CONTRIBUTING.md adds works as it stands there, and so do its tests."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch

import chronicals.kernels
from interpreted import kernels_run

PAGE = (Path(__file__).parent.parent / "CONTRIBUTING.md").read_text()


def load(name: str, text: str, folder: Path):
    """Import ``text`` as the module ``name``; Triton reads a kernel's text from its file."""
    path = folder / f"{name.rpartition('.')[2]}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def kernel_and_tests(tmp_path, monkeypatch):
    kernel, tests = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    name = "chronicals.kernels.relu_squared"
    monkeypatch.setitem(sys.modules, name, None)
    module = load(name, kernel, tmp_path)
    monkeypatch.setattr(chronicals.kernels, "relu_squared", module, raising=False)
    public = module.fused_relu_squared
    monkeypatch.setattr(chronicals.kernels, "fused_relu_squared", public, raising=False)
    monkeypatch.setitem(sys.modules, "test_relu_squared", None)
    return module, load("test_relu_squared", tests, tmp_path)


def test_the_kernel_on_the_page(kernel_and_tests):
    module, tests = kernel_and_tests
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with kernels_run():
        for dtype in tests.TYPES:
            tests.test_equals_the_formula(module.fused_relu_squared, (3, 2049), dtype, device)
        tests.test_rows_may_be_strided(device)
        tests.test_no_elements(device)
        faults = [("positive * positive", "x * x"), ("dy * 2.0", "dy")]
        for old, new in faults:
            tests.test_planted_faults_are_found(old, new, device)


def test_the_page_names_places_that_exist():
    root = Path(__file__).parent.parent
    for path, name in (
        ("tests/kernels/test_outputs.py", "OPERATORS = {"),
        ("tests/kernels/compile_for_card.py", "def calls()"),
        ("src/chronicals/verification/self_test.py", "def _elementwise("),
        ("benchmarks/kernel_rates.py", "def others()"),
        ("tests/test_architecture.py", "SHARED = {"),
    ):
        assert path.removeprefix("src/chronicals/") in PAGE or path in PAGE
        assert name in (root / path).read_text()
