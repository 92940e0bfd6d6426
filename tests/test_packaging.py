"""What is installed for development is what the package admits, and ``make test-gpu`` shares a
card by its memory.
"""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import run_on_card

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OTHERS_CHOOSE = {"chronicals", "triton", "flash-attn-4"}
"""Ourselves; what a build of torch requires one release of; what needs a card."""


def requirements():
    lists = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    return [requirement for text in lists for requirement in map(Requirement, text)]


def pins(file="constraints.txt"):
    lines = (ROOT / file).read_text().splitlines()
    return {
        name.lower(): version
        for name, _, version in (line.partition("==") for line in lines if not line.startswith("#"))
    }


@pytest.mark.parametrize("requirement", requirements(), ids=str)
def test_every_dependency_is_pinned_within_what_the_package_admits(requirement):
    if requirement.name not in OTHERS_CHOOSE:
        assert requirement.specifier.contains(pins()[requirement.name.lower()])


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0", "2.14.1", "2.15.0"])
def test_the_versions_of_torch_that_people_have_are_admitted(version):
    (torch,) = (requirement for requirement in requirements() if requirement.name == "torch")
    assert torch.specifier.contains(version)


def test_make_install_uses_the_pins():
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(r"pip install .*--constraint constraints\.txt .*'\.\[dev\]'", makefile)


@pytest.mark.parametrize(
    ("cores", "free_gib", "count"),
    [(14, 79, 7), (14, 140, 14), (4, 79, 4), (14, 3, 1), (64, 140, 14)],
)
def test_processes_are_as_many_as_the_card_holds(cores, free_gib, count):
    assert run_on_card.processes(cores, free_gib << 30) == count


@pytest.mark.slow
def test_without_a_card_it_says_so_and_fails():
    program = (
        "import torch; torch.cuda.is_available = lambda: False; import runpy; "
        "runpy.run_path(%r, run_name='__main__')"
    )
    script = str(ROOT / "tests" / "run_on_card.py")
    done = subprocess.run([sys.executable, "-c", program % script], capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout.startswith(
        "test-gpu: failed: torch sees no CUDA device"
    )


def test_its_last_line_is_the_verdict(let_return, capsys):
    import torch

    let_return(torch.cuda, is_available=True)
    let_return(torch.cuda, mem_get_info=(80 << 30, 80 << 30))
    let_return(torch.cuda, get_device_name="a card")
    for status, verdict in ((0, "passed"), (1, "failed")):
        done = subprocess.CompletedProcess([], status)
        let_return(subprocess, run=done)
        assert run_on_card.main() == status
        assert capsys.readouterr().out.splitlines()[-1].startswith(f"test-gpu: {verdict}: ")
