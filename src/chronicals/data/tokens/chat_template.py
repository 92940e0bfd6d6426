"""A tokenizer's own chat template: its renderings, its form of messages, its stop token."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from chronicals.data.kinds.messages import THOUGHT_FIELDS, Message
from chronicals.data.reading.gate import DataError

RenderRequest = tuple[Sequence[Message], Any, str]
"""Messages already in form, tools, and what errors call the row."""


class TemplateError(DataError):
    """The chat template cannot be handled, or does not fit the conversation."""

    rule = "template_refuses"


@dataclass(frozen=True)
class Dialect:
    """Form in which a template takes messages.

    Attributes:
        parts: contents as lists of parts, not as text.
        text_arguments: the arguments of a call as JSON text, not as an object.
    """

    parts: bool = False
    text_arguments: bool = False

    def message(self, message: Message) -> Message:
        """Return the message in this form, without ``train``, which no template knows.

        Thoughts stand under both names that templates read. Fields that are null are left out:
        transformers 5.24 leaves them out itself, 5.17 does not and many templates fail on them.
        """
        formed = {
            name: value for name, value in message.items() if name != "train" and value is not None
        }
        thoughts = [formed[name] for name in THOUGHT_FIELDS if name in formed]
        if thoughts:
            formed = {"thinking": thoughts[0], **formed, "reasoning_content": thoughts[0]}
        if self.parts and isinstance(formed.get("content"), str):
            formed["content"] = [{"type": "text", "text": formed["content"]}]
        if formed.get("tool_calls"):
            formed["tool_calls"] = [self._call(call) for call in formed["tool_calls"]]
        return formed

    def _call(self, call: Any) -> Any:
        """Return a tool call with its arguments in this form."""
        if not isinstance(call, dict):
            return call
        if isinstance(call.get("function"), dict):
            return {**call, "function": self._call(call["function"])}
        arguments = call.get("arguments")
        if self.text_arguments and isinstance(arguments, dict):
            return {**call, "arguments": json.dumps(arguments, ensure_ascii=False)}
        if not self.text_arguments and isinstance(arguments, str):
            try:
                value = json.loads(arguments)
            except json.JSONDecodeError as error:
                raise DataError(
                    f"the arguments of a call, {arguments[:40]!r}, do not parse as JSON: {error}"
                ) from error
            if not isinstance(value, dict):
                raise DataError(
                    f"the arguments of a call must be a JSON object, these are {arguments[:40]!r}"
                )
            return {**call, "arguments": value}
        return call


class ChatTemplate:
    """The chat template of a transformers tokenizer.

    Args:
        tokenizer: a ``PreTrainedTokenizerBase``; its template must not change afterwards.
    """

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer

    def compiled(self, tools: Any = None) -> Any:
        """Return the template as transformers compiled it; None if this version hides it."""
        from transformers.utils import chat_template_utils

        compile_template = getattr(chat_template_utils, "_compile_jinja_template", None)
        return (
            None
            if compile_template is None
            else compile_template(self.tokenizer.get_chat_template(tools=tools))
        )

    @functools.cached_property
    def dialect(self) -> Dialect:
        """Form of messages that it takes, found by rendering an answer and a call in each form."""

        def shows(messages: list[Message]) -> bool:
            try:
                text = self.tokenizer.apply_chat_template(messages, tokenize=False)
            except Exception:  # jinja raises whatever the template's author chose
                return False
            return "chronicals" in text

        question = {"role": "user", "content": "?"}
        answer = {"role": "assistant", "content": "chronicals"}
        in_parts = [Dialect(parts=True).message(message) for message in (question, answer)]
        parts = not shows([question, answer]) and shows(in_parts)
        if parts:
            question = in_parts[0]

        def calling(arguments: Any) -> list[Message]:
            function = {"name": "chronicals", "arguments": arguments}
            call = {"type": "function", "id": "call00001", "function": function}
            return [question, {"role": "assistant", "content": "", "tool_calls": [call]}]

        text_arguments = not shows(calling({"a": "b"})) and shows(calling('{"a": "b"}'))
        return Dialect(parts, text_arguments)

    def form(self, messages: Sequence[Message], where: str) -> list[Message]:
        """Return the messages as this template takes them.

        Raises:
            DataError: the arguments of a call are text that is no JSON object.
        """
        self._require(where)
        formed = []
        for number, message in enumerate(messages, 1):
            try:
                formed.append(self.dialect.message(message))
            except ValueError as error:
                raise DataError(f"{where}: message {number}: {error}") from error
        return formed

    def ids(
        self,
        formed: Sequence[Message],
        tools: Any = None,
        generation: bool = False,
        where: str = "chat",
    ) -> list[int]:
        """Return the ids of a conversation.

        Args:
            formed: messages, as ``form`` returns them.
            tools: that the model is offered to call.
            generation: end with the text that asks the assistant to answer.
            where: what errors call the row.

        Raises:
            TemplateError: the template refuses the conversation.
        """
        encoding = self._apply(formed, tools, generation, where, tokenize=True, return_dict=True)
        return list(encoding["input_ids"])

    def text(
        self,
        formed: Sequence[Message],
        tools: Any = None,
        generation: bool = False,
        where: str = "chat",
    ) -> str:
        """Return the text of a conversation, which ``ids`` are the ids of."""
        return self._apply(formed, tools, generation, where, tokenize=False)

    def texts(
        self, requests: Sequence[RenderRequest], generation: bool = False
    ) -> list[str | TemplateError]:
        """Return the ``text`` of each, or its error; many at a time, which is faster."""
        texts: list[str | TemplateError] = []
        for without_tools, alike in itertools.groupby(requests, lambda request: not request[1]):
            # The next one is the last; with tools each is rendered by itself.
            group = list(alike)
            waiting = [group] if without_tools else [[request] for request in reversed(group)]
            while waiting:
                together = waiting.pop()
                if without_tools:
                    try:
                        texts += self.tokenizer.apply_chat_template(
                            [list(formed) for formed, _, _ in together],
                            add_generation_prompt=generation,
                            tokenize=False,
                        )
                        continue
                    except Exception:  # jinja raises whatever the template's author chose
                        # one of them is refused: each half by itself
                        half = len(together) // 2
                        if half:
                            waiting += [together[half:], together[:half]]
                            continue
                ((formed, tools, where),) = together
                try:
                    texts.append(self.text(formed, tools, generation, where))
                except TemplateError as error:
                    texts.append(error)
        return texts

    def _apply(
        self, formed: Sequence[Message], tools: Any, generation: bool, where: str, **how: Any
    ) -> Any:
        self._require(where)
        try:
            return self.tokenizer.apply_chat_template(
                list(formed), tools=tools, add_generation_prompt=generation, **how
            )
        except Exception as error:  # jinja raises whatever the template's author chose
            raise TemplateError(
                f"{where}: the chat template refuses the conversation: {error}"
            ) from error

    def _require(self, where: str) -> None:
        if self.tokenizer.chat_template is None:
            raise TemplateError(
                f"{where}: has messages, but the tokenizer has no chat template; set "
                "tokenizer.chat_template, or "
                "chat_template='chatml' (or another name of docs/templates.md, or a file), use "
                "the instruct version of the "
                "model, or bring the rows as prompt and completion"
            )

    def check_stop(self, where: str) -> None:
        """Check that an answer has an end.

        Raises:
            TemplateError: the template writes no special token after it.
        """
        try:
            assert self.stop >= 0
        except TemplateError as error:
            raise TemplateError(f"{where}: {error}", error.rule) from None

    @functools.cached_property
    def stop(self) -> int:
        """Special token that the template writes after an assistant's content.

        Raises:
            TemplateError: there is none, so a model trained on it would never stop.
        """
        content = "chronicals"
        turn = [{"role": "user", "content": "?"}, {"role": "assistant", "content": content}]
        ids = self.ids(self.form(turn, "chat"))
        after = len(ids)
        while after and content not in self.decode(ids[after - 1 :]):
            after -= 1
        if not after:
            raise TemplateError(
                "the chat template does not render the content of an assistant's message given as "
                "text"
            )
        special = set(self.tokenizer.all_special_ids) | set(self.tokenizer.added_tokens_decoder)
        for token in ids[after:]:
            if token in special:
                return token
        raise TemplateError(
            "the chat template writes no special token after an assistant's answer, so the "
            "model would never "
            "learn to stop; use a template that closes the assistant's turn",
            "no_stop_token",
        )

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, nothing left out and nothing tidied."""
        return self.tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
