"""Where in the ids of a conversation a trained message lies: the definition, by rendering prefixes.

With R(·) the ids the template renders, and i the message. An answer of the assistant:

    start  = len(R(messages[:i], generation prompt))       must be a prefix of R(messages)
    end    = common prefix of R(messages[:i + 1]) and R(messages)
    trained = [start, last stop token before end]           the stop token included

A turn that calls tools may end otherwise (``<|call|>``): then with the special token that ends
R(messages[:i + 1]). A message of anybody else, with R' rendered with another content in its place:

    start   = common prefix of R(messages) and R'
    content = up to their common suffix, and nothing but the content trained = [start, first special
    token after the content], which must belong to R(messages[:i + 1]) and follow at once

Masks go by position, never by id, so ``pad_token = eos_token`` is harmless. Where this does not
hold, the conversation is refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence

from chronicals.data.kinds.messages import Message
from chronicals.data.tokens.chat_template import ChatTemplate, TemplateError
from chronicals.data.tokens.conversation import Conversation, first_unsaid, texts_said

REMEDY = "use another template, give the message 'train': false, or set train_on_turns='last'"


def trained_span(
    template: ChatTemplate, conversation: Conversation, number: int, ids: list[int], where: str
) -> tuple[int, int]:
    """Start and end, in the conversation's ``ids``, of what is trained of message ``number``.

    Raises:
        TemplateError: the template does not delimit it; ``where``, the message and the reason are
            named.
    """
    role = conversation.messages[number]["role"]
    if role == "assistant":
        return _answer(template, conversation, number, ids, where)
    return _other(template, conversation, number, ids, f"{where}: message {number + 1} ({role})")


def _answer(
    template: ChatTemplate, conversation: Conversation, number: int, ids: list[int], where: str
) -> tuple[int, int]:
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
            f"conversation, so training would not match generation; {REMEDY}",
            "template_differs",
        )
    end = _answer_end(template, conversation, number, ids, start, where)
    if end == start:
        stop = template.tokenizer.convert_ids_to_tokens(template.stop)
        raise TemplateError(
            f"{here}: the stop token {stop!r} does not close this assistant turn; {REMEDY}",
            "no_stop_token",
        )
    if unsaid := not_said(template, messages[number], ids[start:end]):
        raise TemplateError(
            f"{here}: the chat template does not render {unsaid[:40]!r} in this assistant turn, "
            "so it would not be "
            f"trained; {REMEDY}"
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
    """Where the answer that begins at ``start`` ends; ``start`` if nothing closes it."""
    messages = conversation.messages
    tools = conversation.tools
    for seen in (messages[: number + 1], followed_by_another(messages, number)):
        end = common_prefix(template.ids(seen, tools, where=where), ids)
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
    """The messages up to ``number`` and a stand-in for the next.

    Where a template renders its last answer otherwise (Qwen3), this shows where an earlier one
    ends.
    """
    return [
        *messages[: number + 1],
        *(_saying(message, "?!") for message in messages[number + 1 : number + 2]),
    ]


def not_said(template: ChatTemplate, message: Message, ids: Sequence[int]) -> str | None:
    """A text of an assistant's message that is not among ``ids``."""
    return first_unsaid(
        texts_said(message), template.decode(ids), lambda text: _as_read(template, text)
    )


def _as_read(template: ChatTemplate, text: str) -> str:
    """The text as the tokenizer gives it back, where it normalises."""
    return template.decode(template.tokenizer(text, add_special_tokens=False)["input_ids"]).strip()


def _other(
    template: ChatTemplate, conversation: Conversation, number: int, ids: list[int], here: str
) -> tuple[int, int]:
    messages = conversation.messages
    tools = conversation.tools
    message = messages[number]
    content = _content(message)
    replaced = [*messages[:number], _saying(message, _unlike(content)), *messages[number + 1 :]]
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


def _content(message: Message) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _saying(message: Message, text: str) -> Message:
    """The message with another content, in the form it has."""
    return {
        **message,
        "content": text
        if not isinstance(message.get("content"), list)
        else [{"type": "text", "text": text}],
    }


def _unlike(content: str) -> str:
    """A content that shares neither its first nor its last letter with this one."""
    ends = {*content.strip()[:1], *content.strip()[-1:]}
    letter = next(letter for letter in "?!0" if letter not in ends)
    return letter * 2


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    for position, (a, b) in enumerate(zip(left, right)):
        if a != b:
            return position
    return min(len(left), len(right))
