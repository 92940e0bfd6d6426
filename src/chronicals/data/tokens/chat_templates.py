"""Chat templates for tokenizers that have none: a few by name, or a file of Jinja text."""

from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from chronicals.config import ConfigurationError
from chronicals.data.tokens.chat_template import ChatTemplate

logger = logging.getLogger(__name__)

_MESSAGES = (
    "{% for message in messages %}{{ BEGIN + message['content'] + END + '\\n' }}{% endfor %}"
)
_GENERATION_PROMPT = "{% if add_generation_prompt %}{{ ASSISTANT }}{% endif %}"

GENERIC_TEMPLATES = {
    "chatml": (
        "'<|im_start|>' + message['role'] + '\\n'",
        "'<|im_start|>assistant\\n'",
        "<|im_end|>",
    ),
    "zephyr": ("'<|' + message['role'] + '|>\\n'", "'<|assistant|>\\n'", ""),
}
"""Beginning of a message, beginning of an answer, and the token that ends a message, by name.

A message ends with the tokenizer's end of text if it lacks that token.
"""

TEMPLATE_FOLDER = Path(__file__).parent.parent / "templates"
"""Folder of the Jinja files of ``FAMILIES``."""

END_OF_TEXT = "eos_token"
"""Stop token in ``FAMILIES`` that stands for the tokenizer's own end of text."""


@dataclass(frozen=True)
class TemplateFamily:
    """A chat template that models of one family share.

    Attributes:
        file: the name of its Jinja file, without the ending.
        stop: the token that ends an answer.
        tokens: the other special tokens that it writes.
    """

    file: str
    stop: str
    tokens: tuple[str, ...] = ()


