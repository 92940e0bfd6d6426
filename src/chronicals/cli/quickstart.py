"""``chronicals quickstart``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from chronicals.cli.noise import keep_in

QuickstartKind = Literal["sft", "dpo", "grpo"]


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
    from rich.table import Table

    from chronicals.distributed import require_one_process
    from chronicals.training.errors import Interrupted, TrainingError
    from chronicals.training.quickstart import run_preferences, run_quickstart, run_rewards
    from chronicals.training.run.resume import how_to_resume

    console = Console(emoji=False, highlight=False, soft_wrap=True)
    require_one_process("quickstart")
    if folder.exists():
        _require_ours(folder)
        shutil.rmtree(folder)
    keep_in(folder)
    preferences = None
    rewarded = None
    try:
        if objective == "dpo":
            done, preferences = run_preferences(folder, seed)
        elif objective == "grpo":
            done, rewarded = run_rewards(folder, seed)
        else:
            done = run_quickstart(folder, seed)
    except (Interrupted, TrainingError) as error:
        # A quickstart has no recipe to resume from.
        anew = "start chronicals quickstart again, which begins anew"
        text = str(error)
        for run in (folder, folder / "preference", folder / "rewarded"):
            text = text.replace(how_to_resume(run), anew)
        raise type(error)(text) from error
    table = Table(
        "held out",
        "before",
        "after",
        title=f"{done.rows:,} questions, {done.parameters / 1e6:.1f}M parameters",
    )
    table.add_row("loss", f"{done.before.loss:.3f}", f"{done.after.loss:.3f}")
    table.add_row("perplexity", f"{done.before.perplexity:,.1f}", f"{done.after.perplexity:,.1f}")
    table.add_row(
        "token accuracy", f"{done.before.token_accuracy:.1%}", f"{done.after.token_accuracy:.1%}"
    )
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
    last = done.result
    if preferences is not None:
        last = preferences.result
        (pairs, held) = preferences.pairs
        console.print()
        chosen = Table(
            "held-out pairs",
            "before DPO",
            "after DPO",
            title=f"{pairs:,} pairs trained on, {held:,} held out",
        )
        for name, words, shown in (
            ("accuracies", "right answer likelier", ".1%"),
            ("margins", "margin, nats a token", ".4f"),
        ):
            values = (
                format(side.others[f"rewards/{name}"], shown)
                for side in (preferences.before, preferences.after)
            )
            chosen.add_row(words, *values)
        console.print(chosen)
    if rewarded is not None:
        last = rewarded.result
        (prompts, held) = rewarded.prompts
        console.print()
        means = Table(
            "held-out prompts",
            "before GRPO",
            "after GRPO",
            title=f"{prompts:,} prompts trained on, {held:,} held out",
        )
        means.add_row(
            "mean reward",
            f"{rewarded.before.others['reward']:.3f}",
            f"{rewarded.after.others['reward']:.3f}",
        )
        console.print(means)
    console.print(
        f"\n[bold]report[/] {escape(str(last.report))}\n[bold]model[/]  "
        f"{escape(str(last.model_dir))}"
    )
    console.print("\nnext, on your own data:")
    console.print(
        "  chronicals train --model MODEL_FOLDER_OR_HUB_NAME --data your.jsonl --use-lora"
    )
    trained = folder
    if preferences is not None:
        trained = folder / "preference"
    elif rewarded is not None:
        trained = folder / "rewarded"
    console.print(
        f"or talk to this one:\n  chronicals generate {escape(shlex.quote(str(trained)))}"
    )


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
