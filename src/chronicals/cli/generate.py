"""``chronicals generate``."""

from __future__ import annotations

from typing import Annotated

import typer


def generate(
    model: Annotated[str, typer.Argument(help="Model, adapter, checkpoint or folder of a run")],
    prompt: Annotated[str | None, typer.Option(help="Ask this and stop; without it a chat begins")] = None,
    base_model: Annotated[str | None, typer.Option(help="The model of an adapter, where it does not say")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token each time")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the sampling")] = 0,
    trust_remote_code: Annotated[bool, typer.Option(help="Run Python code that comes with the model")] = False,
) -> None:
    """Ask a trained model, once or in a chat.

    It is asked exactly as it was taught: through its chat template if it was trained on chats, plainly otherwise.
    """
    from rich.console import Console

    from chronicals.generation import answer, load_trained

    console = Console()
    trained = load_trained(model, base_model, trust_remote_code)
    if prompt is not None:
        print(answer(trained, prompt, max_new_tokens, temperature, seed))  # noqa: T201
        return
    console.print("[dim]an empty line or Ctrl-D ends[/]")
    messages: list[dict[str, str]] = []
    while True:
        try:
            question = console.input("[bold]you[/] ").strip()
        except EOFError:
            break
        if not question:
            break
        messages = [*messages, {"role": "user", "content": question}]
        reply = answer(trained, messages if trained.chats else question, max_new_tokens, temperature, seed)
        messages.append({"role": "assistant", "content": reply})
        print(reply)  # noqa: T201
