"""``chronicals generate``."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chronicals.cli.common_options import BaseModel, TrainedModel, TrustRemoteCode
from chronicals.cli.expert_options import (
    ExpertMemory,
    ExpertMode,
    ExpertPredictor,
    OffloadExperts,
    placing,
)
from chronicals.cli.options import make_room_for

if TYPE_CHECKING:
    from rich.console import Console

    from chronicals.data.kinds.messages import Message
    from chronicals.generation import Chat, Trained

ASKED_AS = 'write {"prompt": TEXT}, and what was said before it as "messages": [...]'
"""Form of a line of ``--json-lines``, for messages."""

CHAT_COMMANDS = {
    "/reset": "forget the conversation; the system prompt stays",
    "/exit": "end, like Ctrl-D",
    "/help": "this list",
}


def generate_command(
    model: TrainedModel,
    prompt: Annotated[
        str | None, typer.Option(help="Ask this and stop; without it a chat begins")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="Answer all prompts of a file, of text a line each, and print lines of JSON"
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="File for the lines of JSON of --prompts")
    ] = None,
    answers: Annotated[int, typer.Option(min=1, help="Answers to each of --prompts")] = 1,
    cache_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Most for keys and values, GB or with a unit as 512MiB (default: as --prompts "
            "need, at most a quarter of what is free)",
        ),
    ] = None,
    generation_exact: Annotated[
        bool,
        typer.Option(
            "--generation-exact",
            help="Log-probabilities of the same bits as the packed pass has, whatever is answered "
            "together",
        ),
    ] = False,
    offload_experts: OffloadExperts = False,
    expert_memory: ExpertMemory = None,
    expert_predictor: ExpertPredictor = None,
    expert_mode: ExpertMode = "exact",
    system: Annotated[
        str | None,
        typer.Option(
            "--system", "--system-prompt", help="System message before the first question"
        ),
    ] = None,
    base_model: BaseModel = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens")] = 256,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="0 always takes the likeliest token")
    ] = 0.0,
    top_p: Annotated[
        float | None,
        typer.Option(
            help="Draw from the fewest tokens with this total probability (default: the model's "
            "own)"
        ),
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Draw from this many of the likeliest tokens, 0: all (default: the model's own)",
        ),
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(
            help="Draw from tokens at least this likely beside the likeliest one (default: the "
            "model's own)"
        ),
    ] = None,
    repetition_penalty: Annotated[
        float | None,
        typer.Option(help="Above 1, tokens that are in the text already become less likely"),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the sampling")] = 0,
    stream: Annotated[bool, typer.Option(help="Print an answer while it is made")] = True,
    json_lines: Annotated[
        bool,
        typer.Option(
            "--json-lines",
            help="For programs: a chat of lines of JSON, questions on standard input, answers on "
            "standard output",
        ),
    ] = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Ask a trained model, once or in a chat.

    `chronicals generate chronicals-output` begins a chat, `--prompt "what is 3?"` asks once.
    Prompts have the format of the training: the chat template if the model was trained on chats,
    else plain text. A chat remembers what was said until `/reset`; `/help` lists its commands.
    Answers go to standard output, everything else to standard error. `--temperature 0.7 --top-p
    0.9` draws answers that vary, `--seed` repeats them. `--prompts prompts.jsonl --output
    answers.jsonl` answers many prompts together.

    With `--json-lines` each line of the input is `{"prompt": ..., "messages": [...]}`, the messages
    being what was said before it, and is answered by lines `{"part": ...}` while it is made and a
    last `{"answer": ...}` or `{"error": ...}`.
    """
    import torch
    from rich.console import Console

    from chronicals.config import ChronicalsConfig
    from chronicals.distributed import warn_of_other_processes
    from chronicals.generation import Chat, EngineSettings, load_trained
    from chronicals.patching import patch_parts

    warn_of_other_processes("generate")
    _check_prompts(prompts, prompt, system, output, answers, temperature)
    if json_lines and (prompt is not None or prompts is not None):
        raise ValueError(
            "json_lines: takes its questions from standard input; leave out the prompt"
        )
    make_room_for(output)
    place = placing(offload_experts, expert_memory, expert_predictor, mode=expert_mode)
    trained = load_trained(model, base_model, trust_remote_code, place=place)
    if torch.cuda.is_available():  # as in training: a step of a 0.5B is a third of the kernels
        patch_parts(trained.model, whole_layers=True)
    sizes = EngineSettings(generation_exact=generation_exact)
    if cache_memory is not None:
        size: dict[str, Any] = {"cache_memory": cache_memory}  # a text, which the field reads
        sizes = replace(sizes, cache_memory=ChronicalsConfig(**size).cache_bytes)
    if sizes != EngineSettings():
        trained = replace(trained, engine_settings=sizes)
    settings: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "seed": seed,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
    }
    if prompts is not None:
        _answer_prompts(trained, prompts, output, answers=answers, **settings)
        return
    chat = Chat(trained, system, **settings)
    if json_lines:
        _talk_in_json(chat, stream)
    elif prompt is not None:
        _print_answer(chat, prompt, stream)
    elif not _talk(chat, stream, Console(stderr=True, highlight=False)):
        raise typer.Exit(1)


