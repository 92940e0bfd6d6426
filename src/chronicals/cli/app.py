"""``chronicals``: the commands together, and how errors are shown."""

from __future__ import annotations

import logging
import os
import shutil
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.markup import escape

from chronicals.cli.benchmark import benchmark
from chronicals.cli.data import app as data
from chronicals.cli.doctor import doctor
from chronicals.cli.evaluate import evaluate
from chronicals.cli.export import export
from chronicals.cli.generate import generate
from chronicals.cli.merge import merge
from chronicals.cli.moe import app as moe
from chronicals.cli.noise import collected
from chronicals.cli.options import Command
from chronicals.cli.plan import plan
from chronicals.cli.push import push
from chronicals.cli.quickstart import quickstart
from chronicals.cli.train import train
from chronicals.cli.verify import verify
from chronicals.cli.wording import LogFormatter, in_users_form
from chronicals.versions import VersionError

HELP_TABLE_COLUMNS = 120
"""Terminal columns that a help table needs to show all flags whole; with fewer, and in a pipe, help
is plain lines."""

app = typer.Typer(
    name="chronicals",
    help="Fine-tune large language models, and see that they really trained. Begin with "
    "'chronicals quickstart'.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown"
    if shutil.get_terminal_size().columns >= HELP_TABLE_COLUMNS
    else None,
)


def _print_version(asked: bool) -> None:
    if asked:
        from chronicals import __version__

        print(f"chronicals {__version__}")  # noqa: T201
        raise typer.Exit


@app.callback()
def begin(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and stop", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    _hide_progress_bars()


for registered in data.registered_commands:
    registered.cls = Command
app.add_typer(data)
app.add_typer(moe)
for command in (
    quickstart,
    train,
    evaluate,
    generate,
    merge,
    export,
    push,
    benchmark,
    plan,
    verify,
    doctor,
):
    app.command(cls=Command)(command)


def main() -> None:
    """Run the command line. An error that the user can fix is one paragraph and exit code 1; Ctrl-C
    with a checkpoint is 130.
    """
    handler = _log_handler()
    handler.setFormatter(LogFormatter("%(message)s"))
    # Of several processes only the first logs more than warnings.
    first = os.environ.get("RANK", "0") == "0"
    logging.basicConfig(level=logging.INFO if first else logging.WARNING, handlers=[handler])
    for name in QUIET_LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)
    with collected():
        _run(first)


def _run(first: bool) -> None:
    """Run the command. An error that the user can fix is shown, and the process ends.

    Args:
        first: True for the first of several processes, or the only one.
    """
    try:
        app()
    except (ValueError, OSError, VersionError) as error:
        _print_error(error)
        sys.exit(1)
    except RuntimeError as error:
        from torch import OutOfMemoryError

        from chronicals.training.errors import CheckpointError, Interrupted, TrainingError

        if not isinstance(error, (CheckpointError, Interrupted, TrainingError, OutOfMemoryError)):
            raise
        interrupted = isinstance(error, Interrupted)
        _print_error(error, "" if interrupted else ERROR, quiet=interrupted and not first)
        sys.exit(130 if interrupted else 1)


ERROR = "[bold red]error[/] "

QUIET_LOGGERS = ("httpx", "httpcore", "matplotlib", "fontTools", "transformers", "numba")
"""Loggers of libraries that log their imports and the writing of files."""


def _print_error(error: Exception, before: str = ERROR, quiet: bool = False) -> None:
    # As Python does for an error that nobody caught; by it other ranks learn of the error.
    sys.last_value = error
    console = Console(stderr=True, emoji=False, highlight=False, soft_wrap=True, quiet=quiet)
    console.print(f"{before}{escape(in_users_form(_words(error)))}")


def _hide_progress_bars() -> None:
    """Hide the progress bars of transformers and the hub, because ours is shown.

    Importing transformers takes longer than reporting an error in a recipe. If it is not imported
    yet, it will find the setting in the environment.
    """
    if "huggingface_hub" not in sys.modules:
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        return
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()


def _words(error: Exception) -> str:
    """Return the text of an error; for an error of the system, the file first."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error) or type(error).__name__


def _log_handler() -> logging.Handler:
    """Return a handler that wraps messages to a terminal; in a file or a pipe they are one line
    each.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        return logging.StreamHandler()
    return RichHandler(console=console, show_path=False, show_time=False, show_level=False)
