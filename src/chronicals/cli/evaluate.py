"""``chronicals evaluate``."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from chronicals.cli.common_options import (
    BaseModel,
    ChatTemplate,
    ColumnNames,
    Overlong,
    TrainedModel,
    TrustRemoteCode,
)
from chronicals.cli.expert_options import (
    ExpertMemory,
    ExpertMode,
    ExpertPredictor,
    OffloadExperts,
    placing,
)
from chronicals.cli.options import fields_from_flags, make_room_for, objective_names
from chronicals.standard_json import to_json


def evaluate_command(
    model: TrainedModel,
    data: Annotated[
        list[str],
        typer.Option(help="What to evaluate on, as `train --data` takes it; may be repeated"),
    ],
    base_model: BaseModel = None,
    reference_model: Annotated[
        str | None,
        typer.Option(
            help="Reference policy of dpo, ipo and kto (default: that of the run), a folder or "
            "hub name"
        ),
    ] = None,
    teacher: Annotated[
        str | None,
        typer.Option(help="Teacher of distill (default: that of the run), a folder or hub name"),
    ] = None,
    max_seq_length: Annotated[
        int | None, typer.Option(help="Tokens in a pack (default: the run's, else 2048)")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Packs in a forward pass")] = 1,
    objective: Annotated[
        str | None,
        typer.Option(
            help=f"What is measured (default: the run's, else sft): {', '.join(objective_names())}"
        ),
    ] = None,
    train_on: Annotated[str | None, typer.Option(help="Which tokens count: answers or all")] = None,
    train_on_roles: Annotated[
        list[str] | None, typer.Option(help="Roles whose messages count, with commas or repeated")
    ] = None,
    train_on_turns: Annotated[
        str | None, typer.Option(help="Which of their messages count: all, or the last alone")
    ] = None,
    completions_as_chat: Annotated[
        bool | None, typer.Option(help="Render prompts and completions by the chat template")
    ] = None,
    overlong: Overlong = None,
    chat_template: ChatTemplate = None,
    columns: ColumnNames = None,
    rewards: Annotated[
        list[str] | None,
        typer.Option(help="What scores drawn answers, as of train (default: those of the run)"),
    ] = None,
    gate: Annotated[
        list[str] | None,
        typer.Option(help="Fraction of the rows that a finding may concern, name=value"),
    ] = None,
    offload_experts: OffloadExperts = False,
    expert_memory: ExpertMemory = None,
    expert_predictor: ExpertPredictor = None,
    expert_mode: ExpertMode = "exact",
    cache_dir: Annotated[
        Path | None, typer.Option(help="Where token stores are kept (default: ~/.cache/chronicals)")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Also write the figures to this JSON file")
    ] = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Held-out loss, perplexity and accuracy.

    `chronicals evaluate chronicals-output --data held-out.jsonl` prints a table, and JSON on
    standard output. The figures are means over all tokens that training would train. If MODEL comes
    from a run, its data settings are used: pack width, objective, reference policy, roles, turns,
    gate, completions and longer rows. Else they are the defaults of `train`. A model of grpo or rloo
    answers each prompt with its likeliest tokens, and the mean rewards are shown. With
    `--expert-mode soft` the loss is shown with and without stand-ins for missing experts.
    """
    from rich.console import Console
    from rich.table import Table

    from chronicals.config import ConfigurationError, Recipe
    from chronicals.config.sections import merged
    from chronicals.data.tokens.chat_templates import with_chat_template
    from chronicals.distributed import Mesh, warn_of_other_processes
    from chronicals.generation import load_trained
    from chronicals.objectives import OBJECTIVES, NextToken, build_objective
    from chronicals.objectives.reference import with_reference
    from chronicals.patching.expert_offload import SOFT
    from chronicals.saving import SavedModel
    from chronicals.training.rollouts.rollout_run import check_prompts, rewards_of
    from chronicals.training.run.evaluation import evaluate_data
    from chronicals.training.run.soft_cost import with_soft_cost

    warn_of_other_processes("evaluate")
    make_room_for(output)
    about = SavedModel.find(model, base_model).about
    scored_by = OBJECTIVES.get(objective or about.get("taught", {}).get("objective"), NextToken)
    place = placing(offload_experts, expert_memory, expert_predictor, mode=expert_mode)
    asked = {
        "data": data,
        "max_seq_length": max_seq_length,
        "objective": objective,
        "train_on": train_on,
        "train_on_roles": train_on_roles,
        "train_on_turns": train_on_turns,
        "completions_as_chat": completions_as_chat,
        "overlong": overlong,
        "chat_template": chat_template,
        "columns": columns,
        "rewards": rewards or None,
        "gate": gate,
        "cache_dir": cache_dir,
    }
    fields: dict[str, Any] = {"max_seq_length": 2048, **about.get("taught", {})}
    if objective not in (None, fields.get("objective")):
        fields.pop("sections", None)  # settings of the objective that it was trained by
        if objective == "distill" and teacher is None:
            raise ConfigurationError(
                "objective='distill': the model was not trained beside a teacher; give one "
                "(--teacher), or leave objective out"
            )
    if teacher is not None:
        measured = objective or fields.get("objective", "sft")
        if measured != "distill":
            raise ConfigurationError(
                f"teacher={teacher!r}: objective={measured!r} has none; leave it out"
            )
        fields["sections"] = merged(fields.get("sections", {}), {"distill": {"teacher": teacher}})
    fields |= fields_from_flags(asked)
    recipe = Recipe(model=model, batch_size=batch_size, gradient_accumulation_steps=1, **fields)
    config = with_reference(recipe.config(), about.get("reference"), reference_model)
    rows = recipe.sources[0]
    built = build_objective(config)
    started = rewards_of(built, config, Mesh())
    with nullcontext() if started is None else started:
        check_prompts(built, started, (rows, None), config, Mesh())  # before the model is loaded
        trained = load_trained(model, base_model, trust_remote_code, scored_by.load, place)
        tokenizer = with_chat_template(trained.tokenizer, recipe.chat_template)
        measure = partial(evaluate_data, trained.model, tokenizer, rows, config, started)
        soft = expert_mode == SOFT
        figures = with_soft_cost(measure, trained.model.offload) if soft else measure().to_dict()
    table = Table("measure", "value")
    for name, value in figures.items():
        table.add_row(
            name.replace("_", " "), f"{value:,.4f}" if isinstance(value, float) else f"{value:,}"
        )
    Console(stderr=True).print(table)
    print(to_json(figures))  # noqa: T201
    if output is not None:
        output.write_text(to_json(figures, indent=2))
