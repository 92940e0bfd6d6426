"""``chronicals data``: looking at data as the model will see it."""

from __future__ import annotations

import itertools
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chronicals.cli.common_options import ChatTemplate, ColumnNames, Overlong
from chronicals.cli.options import fields_from_flags, objective_names, with_known_names

if TYPE_CHECKING:
    import numpy as np
    from rich.text import Text

    from chronicals.config import Recipe
    from chronicals.data import PackPlan, TokenStore

data_commands = typer.Typer(name="data", no_args_is_help=True)

COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "red")

BAR_WIDTH = 96
"""Characters of a full pack."""


@data_commands.callback()
def data() -> None:
    """Look at data as the model will see it."""


@data_commands.command()
def show(
    file: Annotated[
        str,
        typer.Argument(
            help="What `train --data` takes: a file, a folder, a pattern, a hub name; or a recipe"
        ),
    ],
    model: Annotated[
        str | None,
        typer.Option(help="Folder or hub name of the model whose tokenizer and template are used"),
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="Rows to show")] = 3,
    skip: Annotated[int, typer.Option(min=0, help="Rows to leave out before them")] = 0,
    chat_template: ChatTemplate = None,
    columns: ColumnNames = None,
    max_seq_length: Annotated[
        int | None, typer.Option(min=2, help="Tokens in a pack (2048)")
    ] = None,
    objective: Annotated[
        str | None,
        typer.Option(
            help=f"Whose rows these are (sft unless said otherwise): {', '.join(objective_names())}"
        ),
    ] = None,
    train_on: Annotated[
        str | None,
        typer.Option(help="answers or all tokens (unless said otherwise, the objective's)"),
    ] = None,
    train_on_roles: Annotated[
        list[str] | None, typer.Option(help="Whose messages are trained, with commas or repeated")
    ] = None,
    train_on_turns: Annotated[
        str | None, typer.Option(help="all (unless said otherwise), or last")
    ] = None,
    completions_as_chat: Annotated[
        bool | None,
        typer.Option(
            "--completions-as-chat", help="Render prompts and completions by the chat template"
        ),
    ] = None,
    train_after_stop: Annotated[
        bool | None,
        typer.Option(
            "--train-after-stop", help="Train what the template writes behind a stop token, too"
        ),
    ] = None,
    overlong: Overlong = None,
    packing_strategy: Annotated[
        str | None, typer.Option(help="best-fit (unless said otherwise), first-fit or in-order")
    ] = None,
    max_documents: Annotated[
        int | None, typer.Option(min=1, help="Most documents in a pack")
    ] = None,
    trust_remote_code: Annotated[
        bool | None, typer.Option(help="Run Python code that comes with the model")
    ] = None,
) -> None:
    """Show rows as the model will see them.

    That is every token, what is trained, and how documents share packs.

    From a recipe it takes data, model and fields; a flag overrides them. On a terminal trained
    tokens are green and the others dim; elsewhere trained spans are between ⟦ and ⟧.
    """
    from chronicals.config import Recipe

    flags: dict[str, Any] = {
        "model": model,
        "columns": columns,
        "chat_template": chat_template,
        "max_seq_length": max_seq_length,
        "objective": objective,
        "train_on": train_on,
        "train_on_turns": train_on_turns,
        "train_on_roles": train_on_roles,
        "completions_as_chat": completions_as_chat,
        "train_after_stop": train_after_stop,
        "overlong": overlong,
        "packing_strategy": packing_strategy,
        "max_documents": max_documents,
        "trust_remote_code": trust_remote_code,
    }
    given = fields_from_flags(flags)
    is_recipe = Path(file).suffix in (".yaml", ".yml")
    config = with_known_names(
        Recipe.given(None, Path(file), **given) if is_recipe else Recipe.given(data=file, **given)
    )

    from rich.console import Console

    from chronicals.data import DataError, Tokenizer, build_store
    from chronicals.data.making.opening import log_report
    from chronicals.data.packs.packing import plan_epoch
    from chronicals.data.reading.gate import check_shares
    from chronicals.data.tokens.chat_templates import with_chat_template
    from chronicals.objectives import build_objective
    from chronicals.saving import SavedModel

    kinds = build_objective(config).row_kinds
    check_shares(config.gate)
    records = _read(config, skip, rows)
    tokenizer = SavedModel.find(config.model, config.base_model).tokenizer(config.trust_remote_code)
    tokenizer = with_chat_template(tokenizer, config.chat_template)
    console = Console(highlight=False)
    with TemporaryDirectory() as folder:
        encoder = Tokenizer.configured(tokenizer, config, kinds)
        store = build_store(
            records, encoder, config.max_seq_length, Path(folder), overlong=config.overlong
        )
        shown = f"{file}, rows {skip + 1} to {skip + len(records)}"
        log_report(shown, store.report, config.gate)
        for finding in store.report.entries(config.gate):
            if finding["example"]:
                console.print(
                    f"{finding['rule']}: for one, {finding['example']}",
                    markup=False,
                    soft_wrap=True,
                )
        if not len(store):
            raise DataError(
                f"{shown}: no document to show, for the reasons above; mend these rows, or --skip "
                "them"
            )
        for number in range(len(store)):
            if store.is_prompt(number):  # it is shown with each answer
                continue
            ids, trained = store.whole_document(number)
            console.print(
                f"\n[bold]row {skip + int(store.rows[number]) + 1}[/]{_answer(store, number)}: "
                f"{len(ids):,} tokens, "
                f"{int(store.targets[number]):,} of them trained"
            )
            console.print(
                drawn_document(ids, trained, tokenizer, marks=not console.is_terminal),
                soft_wrap=True,
            )
        console.print()
        for line in packs(plan_epoch(store, config), store):
            console.print(line, soft_wrap=True)


