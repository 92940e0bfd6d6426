r"""Encoding of many rows at once, with the tokens that ``Tokenizer.encode`` gives for each.

One call of the fast tokenizer's own threads encodes them all. Only the whole rendering of a
conversation is tokenised. The bounds of its answers are found in its text. With T(·) the tokenizer,
a bound p in the text x, and s the last added token that ends before p:

    T(x) = T(up to s) + T(from s on)   added tokens are cut out before anything else sees the text
    T(x[:p]) is a prefix of T(x)       if T(from s to p), by itself, is what T(x) holds from s on

So the bound's place among the tokens is that of s plus the length of T(from s to p). This is a
short text such as ``<|im_start|>assistant\n``, the same in every row, and is tokenised once.

Some rows are not decided so: a bound inside a token, another rendering of the last turn under a
tokenizer that normalises, roles other than the assistant, any refusal. They are left to
``Tokenizer.encode``, row by row, which is the definition; its errors are the errors.
"""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jinja2
import numpy as np

from chronicals.data.kinds.rows import NormalRow
from chronicals.data.reading.gate import DataError
from chronicals.data.tokens.added_tokens import AddedTokens, CutText
from chronicals.data.tokens.byte_pairs import BytePairs, HasIds
from chronicals.data.tokens.chat_template import RenderRequest
from chronicals.data.tokens.conversation import (
    Conversation,
    first_unsaid,
    followed_by_another,
    not_said,
    texts_said,
)
from chronicals.data.tokens.prefixes import Prefixes
from chronicals.data.tokens.template import Tokenizer, TokenLists
from chronicals.data.tokens.texts import (
    TextPlace,
    TokenisedTexts,
    check_text,
    is_unicode,
    without_double_beginning,
    without_end,
)

TokenArrays = tuple[np.ndarray, np.ndarray]
"""Token ids (int32), and for each whether it is trained (uint8)."""

EncodedRows = list[TokenArrays | DataError]
"""Tokens of each row, or the error that ``Tokenizer.encode`` raises for it."""

NamedRows = tuple[Sequence[NormalRow], Sequence[str]]
"""Rows, and the names that errors call them."""

Finish = Callable[[], TokenArrays]
"""Makes a row of the ids that its texts have by then."""

RENDERED_LETTERS = 1 << 22
"""Letters of the parts of conversations that are rendered at once."""

MANY_ANSWERS = 12
"""A conversation with so many answers is worth a look at how the template writes its parts."""

MAX_CACHED_LETTERS = 64
"""Letters of the longest text before a bound whose ids are kept. Longer ones hold what somebody
said, and do not come again."""


