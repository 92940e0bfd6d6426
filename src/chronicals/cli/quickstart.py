"""``chronicals quickstart``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from chronicals.cli.noise import keep_in

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from chronicals.training.quickstart import Preferences, Quickstart, Rewarded

QuickstartKind = Literal["sft", "dpo", "grpo"]

FURTHER = {"dpo": "preference", "grpo": "rewarded"}
"""Folders of the training behind the first one, in that of the quickstart, by its objective."""


def quickstart_command(
    folder: Annotated[
        Path, typer.Option(help="Output; replaces an earlier quickstart and its exports")
    ] = Path("chronicals-quickstart"),
    seed: Annotated[int, typer.Option(min=0, help="Seed of model, split and order")] = 42,
    objective: Annotated[
        QuickstartKind,
        typer.Option(
            help="sft; or dpo, then preference tuning of the trained model, too; or grpo, then "
            "training on rewards of its own answers"
        ),
    ] = "sft",
) -> None:
    """Train a small model here and now.

    `chronicals quickstart` needs no arguments, no download and no GPU. The data are the
    documentation strings of Python's standard library as questions and answers. A tokenizer and a
    model are trained on them, and the model answers two questions before and after: one it was
    trained on, one held out. With `--objective dpo` the model then learns to prefer the right
    answer to that of another question, with `--objective grpo` to say short whole sentences, by
    rewards of answers that it draws.
    """
    import shlex
    import shutil

    from rich.console import Console
    from rich.markup import escape

    from chronicals.distributed import require_one_process

    console = Console(emoji=False, highlight=False, soft_wrap=True)
    require_one_process("quickstart")
    if folder.exists():
        _require_ours(folder)
        shutil.rmtree(folder)
    keep_in(folder)
    done, further = _run(folder, seed, objective)
    _show(done, console)
    last = done.result
    trained = folder
    if further is not None:
        console.print()
        if objective == "dpo":
            console.print(_preferences_table(further))
        else:
            console.print(_rewards_table(further))
        last = further.result
        trained = folder / FURTHER[objective]
    console.print(
        f"\n[bold]report[/] {escape(str(last.report))}\n[bold]model[/]  "
        f"{escape(str(last.model_dir))}"
    )
    console.print("\nnext, on your own data:")
    console.print(
        "  chronicals train --model MODEL_FOLDER_OR_HUB_NAME --data your.jsonl --use-lora"
    )
    console.print(
        f"or talk to this one:\n  chronicals generate {escape(shlex.quote(str(trained)))}"
    )


def _run(folder: Path, seed: int, objective: QuickstartKind) -> tuple[Quickstart, Any]:
    """Train as the command asks; return the first training, and the one behind it or None.

    Raises:
        Interrupted, TrainingError: the message says how to begin anew, since a quickstart has no
            recipe to resume from.
    """
    from chronicals.training import quickstart
    from chronicals.training.errors import Interrupted, TrainingError
    from chronicals.training.run.resume import how_to_resume

    try:
        if objective == "dpo":
            return quickstart.run_preferences(folder, seed)
        if objective == "grpo":
            return quickstart.run_rewards(folder, seed)
        return quickstart.run_quickstart(folder, seed), None
    except (Interrupted, TrainingError) as error:
        anew = "start chronicals quickstart again, which begins anew"
        text = str(error)
        for run in (folder, *(folder / name for name in FURTHER.values())):
            text = text.replace(how_to_resume(run), anew)
        raise type(error)(text) from error


def _show(done: Quickstart, console: Console) -> None:
    """Print held-out figures, and answers, before and after training."""
    from rich.markup import escape
    from rich.table import Table

    before = done.before
    after = done.after
    title = f"{done.rows:,} questions, {done.parameters / 1e6:.1f}M parameters"
    table = Table("held out", "before", "after", title=title)
    table.add_row("loss", f"{before.loss:.3f}", f"{after.loss:.3f}")
    table.add_row("perplexity", f"{before.perplexity:,.1f}", f"{after.perplexity:,.1f}")
    table.add_row("token accuracy", f"{before.token_accuracy:.1%}", f"{after.token_accuracy:.1%}")
    console.print(table)
    for reply, origin in zip(done.answers, ("trained on", "held out")):
        console.print(f"\n[bold]{escape(reply.question)}[/] [dim]({origin})[/]")
        for word, text in (
            ("before", reply.before),
            ("after", reply.after),
            ("documented", reply.documented),
        ):
            console.print(f"[dim]{word:>10}[/]", end="  ")
            console.print(" ".join(text.split()) or "(nothing)", markup=False)


def _preferences_table(found: Preferences) -> Table:
    """Return what preference tuning changed on held-out pairs."""
    from rich.table import Table

    pairs, held = found.pairs
    title = f"{pairs:,} pairs trained on, {held:,} held out"
    table = Table("held-out pairs", "before DPO", "after DPO", title=title)
    for name, words, form in (
        ("accuracies", "right answer likelier", ".1%"),
        ("margins", "margin, nats a token", ".4f"),
    ):
        sides = (found.before, found.after)
        table.add_row(words, *(format(side.others[f"rewards/{name}"], form) for side in sides))
    return table


def _rewards_table(found: Rewarded) -> Table:
    """Return what training on rewards changed on held-out prompts."""
    from rich.table import Table

    prompts, held = found.prompts
    title = f"{prompts:,} prompts trained on, {held:,} held out"
    table = Table("held-out prompts", "before GRPO", "after GRPO", title=title)
    table.add_row(
        "mean reward", f"{found.before.others['reward']:.3f}", f"{found.after.others['reward']:.3f}"
    )
    return table


def _require_ours(folder: Path) -> None:
    """Raise ConfigurationError if others wrote files of the folder.

    Those that may be there are of a quickstart, or of an export of its model.
    """
    from chronicals.config import ConfigurationError
    from chronicals.export.artefact import EXPORTS, files_of_others
    from chronicals.training.quickstart import WRITTEN

    if not (folder / "untrained").exists():
        raise ConfigurationError(
            f"folder={str(folder)!r}: exists; choose another with --folder, or delete it"
        )
    exports = folder / EXPORTS
    others = sorted({path.name for path in folder.iterdir()} - WRITTEN - {EXPORTS})
    others += [
        f"{EXPORTS}/{name}" for name in (files_of_others(exports) if exports.is_dir() else [])
    ]
    if others:
        raise ConfigurationError(
            f"folder={str(folder)!r}: holds {others[0]!r}, which no quickstart or export wrote; "
            "move it, or choose another "
            "folder (--folder)"
        )
