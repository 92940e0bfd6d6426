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

from chronicals.data.gate import DataError
from chronicals.data.sources import Record, kind_of

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
        ids, trained = _ENCODERS[kind_of(record, where)](self, record, where)
        return ids, [True] * len(ids) if self.objective == "pretraining" else trained

    def fingerprint(self) -> str:
        """Changes whenever this path could turn a row into other tokens."""
        inner = self.tokenizer
        vocabulary = inner.backend_tokenizer.to_str() if getattr(inner, "is_fast", False) else sorted(inner.get_vocab().items())
        state = [vocabulary, inner.chat_template, inner.special_tokens_map, self.objective]
        return hashlib.sha256(json.dumps(state, default=str, sort_keys=True).encode()).hexdigest()

    # --- conversations -------------------------------------------------------------------------------------------

    def render(self, messages: Sequence[Message], tools: Any = None, generation: bool = False, where: str = "chat") -> list[int]:
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
            if not stops:
                raise TemplateError(
                    "the chat template writes no special token after an assistant's answer, so the model would never "
                    "learn to stop; use a template that closes the assistant's turn"
                )
            self._stop = stops[0]
        return self._stop

    def _chat(self, record: Record, where: str) -> Tokens:
        messages, tools = _check_messages(record["messages"], where), record.get("tools")
        ids = self.render(messages, tools, where=where)
        trained = [False] * len(ids)
        for turn, message in enumerate(messages):
            if message["role"] == "assistant":
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
        until = self.render(messages[: turn + 1], tools, where=where)
        stop, end = self.stop_token(), _common_prefix(until, ids)
        while end > len(before) and ids[end - 1] != stop:
            end -= 1
        if end == len(before):
            raise TemplateError(
                f"{where}: message {turn + 1}: the stop token {self.tokenizer.convert_ids_to_tokens(stop)!r} does not "
                "close this assistant turn; this template cannot be used with this conversation"
            )
        return len(before), end

    # --- everything else -----------------------------------------------------------------------------------------

    def prompt(self, text: str) -> list[int]:
        """Ids of a plain prompt as the model sees it in training and in generation."""
        return list(self.tokenizer(text)["input_ids"])

    def _end(self, where: str) -> int:
        if self.tokenizer.eos_token_id is None:
            raise DataError(f"{where}: the tokenizer has no eos_token, so the model would never learn to stop; set one")
        return self.tokenizer.eos_token_id

    def _completion(self, record: Record, where: str) -> Tokens:
        prompt, completion = record["prompt"], record["completion"]
        if isinstance(prompt, list) and isinstance(completion, list):
            return self._chat({**record, "messages": [*prompt, *completion]}, where)
        before = _without_end(self.prompt(_check_text(prompt, "prompt", where)), self.tokenizer.eos_token_id)
        text = _check_text(completion, "completion", where)
        after = [*self.tokenizer(text, add_special_tokens=False)["input_ids"], self._end(where)]
        return before + after, [False] * len(before) + [True] * len(after)

    def _text(self, record: Record, where: str) -> Tokens:
        end = self._end(where)
        ids = [*_without_end(self.prompt(_check_text(record["text"], "text", where)), end), end]
        return ids, [True] * len(ids)

    def _tokens(self, record: Record, where: str) -> Tokens:
        ids, labels = list(record["input_ids"]), record.get("labels")
        if labels is None:
            return ids, [True] * len(ids)
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


def stop_token_ids(tokenizer: Any) -> list[int]:
    """Ids at which generation must end: what training taught, and the tokenizer's own end of text."""
    stops = [] if tokenizer.chat_template is None else [Tokenizer(tokenizer).stop_token()]
    if tokenizer.eos_token_id is not None and tokenizer.eos_token_id not in stops:
        stops.append(tokenizer.eos_token_id)
    return stops


def _common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    for position, (a, b) in enumerate(zip(left, right)):
        if a != b:
            return position
    return min(len(left), len(right))


def _without_end(ids: list[int], end: int | None) -> list[int]:
    return ids[:-1] if ids and ids[-1] == end else ids


def _check_text(value: Any, name: str, where: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{where}: {name} must be text, this is {type(value).__name__}")
    return value


def _check_messages(messages: Any, where: str) -> list[Message]:
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{where}: messages must be a list with at least one message")
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or "role" not in message:
            raise DataError(f"{where}: message {number} must be an object with 'role' and 'content'")
        if "content" not in message and "tool_calls" not in message:
            raise DataError(f"{where}: message {number} ({message['role']}) has no content")
    return messages
