"""``chronicals push``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


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
