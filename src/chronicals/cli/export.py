"""``chronicals export``, ``merge`` and ``push``: a trained model for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from chronicals.cli.options import values_of


def export_command(
    model: Annotated[
        str, typer.Argument(help="Folder of a run, checkpoint, adapter, model or hub name")
    ],
    to: Annotated[
        list[str], typer.Option(help="Formats, with commas or repeated; `--to list` prints them")
    ],
    output: Annotated[
        Path | None, typer.Option(help="Folder for the artefacts (default: MODEL/export)")
    ] = None,
    base_model: Annotated[
        str | None, typer.Option(help="The model of an adapter, where it does not say or has moved")
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(help="What the artefacts' names begin with (default: the folder's)"),
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Held-out rows: report how much of the training survives")
    ] = None,
    importance: Annotated[
        str | None, typer.Option(help="Rows by which llama.cpp's quantiser weighs errors")
    ] = None,
    vllm_python: Annotated[
        str | None, typer.Option(help="Python of an environment with vLLM, to compare with")
    ] = None,
    push_to_hub: Annotated[
        str | None, typer.Option(help="Repository to upload to; a new one is private")
    ] = None,
    ollama: Annotated[
        bool, typer.Option("--ollama", help="Write a Modelfile beside each GGUF file")
    ] = False,
) -> None:
    """Write a trained model for other programs, and prove that they read what was trained.

    `chronicals export chronicals-output --to merged,gguf-q8_0` merges an adapter where there is
    one, writes each format, and reads it back with its own client: transformers, PEFT, llama.cpp.
    What does not agree with the trained model is removed, and the exit code is 1. The comparisons
    lie beside each artefact as JSON.
    """
    import shlex

    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from chronicals.export import FORMATS
    from chronicals.export import export as export_model

    console = Console(emoji=False, highlight=False, soft_wrap=True)
    asked = values_of("to", to)
    if asked == ["list"]:
        console.print("\n".join(FORMATS))
        return
    for exported in export_model(
        model,
        asked,
        output,
        base_model,
        name=name,
        data=data,
        importance=importance,
        vllm_python=vllm_python,
        ollama=ollama,
        push_to_hub=push_to_hub,
    ):
        table = Table(
            "compared", "client", "result", "measure", "bound", title=escape(str(exported.path))
        )
        for check in exported.proof.checks:
            result = {
                True: "equal",
                False: "[red]differs[/]",
                None: "reported" if check.value is not None else "not run",
            }
            measure, bound = ("" if x is None else f"{x:.4g}" for x in (check.value, check.bound))
            table.add_row(
                escape(check.name),
                check.client,
                result[check.passed],
                measure or escape(check.detail),
                bound,
            )
        console.print(table)
        if exported.serve:
            console.print(f"serve it: {escape(exported.serve)}")
    console.print(f"next: chronicals generate {escape(shlex.quote(str(model)))}")


def merge_command(
    model: Annotated[str, typer.Argument(help="Adapter, checkpoint or folder of a run")],
    output: Annotated[Path, typer.Option(help="Folder for the merged model; it must not exist")],
    base_model: Annotated[
        str | None,
        typer.Option(help="The model of the adapter, where it does not say or has moved"),
    ] = None,
) -> None:
    """Write a whole model with the adapter in its weights.

    `chronicals merge chronicals-output --output merged`: for programs that know no adapters.
    Weights are summed in fp32 and rounded once to the dtype of the base's files, one at a time, so
    that the memory of the largest one is enough. Over a base that was in 4 bits the sums are those
    of its dequantised values. `merge.json` beside the model says what was added up, what each
    weight was changed by, what rounding lost, and how far it is from the base's files.
    """
    import shlex
    import statistics

    from rich.console import Console
    from rich.markup import escape

    from chronicals.export import merge

    merged = merge(model, output, base_model)
    changed = [made for made in merged.changes.values() if made.change]
    lost = max(made.lost for made in changed)
    console = Console(emoji=False, highlight=False, soft_wrap=True)
    console.print(f"[bold]merged[/] {escape(merged.summands)}: {len(changed)} weights changed")
    console.print(
        "the adapter changes a weight by "
        f"{statistics.median(made.change for made in changed):.2%} of the norm of what it was "
        f"trained over (median; most {max(made.change for made in changed):.2%}); rounding loses "
        f"up to {lost:.2%} of a change"
    )
    moved = [made.from_files for made in merged.changes.values()]
    console.print(
        f"what is written is {statistics.median(moved):.2%} of its norm away from the weight in "
        "the files of "
        f"{escape(merged.base)} (median; most {max(moved):.2%})"
    )
    console.print(f"[bold]model[/]  {escape(str(merged.folder))}")
    console.print(f"next: chronicals generate {escape(shlex.quote(str(merged.folder)))}")


def push_command(
    folder: Annotated[
        Path,
        typer.Argument(
            help="Folder of a run, checkpoint, adapter, model or export; or one artefact",
            show_default=False,
        ),
    ],
    name: Annotated[
        str,
        typer.Argument(metavar="OWNER/NAME", help="Repository on the hub; made if it is not there"),
    ],
    public: Annotated[
        bool, typer.Option("--public", help="Let everybody read it; without, it is private")
    ] = False,
    base_model: Annotated[
        str | None,
        typer.Option(
            help="Name on the hub of an adapter's model, where it was trained over a folder"
        ),
    ] = None,
) -> None:
    """Upload a trained model to the Hugging Face hub, with a model card.

    `chronicals push chronicals-output OWNER/NAME` uploads the run's `model/`; an adapter, a merged
    model and what `chronicals export` wrote go the same way. The login is that of `hf auth login`,
    or HF_TOKEN. Paths of this machine are not uploaded.
    """
    from rich.console import Console
    from rich.markup import escape

    from chronicals.export import push_saved

    console = Console(emoji=False, highlight=False, soft_wrap=True)
    pushed = push_saved(folder, name, public=public, base_model=base_model)
    for path in pushed.paths:
        console.print(f"[bold]uploaded[/] {escape(str(path))}")
    if pushed.local_base is not None:
        console.print(
            f"[yellow]its base {escape(str(pushed.local_base))} is a folder of this machine: "
            "where that model is on the hub, "
            "push again with --base-model NAME[/]"
        )
    console.print(f"[bold]{'public' if public else 'private'}[/] {escape(pushed.address)}")
