"""What a release needs: one name, a workflow that tests what it uploads, an image that is not root."""

import importlib.util
import os
import re
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
IMAGE = (ROOT / "Dockerfile").read_text()


def script(name):
    """A script of .ci as a module; its dataclasses look themselves up among the modules."""
    spec = importlib.util.spec_from_file_location(f"{name}_of_ours", ROOT / ".ci" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def release():
    return script("release")


@pytest.fixture(scope="module")
def image():
    return script("image")


def test_another_name_is_that_of_the_project_and_of_its_own_extras(release, tmp_path):
    file = tmp_path / "pyproject.toml"
    file.write_text((ROOT / "pyproject.toml").read_text())
    project = release.named(file, "another-name")
    assert project["name"] == "another-name"
    assert project["optional-dependencies"]["dev"][0].startswith("another-name[")
    assert project["scripts"] == {"chronicals": "chronicals.cli:main"}
    assert {**project, "name": 0, "optional-dependencies": 0} == {
        **PROJECT,
        "name": 0,
        "optional-dependencies": 0,
    }


def wheel(folder, files, name="chronicals"):
    path = folder / f"{name}-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as made:
        for one in files:
            made.writestr(one, "")
        made.writestr(
            f"{name}-0.1.0.dist-info/METADATA",
            f"Metadata-Version: 2.4\nName: {name}\nLicense-Expression: Apache-2.0\n",
        )
    return path


WHOLE = [
    "chronicals/py.typed",
    "chronicals/cards/card_rates.json",
    "chronicals/data/templates/a.jinja",
    "chronicals/ui/words/en.yaml",
]


@pytest.mark.parametrize(
    ("files", "name", "said"),
    [
        (WHOLE[1:], "chronicals", "the wheel lacks chronicals/py.typed"),
        ([*WHOLE, "tests/tiny.py"], "chronicals", r"more than the package: .*tests"),
        (WHOLE, "another", "another name or licence"),
    ],
)
def test_a_wheel_that_lacks_something_is_no_release(release, files, name, said, tmp_path):
    sdist = tmp_path / "chronicals-0.1.0.tar.gz"
    with pytest.raises(release.ReleaseError, match=said):
        release.look_into([sdist, wheel(tmp_path, files, name)], "chronicals")


def python_that_says(folder, text, name):
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return str(file)


def test_another_python_is_found_where_it_answers(release, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path / 'path'}:/usr/bin:/bin")
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    assert release.interpreter("3.99") is None
    python_that_says(tmp_path, "echo pyenv: not switched on >&2; exit 127", "path/python3.99")
    python_that_says(tmp_path, "echo 3.9", "pyenv/versions/3.99.0/bin/python")
    assert release.interpreter("3.99") is None
    wanted = python_that_says(tmp_path, "echo 3.99", "pyenv/versions/3.99.1/bin/python")
    assert release.interpreter("3.99") == wanted
    on_path = python_that_says(tmp_path, "echo 3.99", "path/python3.99")
    assert release.interpreter("3.99") == on_path


def test_a_rehearsal_installs_the_extras_in_other_pythons_or_says_that_they_are_not_here(
    release, tmp_path, monkeypatch, capsys
):
    made = wheel(tmp_path, WHOLE)
    tried = []
    monkeypatch.setattr(release, "build", lambda name, tag: [made])
    monkeypatch.setattr(release, "look_into", lambda files, name: made)
    monkeypatch.setattr(release, "try_out", lambda *asked: tried.append(asked[1:]))
    monkeypatch.setattr(release, "interpreter", {"3.12": "/python3.12", "3.13": None}.get)
    monkeypatch.setattr(sys, "argv", ["release.py"])
    assert release.main() == 0
    assert tried == [(sys.executable, ""), ("/python3.12", "[peft,export,ui]")]
    assert (
        "left to the workflow: Python 3.13 with [peft,export,ui] is not" in capsys.readouterr().out
    )
    monkeypatch.setattr(sys, "argv", ["release.py", "--wheel", str(made)])
    assert release.main() == 0 and len(tried) == 3


def test_what_is_uploaded_is_what_was_tested_behind_an_approval():
    jobs = WORKFLOW["jobs"]
    assert WORKFLOW[True] == {"push": {"tags": ["v*"]}}  # YAML 1.1 reads the key on as true
    assert jobs["wheel"]["needs"] == "build" and jobs["publish"]["needs"] == "wheel"
    assert jobs["wheel"]["strategy"]["matrix"]["python"] == ["3.11", "3.12", "3.13"]
    installed = [step.get("run", "") for step in jobs["wheel"]["steps"]]
    assert any("--extras '[peft,export,ui]'" in line for line in installed)
    publish = jobs["publish"]
    assert publish["environment"] == "pypi" and publish["permissions"]["id-token"] == "write"
    used = " ".join(step.get("uses", step.get("run", "")) for step in publish["steps"])
    assert "attest-build-provenance" in used and "password" not in str(publish)
    assert "id-token" not in str(WORKFLOW["permissions"])
    built = [step["run"] for step in jobs["build"]["steps"] if "run" in step]
    assert any('--name "$DISTRIBUTION"' in line and "--tag" in line for line in built)


def test_the_image_is_not_root_and_asks_doctor():
    users = re.findall(r"^USER (\S+)", IMAGE, re.MULTILINE)
    assert users and users[-1] not in ("root", "0")
    assert re.search(r'^HEALTHCHECK .*"chronicals", "doctor"', IMAGE, re.MULTILINE)
    (extras,) = re.findall(r"/tmp/source\[([\w,]+)\]", IMAGE)
    assert extras.split(",") == ["flash", "peft", "export", "ui"]
    assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])
    copied = re.findall(r"^COPY --chown=10001 (.+) /tmp/source", IMAGE, re.MULTILINE)
    for name in " ".join(copied).split():
        assert (ROOT / name).exists()


