"""A conversation with a trained model, with its questions and answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from chronicals.generation.answer import Trained, answer


class Chat:
    """A conversation.

    A model that was trained on plain text has no turns: it continues each question as a separate
    text.

    Args:
        trained: the model.
        system: system message before the first question; none by default.
        settings: keyword arguments of ``answer``.

    Attributes:
        messages: the conversation so far.

    Raises:
        ValueError: there is a system message, but the model was not trained on chats.
    """

    def __init__(self, trained: Trained, system: str | None = None, **settings: Any):
        if system is not None and not trained.chats:
            raise ValueError(
                f"system={system!r}: this model continues plain text and has no system prompt; "
                "leave it out"
            )
        self.trained = trained
        self.settings = settings
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self.reset()

    def reset(self) -> None:
        """Delete all messages but the system message."""
        self.messages = [*self._opening]

    def ask(self, question: str, say: Callable[[str], None] | None = None) -> str:
        """Return the answer to the next question, and append both to the conversation.

        Args:
            question: the question.
            say: called with each new part of the answer.
        """
        asked = [*self.messages, {"role": "user", "content": question}]
        prompt = asked if self.trained.chats else question
        reply = answer(self.trained, prompt, say=say, **self.settings)
        if self.trained.chats:
            self.messages = [*asked, {"role": "assistant", "content": reply}]
        return reply
