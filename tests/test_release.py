"""What a release needs: one name, a workflow that tests what it uploads, an image that is not root."""

import importlib.util
import re
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
IMAGE = (ROOT / "Dockerfile").read_text()


@pytest.fixture(scope="module")
def release():
    spec = importlib.util.spec_from_file_location("release_of_ours", ROOT / ".ci" / "release.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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


def test_what_is_uploaded_is_what_was_tested_behind_an_approval():
    jobs = WORKFLOW["jobs"]
    assert WORKFLOW[True] == {"push": {"tags": ["v*"]}}  # YAML 1.1 reads the key on as true
    assert jobs["wheel"]["needs"] == "build" and jobs["publish"]["needs"] == "wheel"
    assert jobs["wheel"]["strategy"]["matrix"]["python"] == ["3.11", "3.12", "3.13"]
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
