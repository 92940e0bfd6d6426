"""``chronicals ui``."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer


def ui_command(
    root: Annotated[
        Path, typer.Option(help="Folder whose runs are shown; nothing outside of it is named")
    ] = Path(),
    host: Annotated[
        str, typer.Option(help="Address to listen at; one that others can reach needs --key")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen at")] = 8321,
    key: Annotated[
        str | None,
        typer.Option(help="Key of the link (default: a random one, kept in the root)"),
    ] = None,
    trust_remote_code: Annotated[
        bool,
        typer.Option("--trust-remote-code", help="Let recipes run Python code of their models"),
    ] = False,
) -> None:
    """Serve a web page for runs: start, watch, compare, ask, export.

    `chronicals ui` prints a link for this machine's browser. What runs is a process of its own: it
    goes on when the page or the server ends, and the page finds it again. Runs that wait start while
    the server runs. On another machine, open it through `ssh -L 8321:127.0.0.1:8321 HOST`.
    """
    from rich.console import Console

    from chronicals.cli.wording import Wording
    from chronicals.config import Recipe
    from chronicals.ui import serve

    in_recipe = Wording({field.name: False for field in dataclasses.fields(Recipe)}, True)
    console = Console(highlight=False, soft_wrap=True)
    serve(
        root,
        host,
        port,
        key,
        remote_code=trust_remote_code,
        in_words=in_recipe,
        announce=lambda link: console.print(f"[bold]page[/] {link}", markup=True),
    )
