"""A Modelfile for Ollama, which guesses a template and stops where none is given.

Ollama's templates are Go's. A chat template that puts a fixed text in front of each message and
another behind it, by its role, can be said in them; that it can is found out by rendering.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chronicals.export.source import CONVERSATION, Source

MARK = "\ue000"
"""A content that no template has."""


@dataclass(frozen=True)
class Turns:
    """What stands around the messages of each role, and what a text begins with."""

    around: dict[str, tuple[str, str]]

    def render(self, messages: list[dict[str, str]]) -> str:
        """A conversation up to where the model answers."""
        parts = [
            f"{self.around[m['role']][0]}{m['content']}{self.around[m['role']][1]}"
            for m in messages
        ]
        return "".join(parts) + self.around["assistant"][0]

    def in_go(self) -> str:
        roles = [
            f'{{{{ {"if" if n == 0 else "else if"} eq .Role "{role}" }}}}{before}{{{{ .Content '
            f"}}}}{after}"
            for n, (role, (before, after)) in enumerate(self.around.items())
        ]
        return (
            f"{{{{ range .Messages }}}}{''.join(roles)}{{{{ end }}}}{{{{ end "
            f"}}}}{self.around['assistant'][0]}"
        )


def modelfile(source: Source, file: Path) -> tuple[str, str | None]:
    """The text for a GGUF file beside it, and in words what Ollama has to guess."""
    lines = [f"FROM ./{file.name}"]
    guessed = None
    if source.conversation is not None:
        turns = turns_of(source.tokenizer)
        if turns is None:
            guessed = (
                "the chat template is more than a text before and behind each message; "
                "Ollama takes what it knows for it"
            )
        else:
            lines.append(f'TEMPLATE """{turns.in_go()}"""')
    lines += [
        f'PARAMETER stop "{source.tokenizer.convert_ids_to_tokens(stop)}"' for stop in source.stops
    ]
    return "\n".join(lines) + "\n", guessed


def turns_of(tokenizer: Any) -> Turns | None:
    """What a chat template puts around messages; None where it does anything else, or where Go
    would read it otherwise.

    A beginning that the tokenizer adds by itself is left out: Ollama's does, too.
    """

    def rendered(*roles: str, asks: bool = False) -> str:
        messages = [{"role": role, "content": MARK} for role in roles]
        return str(
            tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=asks)
        )

    begins = tokenizer.bos_token or ""
    try:
        one = rendered("user")
        two = rendered("user", "assistant")
        asked = rendered("user", asks=True)
        system = rendered("system", "user")
    except Exception:  # a template refuses a role by whatever exception it likes
        return None
    own = one.removeprefix(begins)
    parts = {
        "system": system.removeprefix(begins).removesuffix(own),
        "user": own,
        "assistant": two[len(one) :],
    }
    if any(part.count(MARK) != 1 for part in parts.values()) or any(
        '"""' in part or "{{" in part for part in parts.values()
    ):
        return None
    found = Turns(
        {role: (part.partition(MARK)[0], part.partition(MARK)[2]) for role, part in parts.items()}
    )
    expected = str(
        tokenizer.apply_chat_template(CONVERSATION, tokenize=False, add_generation_prompt=True)
    )
    whole = found.render(CONVERSATION)
    return (
        found
        if asked.endswith(found.around["assistant"][0]) and whole == expected.removeprefix(begins)
        else None
    )
