"""One way from a row to token ids and the mask of what is trained; training, evaluation and generation all take it.

The mask of a conversation comes from the tokenizer's own chat template, unedited. For the assistant turn i, with R(·)
the ids the template renders:

    start  = len(R(messages[:i], generation prompt))       must be a prefix of R(messages)
    end    = common prefix of R(messages[:i + 1]) and R(messages)
    trained = [start, last stop token before end]           the stop token included

The stop token is the first special token that the template writes after an assistant's content. Masks go by position,
never by id, so ``pad_token = eos_token`` is harmless. A template for which this does not hold is refused by name.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from chronicals.data.gate import DataError
from chronicals.data.rows import Record, kind_of

Message = dict[str, Any]
Tokens = tuple[list[int], list[bool]]
"""Token ids, and for each whether it is trained."""


class TemplateError(DataError):
    """The chat template cannot be handled, or does not fit the conversation."""


class Tokenizer:
    """A transformers tokenizer with the one path from rows to tokens.

    Args:
        tokenizer: a ``PreTrainedTokenizerBase``.
        objective: ``sft`` trains answers, completions and texts; ``pretraining`` every token of every row.
    """

    def __init__(self, tokenizer: Any, objective: str = "sft"):
        self.tokenizer = tokenizer
        self.objective = objective
        self._stop: int | None = None

    def encode(self, record: Record, where: str) -> Tokens:
        """Token ids of a row and the mask of what is trained.

        Raises:
            DataError: the row lacks a field, a field has the wrong type, or the template refuses it.
        """
        return _ENCODERS[kind_of(record, where)](self, record, where)

    def encode_batch(self, records: Sequence[Record], wheres: Sequence[str]) -> list[Any]:
        found: list[Any] = []
        for record, where in zip(records, wheres, strict=True):
            try:
                ids, trained = self.encode(record, where)
                found.append((np.array(ids, np.int32), np.array(trained, np.uint8)))
            except DataError as error:
                found.append(error)
        return found

    def fingerprint(self) -> str:
        """Changes whenever this path could turn a row into other tokens."""
        inner = self.tokenizer
        if getattr(inner, "is_fast", False):
            vocabulary = json.loads(inner.backend_tokenizer.to_str())
            vocabulary.update(padding=None, truncation=None)  # left by whoever called it last
        else:
            vocabulary = sorted(inner.get_vocab().items())
        state = [vocabulary, inner.chat_template, inner.special_tokens_map, self.objective]
        return hashlib.sha256(json.dumps(state, default=str, sort_keys=True).encode()).hexdigest()

    # --- conversations -------------------------------------------------------------------------------------------

    def render(
        self, messages: Sequence[Message], tools: Any = None, generation: bool = False, where: str = "chat"
    ) -> list[int]:
        """Ids the template renders; with ``generation`` up to where the assistant begins to answer."""
        if self.tokenizer.chat_template is None:
            raise TemplateError(
                f"{where}: has messages, but the tokenizer has no chat template; set tokenizer.chat_template, use the "
                "instruct version of the model, or bring the rows as prompt and completion"
            )
        try:
            rendered = self.tokenizer.apply_chat_template(
                list(messages), tools=tools, add_generation_prompt=generation, tokenize=True, return_dict=True
            )
        except Exception as error:  # jinja raises whatever the template author chose
            raise TemplateError(f"{where}: the chat template refuses the conversation: {error}") from error
        return list(rendered["input_ids"])

    def stop_token(self) -> int:
        """The special token that the template writes after an assistant's content.

        Raises:
            TemplateError: there is none, so a model trained on it would never stop.
        """
        if self._stop is None:
            content = "chronicals"
            turn = [{"role": "user", "content": "?"}, {"role": "assistant", "content": content}]
            special = set(self.tokenizer.all_special_ids) | set(self.tokenizer.added_tokens_decoder)
            ids = self.render(turn)
            after = len(ids)
            while after and content not in self.tokenizer.decode(ids[after - 1 :], skip_special_tokens=False):
                after -= 1
            stops = [token for token in ids[after:] if token in special] if after else []
            if not after:
                raise TemplateError("the chat template does not render the content of an assistant's message given as text")
            if not stops:
                raise TemplateError(
                    "the chat template writes no special token after an assistant's answer, so the model would never "
                    "learn to stop; use a template that closes the assistant's turn"
                )
            self._stop = stops[0]
        return self._stop

    def _chat(self, record: Record, where: str) -> Tokens:
        prompt = record["messages"] if "messages" in record else record["prompt"]
        answered = 0 if "messages" in record else len(prompt)
        messages = _check_messages(prompt if "messages" in record else [*prompt, *record["completion"]], where)
        tools = record.get("tools")
        ids = self.render(messages, tools, where=where)
        if self.objective == "pretraining":
            return ids, [True] * len(ids)
        trained = [False] * len(ids)
        for turn, message in enumerate(messages):
            if message["role"] == "assistant" and turn >= answered:
                start, end = self._trained_span(messages, turn, tools, ids, where)
                trained[start:end] = [True] * (end - start)
        return ids, trained

    def _trained_span(self, messages: list[Message], turn: int, tools: Any, ids: list[int], where: str) -> tuple[int, int]:
        if turn == 0:
            raise TemplateError(f"{where}: the conversation begins with the assistant; it needs a message to answer")
        before = self.render(messages[:turn], tools, generation=True, where=where)
        if ids[: len(before)] != before:
            raise TemplateError(
                f"{where}: message {turn + 1}: what the chat template asks the model to continue is not how it renders "
                "the answered conversation, so training would not match generation; this template cannot be used"
            )
        stop = self.stop_token()
        # Where the last answer is rendered otherwise (Qwen3), another message in the next one's place shows the end.
        other = [*messages[: turn + 1], *({**m, "content": "?!"} for m in messages[turn + 1 : turn + 2])]
        for seen in (messages[: turn + 1], other):
            end = _common_prefix(self.render(seen, tools, where=where), ids)
            while end > len(before) and ids[end - 1] != stop:
                end -= 1
            if end > len(before):
                break
        if end == len(before):
            raise TemplateError(
                f"{where}: message {turn + 1}: the stop token {self.tokenizer.convert_ids_to_tokens(stop)!r} does not "
                "close this assistant turn; this template cannot be used with this conversation"
            )
        said = self.tokenizer.decode(ids[len(before) : end], skip_special_tokens=False)
        for text in _parts_of(messages[turn]):
            if text not in said:
                raise TemplateError(
                    f"{where}: message {turn + 1}: the chat template does not render {text[:40]!r} in this "
                    "assistant turn, so it would not be trained; this template cannot be used with this conversation"
                )
        return len(before), end

    # --- everything else -----------------------------------------------------------------------------------------

    def prompt(self, text: str) -> list[int]:
        """Ids of a plain prompt as the model sees it in training and in generation."""
        ids = list(self.tokenizer(text)["input_ids"])
        if ids[:1] == ids[1:2] == [self.tokenizer.bos_token_id]:
            ids = ids[1:]
        return _without_end(ids, self.tokenizer.eos_token_id)

    def _end(self, where: str) -> int:
        if self.tokenizer.eos_token_id is None:
            raise DataError(f"{where}: the tokenizer has no eos_token, so the model would never learn to stop; set one")
        return self.tokenizer.eos_token_id

    def _completion(self, record: Record, where: str) -> Tokens:
        end = self._end(where)
        before = self.prompt(_check_text(record["prompt"], "prompt", where))
        text = _check_text(record["completion"], "completion", where)
        after = [*_without_end(self.tokenizer(text, add_special_tokens=False)["input_ids"], end), end]
        return before + after, [self.objective == "pretraining"] * len(before) + [True] * len(after)

    def _text(self, record: Record, where: str) -> Tokens:
        end = self._end(where)
        ids = [*self.prompt(_check_text(record["text"], "text", where)), end]
        return ids, [True] * len(ids)

    def _tokens(self, record: Record, where: str) -> Tokens:
        ids, labels = record["input_ids"], record.get("labels")
        ids = ids.tolist() if hasattr(ids, "tolist") else ids
        if not isinstance(ids, list) or not all(type(token) is int and 0 <= token < 2**31 for token in ids):
            raise DataError(f"{where}: input_ids must be a list of token ids")
        if labels is None or self.objective == "pretraining":
            return ids, [True] * len(ids)
        labels = labels.tolist() if hasattr(labels, "tolist") else labels
        if len(labels) != len(ids):
            raise DataError(f"{where}: {len(ids)} input_ids but {len(labels)} labels; they must be aligned, not shifted")
        for position, (token, label) in enumerate(zip(ids, labels)):
            if label not in (-100, token):
                raise DataError(f"{where}: labels[{position}]={label} is neither -100 nor input_ids[{position}]={token}")
        return ids, [label != -100 for label in labels]


_ENCODERS = {
    "chat": Tokenizer._chat,
    "completion": Tokenizer._completion,
    "text": Tokenizer._text,
    "tokens": Tokenizer._tokens,
}


def stop_token_ids(tokenizer: Any, chats: bool = True) -> list[int]:
    """Ids at which generation must end: what training taught, and the tokenizer's own end of text.

    Args:
        chats: whether the chat template was trained, so that its stop token counts.

    Raises:
        TemplateError: the template has no stop token.
    """
    stops = [Tokenizer(tokenizer).stop_token()] if chats and tokenizer.chat_template is not None else []
    if tokenizer.eos_token_id is not None and tokenizer.eos_token_id not in stops:
        stops.append(tokenizer.eos_token_id)
    return stops


def _common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    for position, (a, b) in enumerate(zip(left, right)):
        if a != b:
            return position
    return min(len(left), len(right))


def _without_end(ids: list[int], end: int | None) -> list[int]:
    while ids and ids[-1] == end:
        ids = ids[:-1]
    return ids


def _check_text(value: Any, name: str, where: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{where}: {name} must be text, this is {type(value).__name__}")
    if any("\ud800" <= letter <= "\udfff" for letter in value):
        raise DataError(f"{where}: {name} holds half of a surrogate pair, which is no text")
    return value


def _parts_of(message: Message) -> list[str]:
    """Texts that must be in what is trained of an assistant's message."""
    content = message.get("content") or ""
    return [
        content.split("</think>")[-1].strip(),
        *(str(call.get("function", call).get("name", "")) for call in message.get("tool_calls") or []),
    ]


def _check_messages(messages: Any, where: str) -> list[Message]:
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{where}: messages must be a list with at least one message")
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or "role" not in message:
            raise DataError(f"{where}: message {number} must be an object with 'role' and 'content'")
        if "content" not in message and "tool_calls" not in message:
            raise DataError(f"{where}: message {number} ({message['role']}) has no content")
        if not isinstance(message.get("content"), (str, type(None))):
            raise DataError(f"{where}: message {number} ({message['role']}): content must be text; lists are not supported")
    return messages
