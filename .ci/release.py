"""Rehearse a release, or do what its workflow does, up to the upload.

    python .ci/release.py                      # build, look into the files, install the wheel, run it;
                                               # with extras in other Pythons, where they are here
    python .ci/release.py --build-only --tag v0.1.0 --name chronicals-training
    python .ci/release.py --wheel dist/X.whl   # install a wheel that is built, in an empty environment

The name on the index is one setting, ``--name``: the workflow takes it from the repository's variable
DISTRIBUTION. What is imported, and the command, are ``chronicals`` under any name.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
CHECKED_WITHIN = 900
"""Seconds that an installation may take: torch is most of it."""

IN_WHEEL = (
    "chronicals/py.typed",
    "chronicals/cards/card_rates.json",
    "chronicals/data/templates/",
    "chronicals/ui/words/",
)
"""Files beside the code without which an installed package fails."""

COMMANDS = (
    ("chronicals", "--version"),
    ("chronicals", "doctor", "--no-self-test"),
    ("chronicals", "convert", "--help"),
)
"""What an installed package must do, in a folder without the sources."""


OTHERS = ("3.12", "3.13")
"""Versions of Python that a rehearsal installs the wheel in too, with ``EXTRAS``."""

EXTRAS = "[peft,export,ui]"

VERSION = "import sys; print('%d.%d' % sys.version_info[:2])"


class ReleaseError(Exception):
    """What stands between this tree and an upload."""


def build(name: str, tag: str | None) -> list[Path]:
    """Build sdist and wheel of a copy of the tree that has this name; ``dist`` has them after."""
    shutil.rmtree(DIST, ignore_errors=True)
    with tempfile.TemporaryDirectory() as place:
        copy = Path(place) / "tree"
        ignored = shutil.ignore_patterns(".venv*", ".git", "build", "dist", "*_cache", "tests")
        shutil.copytree(ROOT, copy, ignore=ignored)
        project = named(copy / "pyproject.toml", name)
        if tag is not None and tag.removeprefix("v") != project["version"]:
            raise ReleaseError(f"tag {tag} is not of version {project['version']}")
        command = [sys.executable, "-m", "build", "--outdir", str(DIST), str(copy)]
        subprocess.run(command, check=True, timeout=CHECKED_WITHIN)
    return sorted(DIST.iterdir())


def named(file: Path, name: str) -> dict[str, str]:
    """Give the project in ``file`` a name, also where its own extras name it; return the project."""
    text = file.read_text()
    before = tomllib.loads(text)["project"]["name"]
    text = re.sub(rf'(?m)^name = "{before}"$', f'name = "{name}"', text, count=1)
    text = text.replace(f'"{before}[', f'"{name}[')
    file.write_text(text)
    return tomllib.loads(text)["project"]


def look_into(files: list[Path], name: str) -> Path:
    """Check what is in sdist and wheel; return the wheel."""
    wheels = [file for file in files if file.suffix == ".whl"]
    sdists = [file for file in files if file.name.endswith(".tar.gz")]
    if len(wheels) != 1 or len(sdists) != 1:
        raise ReleaseError(f"one sdist and one wheel are expected, and there are {files}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        inside = wheel.namelist()
        metadata = next(one for one in inside if one.endswith(".dist-info/METADATA"))
        head = wheel.read(metadata).decode()
    missing = [one for one in IN_WHEEL if not any(held.startswith(one) for held in inside)]
    if missing:
        raise ReleaseError(f"the wheel lacks {', '.join(missing)}")
    outside = {held.partition("/")[0] for held in inside} - {"chronicals"}
    if any(not one.endswith(".dist-info") for one in outside):
        raise ReleaseError(f"the wheel has more than the package: {sorted(outside)}")
    if f"\nName: {name}\n" not in head or "License-Expression: Apache-2.0" not in head:
        raise ReleaseError(f"the wheel's metadata has another name or licence:\n{head[:400]}")
    with tarfile.open(sdists[0]) as sdist:
        if not any(held.endswith("/LICENSE") for held in sdist.getnames()):
            raise ReleaseError("the sdist has no licence")
    return wheels[0]


def try_out(wheel: Path, python: str, extras: str) -> None:
    """Install a wheel in an empty environment, and run its commands in an empty folder."""
    with tempfile.TemporaryDirectory() as place:
        environment = Path(place) / "environment"
        if python == sys.executable:
            venv.create(environment, with_pip=True)
        else:
            subprocess.run([python, "-m", "venv", environment], check=True, timeout=120)
        binaries = environment / "bin"
        pinned = ["--constraint", str(ROOT / "constraints.txt")]
        install = [
            binaries / "python",
            "-m",
            "pip",
            "install",
            "--quiet",
            *pinned,
            f"{wheel}{extras}",
        ]
        subprocess.run(install, check=True, timeout=CHECKED_WITHIN)
        for words in COMMANDS:
            command = [binaries / words[0], *words[1:]]
            done = subprocess.run(
                command, cwd=place, capture_output=True, text=True, timeout=CHECKED_WITHIN
            )
            if done.returncode:
                raise ReleaseError(f"{' '.join(words)}: exit {done.returncode}\n{done.stderr}")
            print(f"{' '.join(words)}: {done.stdout.strip().splitlines()[0]}")


def interpreter(version: str) -> str | None:
    """Return the Python of a version on the path or among pyenv's; None if there is none.

    A name on the path may be pyenv's, which answers only for versions that are switched on.
    """
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    on_path = shutil.which(f"python{version}")
    candidates = [on_path] if on_path else []
    candidates += sorted(map(str, pyenv.glob(f"{version}.*/bin/python")))
    for python in candidates:
        asked = subprocess.run([python, "-c", VERSION], capture_output=True, text=True, timeout=60)
        if asked.returncode == 0 and asked.stdout.strip() == version:
            return python
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", default="chronicals", help="of the distribution on the index")
    parser.add_argument("--tag", help="which must be that of the version")
    parser.add_argument("--build-only", action="store_true")
    parser.add_argument("--wheel", type=Path, help="install this one instead of building")
    parser.add_argument("--python", default=sys.executable, help="of the empty environment")
    parser.add_argument("--extras", default="", help="to install with it, such as [peft,export,ui]")
    given = parser.parse_args()
    try:
        wheel = given.wheel
        if wheel is None:
            wheel = look_into(build(given.name, given.tag), given.name)
            print(f"built {wheel.name}")
        if not given.build_only:
            try_out(wheel.resolve(), given.python, given.extras)
            for version in OTHERS if given.wheel is None else ():
                python = interpreter(version)
                if python is None:
                    print(f"left to the workflow: Python {version} with {EXTRAS} is not here")
                    continue
                print(f"Python {version} with {EXTRAS}:")
                try_out(wheel.resolve(), python, EXTRAS)
            print(f"{wheel.name} installs and runs; what is left is the upload")
    except ReleaseError as error:
        print(f"no release: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
