"""Packages that other tasks need are not imported at the start, and are there when asked for."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.of_file(3)


def run(program: str, folder) -> str:
    """What the program prints, in a process with stand-ins for two packages in ``folder``."""
    for package, module, function in (
        ("sklearn", "metrics", "roc_curve"),
        ("scipy", "optimize", "linear_sum_assignment"),
    ):
        (folder / package).mkdir()
        (folder / package / "__init__.py").write_text("__version__ = '1.0'\n")
        body = f"def {function}(*values):\n    return ('true', *values)\n\nother = 7\n"
        (folder / package / f"{module}.py").write_text(body)
    found = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(folder)!r})\n{program}"],
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stderr
    return found.stdout


def test_training_imports_nothing_that_it_does_not_use(tmp_path):
    unused = (
        "sklearn.metrics",
        "scipy.optimize",
        "matplotlib",
        "datasets",
        "pandas",
        "torch._dynamo.testing",
    )
    assert (
        run(
            f"import chronicals.training; print([m for m in {unused!r} if m in sys.modules])",
            tmp_path,
        )
        == "[]\n"
    )


def test_a_deferred_function_is_the_true_one_when_it_is_called(tmp_path):
    program = """
from chronicals.deferred_imports import deferring
with deferring():
    from sklearn.metrics import roc_curve
    from scipy import optimize
print("sklearn.metrics" in sys.modules, roc_curve(1, 2), "sklearn.metrics" in sys.modules)
import scipy.optimize
print(scipy.optimize.linear_sum_assignment(3), scipy.optimize.other)
"""
    assert run(program, tmp_path) == "False ('true', 1, 2) True\n('true', 3) 7\n"


def test_another_name_imports_the_true_module_at_once(tmp_path):
    program = """
from chronicals.deferred_imports import deferring
with deferring():
    from sklearn.metrics import other, roc_curve
print(other, roc_curve(1), sys.modules["sklearn.metrics"].other)
"""
    assert run(program, tmp_path) == "7 ('true', 1) 7\n"


@pytest.mark.parametrize("name", ["sklearn.metrics", "scipy.optimize"])
def test_a_module_that_is_there_already_is_left_as_it_is(name, tmp_path):
    program = f"""
import importlib
before = importlib.import_module({name!r})
from chronicals.deferred_imports import deferring
with deferring():
    print(sys.modules[{name!r}] is before)
print(sys.modules[{name!r}] is before)
"""
    assert run(program, tmp_path) == "True\nTrue\n"
