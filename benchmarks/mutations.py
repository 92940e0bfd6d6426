"""Plants faults in a copy of the source, one at a time, and runs the tests that must see them.

``python benchmarks/mutations.py [--only TEXT] [--jobs 2]`` prints a table and exits 1 if a planted
fault survives. The faults are listed in ``tests/mutations/*.toml``, one ``[[mutant]]`` each:

- ``name``: what is wrong.
- ``file``: the module below ``src/chronicals``, or one of ``benchmarks/peers/``. If it does not
  define what ``in`` names, the only module there that does is taken.
- ``in``: a function, class or constant, as ``Class.method``; left out for other code of a module.
- ``old``: an expression or statements that occur once in it. How they are written does not matter.
- ``new``: what stands there instead, ``pass`` for nothing.
- ``tests``: node ids of pytest, which pass without the fault.

``tests/planting.py`` says how ``old`` is found. Some tests need the ``export`` extra and
llama-cpp-python.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from planting import Unfit, find, module_at, path_of, plant  # noqa: E402

SOURCE = ROOT / "src" / "chronicals"
TIME_LIMIT = 900
TESTS_FAILED = 1
"""Exit code of pytest where it ran tests and some failed; with others it could not run them."""


def listed() -> list[dict]:
    """The mutants of all files, in order."""
    files = sorted((ROOT / "tests" / "mutations").glob("*.toml"))
    return [mutant for file in files for mutant in tomllib.loads(file.read_text())["mutant"]]


def check(mutants: list[dict]) -> None:
    """Raises SystemExit with all mutants that have no place in the source, or several."""
    wrong = []
    for mutant in mutants:
        try:
            find(module_at(path_of(mutant, SOURCE)), mutant)
        except Unfit as error:
            wrong.append(f"{mutant['name']} ({mutant['file']}): {error}")
    if wrong:
        raise SystemExit("\n".join(wrong))


def outcome(mutant: dict) -> str:
    """``killed``, ``SURVIVED``, or what kept the tests from running."""
    with tempfile.TemporaryDirectory(prefix="chronicals-") as folder:
        copies = [Path(folder) / "src", Path(folder) / "benchmarks" / "peers"]
        for copied in copies:
            shutil.copytree(
                ROOT / copied.relative_to(folder),
                copied,
                ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"),
            )
        path = path_of(mutant, SOURCE)
        copy = Path(folder) / path.relative_to(ROOT)
        copy.write_text(plant(path.read_text(), mutant))
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            *mutant["tests"],
        ]
        # Tests import ``peers`` from beside the copy of ``chronicals``.
        places = filter(None, [str(copies[0]), os.environ.get("PYTHONPATH")])
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places)}
        try:
            run = subprocess.run(
                command,
                cwd=ROOT,
                env=environment,
                capture_output=True,
                text=True,
                timeout=TIME_LIMIT,
            )
        except subprocess.TimeoutExpired:
            return f"no verdict within {TIME_LIMIT} s"
    if run.returncode == TESTS_FAILED:
        return "killed"
    if run.returncode == 0:
        return (
            "SURVIVED"
            if "skipped" not in run.stdout.splitlines()[-1]
            else "not seen: tests were skipped"
        )
    return f"pytest exited {run.returncode}: {run.stdout[-200:]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="mutants whose name or file contains this text")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    given = parser.parse_args()
    chosen = [
        mutant
        for mutant in listed()
        if given.only in mutant["name"] or given.only in mutant["file"]
    ]
    check(chosen)
    table = Table("planted fault", "in", "outcome")
    with ThreadPoolExecutor(given.jobs) as pool:
        for number, (mutant, found) in enumerate(zip(chosen, pool.map(outcome, chosen)), 1):
            print(f"{number}/{len(chosen)} {found}: {mutant['name']}", file=sys.stderr, flush=True)
            table.add_row(mutant["name"], mutant["file"], found)
    Console(width=140).print(table)
    sys.exit(any(cell != "killed" for cell in table.columns[2].cells))


if __name__ == "__main__":
    main()
