"""Rows of the measured tables on several cards of one machine, a row on each card at a time.

    python benchmarks/rows_on_cards.py FOLDER NAME ... [--cards 4] [--time-limit 585] [--seconds
    560] [--work FOLDER]
        [options of rows.py: --rounds 0 --commit HASH ...]

A card that has ended a row takes the next of those named, until the time limit; a row has
``--seconds``, or what is left. Weights of built-in shapes are written once, before the first row,
and what a trial of a peer found holds for rows as long. Cores are divided evenly, and each file
says that other rows ran at the same time. What a row prints is in WORK/NAME.log; a short table of
all rows comes last.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import rows as one_card

from chronicals.bound_process import BoundProcess

NOTE = "rows on other cards of the machine ran at the same time"
LEAST = 60.0
"""Seconds with less than which no row is begun."""

BUILD = """
import sys
from pathlib import Path
import torch
from chronicals.benchmark.shapes import build_model
build_model(sys.argv[1], Path(sys.argv[2]), "cuda" if torch.cuda.is_available() else "cpu")
"""


def models_of(name: str, other: str | None) -> set[str]:
    """Built-in shapes whose weights the row reads; ``other`` than its own where the script is
    tried.
    """
    options = one_card.ROWS[name]
    values = dict(zip(options, options[1:]))
    return {
        other or values["--model"],
        *([values["--distill.teacher"]] if "--distill.teacher" in values else []),
    }


@dataclass
class Cards:
    """The cards of the machine, and what is still to be measured on them.

    Attributes:
        options: of ``rows.py``.
        seconds: that a row may take.
        ends: when all must have ended, by ``time.monotonic``.
    """

    folder: Path
    work: Path
    count: int
    options: Sequence[str]
    seconds: float
    ends: float
    names: list[str]
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def environment(self, card: int) -> dict[str, str]:
        """Of processes that see this card alone."""
        given = os.environ.get("CUDA_VISIBLE_DEVICES")
        seen = given.split(",")[card] if given else str(card)
        threads = str(max(1, (os.cpu_count() or 1) // self.count))
        place = str(self.work / f"card-{card}" / "unsloth")
        return {
            **os.environ,
            "CUDA_VISIBLE_DEVICES": seen,
            "OMP_NUM_THREADS": threads,
            "UNSLOTH_COMPILE_LOCATION": place,
        }

    def write_weights(self, models: Sequence[str]) -> None:
        """Of each model once, as many at a time as there are cards.

        Raises:
            SystemExit: one could not be written.
        """
        missing = [
            name
            for name in models
            if not (self.work / "weights" / name / "tokenizer.json").exists()
        ]
        for start in range(0, len(missing), self.count):
            some = missing[start : start + self.count]
            places = [str(self.work / "weights" / name) for name in some]
            running = [
                BoundProcess([sys.executable, "-c", BUILD, name, place], env=self.environment(card))
                for card, (name, place) in enumerate(zip(some, places))
            ]
            if failed := [name for name, process in zip(some, running) if process.wait()]:
                sys.exit(f"weights of {', '.join(failed)} could not be written")

    def measure(self, card: int) -> None:
        """Rows, one after the other, while there are rows and time."""
        place = self.work / f"card-{card}"
        place.mkdir(parents=True, exist_ok=True)
        for shared in ("weights", "ways"):
            (self.work / shared).mkdir(parents=True, exist_ok=True)
            if not (place / shared).exists():
                (place / shared).symlink_to((self.work / shared).absolute())
        for name in self._next():
            limit = min(self.seconds, self.ends - time.monotonic())
            with (self.work / f"{name}.log").open("w") as log:
                began = time.monotonic()
                process = BoundProcess(
                    self.command(name, place, limit),
                    env=self.environment(card),
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
                code = process.wait()
            print(
                f"card {card}: {name}, {time.monotonic() - began:.0f} "
                f"s{', failed' if code else ''}",
                flush=True,
            )

    def command(self, name: str, place: Path, seconds: float) -> list[str]:
        script = str(Path(__file__).with_name("rows.py"))
        limits = ["--time-limit", f"{seconds:.0f}", "--note", NOTE]
        return [
            sys.executable,
            script,
            str(self.folder),
            name,
            "--work",
            str(place),
            *limits,
            *self.options,
        ]

    def _next(self) -> Iterator[str]:
        while True:
            with self._lock:
                if not self.names or self.ends - time.monotonic() < LEAST:
                    return
                name = self.names.pop(0)
            yield name


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="+", metavar="NAME")
    parser.add_argument("--cards", type=int, default=2)
    parser.add_argument(
        "--time-limit", type=float, default=585, help="seconds that all of it may take"
    )
    parser.add_argument("--seconds", type=float, default=560, help="that a row may take")
    parser.add_argument("--work", type=Path, help="keep weights, logs and compilers' caches here")
    parser.add_argument("--model", help="another built-in shape than the rows', to try the script")
    given, options = parser.parse_known_args()
    if unknown := set(given.names) - set(one_card.ROWS):
        parser.error(
            f"no such row: {', '.join(sorted(unknown))}; there are {', '.join(one_card.ROWS)}"
        )
    ends = time.monotonic() + given.time_limit
    given.folder.mkdir(parents=True, exist_ok=True)
    options += ["--model", given.model] if given.model else []
    with tempfile.TemporaryDirectory(prefix="chronicals-rows-") as folder:
        work = given.work or Path(folder)
        cards = Cards(
            given.folder, work, given.cards, options, given.seconds, ends, list(given.names)
        )
        cards.write_weights(
            sorted(set().union(*(models_of(name, given.model) for name in given.names)))
        )
        threads = [
            threading.Thread(target=cards.measure, args=(card,), daemon=True)
            for card in range(given.cards)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for name in cards.names:
        print(f"not begun, the time limit is reached: {name}")
    print(
        one_card.table(
            sorted(path for name in given.names for path in given.folder.glob(f"{name}-*.json"))
        )
    )


if __name__ == "__main__":
    main()
