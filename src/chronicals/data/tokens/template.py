"""Tokenizer of rows: token ids and the mask of what is trained, also for evaluation and generation.

A conversation is rendered by the tokenizer's own chat template (``chat_template``), and its mask is
found by rendering prefixes of it (``conversation``). ``encode`` is the definition, a row at a time;
``batch_encoding`` gives the same for many rows at once.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Collection, Sequence
from typing import Any, get_args

import numpy as np

from chronicals.config import ChronicalsConfig, ConfigurationError, Role, TrainOn, Turns
from chronicals.data.kinds.messages import Message, with_conversations
from chronicals.data.kinds.rows import (
    DOCUMENT_KINDS,
    PROMPT,
    NormalRow,
    as_instruction,
    kind_of,
    normalise,
    plain_row,
)
from chronicals.data.reading.gate import DataError
from chronicals.data.reading.records import RowRecord
from chronicals.data.tokens.chat_template import ChatTemplate, TemplateError
from chronicals.data.tokens.conversation import (
    Conversation,
    answer_span,
    messages_of,
    other_span,
    trained_messages,
)
from chronicals.data.tokens.texts import (
    Continuation,
    check_text,
    without_double_beginning,
    without_end,
)

__all__ = ["Message", "TemplateError", "TokenLists", "Tokenizer", "stop_token_ids"]

FINGERPRINT_TEXT = "Ünïcode, 12345 + 67  x\n\tEnd.  don't \uff21\uff22 漢字 🙂"
"""Text that tokenizers with the same vocabulary split in different ways.

