"""Run the commands of the Dockerfile without a container, in an empty folder and as another user.

    python .ci/image.py            # every command from USER on, the health check, and the default

The folder stands for the root of the image: each absolute path of a command is moved into it. Started by
root, commands of the image's user run by its number; by anyone else, all are run as who started it, which
is said. What cannot run here is named with the reason: the build, with the base image, is left to CI.

torch is that of constraints.txt, built for the CPU. Where the index has no such build, tell pip of one
that has (PIP_EXTRA_INDEX_URL).
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from string import Template

ROOT = Path(__file__).resolve().parent.parent
WITHIN = 480
"""Seconds that a command may take, unless the Dockerfile says less: the installation is the longest."""

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""Where an image without a PATH of its own finds its programs, and so python3 here."""

NOT_HERE = {
    "FROM": "the base image",
    "EXPOSE": "it opens nothing by itself",
}
"""Instructions that need a container, and why."""

LEFT_TO_ROOT = {
    "apt-get": "packages of the system: python3 is this machine's",
    "rm": "it cleans up after apt-get",
    "useradd": "no account is made: its number is enough, with an empty home",
}
"""Programs that root runs in the image and nobody runs here, and why."""

RUN_AS_ROOT = ("install",)
"""Programs that root runs here too: they touch nothing but paths that are moved."""

WITHOUT = {"flash": "its wheels are for CUDA alone"}
"""Extras that are not installed here, and why."""

EXTRAS = re.compile(r"(?<=\[)\w+(?:,\w+)*(?=\])")
ABSOLUTE = re.compile(r"(?<![\w./~$}-])/(?=\w)")
PINNED_TORCH = re.compile(r"(?m)^(torch==[\d.]+)$")


class ImageError(Exception):
    """What the image's build, or its user, would fall over."""


class Stage:
    """A folder that stands for the root of the image, and the number of who runs its commands."""

    def __init__(self, folder: Path, user: str) -> None:
        if not user.isdecimal():
            raise ImageError(f"USER {user}: name it by number, which needs no account")
        self.folder = folder
        self.user = int(user) if os.geteuid() == 0 else os.geteuid()
        folder.chmod(0o755)
        for name, mode in (("tmp", 0o1777), ("home", 0o700)):
            (folder / name).mkdir()
            (folder / name).chmod(mode)
        self.give(folder / "home")

    def give(self, path: Path) -> None:
        """Let the image's user own a file, or a folder with all that is in it."""
        for one in (path, *path.rglob("*")):
            os.chown(one, self.user, -1)

    def moved(self, text: str) -> str:
        """Return ``text`` with its absolute paths moved into the folder."""
        return ABSOLUTE.sub(f"{self.folder}/", text)

    def here(self, command: str) -> str:
        """Return a command as it runs here: paths moved, some extras left out, the owner a number."""
        command = re.sub(r"--owner[ =]\S+", f"--owner={self.user}", self.moved(command))
        found = EXTRAS.search(command)
        if found is None:
            return command
        kept = [extra for extra in found.group().split(",") if extra not in WITHOUT]
        return command.replace(found.group(), ",".join(kept))

    def environment(self, variables: list[tuple[str, str]]) -> dict[str, str]:
        """Return what a command finds set: the image's variables, and this machine's way to an index."""
        found = {"PATH": SYSTEM_PATH, "HOME": f"{self.folder}/home", "TMPDIR": f"{self.folder}/tmp"}
        for name, value in os.environ.items():
            if name.startswith("PIP_") or name.lower().endswith("_proxy"):
                found[name] = value
        for name, value in variables:
            found[name] = Template(self.moved(value)).safe_substitute(found)
        return found


@dataclass(frozen=True)
class Left:
    """A part of the Dockerfile that is not run here."""

    text: str
    why: str

    def run(self, stage: Stage) -> str:
        return f"left to the build: {self.text} ({self.why})"


@dataclass(frozen=True)
class Copy:
    """Files of the tree that the image gets; torch's version is that of the CPU in what is copied."""

    text: str
    sources: list[str]
    target: str

    def run(self, stage: Stage) -> str:
        target = Path(stage.moved(self.target))
        told = f"copied: {self.text}"
        for name in self.sources:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, target, dirs_exist_ok=True)
                continue
            into_folder = self.target.endswith("/")
            (target if into_folder else target.parent).mkdir(parents=True, exist_ok=True)
            copied = Path(shutil.copy(source, target))
            if name == "constraints.txt":
                copied.write_text(PINNED_TORCH.sub(r"\1+cpu", copied.read_text()))
                told += " (torch built for the CPU)"
        if "--chown=" in self.text:
            stage.give(target)
        return told


