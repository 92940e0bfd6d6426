"""Conversations: their trained messages, and the place of these among the ids.

The place is defined by rendering prefixes. R(·) are the ids that the template renders, and i is the
message. For an answer of the assistant:

    start   = len(R(messages[:i], generation prompt))      must be a prefix of R(messages)
    end     = common prefix of R(messages[:i + 1]) and R(messages)
    trained = [start, last stop token before end]          the stop token included

A turn that calls tools may end otherwise (``<|call|>``): then with the special token that ends
R(messages[:i + 1]). For a message of anybody else, R' is rendered with another content in its
place:

    start   = common prefix of R(messages) and R'
    content = from start to their common suffix            must be the content and nothing else
    trained = [start, first special token after content]   must belong to R(messages[:i + 1]), and
                                                           follow the content at once

Masks go by position, never by id, so ``pad_token = eos_token`` is harmless. A conversation for
which this does not hold is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from chronicals.config import Turns
from chronicals.data.kinds.messages import THOUGHT_FIELDS, Message
from chronicals.data.reading.gate import DataError
from chronicals.data.reading.records import RowRecord
from chronicals.data.tokens.chat_template import ChatTemplate, TemplateError

_REMEDY = "use another template, give the message 'train': false, or set train_on_turns='last'"


@dataclass(frozen=True)
class Conversation:
    """The conversation of a row.

    Attributes:
        messages: as the template takes them.
        tools: that the row offers the model to call.
        trained: numbers of the messages that are trained, from 0.
    """

    messages: list[Message]
    tools: Any
    trained: list[int]


def messages_of(record: RowRecord) -> tuple[list[Message], int]:
    """Return the messages of a normalised row, and the number of those that are its prompt.

    Messages of the prompt are not trained unless they say so.
    """
    if "messages" in record:
        return record["messages"], 0
    return [*record["prompt"], *record["completion"]], len(record["prompt"])


def trained_messages(
    messages: list[Message], prompt: int, roles: Collection[str], turns: Turns, where: str
) -> list[int]:
    """Return the numbers of the messages to train.

    They are those of ``roles`` after the prompt, all or the last. A message's own ``train`` wins.

    Args:
        messages: of the conversation.
        prompt: number of messages that are the prompt.
        roles: that are trained.
        turns: ``all`` messages of these roles, or the ``last``.
        where: what errors call the row.

    Raises:
        DataError: a ``train`` is neither true nor false.
    """
    numbers = [
        number
        for number, message in enumerate(messages)
        if number >= prompt and message["role"] in roles
    ]
    selected = set(numbers if turns == "all" else numbers[-1:])
    for number, message in enumerate(messages):
        wish = message.get("train")
        if wish is None:
            continue
        if not isinstance(wish, bool):
            raise DataError(
                f"{where}: message {number + 1} ({message['role']}): train={wish!r} must be true "
                "or false"
            )
        if wish:
            selected.add(number)
        else:
            selected.discard(number)
    return sorted(selected)


def texts_said(message: Message) -> list[str]:
    """Return the texts that the trained part of an assistant's message must hold.

    They are its thoughts, its answer, and the names of the tools that it calls.
    """
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "".join(part["text"] for part in content)
    before_answer, _, answer = content.rpartition("</think>")
    if not before_answer and message.keys() == {"role", "content"}:
        return [answer.strip()]
    thoughts = [before_answer.split("<think>")[-1]]
    thoughts += [message.get(name) for name in THOUGHT_FIELDS]
    texts = dict.fromkeys(str(thought).strip() for thought in thoughts if thought)
    calls = message.get("tool_calls") or []
    names = [str(call.get("function", call).get("name", "")) for call in calls]
    return [*texts, answer.strip(), *names]


def first_unsaid(texts: list[str], said: str, as_read: Callable[[str], str] = str) -> str | None:
    """Return the longest of ``texts`` that has no place of its own in ``said``; None if all have.

    Args:
        texts: that must be said, each once.
        said: the text in which they are looked for.
        as_read: gives another form in which a text may stand there.
    """
    for text in sorted(texts, key=len, reverse=True):
        form = text if text in said else as_read(text)
        if form not in said:
            return text
        said = said.replace(form, "\0", 1)
    return None


def answer_span(
    template: ChatTemplate, conversation: Conversation, number: int, ids: list[int], where: str
) -> tuple[int, int]:
    """Return start and end of what is trained of an assistant's message.

    Args:
        template: renders the conversation.
        conversation: as the template takes it.
        number: of the message, from 0.
        ids: of the whole conversation.
        where: what errors call the row.

    Raises:
        TemplateError: the template does not delimit it.
    """
    messages = conversation.messages
    tools = conversation.tools
    if number == 0:
        raise TemplateError(
            f"{where}: the conversation begins with the assistant; it needs a message to answer"
        )
    here = f"{where}: message {number + 1}"
    before = template.ids(messages[:number], tools, generation=True, where=where)
    start = len(before)
    if ids[:start] != before:
        raise TemplateError(
            f"{here}: what the chat template asks the model to continue is not how it renders the "
            "answered "
            f"conversation, so training would not match generation; {_REMEDY}",
            "template_differs",
        )
    end = _answer_end(template, conversation, number, ids, start, where)
    if end == start:
        stop = template.tokenizer.convert_ids_to_tokens(template.stop)
        raise TemplateError(
            f"{here}: the stop token {stop!r} does not close this assistant turn; {_REMEDY}",
            "no_stop_token",
        )
    unsaid = not_said(template, messages[number], ids[start:end])
    if unsaid:
        raise TemplateError(
            f"{here}: the chat template does not render {unsaid[:40]!r} in this assistant turn, "
            "so it would not be "
            f"trained; {_REMEDY}"
        )
    return start, end


def _answer_end(
    template: ChatTemplate,
    conversation: Conversation,
    number: int,
    ids: list[int],
    start: int,
    where: str,
) -> int:
    """Return the end of the answer that begins at ``start``; ``start`` if nothing closes it."""
    messages = conversation.messages
    tools = conversation.tools
    for part in (messages[: number + 1], followed_by_another(messages, number)):
        end = common_prefix(template.ids(part, tools, where=where), ids)
        while end > start and ids[end - 1] != template.stop:
            end -= 1
        if end > start:
            return end
    if messages[number].get("tool_calls"):
        called = template.ids(messages[: number + 1], tools, where=where)
        added = template.tokenizer.added_tokens_decoder.get(called[-1])
        if added is not None and added.special and ids[: len(called)] == called:
            return len(called)
    return start


def followed_by_another(messages: list[Message], number: int) -> list[Message]:
    """Return the messages up to ``number`` and a stand-in for the next, if there is one.

    Some templates render the last answer otherwise (Qwen3); this shows where an earlier one ends.
    """
    following = messages[number + 1 : number + 2]
    return [*messages[: number + 1], *(_saying(message, "?!") for message in following)]


def not_said(template: ChatTemplate, message: Message, ids: Sequence[int]) -> str | None:
    """Return a text of an assistant's message that is not among ``ids``; None if all are."""
    return first_unsaid(
        texts_said(message), template.decode(ids), lambda text: _as_read(template, text)
    )


