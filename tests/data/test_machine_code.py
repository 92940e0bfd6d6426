"""Machine code is kept between processes, and never after any source that it was compiled from
has changed; another process makes that of a run's data, and the run finds it.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import chronicals
from chronicals import precompilation
from chronicals.data.packs import compiled, machine_code

SOURCE = Path(chronicals.__file__).parent

FILES = {
    "__init__.py": "",
    "data/__init__.py": "",
    "data/packs/__init__.py": "",
    **{
        name: (SOURCE / name).read_text()
        for name in (
            "precompilation.py",
            "bound_process.py",
            "log_once.py",
            "data/packs/compiled.py",
            "data/packs/machine_code.py",
        )
    },
    "batch.py": "IGNORED = -100\n",
    "data/packs/inner.py": (
        "from .compiled import compiled\n@compiled\ndef inner(x):\n    return x + 1\n"
    ),
    "data/packs/outer.py": (
        "from chronicals.batch import IGNORED\nfrom .compiled import compiled\nfrom .inner import "
        "inner\n"
        "@compiled(nogil=True)\ndef outer(x):\n    return inner(x) * IGNORED\n"
    ),
}
PROGRAM = (
    "from chronicals.data.packs.outer import outer; "
    "print(outer(2), sum(outer.stats.cache_hits.values()))"
)


def run(folder, **environment):
    clean = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    environment = {**clean, "PYTHONPATH": str(folder), **environment}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, env=environment
    ).stdout.split()


def edit(file, old, new):
    """Of the same length, and with the times of the file as they were."""
    times = file.stat()
    file.write_text(file.read_text().replace(old, new))
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.mark.slow
def test_an_edit_of_a_callee_or_a_constant_in_another_file_is_compiled(tmp_path):
    package = tmp_path / "chronicals"
    for name, text in FILES.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
    assert run(tmp_path) == ["-300", "0"]
    assert run(tmp_path) == ["-300", "1"], "it is not kept"
    old = next((package / "data/packs/__pycache__").glob(f"{compiled.CODE_FOLDER_PREFIX}*"))
    os.utime(old, (0, 0))
    edit(package / "data/packs/inner.py", "x + 1", "x + 2")
    assert run(tmp_path) == ["-400", "0"]
    assert not old.exists(), "old machine code is never deleted"
    edit(package / "batch.py", "-100", "-200")
    assert run(tmp_path) == ["-800", "0"]
    edit(package / "batch.py", "-200", "-100")
    assert run(tmp_path) == ["-400", "1"]
    assert run(tmp_path, NUMBA_CACHE_DIR=str(tmp_path / "own")) == ["-400", "0"]
    assert list((tmp_path / "own").rglob("*.nbi"))


@pytest.mark.slow
def test_all_that_numba_compiles_is_kept_in_this_way():
    decorated = re.compile(r"\b(njit|jit|vectorize|guvectorize|cfunc|jit_module)\(|cache=True")
    using = {
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        if decorated.search(path.read_text())
    }
    assert {name for name in using if "numba" in (SOURCE / name).read_text()} == {
        "data/packs/compiled.py"
    }
    covered = {
        file.relative_to(SOURCE).as_posix()
        for pattern in machine_code.COMPILED_SOURCES
        for file in SOURCE.glob(pattern)
    }
    assert {
        "data/packs/assembly.py",
        "data/packs/packing.py",
        "data/packs/strategies.py",
        "batch.py",
    } <= covered


def package_in(folder):
    for name, text in FILES.items():
        (folder / "chronicals" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "chronicals" / name).write_text(text)
    return folder


@pytest.mark.slow
def test_where_no_folder_can_be_written_nothing_is_kept_and_that_is_said(tmp_path):
    """A file stands where each folder would be made, which not even root can write through."""
    package_in(tmp_path)
    (tmp_path / "chronicals/data/packs/__pycache__").write_text("")
    (tmp_path / "file").write_text("")
    nowhere = str(tmp_path / "file" / "below")
    environment = {
        "NUMBA_CACHE_DIR": nowhere,
        "HOME": nowhere,
        "XDG_CACHE_HOME": nowhere,
        "PYTHONPATH": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )
    assert done.stdout.split() == ["-300", "0"], done.stderr
    assert done.stderr.count("machine code is not kept") == 1 and "NUMBA_CACHE_DIR" in done.stderr


@pytest.mark.slow
def test_machine_code_that_cannot_be_saved_does_not_end_the_run(tmp_path):
    program = (
        "import pathlib, shutil; from chronicals.data.packs.outer import outer; "
        "shutil.rmtree('own'); "
        "pathlib.Path('own').write_text(''); print(outer(2))"
    )
    environment = {
        **os.environ,
        "NUMBA_CACHE_DIR": "own",
        "PYTHONPATH": str(package_in(tmp_path / "code")),
    }
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
    )
    assert done.stdout.split() == ["-300"], done.stderr
    assert done.stderr.count("machine code is not kept") == 1


STARTED_RUN = """
from numba.core import event
from chronicals import precompilation
from chronicals.data.packs import compilation, machine_code
if {starts}:
    precompilation.start_precompilation(machine_code.COMPILING_MODULE, [], machine_code.facts())
with event.install_recorder("numba:compile") as compiled:
    compilation.main()
print(sum(made.is_start for _, made in compiled.buffer))
"""


@pytest.mark.slow
def test_another_process_compiles_and_the_run_waits_for_it(tmp_path):
    source = str(Path(precompilation.__file__).parent.parent)
    place = {
        **os.environ,
        "HOME": str(tmp_path),
        "NUMBA_CACHE_DIR": str(tmp_path / "numba"),
        "PYTHONPATH": source,
    }
    place.pop("LOCAL_RANK", None)

    def compiled(starts):
        found = subprocess.check_output(
            [sys.executable, "-c", STARTED_RUN.format(starts=starts)], env=place, text=True
        )
        return int(found.split()[0])

    assert compiled(starts=True) == 0
    assert compiled(starts=False) == 0, "the machine code is there for whoever comes next"


def test_the_facts_tell_sources_and_places_apart(monkeypatch):
    before = machine_code.facts()
    monkeypatch.setenv("NUMBA_CACHE_DIR", "elsewhere")
    assert machine_code.facts() != before and machine_code.source_hash() in before