class BatchEncoder:
    """Encodes rows as a ``Tokenizer`` does, many at once."""

    def __init__(self, encoder: Tokenizer):
        self.encoder = encoder
        self.fast = calls_rust_only(encoder.tokenizer)
        self.added_tokens = AddedTokens.of(encoder.tokenizer) if self.fast else None
        self.beginning = encoder.tokenizer.bos_token_id
        self.ending = encoder.tokenizer.eos_token_id
        self._ids_before: dict[str, list[int]] = {}
        self._byte_pairs: BytePairs | None = None

    def on_one_core(self) -> None:
        """Tokenise in the caller's thread from now on, by tiktoken if it gives the same ids."""
        if self.encoder.tokenizer.chat_template is not None:
            # For each text jinja copies the template's globals, which it keeps in a ChainMap; a
            # dict is copied in a tenth of the time, and nothing is put into either afterwards. A
            # faulty template is reported when it is used.
            with contextlib.suppress(ValueError, jinja2.TemplateError):
                compiled = self.encoder.template.compiled()
                if compiled is not None:
                    compiled.globals = dict(compiled.globals)
        if self.fast:
            self._byte_pairs = BytePairs.of(self.encoder.tokenizer.backend_tokenizer, self._by_rust)

    def encode_batch(self, rows: Sequence[NormalRow], places: Sequence[str]) -> EncodedRows:
        """Return the tokens of each row, or its error.

        Args:
            rows: in their normal form.
            places: what errors call the rows.
        """
        return next(self.encode([(rows, places)]))

    def encode(self, batches: Iterable[NamedRows]) -> Iterator[EncodedRows]:
        """Yield the tokens of each batch of rows.

        While a batch is tokenised, without the GIL, the next is rendered and the one before is the
        caller's.
        """
        if self._byte_pairs is not None:
            for rows, places in batches:
                texts = TokenisedTexts(self.added_tokens)
                begun = self._begun(rows, places, texts)
                texts.tokenise(self._byte_pairs.encode)
                yield self._finished(begun, texts)
            return
        with ThreadPoolExecutor(1, thread_name_prefix="tokenizer") as beside:
            earlier: tuple[Future[None], list[Finish | DataError], TokenisedTexts] | None = None
            for rows, places in batches:
                texts = TokenisedTexts(self.added_tokens)
                begun = self._begun(rows, places, texts)
                tokenised = beside.submit(texts.tokenise, self._by_rust)
                if earlier is not None:
                    earlier[0].result()
                    yield self._finished(*earlier[1:])
                earlier = tokenised, begun, texts
            if earlier is not None:
                earlier[0].result()
                yield self._finished(*earlier[1:])

    def _by_rust(self, texts: Sequence[str], special: bool) -> Sequence[HasIds]:
        """Tokenise texts by the fast tokenizer's Rust part."""
        backend = self.encoder.tokenizer.backend_tokenizer
        # Whoever used the tokenizer last may have left these; transformers would reset them, too.
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = False
        return backend.encode_batch_fast(texts, add_special_tokens=special)

    def _finished(self, begun: list[Finish | DataError], texts: TokenisedTexts) -> EncodedRows:
        texts.collect(self.beginning, self.ending)
        return [row if isinstance(row, DataError) else _caught(row) for row in begun]

    def _begun(
        self, rows: Sequence[NormalRow], places: Sequence[str], texts: TokenisedTexts
    ) -> list[Finish | DataError]:
        """Add the texts of the rows to ``texts``; return functions that make rows of their ids."""
        begun = [_caught(self._begin, *row, texts) for row in zip(rows, places, strict=True)]
        chats = {n: row for n, row in enumerate(begun) if isinstance(row, Conversation)}
        for number, chat in self._rendered(chats, places).items():
            if isinstance(chat, RenderedChat):
                begun[number] = self._chat(chat, places[number], texts)
            else:
                begun[number] = chat
        return begun

    def _begin(self, row: NormalRow, place: str, texts: TokenisedTexts) -> Finish | Conversation:
        if self.fast and row.kind == "text":
            self.encoder.end(place)
            text = check_text(row.record["text"], "text", place)
            added = texts.add(text, special=True, whole=True)
            return lambda: (texts[added], texts.all_trained(added))
        if self.fast and row.kind == "chat":
            return self.encoder.conversation(row.record, place)
        if not self.fast or row.kind != "completion":
            return lambda: _arrays(self.encoder.encode_normalised(row, place))
        self.encoder.end(place)
        record = row.record
        mark = ""
        mark_ids: list[int] = []
        if record["prompt"]:
            mark = self.encoder.continuation.mark
            mark_ids = self.encoder.continuation.mark_ids
        prompt = texts.add(check_text(record["prompt"], "prompt", place), special=True)
        text = mark + check_text(record["completion"], "completion", place)
        completion = texts.add(text, special=False, whole=True)

        def finish() -> TokenArrays:
            ids = without_double_beginning(texts[prompt], self.beginning)
            before = without_end(ids, self.ending)
            behind = texts[completion]
            if mark and behind[: len(mark_ids)].tolist() != mark_ids:
                return _arrays(self.encoder.encode_normalised(row, place))
            ids = np.concatenate((before, behind[len(mark_ids) :]))
            trained = np.ones(len(ids), np.uint8)
            trained[: len(before)] = self.encoder.train_on == "all"
            return ids, trained

        return finish

    # --- conversations

    def _rendered(
        self, chats: Mapping[int, Conversation], places: Sequence[str]
    ) -> dict[int, RenderedChat | DataError]:
        """Return the conversations as text, by number of row; many are rendered at once.

        Each has its parts before and through each answer.
        """
        template = self.encoder.template
        wholes = template.texts(
            [(chat.messages, chat.tools, places[n]) for n, chat in chats.items()]
        )
        rendered: dict[int, RenderedChat | DataError] = {}
        answers = list[_Answer]()
        for (n, conversation), whole in zip(chats.items(), wholes, strict=True):
            if isinstance(whole, DataError):
                rendered[n] = whole
                continue
            chat = RenderedChat(conversation, whole)
            rendered[n] = chat
            # The trained messages whose place the text may tell.
            numbers = []
            if self.encoder.train_on != "all" and self.added_tokens is not None:
                for number in conversation.trained:
                    if number and conversation.messages[number]["role"] == "assistant":
                        numbers.append(number)
            if len(numbers) >= MANY_ANSWERS:
                self._prove(chat, numbers)
            answers += [_Answer(chat, number, places[n]) for number in numbers]
        for group in _grouped(answers):
            unknown = [answer for answer in group if answer.number not in answer.chat.before]
            requests = list[RenderRequest]()
            for answer in unknown:
                conversation = answer.chat.conversation
                before = conversation.messages[: answer.number]
                requests.append((before, conversation.tools, answer.place))
            parts = template.texts(requests, generation=True)
            for answer, text in zip(unknown, parts, strict=True):
                answer.chat.before[answer.number] = self._shared(text, answer.chat.whole)
            unknown = []
            requests = []
            for answer in group:
                conversation = answer.chat.conversation
                is_last = answer.number + 1 == len(conversation.messages)
                if not is_last and answer.number not in answer.chat.through:
                    unknown.append(answer)
                    through = conversation.messages[: answer.number + 1]
                    requests.append((through, conversation.tools, answer.place))
            parts = template.texts(requests)
            for answer, text in zip(unknown, parts, strict=True):
                answer.chat.through[answer.number] = self._shared(text, answer.chat.whole)
        return rendered

    def _prove(self, chat: RenderedChat, numbers: list[int]) -> None:
        """Fill ``before`` and ``through`` of a long conversation without rendering its parts.

        Only parts that are proved are filled in.
        """
        conversation = chat.conversation
        template = self.encoder.template
        prefixes = Prefixes(template, conversation.messages, conversation.tools, chat.whole)
        exact = self.added_tokens is not None and self.added_tokens.is_exact(chat.whole)

        def prove(known: dict[int, Shared | None], number: int, count: int, asks: bool) -> None:
            part = prefixes.part(count, asks)
            if part is None:
                return
            # ``rest`` are the letters of the part behind those known to be of the whole.
            place, rest = part
            if chat.whole.startswith(rest, place):
                known[number] = Shared(place + len(rest), True, True)
            elif exact and rest.isascii():
                # No other text has the tokens of the whole, and ASCII letters do not change that.
                common = _common_prefix(rest, chat.whole[place : place + len(rest)])
                known[number] = Shared(place + common, False, True)

        for number in numbers:
            prove(chat.before, number, number, True)
            if number + 1 < len(conversation.messages):
                prove(chat.through, number, number + 1, False)

    def _shared(self, text: str | DataError, whole: str) -> Shared | None:
        """Return the common beginning of a part's rendering and the whole; None if refused."""
        if isinstance(text, DataError):
            return None
        if whole.startswith(text):
            return Shared(len(text), True, True)
        added = self.added_tokens
        exact = added is not None and added.is_exact(text) and added.is_exact(whole)
        return Shared(_common_prefix(text, whole), False, exact)

    def _chat(self, chat: RenderedChat, where: str, texts: TokenisedTexts) -> Finish:
        place = texts.add(chat.whole, special=False) if is_unicode(chat.whole) else None

        def finish() -> TokenArrays:
            if place is not None:
                trained = _caught(self._mask, chat, texts, place, where)
                if isinstance(trained, np.ndarray):
                    return texts[place], trained
            return _arrays(self.encoder.encode_conversation(chat.conversation, where))

        return finish

    def _mask(
        self, chat: RenderedChat, texts: TokenisedTexts, place: TextPlace, where: str
    ) -> np.ndarray | None:
        """Return the mask of a conversation, or None if the text does not decide it."""
        ids = texts[place]
        if self.encoder.train_on == "all":
            return np.ones(len(ids), np.uint8)
        trained = np.zeros(len(ids), np.uint8)
        if not chat.conversation.trained:
            return trained
        if self.added_tokens is None:
            return None
        row = self.added_tokens.find(chat.whole, ids, texts.added(place))
        for number in chat.conversation.trained:
            span = None if row is None else self._answer(chat, number, row, where)
            if span is None:
                return None
            start, end = span
            end = self.encoder.end_of_answer(chat.conversation, number, ids, end)
            trained[start:end] = 1
        return trained

    def _answer(
        self, chat: RenderedChat, number: int, row: CutText, where: str
    ) -> tuple[int, int] | None:
        """Return the span as ``answer_span`` does, or None if the text does not decide it."""
        before = chat.before.get(number)
        if before is None or not before.entire:
            return None
        # The tokens of the text up to the answer must be the first of the row's.
        bound = before.letters
        last = bisect.bisect_right(row.ends, bound) - 1
        if last + 1 < len(row.ends) and row.begins[last + 1] < bound:
            return None
        place = row.places[last] if last >= 0 else 0
        text = row.text[row.begins[last] if last >= 0 else 0 : bound]
        ids = self._ids_before.get(text)
        if ids is None:
            backend = self.encoder.tokenizer.backend_tokenizer
            ids = backend.encode(text, add_special_tokens=False).ids
            if len(text) <= MAX_CACHED_LETTERS:
                self._ids_before[text] = ids
        start = place + len(ids)
        if row.ids[place:start].tolist() != ids:
            return None
        closing = self._closing(chat, number, row, bound, where)
        if closing is None:
            return None
        end = row.places[closing] + 1
        message = chat.conversation.messages[number]
        if row.is_exact:
            answer = row.text[bound : row.ends[closing]]
            unsaid = first_unsaid(texts_said(message), answer)
        else:
            unsaid = not_said(self.encoder.template, message, row.ids[start:end].tolist())
        return (start, end) if unsaid is None else None

    def _closing(
        self, chat: RenderedChat, number: int, row: CutText, bound: int, where: str
    ) -> int | None:
        """Return which of the row's added tokens is the stop token that closes an answer.

        Args:
            chat: the conversation as text.
            number: of the answer's message.
            row: the conversation's text, ids and added tokens.
            bound: where the answer begins in the text.
            where: what errors call the row.
        """
        stop = self.encoder.template.stop
        if not row.added_tokens.is_unmistakable(stop):
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
        """Yield what is rendered up to and including an answer.

        It is rendered by itself first, then with a next message.
        """
        yield chat.through.get(number, Shared(len(chat.whole), True, True))
        conversation = chat.conversation
        if number + 1 < len(conversation.messages):
            messages = followed_by_another(conversation.messages, number)
            text = self.encoder.template.text(messages, conversation.tools, where=where)
            yield self._shared(text, chat.whole)