@dataclass(frozen=True)
class Command:
    """A command as the image runs it.

    Attributes:
        text: As it is told, and the command itself where the shell runs it.
        user: Who runs it: ``root`` or the number of USER.
        folder: Where it runs: that of WORKDIR.
        variables: Those of ENV, in their order.
        words: Program and arguments, where no shell stands between.
        within: Seconds that it may take.
    """

    text: str
    user: str
    folder: str
    variables: list[tuple[str, str]]
    words: list[str] = field(default_factory=list)
    within: int = WITHIN

    def run(self, stage: Stage) -> str:
        """Run it, and return what it was, by whom, and its seconds."""
        folder = Path(stage.moved(self.folder)) if self.folder != "/" else stage.folder
        folder.mkdir(parents=True, exist_ok=True)
        words = self.words or ["sh", "-c", self.text]
        started = time.monotonic()
        done = subprocess.run(
            # timeout ends what the command started too, such as pip's build of a wheel
            ["timeout", "--kill-after=5", str(self.within), *map(stage.here, words)],
            cwd=folder,
            env=stage.environment(self.variables),
            capture_output=True,
            text=True,
            **self.as_whom(stage),
        )
        if done.returncode in (124, 137):
            raise ImageError(f"{self.text}: not done within {self.within} s")
        if done.returncode:
            said = (done.stdout + done.stderr)[-2000:]
            raise ImageError(f"{self.text}: exit {done.returncode}\n{said}")
        number = os.geteuid() if self.user == "root" else stage.user
        who = f"user {number}" if number else "root"
        return f"{who}, {time.monotonic() - started:.1f} s: {self.text}"

    def as_whom(self, stage: Stage) -> dict[str, object]:
        """Return what makes a process that of the image's user; nothing for root and where we are not root."""
        if self.user == "root" or os.geteuid() != 0:
            return {}
        return {"user": stage.user, "group": stage.user, "extra_groups": []}


def instructions(text: str) -> list[tuple[str, str]]:
    """Return the instructions of a Dockerfile, each its word and what follows, on one line."""
    lines = [
        line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")
    ]
    joined = re.sub(r"\s*\\\n\s*", " ", "\n".join(lines))
    pairs = [line.strip().partition(" ") for line in joined.splitlines()]
    return [(word.upper(), rest.strip()) for word, _, rest in pairs]


def steps(text: str) -> list[Left | Copy | Command]:
    """Return all that a Dockerfile does, in its order; at the end the health check and the default.

    Raises:
        ImageError: An instruction, or a command of root, for which there is no rule here.
    """
    user, folder, variables = "root", "/", []
    found: list[Left | Copy | Command] = []
    exec_forms: dict[str, list[str]] = {}
    limit = WITHIN
    for word, rest in instructions(text):
        if word in NOT_HERE:
            found.append(Left(f"{word} {rest}", NOT_HERE[word]))
        elif word == "RUN":
            for command in re.split(r"\s*&&\s*", rest):
                found.append(_of_shell(Command(command, user, folder, list(variables))))
        elif word == "COPY":
            *sources, target = [part for part in rest.split() if not part.startswith("--")]
            found.append(Copy(f"{word} {rest}", sources, target))
        elif word == "ENV":
            variables += [tuple(pair.split("=", 1)) for pair in shlex.split(rest)]
        elif word == "USER":
            user = "root" if rest == "0" else rest
        elif word == "WORKDIR":
            folder = rest
        elif word == "HEALTHCHECK":
            options, _, command = rest.partition("CMD ")
            exec_forms[word] = _exec_form(word, command)
            limit = _seconds(options)
        elif word in ("ENTRYPOINT", "CMD"):
            exec_forms[word] = _exec_form(word, rest)
        else:
            raise ImageError(f"{word}: there is no rule for it in .ci/image.py")
    default = exec_forms.get("ENTRYPOINT", []) + exec_forms.get("CMD", [])
    for words, within in ((exec_forms.get("HEALTHCHECK", []), limit), (default, WITHIN)):
        if words:
            found.append(Command(shlex.join(words), user, folder, variables, words, within))
    return found


def _of_shell(command: Command) -> Left | Command:
    """Return a command of RUN, or why it is not run here."""
    program = command.text.split()[0]
    if command.user != "root" or program in RUN_AS_ROOT:
        return command
    if program not in LEFT_TO_ROOT:
        raise ImageError(f"{command.text}: root's; add {program} to LEFT_TO_ROOT or RUN_AS_ROOT")
    return Left(command.text, LEFT_TO_ROOT[program])


def _exec_form(word: str, command: str) -> list[str]:
    """Return the words of a command that no shell reads, which stop when the container does."""
    if not command.startswith("["):
        raise ImageError(f'{word} {command}: write it as a list, such as ["chronicals"]')
    return json.loads(command)


def _seconds(options: str) -> int:
    """Return the time that a health check has; Docker's own is 30 s."""
    given = re.search(r"--timeout=(\S+)", options)
    parts = re.findall(r"(\d+)([sm])", given.group(1) if given else "30s")
    return sum(int(number) * {"s": 1, "m": 60}[unit] for number, unit in parts)


def rehearse(text: str) -> str:
    """Run what can run of a Dockerfile, print each step, and return the verdict."""
    users = [rest for word, rest in instructions(text) if word == "USER"]
    if not users or users[-1] in ("root", "0"):
        raise ImageError("the image runs as root: end with USER and a number")
    found = steps(text)
    with tempfile.TemporaryDirectory() as place:
        stage = Stage(Path(place), users[-1])
        for step in found:
            print(step.run(stage), flush=True)
    for extra, why in WITHOUT.items():
        if extra in ",".join(EXTRAS.findall(text)).split(","):
            print(f"left to the build: extra {extra} ({why})")
    ran = sum(isinstance(step, Command) for step in found)
    left = sum(isinstance(step, Left) for step in found)
    who = f"as user {stage.user}" if os.geteuid() == 0 else f"as {stage.user}, not {users[-1]}"
    return f"the image's commands: {ran} run here, {who}; {left} parts are left to the build"


def main() -> int:
    try:
        print(rehearse((ROOT / "Dockerfile").read_text()))
    except ImageError as error:
        print(f"no image: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
