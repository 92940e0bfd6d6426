"""``chronicals``: the commands together, and how errors are shown."""

from __future__ import annotations

import logging
import shutil
import sys

import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.markup import escape

from chronicals.cli.benchmark import benchmark
from chronicals.cli.data import app as data
from chronicals.cli.doctor import doctor
from chronicals.cli.evaluate import evaluate
from chronicals.cli.generate import generate
from chronicals.cli.quickstart import quickstart
from chronicals.cli.train import train
from chronicals.cli.verify import verify

WIDE = 120
"""Columns in which a table holds the names of all flags whole; in fewer, and in a pipe, help is plain lines, which cut none."""

app = typer.Typer(
    name="chronicals",
    help="Fine-tune large language models, and see that they really trained. Begin with 'chronicals quickstart'.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown" if shutil.get_terminal_size().columns >= WIDE else None,
)


@app.callback()
def begin() -> None:
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # ours is the one to watch


app.add_typer(data)
for command in (quickstart, train, evaluate, generate, benchmark, verify, doctor):
    app.command()(command)


def main() -> None:
    """Entry point: an error a user can mend is one paragraph and exit code 1; Ctrl-C after a checkpoint is 130."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[_log_handler()])
    _quieten()
    try:
        app()
    except (ValueError, RuntimeError, OSError) as error:
        from torch import OutOfMemoryError

        from chronicals.training.errors import Interrupted, TrainingFailure

        if not isinstance(error, (ValueError, TrainingFailure, OSError, OutOfMemoryError)):
            raise
        stopped = isinstance(error, Interrupted)
        word = "" if stopped else "[bold red]error[/] "
        Console(stderr=True, emoji=False, highlight=False, soft_wrap=True).print(f"{word}{escape(_words(error))}")
        sys.exit(130 if stopped else 1)


def _words(error: Exception) -> str:
    """What an error says; of one the system reported, the file first."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error) or type(error).__name__


def _log_handler() -> logging.Handler:
    """Lines fitted to a terminal; into a file or a pipe, each message as the line it is."""
    console = Console(stderr=True)
    if not console.is_terminal:
        return logging.StreamHandler()
    return RichHandler(console=console, show_path=False, show_time=False, show_level=False)


def _quieten() -> None:
    """Libraries that narrate their imports and their file writing do so only at warnings."""
    for name in ("httpx", "httpcore", "matplotlib", "fontTools", "transformers", "numba"):
        logging.getLogger(name).setLevel(logging.WARNING)