IM_START = ("<|im_start|>",)
LLAMA3_TURN = ("<|start_header_id|>", "<|end_header_id|>")
MISTRAL_V3 = (
    *("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
)
GEMMA_TURN = ("<start_of_turn>",)
COHERE_TURN = ("<|START_OF_TURN_TOKEN|>", "<|SYSTEM_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>")
DEEPSEEK_TURN = ("<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>")
DEEPSEEK_TOOLS = tuple(
    f"<\uff5ctool\u2581{part}\uff5c>"
    for part in (
        *("calls\u2581begin", "calls\u2581end", "call\u2581begin", "call\u2581end", "sep"),
        *("outputs\u2581begin", "outputs\u2581end", "output\u2581begin", "output\u2581end"),
    )
)
EXAONE_TURN = ("[|system|]", "[|user|]", "[|assistant|]")
LFM_TOOLS = tuple(
    f"<|tool_{part}_{end}|>" for part in ("list", "call", "response") for end in ("start", "end")
)
PHI_TURN = ("<|system|>", "<|user|>", "<|assistant|>")

FAMILIES = {
    "alpaca": TemplateFamily("alpaca", END_OF_TEXT),
    "vicuna": TemplateFamily("vicuna", END_OF_TEXT),
    "llama2": TemplateFamily("llama2", END_OF_TEXT),
    "llama3": TemplateFamily("llama3", "<|eot_id|>", LLAMA3_TURN),
    "llama3.1": TemplateFamily("llama3.1", "<|eot_id|>", LLAMA3_TURN),
    "llama3.2": TemplateFamily("llama3.2", "<|eot_id|>", LLAMA3_TURN),
    "llama4": TemplateFamily(
        "llama4",
        "<|eot|>",
        ("<|header_start|>", "<|header_end|>", "<|python_start|>", "<|python_end|>"),
    ),
    "mistral-v1": TemplateFamily("mistral-v1", END_OF_TEXT),
    "mistral-v3": TemplateFamily("mistral-v3", END_OF_TEXT, MISTRAL_V3),
    "mistral-v3-tekken": TemplateFamily("mistral-v3-tekken", END_OF_TEXT, MISTRAL_V3),
    "mistral-v7-tekken": TemplateFamily(
        "mistral-v7-tekken",
        END_OF_TEXT,
        ("[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    ),
    "gemma": TemplateFamily("gemma", "<end_of_turn>", GEMMA_TURN),
    "gemma2": TemplateFamily("gemma", "<end_of_turn>", GEMMA_TURN),
    "gemma3": TemplateFamily("gemma3", "<end_of_turn>", GEMMA_TURN),
    "gemma3n": TemplateFamily("gemma3", "<end_of_turn>", GEMMA_TURN),
    "phi3": TemplateFamily("phi3", "<|end|>", PHI_TURN),
    "phi3.5": TemplateFamily("phi3.5", "<|end|>", PHI_TURN),
    "phi3-small": TemplateFamily("phi3-small", "<|end|>", PHI_TURN),
    "cohere": TemplateFamily("cohere", "<|END_OF_TURN_TOKEN|>", COHERE_TURN),
    "command-r": TemplateFamily("cohere", "<|END_OF_TURN_TOKEN|>", COHERE_TURN),
    "aya": TemplateFamily("cohere", "<|END_OF_TURN_TOKEN|>", COHERE_TURN),
    "deepseek-v2": TemplateFamily("deepseek-v2", END_OF_TEXT, DEEPSEEK_TURN),
    "deepseek-v3": TemplateFamily(
        "deepseek-v3", "<\uff5cend\u2581of\u2581sentence\uff5c>", DEEPSEEK_TURN + DEEPSEEK_TOOLS
    ),
    "exaone": TemplateFamily("exaone", "[|endofturn|]", EXAONE_TURN),
    "exaone4": TemplateFamily("exaone4", "[|endofturn|]", (*EXAONE_TURN, "[|tool|]")),
    "falcon-h1": TemplateFamily("falcon-h1", "<|im_end|>", IM_START),
    "gpt-oss": TemplateFamily(
        "gpt-oss", "<|return|>", ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>")
    ),
    "granite": TemplateFamily(
        "granite", "<|end_of_text|>", ("<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>")
    ),
    "lfm2": TemplateFamily("lfm2", "<|im_end|>", IM_START + LFM_TOOLS),
    "openchat": TemplateFamily("openchat", "<|end_of_turn|>"),
    "saiga": TemplateFamily("saiga", END_OF_TEXT),
    "nemotron-h": TemplateFamily("nemotron-h", "<|im_end|>", IM_START),
    "qwen2.5": TemplateFamily("qwen2.5", "<|im_end|>", IM_START),
    "qwen2.5-vl": TemplateFamily("qwen2.5-vl", "<|im_end|>", IM_START),
    "qwen3": TemplateFamily("qwen3", "<|im_end|>", IM_START),
    "qwen3-instruct": TemplateFamily("qwen3-instruct", "<|im_end|>", IM_START),
    "qwen3-vl": TemplateFamily("qwen3-vl", "<|im_end|>", IM_START),
}
"""Templates by name; ``benchmarks/public_templates.py`` names the public text that each equals."""

TEMPLATE_SPELLINGS = {re.sub(r"[-_.]", "", name): name for name in (*GENERIC_TEMPLATES, *FAMILIES)}
"""Names by their letters and digits, so that ``llama-3.1`` and ``phi_35`` are understood, too."""


def with_chat_template(tokenizer: Any, name: str | None) -> Any:
    """Give a tokenizer a chat template, which it then saves, and return it.

    Args:
        tokenizer: a transformers tokenizer, which is changed.
        name: one of ``GENERIC_TEMPLATES`` or ``FAMILIES``, or the path of a file with Jinja text;
            None changes nothing.

    Raises:
        ConfigurationError: there is no such name or file, it is no template, or the tokenizer lacks
            a token that it writes.
    """
    if name is None:
        return tokenizer
    if tokenizer.chat_template is not None:
        logger.info("chat_template=%r replaces the tokenizer's own", name)
    known = TEMPLATE_SPELLINGS.get(re.sub(r"[-_.]", "", name.lower()))
    if known in GENERIC_TEMPLATES:
        tokenizer.chat_template = _generic_text(tokenizer, known)
    elif known in FAMILIES:
        tokenizer.chat_template = _family_text(tokenizer, name, FAMILIES[known])
    else:
        path = Path(os.path.expanduser(name))
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ConfigurationError(
                f"chat_template={name!r}: not UTF-8 text ({error.reason})"
            ) from error
        except OSError as error:
            names = ", ".join([*GENERIC_TEMPLATES, *FAMILIES])
            raise ConfigurationError(
                f"chat_template={name!r}: cannot be read ({error.strerror}); give a file, or one of "
                f"{names}"
            ) from error
        if "{" not in text:
            raise ConfigurationError(
                f"chat_template={name!r}: holds no Jinja text, which has {{{{ }}}} and {{% %}}"
            )
        tokenizer.chat_template = text
    try:
        ChatTemplate(tokenizer).compiled()
    except jinja2.TemplateSyntaxError as error:
        raise ConfigurationError(
            f"chat_template={name!r}: line {error.lineno}: {error.message}"
        ) from error
    return tokenizer


def _family_text(tokenizer: Any, name: str, family: TemplateFamily) -> str:
    """Return the template of a family, for a tokenizer that has all its special tokens."""
    special = {str(token) for token in tokenizer.added_tokens_decoder.values()}
    needed = [*family.tokens, family.stop]
    lacking = [token for token in needed if token not in (END_OF_TEXT, *special)]
    if lacking:
        raise ConfigurationError(
            f"chat_template={name!r}: the tokenizer lacks {', '.join(lacking)}, which this "
            "template writes as special "
            "tokens; add them (tokenizer.add_special_tokens) and resize the model's embeddings, "
            "or take "
            "chat_template='chatml', which can do with the tokenizer's own eos_token"
        )
    if family.stop == END_OF_TEXT and tokenizer.eos_token is None:
        raise ConfigurationError(
            f"chat_template={name!r}: the tokenizer has no eos_token to end an answer with; set one"
        )
    return (TEMPLATE_FOLDER / f"{family.file}.jinja").read_text(encoding="utf-8")


def _generic_text(tokenizer: Any, name: str) -> str:
    """Return a generic template, with tokens that the tokenizer has."""
    begin, answer, end = GENERIC_TEMPLATES[name]
    known = {str(token) for token in tokenizer.added_tokens_decoder.values()}
    if end not in known:
        if tokenizer.eos_token is None:
            raise ConfigurationError(
                f"chat_template={name!r}: the tokenizer has no eos_token to end a message with; "
                "set one"
            )
        lacking = f", for there is no {end}" if end else ""
        logger.info("chat_template=%r: messages end with %r%s", name, tokenizer.eos_token, lacking)
    begins = tokenizer.bos_token is not None and tokenizer("a")["input_ids"][:1] == [
        tokenizer.bos_token_id
    ]
    written_end = repr(end) if end in known else "eos_token"
    messages = _MESSAGES.replace("BEGIN", begin).replace("END", written_end)
    beginning = "{{ bos_token }}" if begins else ""
    return beginning + messages + _GENERATION_PROMPT.replace("ASSISTANT", answer)
