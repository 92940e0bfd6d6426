"""Machine code for a run's data is made by another process, and found by the run."""

import os
import subprocess
import sys
from pathlib import Path

from chronicals import precompilation
from chronicals.data.packs import machine_code

RUN = """
from numba.core import event
from chronicals import precompilation
from chronicals.data.packs import compilation, machine_code
if {starts}:
    precompilation.start_precompilation(machine_code.COMPILING_MODULE, [], machine_code.facts())
with event.install_recorder("numba:compile") as compiled:
    compilation.main()
print(sum(made.is_start for _, made in compiled.buffer))
"""


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
            [sys.executable, "-c", RUN.format(starts=starts)], env=place, text=True
        )
        return int(found.split()[0])

    assert compiled(starts=True) == 0
    assert compiled(starts=False) == 0, "the machine code is there for whoever comes next"


def test_the_facts_tell_sources_and_places_apart(monkeypatch):
    before = machine_code.facts()
    monkeypatch.setenv("NUMBA_CACHE_DIR", "elsewhere")
    assert machine_code.facts() != before and machine_code.source_hash() in before
