"""``chronicals verify``."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chronicals.cli.common_options import PresetName
from chronicals.cli.options import (
    make_room_for,
    with_known_names,
    with_recipe_flags,
)
from chronicals.standard_json import to_json

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from chronicals.verification import Verification
    from chronicals.verification.comparison import Beside, Deviation

TABLE_ROWS = 15
"""Modules and failures that are printed; the JSON has all of them."""


@with_recipe_flags
def verify_command(
    recipe: Annotated[
        Path | None, typer.Argument(help="YAML file with any of the fields below, as for train")
    ] = None,
    steps: Annotated[int, typer.Option(min=5, max=20, help="Optimizer steps to compare")] = 5,
    output: Annotated[
        Path | None, typer.Option(help="Write every figure to this JSON file")
    ] = None,
    preset: PresetName = None,
    **flags: Any,
) -> None:
    """Prove that a run trains what it should.

    `chronicals verify --model MODEL --data your.jsonl` takes what `train` takes, and writes no
    model.

    The first steps of the run are computed three times from the same weights: as `train` would,
    by plain transformers in fp32 (eager attention, no packing, no accumulation), and by plain
    transformers in the run's own dtype. The loss of each step and the gradient and update of
    each module may be at most 1.5 times as far from fp32 as the third is. The update must be
    that of torch's AdamW for the run's own gradients, apart from roundings in fp32, and the
    learning rate of every step of the whole run that of its schedule. Over a base in 4 bits,
    transformers with bitsandbytes and PEFT is a fourth arm, where they are installed, whose
    weights must be those of the run. The last line is the verdict; exit code 1 if one of these
    fails, or if something that should be trained is not.
    """
    from chronicals.config import Recipe
    from chronicals.config.presets import AUTO_PRESET

    plan = with_known_names(Recipe.given(preset, recipe, **flags))
    if preset == AUTO_PRESET:
        from chronicals.planning.ways import with_way_of_this_machine

        plan = with_way_of_this_machine(plan)

    from rich.console import Console
    from rich.progress import Progress

    from chronicals.data.tokens.chat_templates import with_chat_template
    from chronicals.models.loading import WEIGHT_DTYPES
    from chronicals.objectives import OBJECTIVES, build_objective
    from chronicals.saving import SavedModel
    from chronicals.training.adapters import watcher
    from chronicals.verification import verify as compare

    config = plan.config()
    console = Console(stderr=True)
    build_objective(config)
    make_room_for(output)
    saved = SavedModel.find(plan.model, plan.base_model)
    tokenizer = with_chat_template(saved.tokenizer(plan.trust_remote_code), plan.chat_template)
    model = OBJECTIVES[config.objective].load(
        saved,
        WEIGHT_DTYPES[config.mixed_precision],
        plan.trust_remote_code,
        config.quantization,
        watcher(config),
    )
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("steps in all arms", total=steps)
        found = compare(
            model,
            tokenizer,
            config,
            *plan.sources,
            steps,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    _show(found, Console())
    if output is not None:
        output.write_text(to_json(found.to_dict(), indent=2))
    if not found.passed:
        raise typer.Exit(1)


def _show(found: Verification, console: Console) -> None:
    from rich.markup import escape

    beside = found.bitsandbytes
    rows = sorted([*found.gradients, *found.updates, *found.optimizer], key=lambda row: -row.ratio)
    console.print(_losses_table(found), "", _modules_table(rows[:TABLE_ROWS], beside))
    if len(rows) > TABLE_ROWS:
        console.print(
            f"… and {len(rows) - TABLE_ROWS} more rows, each further inside what it is allowed"
        )
    if beside and beside.gradients:
        our_median = statistics.median(row.deviation for row in found.gradients)
        their_median = statistics.median(row.deviation for row in beside.gradients)
        words = "transformers + bitsandbytes + PEFT: median deviation of a gradient from fp32"
        console.print(f"{words} {their_median:.1e}, ours {our_median:.1e}", soft_wrap=True)
    for note in found.notes:
        console.print(f"note: {escape(note)}")
    for failure in found.failures[:TABLE_ROWS]:
        console.print(f"[bold red]failed[/] {escape(failure)}", soft_wrap=True)
    if len(found.failures) > TABLE_ROWS:
        console.print(
            f"[bold red]failed[/] and {len(found.failures) - TABLE_ROWS} more, in the JSON of --output"
        )
    worst = max((row.ratio for row in rows), default=0.0)
    summary = f"{len(found.losses)} steps; the worst module is at {worst:.0%} of what is allowed"
    if found.passed:
        console.print(f"[bold green]passed[/] {summary}", soft_wrap=True)
    else:
        console.print(
            f"[bold red]failed[/] {len(found.failures)} checks in {summary}", soft_wrap=True
        )


def _losses_table(found: Verification) -> Table:
    """Return the loss of each step in all arms."""
    from rich.table import Table

    beside = found.bitsandbytes
    others = ["bitsandbytes"] if beside else []
    table = Table("step", "loss", "fp32", "plain", *others, "off by", "allowed", show_edge=False)
    for number, row in enumerate(found.losses):
        losses = [row.ours, row.fp32, row.plain]
        if beside:
            losses.append(beside.losses[number].ours)
        table.add_row(
            str(row.step),
            *(f"{loss:.6f}" for loss in losses),
            f"{abs(row.ours - row.fp32):.1e}",
            f"{row.allowed:.1e}",
        )
    return table


def _modules_table(rows: Sequence[Deviation], beside: Beside | None) -> Table:
    """Return what deviates in modules, beside the gradients of other libraries if there are any."""
    from rich import box
    from rich.table import Table

    theirs: dict[str, str] = {}
    if beside:
        theirs = {row.module: f"{row.deviation:.1e}" for row in beside.gradients}
    # Without padding, most columns are left for names.
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=0)
    table.add_column("module", overflow="fold")
    others = ["bnb's"] if beside else []
    for name in ("of", "deviation", "plain's", *others, "allowed", "cosine", "norm", ""):
        table.add_column(name, no_wrap=True)
    for row in rows:
        figures = [f"{row.deviation:.1e}", f"{row.plain:.1e}"]
        if beside:
            figures.append(theirs.get(row.module, "") if row.quantity == "gradient" else "")
        table.add_row(
            row.module,
            row.quantity,
            *figures,
            f"{row.allowed:.1e}",
            f"{row.cosine:.6f}",
            f"{row.norm_ratio:.4f}",
            "[green]ok[/]" if row.ratio <= 1 else "[bold red]differs[/]",
        )
    return table
