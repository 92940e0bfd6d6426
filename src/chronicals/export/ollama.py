"""A Modelfile for Ollama, which guesses a template and stop tokens otherwise.

Ollama's templates are those of Go. A chat template can be written in them if it puts fixed texts in
front of and behind each message, by its role; rendering it shows whether it does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from chronicals.export.source import CONVERSATION, SourceModel

CONTENT_MARK = "\ue000"
"""Content of messages that no template contains."""


def modelfile(source: SourceModel, file: Path) -> tuple[str, str | None]:
    """Return a Modelfile beside a GGUF file, and a warning if Ollama guesses the template."""
    lines = [f"FROM ./{file.name}"]
    guessed = None
    if source.conversation is not None:
        template = template_of(source.tokenizer)
        if template is None:
            guessed = (
                "the chat template is more than a text before and behind each message; "
                "Ollama takes what it knows for it"
            )
        else:
            lines.append(f'TEMPLATE """{template}"""')
    for stop in source.stops:
        lines.append(f'PARAMETER stop "{source.tokenizer.convert_ids_to_tokens(stop)}"')
    return "\n".join(lines) + "\n", guessed


def template_of(tokenizer: Any) -> str | None:
    """Return a chat template in Go's language.

    None if it does more than put texts around messages, or Go would read these otherwise. BOS in
    front of a text, which the tokenizer adds by itself, is left out, since Ollama adds it, too.
    """

    def render(messages: list[dict[str, str]], asks: bool = False) -> str:
        rendered = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=asks
        )
        return str(rendered)

    bos = tokenizer.bos_token or ""
    system = {"role": "system", "content": CONTENT_MARK}
    question = {"role": "user", "content": CONTENT_MARK}
    answer = {"role": "assistant", "content": CONTENT_MARK}
    try:
        user = render([question])
        user_and_answer = render([question, answer])
        asked = render([question], asks=True)
        system_and_user = render([system, question])
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
    if not asked.endswith(around["assistant"][0]):
        return None
    # A conversation up to the model's answer, of these texts alone.
    made = ""
    for message in CONVERSATION:
        before, after = around[message["role"]]
        made += f"{before}{message['content']}{after}"
    made += around["assistant"][0]
    expected = render(CONVERSATION, asks=True).removeprefix(bos)
    if made != expected:
        return None
    in_go = "{{ range .Messages }}"
    test = "if"
    for role, (before, after) in around.items():
        in_go += f'{{{{ {test} eq .Role "{role}" }}}}{before}{{{{ .Content }}}}{after}'
        test = "else if"
    return in_go + "{{ end }}{{ end }}" + around["assistant"][0]
