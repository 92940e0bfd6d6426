"""``chronicals train``."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chronicals.cli.noise import keep_in
from chronicals.cli.objective_names import with_known_names
from chronicals.cli.options import with_recipe_flags, without_option

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from chronicals.config import ChronicalsConfig, Recipe
    from chronicals.data import Ledger
    from chronicals.distributed import Mesh
    from chronicals.saving import SavedModel


@with_recipe_flags
def train(
    recipe: Annotated[
        Path | None, typer.Argument(help="YAML file with any of the fields below")
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on from the newest whole checkpoint, with the recipe kept in --output-dir",
        ),
    ] = False,
    resume_from: Annotated[
        Path | None,
        typer.Option(
            help="Go on from this checkpoint, or this run's newest, in its own folder or in "
            "another --output-dir"
        ),
    ] = None,
    check: Annotated[
        bool,
        typer.Option("--check", help="Stop after the report on the data and the length of the run"),
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Log every decision, also what does not run, and why")
    ] = False,
    nproc: Annotated[
        int | None,
        typer.Option(
            min=1, help="Processes on this machine that train together, one for each card"
        ),
    ] = None,
    preset: Annotated[
        str | None, typer.Option(help="Start from a preset: fast, memory-lean, long-context")
    ] = None,
    **flags: Any,
) -> None:
    """Train a model: `chronicals train --model DIR_OR_HUB --data FILE`, or `chronicals train
    recipe.yaml`.

    A list is written with commas, or its flag repeated. A flag overrides the field of the recipe;
    `--max-steps` also overrides its `num_epochs`, and the reverse. Without both there is one epoch.
    A run writes to `--output-dir`: `model/` (the model or the adapter), `checkpoints/`,
    `metrics.jsonl`, `report.html` and `resume.yaml`, with which `chronicals train --resume
    --output-dir DIR` goes on; flags override it.
    """
    import logging

    if nproc is not None:
        from chronicals.distributed.launch import become_launcher

        become_launcher(nproc, without_option(sys.argv[1:], "--nproc"))

    from chronicals.cli.precompile import compile_attention, compile_data_functions
    from chronicals.config import Recipe

    if resume:
        _put_back_earlier_run(flags)
    plan = with_known_names(Recipe.given(preset, recipe, resume_from or resume, **flags))
    config = plan.config()
    compile_data_functions()
    if verbose:
        logging.getLogger("chronicals").setLevel(logging.DEBUG)
    if not check:
        compile_attention(plan.model, config)

    from rich.console import Console
    from rich.markup import escape

    from chronicals.data.tokens.chat_templates import with_chat_template
    from chronicals.distributed import Mesh
    from chronicals.objectives import OBJECTIVES, build_objective
    from chronicals.saving import SavedModel
    from chronicals.training import ChronicalsTrainer
    from chronicals.training.loading import load_to_train

    build_objective(config)  # raises before anything is loaded if its settings are wrong
    ranks = Mesh.current()
    console = Console(emoji=False, highlight=False, soft_wrap=True, quiet=not ranks.writer)
    saved = SavedModel.find(plan.model, plan.base_model)
    tokenizer = with_chat_template(saved.tokenizer(plan.trust_remote_code), plan.chat_template)
    if check:
        _check_data(plan, config, saved, tokenizer, ranks, resume_from or resume, console)
        return
    if ranks.writer:
        keep_in(config.output_dir)
    model, config = load_to_train(saved, config, ranks, plan.trust_remote_code)
    trainer = ChronicalsTrainer(model, tokenizer, config, write_recipe=plan.write_to)
    result = trainer.train(*plan.sources, resume=resume_from or resume)
    console.print(f"[bold]trained[/] {result.steps} steps, last loss {result.loss:.4f}")
    if result.evaluation:
        console.print(f"[bold]held out[/] {result.evaluation}")
    if result.model_step != result.steps:
        console.print(f"[bold]best[/]   step {result.model_step}, whose weights the model has")
    console.print(
        f"[bold]model[/]  {escape(str(result.model_dir))}\n[bold]report[/] "
        f"{escape(str(result.report))}"
    )
    if OBJECTIVES[config.objective].generates:
        console.print(f"next: chronicals generate {escape(shlex.quote(str(config.output_dir)))}")


def _put_back_earlier_run(flags: Mapping[str, Any]) -> None:
    """Restore the earlier run, if the process that was to replace it was killed before its first
    checkpoint.
    """
    from chronicals.config import ChronicalsConfig

    folder = Path(flags.get("output_dir", ChronicalsConfig().output_dir)).expanduser()
    if any((folder / name).exists() for name in (".earlier-run", ".moving-run")):
        from chronicals.training.resume import sole_writer

        with sole_writer(folder):
            pass


def _ledger(ledger: Ledger) -> Table:
    """Return a table of the rows of a data set by kind, and of what becomes of them."""
    from rich import box
    from rich.table import Table

    from chronicals.data.reading.ledger import LEDGER_COLUMNS

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in LEDGER_COLUMNS:
        table.add_column(
            column, justify="left" if column in ("kind", "why") else "right", overflow="fold"
        )
    for row in ledger.table():
        table.add_row(*row)
    return table


def _check_data(
    plan: Recipe,
    config: ChronicalsConfig,
    saved: SavedModel,
    tokenizer: Any,
    ranks: Mesh,
    resume: bool | Path,
    console: Console,
) -> None:
    """Report on the data and the length of the run; reports of an earlier run stay."""
    from rich.console import Console
    from rich.markup import escape

    from chronicals.data.packs.loader import plan_epoch
    from chronicals.training.length import fit_batch, fit_learning_rate
    from chronicals.training.preparation import open_stores, rows_needed
    from chronicals.training.resume import checkpoint_to_resume, holds_a_run

    embedding_rows = rows_needed(tokenizer, saved.embedding_rows(plan.trust_remote_code), config)
    reports = None if holds_a_run(config.output_dir) else config.output_dir
    if reports is not None and ranks.writer:
        reports.mkdir(parents=True, exist_ok=True)
    store, held_out = open_stores(*plan.sources, embedding_rows, tokenizer, config, ranks, reports)
    apart = [] if held_out is None or config.validation_split else [held_out]
    beside_the_log = Console(stderr=True, highlight=False, quiet=not ranks.writer)
    for data in (store, *apart):
        beside_the_log.print(_ledger(data.ledger))
    resumed = checkpoint_to_resume(config.output_dir, resume, ranks) if resume else None
    fit_batch(fit_learning_rate(config, ranks), plan_epoch(store, config), ranks, resumed)
    where = (
        f"the report is in {config.output_dir}"
        if reports
        else f"the run in {config.output_dir} keeps its own report"
    )
    console.print(escape(f"the data can be trained on; {where}"))
