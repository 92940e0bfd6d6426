"""Many rows at once: what ``Tokenizer.encode`` gives for each, from one call of the fast tokenizer's own threads.

Only the whole rendering of a conversation is tokenised, and the bounds of what is trained are found in its text. With
T(·) the tokenizer, a bound p in the text x, and s the last added token that ends before p:

    T(x) = T(up to s) + T(from s on)      because added tokens are cut out before anything else sees the text
    T(x[:p]) is a prefix of T(x)          if T(from s to p), by itself, is what T(x) holds from s on

so the bound's place among the tokens is that of s plus the length of T(from s to p), which is a short text such as
``<|im_start|>assistant\\n``, the same in every row, and tokenised once. Whatever this cannot decide (a bound inside a
token, another rendering of the last turn under a tokenizer that normalises, roles other than the assistant, any refusal)
is left to ``Tokenizer.encode``, row by row: it is the definition, and its errors are the errors.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from chronicals.data.kinds.rows import NormalRow
from chronicals.data.reading.gate import DataError
from chronicals.data.reading.records import Record
from chronicals.data.tokens.added_tokens import Cuts, Row
from chronicals.data.tokens.byte_pairs import BytePairs, HasIds
from chronicals.data.tokens.chat_template import Asked
from chronicals.data.tokens.conversation import Conversation, first_unsaid, texts_said
from chronicals.data.tokens.prefixes import Prefixes
from chronicals.data.tokens.spans import followed_by_another, not_said
from chronicals.data.tokens.template import Tokenizer, Tokens
from chronicals.data.tokens.texts import (
    check_text,
    is_unicode,
    without_double_beginning,
    without_end,
)
from chronicals.data.tokens.tokenised_texts import Texts

TokenArrays = tuple[np.ndarray, np.ndarray]
"""Token ids (int32), and for each whether it is trained (uint8)."""

Rows = tuple[Sequence[NormalRow], Sequence[str]]
"""Rows, and what errors call each."""

T = TypeVar("T")

Finish = Callable[[], TokenArrays]
"""Makes a row of the ids that its texts have by then."""

LETTERS_AT_ONCE = 1 << 22
"""Of the parts of conversations that are rendered at once."""

MANY_ANSWERS = 12
"""From so many on it is worth looking how the template comes to its parts."""

LONGEST_KEPT = 64
"""Letters of the longest text before a bound whose ids are kept; longer ones hold what somebody
said.
"""


class BatchEncoder:
    """The rows of a ``Tokenizer``, many at once."""

    def __init__(self, encoder: Tokenizer):
        self.encoder = encoder
        self.fast = is_plain(encoder.tokenizer)
        self.cuts = Cuts.of(encoder.tokenizer) if self.fast else None
        self.beginning = encoder.tokenizer.bos_token_id
        self.ending = encoder.tokenizer.eos_token_id
        self._begin_kind: dict[str, Callable[[Record, str, Texts], Finish | Conversation]] = {}
        if self.fast:
            self._begin_kind = {
                "text": self._text,
                "completion": self._completion,
                "chat": self._conversation,
            }
        self._before: dict[str, list[int]] = {}
        self._byte_pairs: BytePairs | None = None

    def on_one_core(self) -> None:
        """From now on tokenise in the caller's own thread by tiktoken, and as before what that
        may give other ids.
        """
        self.encoder.template.copy_globals_once()
        if self.fast:
            self._byte_pairs = BytePairs.of(self.encoder.tokenizer.backend_tokenizer, self._by_rust)

    def encode_batch(
        self, rows: Sequence[NormalRow], wheres: Sequence[str]
    ) -> list[TokenArrays | DataError]:
        """What ``Tokenizer.encode_normalised`` gives for each row, or the error it raises.

        Args:
            wheres: what errors call the rows.
        """
        return next(self.encode([(rows, wheres)]))

    def encode(self, batches: Iterable[Rows]) -> Iterator[list[TokenArrays | DataError]]:
        """For each batch, its rows' tokens, or the errors that ``Tokenizer.encode`` raises for
        them.

        While a batch is tokenised, without the GIL, the next is rendered and the one before is the
        caller's.
        """
        if self._byte_pairs is not None:
            for rows, wheres in batches:
                texts = Texts(self.cuts)
                begun = self._begun(rows, wheres, texts)
                texts.tokenise(self._byte_pairs.encode)
                yield self._finished(begun, texts)
            return
        with ThreadPoolExecutor(1, thread_name_prefix="tokenizer") as beside:
            earlier: Callable[[], list[TokenArrays | DataError]] | None = None
            for rows, wheres in batches:
                texts = Texts(self.cuts)
                begun = self._begun(rows, wheres, texts)
                tokenised = beside.submit(texts.tokenise, self._by_rust)
                if earlier is not None:
                    yield earlier()
                earlier = functools.partial(self._awaited, tokenised, begun, texts)
            if earlier is not None:
                yield earlier()

    def _awaited(
        self, tokenised: Future[None], begun: list[Finish | DataError], texts: Texts
    ) -> list[TokenArrays | DataError]:
        tokenised.result()
        return self._finished(begun, texts)

    def _by_rust(self, texts: Sequence[str], special: bool) -> Sequence[HasIds]:
        """Without what the last caller left in the tokenizer, which calling it by transformers
        would reset, too.
        """
        backend = self.encoder.tokenizer.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = False
        return backend.encode_batch_fast(texts, add_special_tokens=special)

    def _finished(
        self, begun: list[Finish | DataError], texts: Texts
    ) -> list[TokenArrays | DataError]:
        texts.collect(self.beginning, self.ending)
        return [row if isinstance(row, DataError) else _caught(row) for row in begun]

    def _begun(
        self, rows: Sequence[NormalRow], wheres: Sequence[str], texts: Texts
    ) -> list[Finish | DataError]:
        """Hand the texts of the rows to the tokenizer; what is returned makes the rows of their
        ids.
        """
        begun = [_caught(self._begin, *row, texts) for row in zip(rows, wheres, strict=True)]
        chats = {n: row for n, row in enumerate(begun) if isinstance(row, Conversation)}
        for number, chat in self._rendered(chats, wheres).items():
            if isinstance(chat, RenderedChat):
                begun[number] = self._chat(chat, wheres[number], texts)
            else:
                begun[number] = chat
        return begun

    def _begin(self, row: NormalRow, where: str, texts: Texts) -> Finish | Conversation:
        begin = self._begin_kind.get(row.kind)
        if begin is None:
            return lambda: _arrays(self.encoder.encode_normalised(row, where))
        return begin(row.record, where, texts)

    def _text(self, record: Record, where: str, texts: Texts) -> Finish:
        self._check_end(where)
        place = texts.add(check_text(record["text"], "text", where), special=True, whole=True)

        def finish() -> TokenArrays:
            return texts[place], texts.all_trained(place)

        return finish

    def _completion(self, record: Record, where: str, texts: Texts) -> Finish:
        self._check_end(where)
        behind = self.encoder.continuation
        mark, mark_ids = (behind.mark, behind.mark_ids) if record["prompt"] else ("", [])
        asked = texts.add(check_text(record["prompt"], "prompt", where), special=True)
        said = texts.add(
            mark + check_text(record["completion"], "completion", where), special=False, whole=True
        )

        def finish() -> TokenArrays:
            before = without_end(
                without_double_beginning(texts[asked], self.beginning), self.ending
            )
            if mark and texts[said][: len(mark_ids)].tolist() != mark_ids:
                return _arrays(
                    self.encoder.encode_normalised(NormalRow("completion", record), where)
                )
            ids = np.concatenate((before, texts[said][len(mark_ids) :]))
            trained = np.ones(len(ids), np.uint8)
            trained[: len(before)] = self.encoder.train_on == "all"
            return ids, trained

        return finish

    def _check_end(self, where: str) -> None:
        """Raises where the tokenizer has no token that ends texts and completions."""
        if self.ending is None:
            self.encoder.end(where)

    # --- conversations
    # -------------------------------------------------------------------------------------------

    def _conversation(self, record: Record, where: str, texts: Texts) -> Conversation:
        return self.encoder.conversation(record, where)

    def _rendered(
        self, chats: Mapping[int, Conversation], wheres: Sequence[str]
    ) -> dict[int, RenderedChat | DataError]:
        """The conversations by number of row, rendered together, with their parts that tell
        where the answers lie.
        """
        template = self.encoder.template
        wholes = template.texts(
            [(chat.messages, chat.tools, wheres[n]) for n, chat in chats.items()]
        )
        rendered: dict[int, RenderedChat | DataError] = {
            n: whole if isinstance(whole, DataError) else RenderedChat(chat, whole)
            for (n, chat), whole in zip(chats.items(), wholes, strict=True)
        }
        answers = list[tuple[RenderedChat, int, str]]()
        for n, chat in rendered.items():
            if isinstance(chat, RenderedChat):
                numbers = self._answers(chat.conversation)
                self._prove(chat, numbers if len(numbers) >= MANY_ANSWERS else [])
                answers += [(chat, number, wheres[n]) for number in numbers]
        for some in _grouped(answers, lambda answer: len(answer[0].whole)):
            asked = [answer for answer in some if answer[1] not in answer[0].before]
            before = template.texts(
                [chat.up_to(number, where) for chat, number, where in asked], generation=True
            )
            for (chat, number, _), text in zip(asked, before, strict=True):
                chat.before[number] = self._shared(text, chat.whole)
            asked = [
                answer
                for answer in some
                if answer[0].is_early(answer[1]) and answer[1] not in answer[0].through
            ]
            through = template.texts(
                [chat.up_to(number + 1, where) for chat, number, where in asked]
            )
            for (chat, number, _), text in zip(asked, through, strict=True):
                chat.through[number] = self._shared(text, chat.whole)
        return rendered

    def _prove(self, chat: RenderedChat, numbers: list[int]) -> None:
        """Tell ``before`` and ``through`` of a long conversation without rendering its parts, as
        far as that can be proved.
        """
        if not numbers:
            return
        prefixes = Prefixes(
            self.encoder.template, chat.conversation.messages, chat.conversation.tools, chat.whole
        )
        exact = self.cuts is not None and self.cuts.is_exact(chat.whole)
        for number in numbers:
            for found, count, generation in (
                (chat.before, number, True),
                (chat.through, number + 1, False),
            ):
                part = (
                    prefixes.part(count, generation)
                    if generation or chat.is_early(number)
                    else None
                )
                shared = part and _shared_part(chat.whole, *part, exact)
                if shared is not None:
                    found[number] = shared

    def _shared(self, text: str | DataError, whole: str) -> Shared | None:
        """What a rendering of a part has in common with that of the whole conversation; None
        where the part is refused.
        """
        if isinstance(text, DataError):
            return None
        if whole.startswith(text):
            return Shared(len(text), True, True)
        exact = self.cuts is not None and self.cuts.is_exact(text) and self.cuts.is_exact(whole)
        return Shared(_common_prefix(text, whole), False, exact)

    def _answers(self, chat: Conversation) -> list[int]:
        """Numbers of the trained messages whose place the text may tell."""
        if self.encoder.train_on == "all" or self.cuts is None:
            return []
        return [
            number
            for number in chat.trained
            if number and chat.messages[number]["role"] == "assistant"
        ]

    def _chat(self, chat: RenderedChat, where: str, texts: Texts) -> Finish:
        def by_definition() -> TokenArrays:
            return _arrays(self.encoder.encode_conversation(chat.conversation, where))

        if not is_unicode(chat.whole):
            return by_definition
        place = texts.add(chat.whole, special=False)

        def finish() -> TokenArrays:
            trained = _caught(self._mask, chat, texts, place, where)
            return (texts[place], trained) if isinstance(trained, np.ndarray) else by_definition()

        return finish

    def _mask(
        self, chat: RenderedChat, texts: Texts, place: tuple[bool, int], where: str
    ) -> np.ndarray | None:
        """What is trained, or None where the text does not decide it."""
        ids = texts[place]
        if self.encoder.train_on == "all":
            return np.ones(len(ids), np.uint8)
        trained = np.zeros(len(ids), np.uint8)
        if not chat.conversation.trained:
            return trained
        row = None if self.cuts is None else self.cuts.find(chat.whole, ids, texts.added(place))
        for number in chat.conversation.trained:
            span = None if row is None else self._answer(chat, number, row, where)
            if span is None:
                return None
            trained[
                span[0] : self.encoder.end_of_answer(chat.conversation, number, ids, span[1])
            ] = 1
        return trained

    def _answer(
        self, chat: RenderedChat, number: int, row: Row, where: str
    ) -> tuple[int, int] | None:
        """What ``trained_span`` gives for this message, or None where the text does not decide
        it.
        """
        before = chat.before.get(number)
        message = chat.conversation.messages[number]
        template = self.encoder.template
        whole = row.text
        if before is None or not before.entire:
            return None
        start = self._place(row, before.letters)
        closed = self._closing(chat, number, row, before.letters, where)
        if start is None or closed is None:
            return None
        span = start, row.places[closed] + 1
        if row.is_exact:
            said = whole[before.letters : row.ends[closed]]
            complete = first_unsaid(texts_said(message), said) is None
        else:
            complete = not_said(template, message, row.ids[slice(*span)].tolist()) is None
        return span if complete else None

    def _place(self, row: Row, bound: int) -> int | None:
        """How many tokens the text up to ``bound`` has, if they are the first of the row's."""
        last = bisect.bisect_right(row.ends, bound) - 1
        if last + 1 < len(row.ends) and row.begins[last + 1] < bound:
            return None
        text, place = (
            (row.text[row.begins[last] : bound], row.places[last])
            if last >= 0
            else (row.text[:bound], 0)
        )
        ids = self._before.get(text)
        if ids is None:
            ids = self.encoder.tokenizer.backend_tokenizer.encode(
                text, add_special_tokens=False
            ).ids
            if len(text) <= LONGEST_KEPT:
                self._before[text] = ids
        return place + len(ids) if row.ids[place : place + len(ids)].tolist() == ids else None

    def _closing(
        self, chat: RenderedChat, number: int, row: Row, bound: int, where: str
    ) -> int | None:
        """Which of the row's added tokens is the stop token that closes the answer beginning at
        ``bound``.
        """
        stop = self.encoder.template.stop
        if not row.cuts.stands_alone(stop):
            return None
        for shared in self._through(chat, number, where):
            if shared is None or not shared.exact:
                return None
            last = bisect.bisect_right(row.ends, shared.letters) - 1
            while last >= 0 and row.begins[last] >= bound:
                if row.ids[row.places[last]] == stop:
                    return last
                last -= 1
        return None

    def _through(self, chat: RenderedChat, number: int, where: str) -> Iterator[Shared | None]:
        """What is rendered of the conversation up to and with an answer, alone and followed by a
        stand-in.
        """
        yield chat.through.get(number, Shared(len(chat.whole), True, True))
        if chat.is_early(number):
            conversation = chat.conversation
            seen = followed_by_another(conversation.messages, number)
            yield self._shared(
                self.encoder.template.text(seen, conversation.tools, where=where), chat.whole
            )