def _read(config: Recipe, skip: int, rows: int) -> list[Any]:
    """Return the rows to show, as training would read them.

    Those it would leave out are ``BadRow``.

    Raises:
        ConfigurationError: ``skip`` skips all rows.
        DataError: a row cannot be read and the gate's limit for that is zero, or there is no row at
            all.
    """
    from chronicals.config import ConfigurationError
    from chronicals.data import BadRow, DataError, read_records

    records = read_records(config.sources[0], config.seed)
    skipped = sum(1 for _ in itertools.islice(records, skip))
    shown = list(itertools.islice(records, rows))
    if not shown and skipped:
        raise ConfigurationError(f"skip={skip}: there are {skipped:,} rows in all; skip fewer")
    if not shown:
        raise DataError("data: holds no rows; give a file with at least one")
    for where, record in shown:
        if isinstance(record, BadRow) and not config.gate.get(record.rule):
            raise DataError(
                f"{where}: {record.reason}; leave it out with --skip, or let it pass by the gate",
                record.rule,
            )
    return [record for _, record in shown]


def _answer(store: TokenStore, number: int) -> str:
    """Describe which answer of its row a document is, and what it shares.

    It is empty for a row with one answer, and for a prompt without one.
    """
    from chronicals.data.kinds.preferences import PAIR_FIELDS
    from chronicals.data.making.store import LABEL_COLUMN, SIDE_COLUMN

    if store.items is None or store.report.are_prompts:
        return ""
    side = int(store.columns[SIDE_COLUMN][number])
    label = int(store.columns[LABEL_COLUMN][number])
    judged = ("bad" if label == 0 else "good", "with the answer of another row")
    name = PAIR_FIELDS[side] if label < 0 else judged[side]
    shared = int(store.before[number])
    remark = f" (its prompt's first {shared:,} tokens are shared)" if shared else ""
    return f", {name}{remark}"


def drawn_document(ids: np.ndarray, trained: np.ndarray, tokenizer: Any, marks: bool) -> Text:
    """Return a document's tokens as text, in spans of trained and other tokens.

    Special tokens are included.

    Args:
        ids: int ``[length]``.
        trained: bool ``[length]``, True for tokens that are trained.
        tokenizer: reads ``ids``.
        marks: put trained spans between ⟦ and ⟧, for outputs without colours.
    """
    import numpy as np
    from rich.text import Text

    text = Text()
    bounds = [0, *(np.flatnonzero(np.diff(trained)) + 1).tolist(), len(ids)]
    for start, end in itertools.pairwise(bounds):
        # The first token of a text may lose its leading space, so the one before is decoded, too.
        first = max(start - 1, 0)
        before = tokenizer.decode(ids[first:start].tolist())
        span = tokenizer.decode(ids[first:end].tolist())[len(before) :]
        opening, closing = ("⟦", "⟧") if marks and trained[start] else ("", "")
        text.append(opening + span + closing, "bold green" if trained[start] else "dim")
    return text


def packs(plan: PackPlan, store: TokenStore) -> list[Text]:
    """Return a bar for each pack.

    Its documents have alternating colours and the numbers of their rows; its padding is dots.
    """
    from rich.text import Text

    bars = []
    for number, pack in enumerate(plan, 1):
        used = int(store.lengths[pack].sum())
        bar = Text(f"pack {number} ")
        for place, document in enumerate(pack):
            width = max(round(BAR_WIDTH * int(store.lengths[document]) / plan.max_seq_length), 3)
            bar.append(
                f"{int(store.rows[document]) + 1}".center(width, "▁"),
                f"black on {COLOURS[place % len(COLOURS)]}",
            )
        bar.append("·" * round(BAR_WIDTH * (plan.max_seq_length - used) / plan.max_seq_length))
        bars.append(bar.append(f" {used:,} of {plan.max_seq_length:,}"))
    return bars
