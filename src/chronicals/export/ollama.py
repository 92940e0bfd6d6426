"""A Modelfile for Ollama, which guesses a template and stop tokens otherwise.

Ollama's templates are those of Go. A chat template can be written in them if it puts fixed texts in
front of and behind each message, by its role; rendering it shows whether it does.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chronicals.export.source import CONVERSATION, Source

CONTENT_MARK = "\ue000"
"""Content of messages that no template contains."""


@dataclass(frozen=True)
class TurnMarks:
    """Texts in front of and behind the messages of each role."""

    around: dict[str, tuple[str, str]]

    def render(self, messages: list[dict[str, str]]) -> str:
        """Return a conversation up to the model's answer."""
        text = ""
        for message in messages:
            before, after = self.around[message["role"]]
            text += f"{before}{message['content']}{after}"
        return text + self.around["assistant"][0]

    def in_go(self) -> str:
        """Return the template in Go's language."""
        text = "{{ range .Messages }}"
        test = "if"
        for role, (before, after) in self.around.items():
            text += f'{{{{ {test} eq .Role "{role}" }}}}{before}{{{{ .Content }}}}{after}'
            test = "else if"
        return text + "{{ end }}{{ end }}" + self.around["assistant"][0]


def modelfile(source: Source, file: Path) -> tuple[str, str | None]:
    """Return the text for a GGUF file beside it, and a warning if Ollama guesses the template."""
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
    for stop in source.stops:
        lines.append(f'PARAMETER stop "{source.tokenizer.convert_ids_to_tokens(stop)}"')
    return "\n".join(lines) + "\n", guessed


def turns_of(tokenizer: Any) -> TurnMarks | None:
    """Return the texts that a chat template puts around messages.

    None if the template does anything else, or Go would read it otherwise. BOS in front of a text,
    which the tokenizer adds by itself, is left out, since Ollama adds it, too.
    """

    def render(messages: list[dict[str, str]], asks: bool) -> str:
        rendered = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=asks
        )
        return str(rendered)

    def render_roles(*roles: str, asks: bool = False) -> str:
        return render([{"role": role, "content": CONTENT_MARK} for role in roles], asks)

    bos = tokenizer.bos_token or ""
    try:
        user = render_roles("user")
        user_and_answer = render_roles("user", "assistant")
        question = render_roles("user", asks=True)
        system_and_user = render_roles("system", "user")
    except Exception:  # a template refuses a role by whatever exception it likes
        return None
    user_turn = user.removeprefix(bos)
    parts = {
        "system": system_and_user.removeprefix(bos).removesuffix(user_turn),
        "user": user_turn,
        "assistant": user_and_answer[len(user) :],
    }
    around = {}
    for role, part in parts.items():
        if part.count(CONTENT_MARK) != 1 or '"""' in part or "{{" in part:
            return None
        before, _, after = part.partition(CONTENT_MARK)
        around[role] = before, after
    turns = TurnMarks(around)
    if not question.endswith(around["assistant"][0]):
        return None
    expected = render(CONVERSATION, asks=True).removeprefix(bos)
    return turns if turns.render(CONVERSATION) == expected else None
