"""Chat templates for tokenizers that have none: a few by name, or a file of Jinja text."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import jinja2

from chronicals.config import ConfigurationError
from chronicals.data.chat_template import ChatTemplate

logger = logging.getLogger(__name__)

LOOP = "{% for message in messages %}{{ BEGIN + message['content'] + END + '\\n' }}{% endfor %}"
ASKED = "{% if add_generation_prompt %}{{ ASSISTANT }}{% endif %}"

NAMED = {
    "chatml": ("'<|im_start|>' + message['role'] + '\\n'", "'<|im_start|>assistant\\n'", "<|im_end|>"),
    "zephyr": ("'<|' + message['role'] + '|>\\n'", "'<|assistant|>\\n'", ""),
}
"""By name: what begins a message, what asks for an answer, and the token that ends a message where the tokenizer has it; else
its end of text does."""


def with_chat_template(tokenizer: Any, name: str | None) -> Any:
    """The same tokenizer, which from now on has the template and saves it.

    Args:
        name: one of ``NAMED`` or the path of a file with Jinja text; None changes nothing.

    Raises:
        ConfigurationError: there is no such name or file, it is no template, or no token can end its turns.
    """
    if name is None:
        return tokenizer
    if tokenizer.chat_template is not None:
        logger.info("chat_template=%r replaces the tokenizer's own", name)
    tokenizer.chat_template = _named(tokenizer, name) if name in NAMED else _read(name)
    try:
        ChatTemplate(tokenizer).compiled()
    except jinja2.TemplateSyntaxError as error:
        raise ConfigurationError(f"chat_template={name!r}: line {error.lineno}: {error.message}") from error
    return tokenizer


def _named(tokenizer: Any, name: str) -> str:
    begin, asked, end = NAMED[name]
    known = {str(token) for token in tokenizer.added_tokens_decoder.values()}
    if end not in known:
        if tokenizer.eos_token is None:
            raise ConfigurationError(f"chat_template={name!r}: the tokenizer has no eos_token to end a message with; set one")
        lacking = f", for there is no {end}" if end else ""
        logger.info("chat_template=%r: messages end with %r%s", name, tokenizer.eos_token, lacking)
    begins = tokenizer.bos_token is not None and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
    filled = LOOP.replace("BEGIN", begin).replace("END", repr(end) if end in known else "eos_token")
    return ("{{ bos_token }}" if begins else "") + filled + ASKED.replace("ASSISTANT", asked)


def _read(name: str) -> str:
    path = Path(os.path.expanduser(name))
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"chat_template={name!r}: not UTF-8 text ({error.reason})") from error
    except OSError as error:
        raise ConfigurationError(
            f"chat_template={name!r}: cannot be read ({error.strerror}); give a file, or one of {', '.join(NAMED)}"
        ) from error
    if "{" not in text:
        raise ConfigurationError(f"chat_template={name!r}: holds no Jinja text, which has {{{{ }}}} and {{% %}}")
    return text
