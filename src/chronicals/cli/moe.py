"""``chronicals moe``: mixtures of experts."""

from __future__ import annotations

import typer

from chronicals.cli.moe_predict_train import predict_train
from chronicals.cli.moe_trace import trace
from chronicals.cli.options import Command

app = typer.Typer(name="moe", no_args_is_help=True)


@app.callback()
def moe() -> None:
    """Look at the routers of a mixture of experts, and learn to predict them."""


app.command(cls=Command)(trace)
app.command(name="predict-train", cls=Command)(predict_train)
