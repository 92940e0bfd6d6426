"""A conversation with a trained model, which remembers what was said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from chronicals.generation.answer import Trained, answer


class Chat:
    """Questions and answers so far.

    A model that was trained on plain text has no turns: it continues each question as a text of its
        own.

    Args:
        system: system message before the first question; none by default.
        settings: as ``answer`` takes them.

    Raises:
        ValueError: a system prompt for a model that was not trained on chats.
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
        """Forget all but the system prompt."""
        self.messages = [*self._opening]

    def ask(self, question: str, say: Callable[[str], None] | None = None) -> str:
        """The answer to the next question. Both join the conversation, unless an error is raised.

        Args:
            say: called with each new part of the answer.
        """
        asked = [*self.messages, {"role": "user", "content": question}]
        reply = answer(
            self.trained, asked if self.trained.chats else question, say=say, **self.settings
        )
        if self.trained.chats:
            self.messages = [*asked, {"role": "assistant", "content": reply}]
        return reply
