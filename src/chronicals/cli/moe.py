"""``chronicals moe``: mixtures of experts."""

from __future__ import annotations

import typer

from chronicals.cli.moe_new import new
from chronicals.cli.moe_predict_train import predict_train
from chronicals.cli.moe_trace import trace
from chronicals.cli.options import Command

app = typer.Typer(name="moe", no_args_is_help=True)


@app.callback()
def moe() -> None:
    """Mixtures of experts: make one, look at its routers, learn to predict them."""


app.command(cls=Command)(new)
app.command(cls=Command)(trace)
app.command(name="predict-train", cls=Command)(predict_train)
