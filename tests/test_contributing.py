"""What CONTRIBUTING.md adds, a kernel, an objective and a weight format, works as it stands there,
and so do its tests.
"""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import chronicals.kernels
import chronicals.objectives
from chronicals.quantization.packed import PACKED_FORMATS
from interpreted import kernels_run

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "CONTRIBUTING.md").read_text()


def files_of(walk: str) -> list[str]:
    """The Python files of the walk under this heading: the module, and its tests."""
    section = PAGE.split(f"\n## {walk}\n")[1].partition("\n## ")[0]
    module, tests = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    return [module, tests]


FILES = {
    "Add a kernel": ("kernels", "relu_squared"),
    "Add an objective": ("objectives", "slic"),
    "Add a weight format": ("quantization", "int8_rows"),
}
"""By walk, the room and the name of what it adds."""


def faults_of_lint(text: str, path: str) -> str:
    """What the linter and the formatter say of a file at this path; empty if nothing."""
    said = ""
    # The order of imports depends on whether the modules exist.
    for command in (["check", "--ignore", "I001"], ["format", "--diff"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--quiet", "--no-cache"]
        ruff += ["--stdin-filename", path, "-"]
        run = subprocess.run(ruff, input=text, cwd=ROOT, capture_output=True, text=True)
        said += run.stdout + run.stderr if run.returncode else ""
    return said


@pytest.mark.parametrize("walk", FILES)
def test_files_of_the_page_pass_the_linter(walk):
    room, name = FILES[walk]
    module, tests = files_of(walk)
    assert not faults_of_lint(module, f"src/chronicals/{room}/{name}.py")
    assert not faults_of_lint(tests, f"tests/{room}/test_{name}.py")


def test_the_linter_finds_a_class_without_a_docstring():
    module, _ = files_of("Add an objective")
    broken = module.replace('        """Section ``slic`` of a configuration."""\n\n', "")
    assert "D106" in faults_of_lint(broken, "src/chronicals/objectives/slic.py")
    assert faults_of_lint(module.replace('name = "slic"', "name = 'slic'"), "src/slic.py")


def load(name: str, text: str, folder: Path):
    """Import ``text`` as the module ``name``; Triton reads a kernel's text from its file."""
    path = folder / f"{name.rpartition('.')[2]}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def names_of_tests(module):
    """The names of the tests of a page."""
    return {name for name in vars(module) if name.startswith("test_")}


@pytest.fixture
def kernel_and_tests(tmp_path, monkeypatch):
    kernel, tests = files_of("Add a kernel")
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
    assert names_of_tests(tests) == {
        "test_equals_the_formula",
        "test_rows_may_be_strided",
        "test_no_elements",
        "test_planted_faults_are_found",
    }


@pytest.fixture
def objective_tests(tmp_path, monkeypatch):
    objective, tests = files_of("Add an objective")
    name = "chronicals.objectives.slic"
    monkeypatch.setitem(sys.modules, name, None)
    module = load(name, objective, tmp_path)
    monkeypatch.setattr(chronicals.objectives, "slic", module, raising=False)
    monkeypatch.setitem(sys.modules, "test_slic", None)
    yield load("test_slic", tests, tmp_path)
    del chronicals.objectives.OBJECTIVES["slic"]


@pytest.mark.slow
def test_the_objective_on_the_page(objective_tests, tmp_path, monkeypatch):
    tests = objective_tests
    for number, packs in enumerate((tests.ONE_PACK, tests.SEVERAL)):
        tests.test_a_step_is_the_formula(packs, tmp_path / str(number))
    tests.test_a_pair_beyond_the_margin_has_no_loss()
    tests.test_a_wrong_sign_is_found(tmp_path / "wrong", monkeypatch)
    assert names_of_tests(tests) == {
        "test_a_step_is_the_formula",
        "test_a_pair_beyond_the_margin_has_no_loss",
        "test_a_wrong_sign_is_found",
    }


@pytest.fixture
def format_tests(tmp_path, monkeypatch):
    weight_format, tests = files_of("Add a weight format")
    name = "chronicals.quantization.int8_rows"
    monkeypatch.setitem(sys.modules, name, None)
    load(name, weight_format, tmp_path)
    monkeypatch.setitem(sys.modules, "test_int8_rows", None)
    yield load("test_int8_rows", tests, tmp_path)
    del PACKED_FORMATS["Int8Rows"]


def test_the_weight_format_on_the_page(format_tests, tmp_path, monkeypatch):
    tests = format_tests
    tests.test_values_are_within_half_a_scale()
    tests.test_a_layer_is_the_plain_layer_of_its_values()
    tests.test_rows_are_divided_among_ranks()
    tests.test_adapters_are_trained_over_it(tmp_path)
    tests.test_a_wrong_zero_is_found(monkeypatch)
    assert names_of_tests(tests) == {
        "test_values_are_within_half_a_scale",
        "test_a_layer_is_the_plain_layer_of_its_values",
        "test_rows_are_divided_among_ranks",
        "test_adapters_are_trained_over_it",
        "test_a_wrong_zero_is_found",
    }


def test_the_page_names_places_that_exist():
    for path, name in (
        ("tests/kernels/test_outputs.py", "OPERATORS = {"),
        ("tests/kernels/compile_for_card.py", "def calls()"),
        ("src/chronicals/verification/self_test.py", "def _of_tokens("),
        ("benchmarks/kernel_rates.py", "def others()"),
        ("tests/test_architecture.py", "SHARED = {"),
    ):
        assert path.removeprefix("src/chronicals/") in PAGE or path in PAGE
        assert name in (ROOT / path).read_text()
