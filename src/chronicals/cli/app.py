"""``chronicals``: the commands together, and how errors are shown."""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.markup import escape
from typer.core import TyperGroup

from chronicals.cli.benchmark import benchmark_command
from chronicals.cli.convert import convert_command
from chronicals.cli.data import data_commands
from chronicals.cli.doctor import doctor_command
from chronicals.cli.evaluate import evaluate_command
from chronicals.cli.export import export_command, merge_command, push_command
from chronicals.cli.generate import generate_command
from chronicals.cli.moe import moe_commands
from chronicals.cli.noise import collected
from chronicals.cli.options import Command
from chronicals.cli.plan import plan_command
from chronicals.cli.quickstart import quickstart_command
from chronicals.cli.train import train_command
from chronicals.cli.tune import tune_command
from chronicals.cli.ui import ui_command
from chronicals.cli.verify import verify_command
from chronicals.cli.wording import LogFormatter, in_users_form
from chronicals.versions import VersionError

HELP_TABLE_COLUMNS = 120
"""Terminal columns that a help table needs to show all flags whole; with fewer, and in a pipe, help
is plain lines."""

COMMANDS_OF_OTHERS = {
    "chat": "generate",
    "inference": "generate",
    "webchat": "generate",
    "finetune": "train",
    "sft": "train",
    "dpo": "train --objective dpo",
    "kto": "train --objective kto",
    "reward": "train --objective reward",
    "preprocess": "train --check",
    "eval": "evaluate",
    "lm-eval": "evaluate",
    "merge-lora": "merge",
    "env": "doctor",
}
"""Our command for one of TRL, Axolotl, LLaMA-Factory or torchtune that has another name."""


class CommandGroup(TyperGroup):
    """Our commands; one that another trainer has is answered with ours."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that is called, and its arguments."""
        try:
            return super().resolve_command(ctx, args)
        except Exception as caught:
            error: Any = caught  # typer does not export its class
            ours = COMMANDS_OF_OTHERS.get(args[0].lower())
            if ours is not None and type(error).__name__ == "UsageError":
                error.message = f"No such command '{args[0]}'; use chronicals {ours}"
            raise


app = typer.Typer(
    name="chronicals",
    cls=CommandGroup,
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
def before_commands(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and stop", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Hide the progress bars of transformers and the hub, because ours is shown."""
    # Importing transformers takes longer than reporting an error in a recipe. If it is not imported
    # yet, it will find the setting in the environment.
    if "huggingface_hub" not in sys.modules:
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        return
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()


for registered in data_commands.registered_commands:
    registered.cls = Command
app.add_typer(data_commands)
app.add_typer(moe_commands)
COMMANDS: dict[str, Callable[..., Any]] = {
    "quickstart": quickstart_command,
    "train": train_command,
    "evaluate": evaluate_command,
    "generate": generate_command,
    "merge": merge_command,
    "export": export_command,
    "push": push_command,
    "benchmark": benchmark_command,
    "plan": plan_command,
    "tune": tune_command,
    "convert": convert_command,
    "verify": verify_command,
    "doctor": doctor_command,
    "ui": ui_command,
}
for name, command in COMMANDS.items():
    app.command(name, cls=Command)(command)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line.

    An error that the user can fix is one paragraph and exit code 1; Ctrl-C with a checkpoint is
    130.

    Args:
        arguments: command and options; by default those of this process, with which ``train
            --nproc`` starts its processes in any case.
    """
    console = Console(stderr=True)
    handler: logging.Handler = logging.StreamHandler()  # a line for each message, in files, too
    if console.is_terminal:  # there they are wrapped
        handler = RichHandler(console=console, show_path=False, show_time=False, show_level=False)
    handler.setFormatter(LogFormatter("%(message)s"))
    # Of several processes only the first logs more than warnings.
    first = os.environ.get("RANK", "0") == "0"
    logging.basicConfig(level=logging.INFO if first else logging.WARNING, handlers=[handler])
    for name in QUIET_LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)
    with collected():
        try:
            app(arguments)
        except (ValueError, OSError, VersionError) as error:
            _print_error(error)
            sys.exit(1)
        except RuntimeError as error:
            from torch import OutOfMemoryError

            from chronicals.training.errors import CheckpointError, Interrupted, TrainingError

            shown = (CheckpointError, Interrupted, TrainingError, OutOfMemoryError)
            if not isinstance(error, shown):
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
    text = str(error) or type(error).__name__
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        text = f"{error.filename}: {error.strerror}"
    console = Console(stderr=True, emoji=False, highlight=False, soft_wrap=True, quiet=quiet)
    console.print(f"{before}{escape(in_users_form(text))}")