def _check_prompts(
    prompts: Path | None,
    prompt: str | None,
    system: str | None,
    output: Path | None,
    answers: int,
    temperature: float,
) -> None:
    """Raise ValueError for options that exclude each other or have no effect."""
    beside = {"prompt": prompt, "system": system}
    only_with = {"output": output, "answers": answers if answers > 1 else None}
    for name, value in (beside if prompts is not None else only_with).items():
        if value is not None:
            why = "is not for" if prompts is not None else "has no effect without"
            raise ValueError(f"{name}={value}: {why} prompts=FILE; leave one of them out")
    if prompts is not None and output is not None and _are_one_file(prompts, output):
        raise ValueError(
            f"output={str(output)!r}: is the file of prompts={str(prompts)!r}, which the answers "
            "would replace; name another file"
        )
    if answers > 1 and temperature == 0:
        raise ValueError(
            f"answers={answers}: at temperature 0 all would be the same; give a temperature above 0"
        )


def _are_one_file(one: Path, other: Path) -> bool:
    """Return whether two paths are of one file, also by links."""
    return one.exists() and other.exists() and one.samefile(other)


def _answer_prompts(trained: Trained, prompts: Path, output: Path | None, **settings: Any) -> None:
    """Print the answers to a file's prompts, or write them to ``output``."""
    from chronicals.generation.answer import generate_many, prompt_ids
    from chronicals.generation.prompt_files import answer_lines, read_prompts

    questions = read_prompts(prompts)
    ids = [prompt_ids(trained, question) for question in questions]
    found = generate_many(trained, ids, **settings)
    ending = trained.ending
    texts = [[(ending.text(answer.tokens), answer) for answer in one] for one in found]
    lines = "".join(f"{line}\n" for line in answer_lines(questions, texts))
    if output is None:
        print(lines, end="", flush=True)  # noqa: T201
    else:
        output.write_text(lines, encoding="utf-8")


def _talk(chat: Chat, stream: bool, console: Console) -> bool:
    """Answer typed lines until the input ends. Returns whether the last question was answered."""
    from rich.markup import escape

    remark = ""
    if not chat.trained.chats:
        remark = "each text is continued by itself: this model was not trained on chats; "
    console.print(f"[dim]{remark}/help lists the commands, Ctrl-D ends[/]")
    answered = True
    while True:
        try:
            typed = console.input("[bold]you[/] ").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return answered
        if typed == "/exit":
            return answered
        if typed == "/reset":
            chat.reset()
            console.print("[dim]the conversation begins anew[/]")
        elif typed == "/help":
            for name, meaning in CHAT_COMMANDS.items():
                console.print(f"  {name:8}{meaning}", style="dim")
        elif typed.startswith("/") and typed[1:].isalpha():
            console.print(
                f"[yellow]{escape(typed)}: no such command; there are {', '.join(CHAT_COMMANDS)}[/]"
            )
        elif typed:
            try:
                _print_answer(chat, typed, stream)
                answered = True
            except KeyboardInterrupt:
                print(flush=True)  # noqa: T201
                console.print("[dim]stopped; the question is not part of the conversation[/]")
            except ValueError as error:
                answered = False
                console.print(f"[bold red]error[/] {escape(str(error))}", soft_wrap=True)
                if chat.messages:
                    console.print(
                        "[dim]the conversation goes on without the question; /reset makes room[/]"
                    )


def _talk_in_json(chat: Chat, stream: bool) -> None:
    """Answer lines of JSON from standard input by lines of JSON, until the input ends."""

    def say(**values: Any) -> None:
        print(json.dumps(values, ensure_ascii=False), flush=True)  # noqa: T201

    on_part = (lambda part: say(part=part)) if stream else None
    say(ready=True)
    opening = [*chat.messages]
    for line in sys.stdin:
        try:
            prompt, messages = _asked(line)
            chat.messages = [*opening, *messages]
            say(answer=chat.ask(prompt, on_part))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            say(error=f"{type(error).__name__}: {error}" if not str(error) else str(error))


def _asked(line: str) -> tuple[str, list[Message]]:
    """Return the question of a line of JSON, and the messages before it.

    Raises:
        ValueError: the line is not as ``generate_command`` describes it.
    """
    from chronicals.data.kinds.messages import normal_messages

    try:
        asked = json.loads(line)
    except ValueError as error:
        raise ValueError(f"a line is no JSON ({error}); {ASKED_AS}") from None
    if not isinstance(asked, dict) or not isinstance(asked.get("prompt"), str):
        raise ValueError(f"a line has no text as prompt; {ASKED_AS}")
    before = asked.get("messages")
    said = normal_messages(before, "messages", "a line") if before else []
    return asked["prompt"], said


def _print_answer(chat: Chat, question: str, stream: bool) -> None:
    """Print an answer as plain text, without rich's markup."""
    parts: list[str] = []

    def say(part: str) -> None:
        parts.append(part)
        print(part, end="", flush=True)  # noqa: T201

    on_part: Callable[[str], None] | None = say if stream else None
    reply = chat.ask(question, on_part)
    print(reply[len("".join(parts)) :], flush=True)  # noqa: T201