@dataclass(frozen=True)
class Shared:
    """What a text has in common with the rendering of a whole conversation, at the beginning.

    Attributes:
        letters: how many.
        entire: the text has no others.
        exact: their tokens are as different as the texts: what follows in either does not change
            the ids of what is shared.
    """

    letters: int
    entire: bool
    exact: bool


@dataclass(frozen=True)
class RenderedChat:
    """A conversation as text.

    Attributes:
        before: for the number of an answer, how much of ``whole`` the template writes before it.
        through: for those that are not the last message, what it writes of the conversation up to
            and with them.
    """

    conversation: Conversation
    whole: str
    before: dict[int, Shared | None] = field(default_factory=dict)
    through: dict[int, Shared | None] = field(default_factory=dict)

    def is_early(self, number: int) -> bool:
        """Whether a message follows it."""
        return number + 1 < len(self.conversation.messages)

    def up_to(self, number: int, where: str) -> Asked:
        return self.conversation.messages[:number], self.conversation.tools, where


def is_plain(tokenizer: Any) -> bool:
    """Whether calling the tokenizer is calling its Rust part and nothing more."""
    if not getattr(tokenizer, "is_fast", False) or tokenizer.split_special_tokens:
        return False
    names = ("__call__", "_encode_plus", "apply_chat_template")
    general = ("transformers.tokenization_utils_base", "transformers.tokenization_utils_tokenizers")
    return all(getattr(type(tokenizer), name).__module__ in general for name in names)