def test_every_command_of_the_image_is_run_or_left_with_a_reason(image):
    steps = image.steps(IMAGE)
    shell = IMAGE.replace("\\\n", " ")
    lines = re.findall(r"^(?:RUN|COPY|FROM|EXPOSE) .+", shell, re.MULTILINE)
    said = []
    for line in lines:
        said += line.removeprefix("RUN ").split("&&")
    said += ["chronicals doctor --no-self-test", "chronicals --help"]
    assert [step.text for step in steps] == [" ".join(command.split()) for command in said]
    left = {step.text.split()[0] for step in steps if isinstance(step, image.Left)}
    assert left == {"FROM", "apt-get", "rm", "useradd", "EXPOSE"}
    users = [step.user for step in steps if isinstance(step, image.Command)]
    assert users == ["root", *["10001"] * 5]


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("ADD a /b", "ADD: there is no rule"),
        ("RUN apt-get update && curl https://a.b/c", "curl https://a.b/c: root's; add curl"),
        ("CMD chronicals --help", r"CMD chronicals --help: write it as a list"),
        ("USER 10001\nUSER root", "runs as root"),
        ("USER somebody", "USER somebody: name it by number"),
    ],
)
def test_what_the_check_of_the_image_does_not_know_stops_it(image, lines, said):
    with pytest.raises(image.ImageError, match=said):
        image.rehearse(f"FROM base\n{lines}\n" + "USER 10001\n" * ("USER" not in lines))


SMALL = r"""
FROM base
RUN useradd --uid 10001 somebody \
    # between continued lines
    && install --directory --owner somebody /opt/held
USER 10001
ENV HELD=/opt/held
COPY --chown=10001 constraints.txt /tmp/source/
RUN grep '^torch==[0-9.]*+cpu$' /tmp/source/constraints.txt && rm -r /tmp/source
RUN touch $HELD/a && test -e /opt/held/a && test "[flash,peft]" = "[peft]"
WORKDIR /work
"""


def test_commands_run_in_the_folder_of_the_image_as_its_user(image, capsys):
    user = 10001 if os.geteuid() == 0 else os.geteuid()
    asked = f'CMD ["sh", "-c", "test $(id -u) = {user} && test -z $(ls) && test -e /opt/held/a"]'
    verdict = image.rehearse(f"{SMALL}{asked}\n")
    told = capsys.readouterr().out
    assert f"7 run here, as {'user ' if user == 10001 else ''}{user}" in verdict
    assert "left to the build: useradd" in told and "(torch built for the CPU)" in told
    assert "left to the build: extra flash" in told
    assert not Path("/opt/held").exists()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("RUN echo why && false", r"false: exit 1"),
        ('CMD ["sh", "-c", "echo why; exit 3"]', r"exit 3\nwhy"),
        pytest.param(
            'HEALTHCHECK --timeout=1s CMD ["sleep", "9"]',
            "sleep 9: not done within 1 s",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_command_that_fails_or_hangs_is_named(image, line, said):
    with pytest.raises(image.ImageError, match=said):
        image.rehearse(f"{SMALL}{line}\n")