def _as_read(template: ChatTemplate, text: str) -> str:
    """Return the text as the tokenizer gives it back, which may be normalised."""
    return template.decode(template.tokenizer(text, add_special_tokens=False)["input_ids"]).strip()


def other_span(
    template: ChatTemplate, conversation: Conversation, number: int, ids: list[int], where: str
) -> tuple[int, int]:
    """Return start and end of what is trained of a message of another role than the assistant.

    Arguments and errors are those of ``answer_span``.
    """
    messages = conversation.messages
    tools = conversation.tools
    message = messages[number]
    here = f"{where}: message {number + 1} ({message['role']})"
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "".join(part["text"] for part in content)
    # The stand-in shares neither its first nor its last letter with the content.
    ends = {*content.strip()[:1], *content.strip()[-1:]}
    letter = next(letter for letter in "?!0" if letter not in ends)
    replaced = [*messages[:number], _saying(message, letter * 2), *messages[number + 1 :]]
    changed = template.ids(replaced, tools, where=here)
    start = common_prefix(ids, changed)
    after = max(start, len(ids) - common_prefix(ids[::-1], changed[::-1]))
    rendered = template.decode(ids[start:after]).strip()
    if rendered not in (content.strip(), _as_read(template, content.strip())):
        raise TemplateError(
            f"{here}: the chat template does not render its content once and as it is, but as "
            f"{rendered[:40]!r}, so it "
            "cannot be told what to train; leave this role out of train_on_roles"
        )
    shown = common_prefix(template.ids(messages[: number + 1], tools, where=here), ids)
    special = set(template.tokenizer.all_special_ids) | set(template.tokenizer.added_tokens_decoder)
    closing = next((place for place in range(after, shown) if ids[place] in special), None)
    if closing is None or template.decode(ids[after:closing]).strip():
        raise TemplateError(
            f"{here}: the chat template writes no special token of this message's own right after "
            "its content, so its end "
            "cannot be told; leave this role out of train_on_roles"
        )
    return start, closing + 1


def _saying(message: Message, text: str) -> Message:
    """Return the message with another content, as text or in parts as before."""
    if isinstance(message.get("content"), list):
        return {**message, "content": [{"type": "text", "text": text}]}
    return {**message, "content": text}


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Return the number of ids that both begin with."""
    for position, (one, other) in enumerate(zip(left, right)):
        if one != other:
            return position
    return min(len(left), len(right))
