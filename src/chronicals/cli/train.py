"""``chronicals train``."""

from __future__ import annotations

import json
import shlex
import sys
from contextlib import nullcontext
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chronicals.cli.common_options import PresetName
from chronicals.cli.noise import keep_in
from chronicals.cli.options import (
    with_known_names,
    with_recipe_flags,
    without_option,
)
from chronicals.cli.space_table import show_space

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from chronicals.config import ChronicalsConfig, Recipe
    from chronicals.data.reading.ledger import Ledger
    from chronicals.distributed import Mesh
    from chronicals.rewards import Rewards
    from chronicals.saving import SavedModel


FLASH_ATTENTION_PACKAGES = ("flash-attn-4", "quack-kernels", "nvidia-cutlass-dsl", "torch")
"""Packages whose versions decide what FlashAttention-4 compiles."""


@with_recipe_flags
def train_command(
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
        typer.Option(
            "--check",
            help="Stop after the report on the data, the length and the memory of the run",
        ),
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
    preset: PresetName = None,
    **flags: Any,
) -> None:
    """Train a model.

    `chronicals train --model DIR_OR_HUB --data FILE`, or `chronicals train recipe.yaml`.

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

    from chronicals import precompilation
    from chronicals.config import ChronicalsConfig, Recipe
    from chronicals.config.presets import AUTO_PRESET
    from chronicals.data.packs import machine_code

    if resume:
        folder = Path(flags.get("output_dir", ChronicalsConfig().output_dir)).expanduser()
        if any((folder / name).exists() for name in (".earlier-run", ".moving-run")):
            from chronicals.training.run.resume import sole_writer

            with sole_writer(folder):  # puts back a run whose successor had no checkpoint yet
                pass
    plan = with_known_names(Recipe.given(preset, recipe, resume_from or resume, **flags))
    if preset == AUTO_PRESET:
        from chronicals.planning.ways import with_way_of_this_machine

        plan = with_way_of_this_machine(plan)
    config = plan.config()
    # Other processes compile while this one imports libraries and loads the model.
    if machine_code.source_hash():
        precompilation.start_precompilation(machine_code.COMPILING_MODULE, [], machine_code.facts())
    if verbose:
        logging.getLogger("chronicals").setLevel(logging.DEBUG)
    if not check:
        _compile_attention(plan.model, config)

    from rich.console import Console
    from rich.markup import escape

    from chronicals.data.tokens.chat_templates import with_chat_template
    from chronicals.distributed import Mesh
    from chronicals.objectives import OBJECTIVES, build_objective
    from chronicals.saving import SavedModel
    from chronicals.training import ChronicalsTrainer
    from chronicals.training.loading import load_to_train
    from chronicals.training.rollouts.rollout_run import check_prompts, rewards_of

    # Both raise before anything is loaded if their settings are wrong.
    objective = build_objective(config)
    ranks = Mesh.current()
    rewards = rewards_of(objective, config, ranks)
    console = Console(emoji=False, highlight=False, soft_wrap=True, quiet=not ranks.writer)
    saved = SavedModel.find(plan.model, plan.base_model)
    tokenizer = with_chat_template(saved.tokenizer(plan.trust_remote_code), plan.chat_template)
    with nullcontext() if rewards is None else rewards:
        if check:
            resumed = resume_from or resume
            _check_data(plan, config, saved, tokenizer, ranks, resumed, console, rewards)
            return
        check_prompts(objective, rewards, plan.sources, config, ranks)
        if ranks.writer:
            keep_in(config.output_dir)
        model, config = load_to_train(saved, config, ranks, plan.trust_remote_code)
        trainer = ChronicalsTrainer(
            model, tokenizer, config, write_recipe=plan.write_to, rewards=rewards
        )
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


def _ledger_table(ledger: Ledger) -> Table:
    """Return what became of the rows of data, as a table."""
    from rich import box
    from rich.table import Table

    from chronicals.data.reading.ledger import LEDGER_COLUMNS

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in LEDGER_COLUMNS:
        is_text = column in ("kind", "why")
        table.add_column(column, justify="left" if is_text else "right", overflow="fold")
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
    rewards: Rewards | None,
) -> None:
    """Report on the data and the length of the run; reports of an earlier run stay."""
    from rich.console import Console
    from rich.markup import escape

    from chronicals.data.packs.packing import plan_epoch
    from chronicals.objectives import build_objective
    from chronicals.objectives.policy_gradient import PolicyGradient
    from chronicals.planning import planned_space
    from chronicals.training.preparation import open_stores, rows_needed
    from chronicals.training.rollouts.rollout_run import RolloutRun
    from chronicals.training.run.length import fit_batch, fit_learning_rate
    from chronicals.training.run.resume import checkpoint_to_resume, holds_a_run

    embedding_rows = rows_needed(tokenizer, saved.embedding_rows(plan.trust_remote_code), config)
    reports = None if holds_a_run(config.output_dir) else config.output_dir
    if reports is not None and ranks.writer:
        reports.mkdir(parents=True, exist_ok=True)
    objective = build_objective(config)
    store, held_out = open_stores(
        *plan.sources,
        embedding_rows,
        tokenizer,
        config,
        ranks,
        reports,
        objective.answer_tokens,
    )
    apart = [] if held_out is None or config.validation_split else [held_out]
    beside_the_log = Console(stderr=True, highlight=False, quiet=not ranks.writer)
    for data in (store, *apart):
        beside_the_log.print(_ledger_table(data.ledger))
    resumed = checkpoint_to_resume(config.output_dir, resume, ranks) if resume else None
    fitted = fit_learning_rate(config, ranks)
    if isinstance(objective, PolicyGradient):
        rollouts = RolloutRun.of(objective, tokenizer, rewards, plan.sources, config, ranks)
        fitted = rollouts.fitted(fitted, store, ranks)
    else:
        fitted = fit_batch(fitted, plan_epoch(store, config), ranks, resumed)
    if ranks.writer:
        show_space(planned_space(plan, fitted, ranks), beside_the_log)
    where = (
        f"the report is in {config.output_dir}"
        if reports
        else f"the run in {config.output_dir} keeps its own report"
    )
    console.print(escape(f"the data can be trained on; {where}"))


def _compile_attention(model: str, config: ChronicalsConfig) -> None:
    """Start a process that compiles FlashAttention-4's kernels.

    There is none if it is not installed, or the model's head sizes are not known.
    """
    from chronicals import precompilation
    from chronicals.model_shape import ModelShape

    try:
        versions = [version(package) for package in FLASH_ATTENTION_PACKAGES]
    except PackageNotFoundError:
        return
    file: Path | None = Path(model) / "config.json"
    if not Path(model).is_dir():  # a hub model, which may be in the local cache
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        try:
            cached = try_to_load_from_cache(model, "config.json")
        except HFValidationError:
            cached = None
        file = Path(cached) if isinstance(cached, str) else None
    try:
        configuration = json.loads(file.read_text()) if file is not None else {}
    except (OSError, ValueError):  # loading the model will report it
        configuration = {}
    shape = ModelShape.of(configuration)
    if not shape.head_dim:
        return
    text_config = configuration.get("text_config") or configuration
    softcap = text_config.get("attn_logit_softcapping") or 0
    heads = [str(number) for number in (shape.heads, shape.kv_heads, shape.head_dim, softcap)]
    if config.use_flash_attention and config.mixed_precision in ("bf16", "fp16"):
        dtype = {"bf16": "bfloat16", "fp16": "float16"}[config.mixed_precision]
        precompilation.start_precompilation(
            "chronicals.attention.compilation",
            [dtype, str(config.max_seq_length), *heads],
            versions,
        )
