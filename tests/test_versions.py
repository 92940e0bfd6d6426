"""Below the lowest versions nothing is computed, and one line says what is needed; what looks at
the machine still works.
"""

import os
import re
import subprocess
import sys

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import tiny
from chronicals import ChronicalsTrainer, patch_model, versions
from chronicals.models import load_config, load_model
from test_packaging import PROJECT, ROOT, pins

OLDER = "5.10.4"
LINE = r"transformers 5\.10\.4 is installed and 5\.17 or newer is needed: pip install --upgrade 'transformers>=5\.17'"

CALLS = {
    "patch_model": lambda: patch_model(tiny.llama()),
    "the trainer": lambda: ChronicalsTrainer(tiny.llama(), None),
    "load_model": lambda: load_model("nowhere", "float32"),
    "load_config": lambda: load_config("nowhere"),
}


def with_installed(monkeypatch, **older):
    """Let these packages be installed in these versions, and the others in their own."""
    own = versions.installed
    monkeypatch.setattr(versions, "installed", lambda package: older.get(package) or own(package))


@pytest.mark.parametrize("call", CALLS)
def test_one_line_says_which_version_is_needed(call, monkeypatch):
    with_installed(monkeypatch, transformers=OLDER)
    with pytest.raises(versions.VersionError, match=f"^{LINE}$"):
        CALLS[call]()


def test_pefts_version_matters_where_the_model_is_wrapped_by_it(monkeypatch):
    peft = pytest.importorskip("peft")
    with_installed(monkeypatch, peft="0.18.1")
    patch_model(tiny.llama())
    wrapped = peft.get_peft_model(tiny.llama(), peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(
        versions.VersionError, match=r"^peft 0\.18\.1 is installed and 0\.19\.1 or newer is needed"
    ):
        patch_model(wrapped)
    with pytest.raises(versions.VersionError, match=r"^peft 0\.18\.1"):
        ChronicalsTrainer(wrapped, None)


@pytest.mark.parametrize(
    ("version", "older"),
    [
        ("5.16.1", True),
        ("5.17.0.dev0", False),
        ("5.17", False),
        ("5.17.0+local", False),
        ("5.9", True),
        ("6.0", False),
    ],
)
def test_versions_are_compared_as_numbers(version, older):
    assert versions.is_older(version, "5.17") is older


def run(folder, *arguments):
    """A process for which an older transformers is installed, by what a package says of itself."""
    about = folder / f"transformers-{OLDER}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: transformers\nVersion: {OLDER}\n"
    )
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )


@pytest.mark.slow
def test_importing_works_and_the_parts_that_run_models_say_what_is_needed(tmp_path):
    program = """
import chronicals
chronicals.ChronicalsConfig()
for name in ("chronicals", "chronicals.patching", "chronicals.training", "chronicals.verification"):
    wanted = {"chronicals.training": "ChronicalsTrainer", "chronicals.verification": "verify"}.get(name, "patch_model")
    try:
        exec(f"from {name} import {wanted}")
    except ImportError as error:
        print(error)
"""
    done = run(tmp_path, "-c", program)
    assert re.fullmatch(f"(?:{LINE}\n){{4}}", done.stdout), done.stderr


@pytest.mark.slow
def test_help_works(tmp_path):
    done = run(tmp_path, "-m", "chronicals.cli", "train", "--help")
    assert done.returncode == 0 and "--model" in done.stdout


@pytest.mark.slow
def test_the_doctor_works_and_its_last_line_names_the_version(tmp_path):
    done = run(tmp_path, "-m", "chronicals.cli", "doctor")
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(f"too old {LINE}", done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "command", ["train --model m --data d", "generate m", "merge m --output o", "plan --model m"]
)
def test_a_command_that_loads_a_model_is_one_line(command, tmp_path):
    done = run(tmp_path, "-m", "chronicals.cli", *command.split())
    assert done.returncode == 1
    assert re.fullmatch(f"error {LINE}\n", done.stderr)


def lowest(requirement):
    (bound,) = (entry.version for entry in requirement.specifier if entry.operator == ">=")
    return Version(bound)


def requirements():
    lists = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    every = (requirement for text in lists for requirement in map(Requirement, text))
    return [
        requirement
        for requirement in every
        if requirement.name not in ("chronicals", "flash-attn-4", "types-PyYAML")
    ]


@pytest.mark.parametrize("requirement", requirements(), ids=str)
def test_the_lowest_version_that_is_admitted_is_the_one_that_is_tested(requirement):
    if requirement.name != "triton":  # torch requires one release of it
        assert Version(pins("constraints-lowest.txt")[requirement.name.lower()]) == lowest(
            requirement
        )


def test_the_lowest_versions_that_are_checked_are_those_of_the_package():
    admitted = {requirement.name: lowest(requirement) for requirement in requirements()}
    checked = {**versions.LOWEST_VERSIONS, **versions.LOWEST_OF_EXTRAS}
    assert {name: Version(version) for name, version in checked.items()} == {
        name: admitted[name] for name in checked
    }


def test_the_lowest_versions_are_tested_by_a_workflow():
    assert "- run: make test-lowest\n" in (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert re.search(
        r"pip install .*--constraint constraints-lowest\.txt .*'\.\[dev\]'",
        (ROOT / "Makefile").read_text(),
    )