For tokenizers in Python nothing else shows how they split.
"""

STORED_TRAIN_ON: dict[TrainOn, str] = {"answers": "sft", "all": "pretraining"}
"""Values of ``train_on`` as written in fingerprints, which are part of the names of stores."""

TokenLists = tuple[list[int], list[bool]]
"""Token ids, and for each whether it is trained."""


class Tokenizer:
    """A transformers tokenizer with the one path from rows to tokens.

    A message's own ``train`` (true or false) wins over ``train_on_roles`` and ``train_on_turns``.

    Args:
        tokenizer: a ``PreTrainedTokenizerBase``; its vocabulary and template must not change
            afterwards.
        train_on: ``answers`` of conversations, completions and texts, or ``all`` tokens of every
            row.
        train_on_roles: roles of the messages that are trained.
        train_on_turns: ``all`` of those messages, or the ``last`` of each conversation.
        completions_as_chat: rows of prompt and completion go through the chat template, as a
            question and its answer.
        kinds: of rows that the objective takes; a ``preference`` becomes an item of two documents.
        train_after_stop: train, too, the text that the template writes behind the stop token of a
            trained answer: white space, and everything behind the last message.

    Raises:
        ConfigurationError: a role is unknown, or none is named.
    """

    def __init__(
        self,
        tokenizer: Any,
        train_on: TrainOn = "answers",
        train_on_roles: Collection[str] = ("assistant",),
        train_on_turns: Turns = "all",
        completions_as_chat: bool = False,
        kinds: Collection[str] = DOCUMENT_KINDS,
        train_after_stop: bool = False,
    ):
        if not train_on_roles or not set(train_on_roles) <= set(get_args(Role)):
            raise ConfigurationError(
                f"train_on_roles={list(train_on_roles)}: name at least one of "
                f"{', '.join(get_args(Role))}"
            )
        if train_on not in get_args(TrainOn):
            raise ConfigurationError(
                f"train_on={train_on!r}: must be one of {', '.join(get_args(TrainOn))}"
            )
        if train_on_turns not in get_args(Turns):
            raise ConfigurationError(
                f"train_on_turns={train_on_turns!r}: must be one of {', '.join(get_args(Turns))}"
            )
        self.tokenizer = tokenizer
        self.train_on = train_on
        self.train_on_roles = frozenset(train_on_roles)
        self.train_on_turns = train_on_turns
        self.completions_as_chat = completions_as_chat
        self.kinds = frozenset(kinds)
        self.train_after_stop = train_after_stop
        self._white: dict[int, bool] = {}
        self.template = ChatTemplate(tokenizer)

    @classmethod
    def configured(
        cls, tokenizer: Any, config: ChronicalsConfig, kinds: Collection[str] = DOCUMENT_KINDS
    ) -> Tokenizer:
        """Return the tokenizer for a run's configuration."""
        return cls(
            tokenizer,
            config.trained_tokens,
            config.train_on_roles,
            config.train_on_turns,
            config.completions_as_chat,
            kinds,
            config.train_after_stop,
        )

    def encode(self, record: RowRecord, where: str) -> TokenLists:
        """Return the token ids of a row and the mask of what is trained.

        Raises:
            DataError: the row lacks a field, a field has the wrong type, or the template refuses
                it.
        """
        record = plain_row(with_conversations(record), where)
        kind = kind_of(record, where)
        if kind == "completion" and self.completions_as_chat:
            kind = "instruction"
            record = as_instruction(record)
        return self.encode_normalised(normalise(record, kind, where), where)

    def encode_normalised(self, row: NormalRow, where: str) -> TokenLists:
        """Encode a row that is normalised already, as ``encode`` does."""
        record = row.record
        if row.kind == "chat":
            return self.encode_conversation(self.conversation(record, where), where)
        if row.kind == "tokens":
            return self._tokens(record, where)
        if row.kind == PROMPT and "messages" in record:
            self.template.check_stop(where)
            asked = self.render(record["messages"], record["tools"], generation=True, where=where)
            return asked, [False] * len(asked)
        end = self.end(where)
        if row.kind == PROMPT:
            asked = self.prompt(check_text(record["prompt"], "prompt", where))
            return asked, [False] * len(asked)
        if row.kind == "text":
            ids = [*self.prompt(check_text(record["text"], "text", where)), end]
            return ids, [True] * len(ids)
        prompt = check_text(record["prompt"], "prompt", where)
        text = check_text(record["completion"], "completion", where)
        before = self.prompt(prompt)
        after = [*without_end(self.continuation.ids(prompt, text, where), end), end]
        return before + after, [self.train_on == "all"] * len(before) + [True] * len(after)

    @functools.cached_property
    def continuation(self) -> Continuation:
        """Tokenises completions behind their prompts."""
        return Continuation(self.tokenizer)

    def fingerprint(self) -> str:
        """Return a hash that changes whenever this path could turn a row into other tokens."""
        inner = self.tokenizer
        if getattr(inner, "is_fast", False):
            described = inner.backend_tokenizer.to_str()
            # before the added tokens stand truncation and padding, left by whoever called the
            # tokenizer last
            vocabulary = described.partition('"added_tokens":')[2] or described
        else:
            ids = inner(FINGERPRINT_TEXT)["input_ids"]
            entries = sorted(inner.get_vocab().items())
            vocabulary = json.dumps([entries, type(inner).__qualname__, ids])
        trained: list[Any] = [
            STORED_TRAIN_ON[self.train_on],
            sorted(self.train_on_roles),
            self.train_on_turns,
        ]
        # A setting that came later is left out at its default: stores then keep their names.
        if self.completions_as_chat:
            trained.append(True)
        if self.train_after_stop:
            trained.append("after stop")
        if self.kinds != frozenset(DOCUMENT_KINDS):
            trained.append(sorted(self.kinds))
        splits = bool(getattr(inner, "split_special_tokens", False))
        state = json.dumps(
            [inner.chat_template, inner.special_tokens_map, splits, *trained],
            default=str,
            sort_keys=True,
        )
        return hashlib.sha256(f"{vocabulary}{state}".encode()).hexdigest()

    # --- conversations
    # -------------------------------------------------------------------------------------------

    def render(
        self,
        messages: Sequence[Message],
        tools: Any = None,
        generation: bool = False,
        where: str = "chat",
    ) -> list[int]:
        """Return the ids that the template renders.

        Args:
            messages: of the conversation, in their normal form.
            tools: that the model is offered to call.
            generation: end with the text that asks the assistant to answer.
            where: what errors call the row.
        """
        return self.template.ids(self.template.form(messages, where), tools, generation, where)

    def conversation(self, record: RowRecord, where: str) -> Conversation:
        """Return the messages of a row in the template's form, and which of them are trained."""
        messages, prompt = messages_of(record)
        trained = trained_messages(
            messages, prompt, self.train_on_roles, self.train_on_turns, where
        )
        return Conversation(self.template.form(messages, where), record.get("tools"), trained)

    def encode_conversation(self, conversation: Conversation, where: str) -> TokenLists:
        """Return the token ids of a conversation and the mask of what is trained.

        Raises:
            TemplateError: the template refuses it, or does not delimit a trained message.
        """
        ids = self.template.ids(conversation.messages, conversation.tools, where=where)
        if self.train_on == "all":
            return ids, [True] * len(ids)
        trained = [False] * len(ids)
        for number in conversation.trained:
            if conversation.messages[number]["role"] == "assistant":
                start, end = answer_span(self.template, conversation, number, ids, where)
                end = self.end_of_answer(conversation, number, ids, end)
            else:
                start, end = other_span(self.template, conversation, number, ids, where)
            trained[start:end] = [True] * (end - start)
        return ids, trained

    def end_of_answer(
        self, conversation: Conversation, number: int, ids: Sequence[int] | np.ndarray, end: int
    ) -> int:
        """Return the end, in ``ids``, of what is trained of an answer.

        Args:
            conversation: as the template takes it.
            number: of the message.
            ids: of the whole conversation.
            end: place behind its stop token.
        """
        if not self.train_after_stop:
            return end
        if number + 1 == len(conversation.messages):
            return len(ids)
        # Tokens that are white space and nothing else.
        while end < len(ids):
            token = int(ids[end])
            if token not in self._white:
                is_text = token not in self.tokenizer.added_tokens_decoder
                self._white[token] = is_text and not self.template.decode([token]).strip()
            if not self._white[token]:
                break
            end += 1
        return end

    # --- everything else
    # -----------------------------------------------------------------------------------------

    def prompt(self, text: str) -> list[int]:
        """Return the ids of a plain prompt as the model sees it in training and in generation."""
        ids = list(self.tokenizer(text)["input_ids"])
        ids = without_double_beginning(ids, self.tokenizer.bos_token_id)
        return without_end(ids, self.tokenizer.eos_token_id)

    def end(self, where: str) -> int:
        """Return the token that ends texts and completions.

        Raises:
            DataError: the tokenizer has none.
        """
        if self.tokenizer.eos_token_id is None:
            raise DataError(
                f"{where}: the tokenizer has no eos_token, so the model would never learn to "
                "stop; set one",
                "no_stop_token",
            )
        return self.tokenizer.eos_token_id

    def _tokens(self, record: RowRecord, where: str) -> TokenLists:
        ids = _integers(record["input_ids"])
        labels = record.get("labels")
        if ids is None or (ids.size and not 0 <= ids.min() <= ids.max() < 2**31):
            raise DataError(f"{where}: input_ids must be a list of token ids")
        # The positions that are no padding, which may stand at either end.
        attended = slice(0, len(ids))
        mask = record.get("attention_mask")
        if mask is not None:
            values = _integers(mask, "iub")
            if values is None or len(values) != len(ids) or not np.isin(values, (0, 1)).all():
                raise DataError(
                    f"{where}: attention_mask must hold a 0 or a 1 for each of {len(ids)} input_ids"
                )
            ones = np.flatnonzero(values)
            begin = int(ones[0]) if ones.size else 0
            end = int(ones[-1]) + 1 if ones.size else 0
            if end - begin != ones.size:
                hole = begin + int(np.flatnonzero(values[begin:end] == 0)[0])
                raise DataError(
                    f"{where}: attention_mask[{hole}] is 0 between ones; only padding at either "
                    "end can be left out"
                )
            attended = slice(begin, end)
        if labels is None or self.train_on == "all":
            return ids[attended].tolist(), [True] * len(ids[attended])
        labels = _integers(labels)
        if labels is None:
            raise DataError(f"{where}: labels must be a list of token ids and -100")
        if len(labels) != len(ids):
            raise DataError(
                f"{where}: {len(ids)} input_ids but {len(labels)} labels; they must be aligned, "
                "not shifted"
            )
        for position in np.flatnonzero((labels != -100) & (labels != ids))[:1]:
            label = labels[position]
            token = ids[position]
            raise DataError(
                f"{where}: labels[{position}]={label} is neither -100 nor "
                f"input_ids[{position}]={token}"
            )
        return ids[attended].tolist(), (labels[attended] != -100).tolist()


def _integers(values: Any, kinds: str = "iu") -> np.ndarray | None:
    """Return values as int64 ``[T]``; None if they are no flat list of whole numbers.

    Args:
        values: a list, an array or a tensor.
        kinds: numpy's kinds of types that count as whole numbers.
    """
    try:
        array = np.asarray(values)
        if array.dtype == object:  # how pandas holds a column of lists
            array = np.asarray(array.tolist())
    except ValueError:
        return None
    whole = array.dtype.kind in kinds or array.size == 0
    return array.astype(np.int64) if whole and array.ndim == 1 else None


def stop_token_ids(tokenizer: Any, chats: bool = True) -> list[int]:
    """Return the ids at which generation must end.

    They are the stop token that training used, and the tokenizer's own end of text.

    Args:
        tokenizer: a transformers tokenizer.
        chats: the chat template was trained, so its stop token counts.

    Raises:
        TemplateError: the template has no stop token.
    """
    stops = []
    if chats and tokenizer.chat_template is not None:
        stops.append(ChatTemplate(tokenizer).stop)
    if tokenizer.eos_token_id is not None and tokenizer.eos_token_id not in stops:
        stops.append(tokenizer.eos_token_id)
    return stops