def _shared_part(whole: str, place: int, rest: str, exact: bool) -> Shared | None:
    """Of a part that begins as ``whole`` does up to ``place`` and goes on with ``rest``; None where
    tokens may say otherwise.

    Args:
        exact: no other text has the tokens of ``whole``; with ASCII letters behind some of it this
            stays so.
    """
    if whole.startswith(rest, place):
        return Shared(place + len(rest), True, True)
    letters = place + _common_prefix(rest, whole[place : place + len(rest)])
    return Shared(letters, False, True) if exact and rest.isascii() else None


def _grouped(items: Sequence[T], letters: Callable[[T], int]) -> Iterator[list[T]]:
    """The items in order, as many at a time as have ``LETTERS_AT_ONCE``."""
    group = list[T]()
    held = 0
    for item in items:
        group.append(item)
        held += letters(item)
        if held >= LETTERS_AT_ONCE:
            yield group
            group = []
            held = 0
    if group:
        yield group


def _arrays(tokens: Tokens) -> TokenArrays:
    ids, trained = tokens
    return np.array(ids, np.int32), np.array(trained, np.uint8)


def _caught(step: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return step(*arguments)
    except DataError as error:
        return error


def _common_prefix(left: str, right: str) -> int:
    """Letters that two texts have in common at their beginning, by halving: slices are compared
    at once.
    """
    low = 0
    high = min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