@dataclass(frozen=True)
class Shared:
    """The common beginning of a text and the rendering of a whole conversation.

    Attributes:
        letters: number of letters in common.
        entire: True if the text has no other letters.
        exact: True if the tokens of the two texts differ just as the texts do: what follows in
            either does not change the ids of the common letters.
    """

    letters: int
    entire: bool
    exact: bool


@dataclass(frozen=True)
class RenderedChat:
    """A conversation as text.

    Attributes:
        whole: the text.
        before: by index of answer, the text that the template writes before it.
        through: by index of answer, the text up to and including it; not for the last message.
    """

    conversation: Conversation
    whole: str
    before: dict[int, Shared | None] = field(default_factory=dict)
    through: dict[int, Shared | None] = field(default_factory=dict)


class _Answer(NamedTuple):
    """A trained message, and what errors call its row."""

    chat: RenderedChat
    number: int
    place: str


def calls_rust_only(tokenizer: Any) -> bool:
    """Return whether calling the tokenizer is calling its Rust part and nothing more."""
    if not getattr(tokenizer, "is_fast", False) or tokenizer.split_special_tokens:
        return False
    names = ("__call__", "_encode_plus", "apply_chat_template")
    general = ("transformers.tokenization_utils_base", "transformers.tokenization_utils_tokenizers")
    return all(getattr(type(tokenizer), name).__module__ in general for name in names)


def _grouped(answers: Sequence[_Answer]) -> Iterator[list[_Answer]]:
    """Yield the answers in order, as many at a time as have ``RENDERED_LETTERS``."""
    group = list[_Answer]()
    total = 0
    for answer in answers:
        group.append(answer)
        total += len(answer.chat.whole)
        if total >= RENDERED_LETTERS:
            yield group
            group = []
            total = 0
    if group:
        yield group


def _arrays(tokens: TokenLists) -> TokenArrays:
    ids, trained = tokens
    return np.array(ids, np.int32), np.array(trained, np.uint8)


def _caught(step: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of a call, or the DataError that it raises."""
    try:
        return step(*arguments)
    except DataError as error:
        return error


def _common_prefix(left: str, right: str) -> int:
    """Return the number of letters that two texts have in common at their beginning."""
    # By halving: slices are compared at once.
    low = 0
    high = min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
