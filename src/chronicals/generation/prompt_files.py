"""Files of prompts, and of the answers to them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from chronicals.data import BadRow, DataError
from chronicals.data.kinds.messages import Message, conversation_in, normal_messages
from chronicals.data.kinds.rows import question_messages
from chronicals.data.reading.formats import is_text, read_file
from chronicals.data.reading.records import CONVERSATION_FIELDS, parsed
from chronicals.generation.requests import Answer
from chronicals.standard_json import to_json

PROMPT_FIELDS = ("prompt", "question", "query", "text")
"""Fields that hold a prompt as text; the first may hold messages."""

Question = str | list[Message]
"""A text, or the messages of a conversation so far."""


def read_prompts(path: Path) -> list[Question]:
    """Return the prompts of a file: of a text file its lines, of others a row each.

    A row has ``messages``, of which a last answer is left out, ``instruction``, or one of
    ``PROMPT_FIELDS``.

    Raises:
        DataError: the file cannot be read, a row has no prompt, or there is none.
    """
    if is_text(path):
        lines = (line for _, row in read_file(path) for line in dict(row)["text"].splitlines())  # type: ignore[arg-type]
        found: list[Question] = [line for line in lines if line.strip()]
    else:
        found = [_question(parsed(row), f"{place}") for place, row in read_file(path)]
    if not found:
        raise DataError(f"{path}: has no prompt; give it a line or a row for each")
    return found


def _question(row: Any, where: str) -> Question:
    """Return the prompt of a row."""
    if isinstance(row, BadRow):
        raise DataError(f"{where}: {row.reason}")
    if not isinstance(row, Mapping):
        raise DataError(f"{where}: is {type(row).__name__}, not a row; give it a prompt")
    for name in (*CONVERSATION_FIELDS, *PROMPT_FIELDS[:1]):
        value = row.get(name)
        if value is not None and not isinstance(value, str):
            messages = normal_messages(conversation_in(value, name, where), name, where)
            answered = messages[-1]["role"] == "assistant"
            if answered and len(messages) == 1:
                raise DataError(f"{where}: {name} has an answer and no question; give it one")
            return messages[:-1] if answered else messages
    if isinstance(row.get("instruction"), str):
        return question_messages(row, where)
    for name in PROMPT_FIELDS:
        if isinstance(row.get(name), str) and row[name].strip():
            return str(row[name])
    raise DataError(
        f"{where}: has no prompt; give messages, instruction, or one of {', '.join(PROMPT_FIELDS)}"
    )


def answer_lines(
    questions: Sequence[Question], texts: Iterable[Sequence[tuple[str, Answer]]]
) -> Iterator[str]:
    """Yield a line of JSON for each prompt, with its answers.

    Of an answer these are sums over its tokens, as ``Answer`` has them; None for an answer that
    transformers generated, which has none:

        drawn_log_probability  under the distributions that the tokens were drawn from; 0 at
                               temperature 0
        full_log_probability   under the model's own distributions, at any temperature

    Args:
        questions: the prompts.
        texts: for each prompt the text of each answer, and the answer.
    """
    for question, answers in zip(questions, texts, strict=True):
        name = "prompt" if isinstance(question, str) else "messages"
        listed = [
            {
                "text": text,
                "ended": answer.ended,
                "tokens": len(answer.tokens),
                "drawn_log_probability": _total(answer.log_probabilities),
                "full_log_probability": _total(answer.full_log_probabilities),
            }
            for text, answer in answers
        ]
        yield to_json({name: question, "answers": listed})


def _total(log_probabilities: Sequence[float]) -> float | None:
    """Return the sum, None without any."""
    return sum(log_probabilities) if log_probabilities else None
