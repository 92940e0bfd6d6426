"""Renderings of the first messages of a long conversation, without rendering each of these parts.

A template is a program that is run on a list of messages. On the first i of them it does the same
as on all, until it first looks at message i or at the end of the list. Suppose that it looks there
only by going on in its one loop over the messages. Then:

- The text that it has written by then is common to both renderings.
- The text that it writes from there on, behind the loop, depends on nothing but its namespaces, if
  it looks at no message again: Jinja's other variables do not outlive an iteration. So it is
  rendered once for each state of the namespaces.

All of this is observed while the template runs, on lists and namespaces that record their use.
Nothing is proved for templates that look ahead, at the length or from the end, that loop within a
macro or a buffer, or that keep what they see elsewhere. The latter may be the position of an
iterator: a lazy filter that is not consumed where it stands, ``loop`` itself, or one in a
namespace.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, overload

from jinja2 import nodes
from jinja2.runtime import LoopContext
from jinja2.utils import Namespace

from chronicals.data.kinds.messages import Message
from chronicals.data.tokens.chat_template import ChatTemplate

MAX_STATES = 16
"""States of namespaces that are recorded, and rendered to the end; with more there is no gain."""

LAZY_FILTERS = {
    "batch",
    "items",
    "map",
    "reject",
    "rejectattr",
    "reverse",
    "select",
    "selectattr",
    "slice",
    "unique",
}
"""Filters that return an iterator."""

CONSUMING_FILTERS = {"first", "join", "list", "max", "min", "sort", "sum"}
"""Filters that use an iterator up, or let nothing else use it."""

NamespaceState = tuple[tuple[tuple[int, str], str], ...]
"""Values of the namespaces, as ``repr`` gives them, by (number of namespace, name)."""


class Prefixes:
    """The first messages of one conversation as text.

    Args:
        whole: text of all messages.
    """

    def __init__(self, template: ChatTemplate, messages: Sequence[Message], tools: Any, whole: str):
        self._template = template
        self._messages = messages
        self._tools = tools
        self._whole = whole
        self._rests: dict[tuple[bool, NamespaceState], str | None] = {}
        self._runs: dict[bool, _Run] = {}
        compiled = template.compiled(tools)
        if compiled is None or not _keeps_nothing(
            compiled, template.tokenizer.get_chat_template(tools=tools)
        ):
            return
        try:
            runs = {
                generation: _Run(template, messages, tools, generation)
                for generation in (False, True)
            }
        except Exception:  # jinja raises whatever the template's author chose
            return
        if runs[False].text == whole:
            self._runs = runs

    def part(self, count: int, generation: bool) -> tuple[int, str] | None:
        """Return the text of the first ``count`` messages; None if it is not proved.

        Args:
            count: number of messages.
            generation: end with the text that asks the assistant to answer.

        Returns:
            The number of letters in common with the whole, and the letters that follow these.
        """
        run = self._runs.get(generation)
        if run is None or count >= len(run.places):
            return None
        place = run.places[count]
        state = run.states[count]
        if place is None:
            return None
        if not self._whole.startswith(run.text[run.compared : place], run.compared):
            del self._runs[generation]
            return None
        run.compared = max(run.compared, place)
        if (generation, state) not in self._rests:
            if len(self._rests) >= MAX_STATES:
                return None
            # The text behind the loop's end, if messages are not looked at there.
            first = self._messages[:count]
            try:
                alone = _Run(self._template, first, self._tools, generation)
                text = self._template.text(first, self._tools, generation)
            except Exception:  # jinja raises whatever the template's author chose
                self._rests[generation, state] = None
            else:
                differs = alone.ended != place or alone.looked_again or alone.text != text
                self._rests[generation, state] = None if differs else text[place:]
        rest = self._rests[generation, state]
        return None if rest is None else (place, rest)


def _keeps_nothing(compiled: Any, source: str) -> bool:
    """Return whether the template loops outside of buffers, and has no state but namespaces."""
    tree = compiled.environment.parse(source)
    for parent in tree.find_all(nodes.Node):
        for child in parent.iter_child_nodes():
            # An iterator that the parent may keep for later use.
            keeps = False
            if isinstance(child, nodes.Name) and child.name == "loop":
                keeps = not isinstance(parent, (nodes.Getattr, nodes.Getitem))
            elif isinstance(child, nodes.Filter) and child.name in LAZY_FILTERS:
                looped = isinstance(parent, nodes.For) and child is parent.iter
                consumed = (
                    isinstance(parent, nodes.Filter)
                    and child is parent.node
                    and parent.name in LAZY_FILTERS | CONSUMING_FILTERS
                )
                keeps = not (looped or consumed)
            if keeps:
                return False
    for block in tree.find_all((nodes.AssignBlock, nodes.FilterBlock)):
        if block.find(nodes.For):
            return False
    return not any(
        name.name in ("cycler", "joiner", "lipsum") for name in tree.find_all(nodes.Name)
    )


def _is_plain(value: Any) -> bool:
    """Return True for texts, numbers, None, and collections of these: ``repr`` shows all of it."""
    if isinstance(value, Mapping):
        return all(_is_plain(name) and _is_plain(inner) for name, inner in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (str, int, float))


class _Run:
    """A rendering that is observed.

    Attributes:
        text: the whole text.
        places: for each message, the number of letters written when the loop first took it; None if
            it was read in another way.
        states: states of the namespaces at these moments.
        ended: number of letters written when the loop reached the end; None if the end was read in
            another way.
        looked_again: True if messages were read after that.
        compared: number of letters of ``text`` that are known to equal those of the whole.
    """

    def __init__(
        self, template: ChatTemplate, messages: Sequence[Message], tools: Any, generation: bool
    ):
        self.messages = messages
        self.places: list[int | None] = []
        self.states: list[NamespaceState] = []
        self.ended: int | None = None
        self.looked_again = False
        self.compared = 0
        self.loops = 0
        self._seen_end = False
        self._letters = 0
        self._state: dict[tuple[int, str], str] = {}
        self._known: dict[NamespaceState, NamespaceState] = {}
        self._recording = True
        self._namespaces: list[Any] = []
        pieces = []
        variables = {**template.tokenizer.special_tokens_map, "namespace": self._recorded_namespace}
        watched = _Watched(self)
        for piece in template.compiled(tools).generate(
            messages=watched,
            tools=tools,
            documents=None,
            add_generation_prompt=generation,
            **variables,
        ):
            pieces.append(piece)
            self._letters += len(piece)
        self.text = "".join(pieces)

    def look(self, number: int, in_loop: bool) -> None:
        """Record that the template looks at a message, or at the end."""
        self.looked_again |= self._seen_end
        while len(self.places) <= min(number, len(self.messages) - 1):
            proper = (
                in_loop and len(self.places) == number and self.loops == 1 and not self._seen_end
            )
            # One object for equal states; with too many of them, stop.
            state = tuple(sorted(self._state.items()))
            if state not in self._known and len(self._known) == MAX_STATES:
                self._recording = False
                self._state.clear()
                state = ()
            else:
                state = self._known.setdefault(state, state)
            self.places.append(self._letters if proper and self._recording else None)
            self.states.append(state)
        if number >= len(self.messages):
            self.look_at_end(in_loop and self.loops == 1)

    def look_at_end(self, in_loop: bool = False) -> None:
        """Record that the template learns where the messages end."""
        self.looked_again |= self._seen_end
        if in_loop and not self._seen_end:
            self.ended = self._letters
        self._seen_end = True

    def _recorded_namespace(self, *args: Any, **attributes: Any) -> Namespace:
        run = self
        number = len(self._namespaces)

        class Recorded(Namespace):
            def __setitem__(self, name: str, value: Any) -> None:
                super().__setitem__(name, value)
                if run._recording and _is_plain(value):
                    run._state[number, name] = repr(value)
                else:
                    run._recording = False
                    run._state.clear()

        made = Recorded()
        self._namespaces.append(made)
        for name, value in dict(*args, **attributes).items():
            made[name] = value
        return made


class _Watched(Sequence[Message]):
    """The messages of a run from ``first`` on, which record their use."""

    def __init__(self, run: _Run, first: int = 0):
        self._run = run
        self._first = first

    def __iter__(self) -> Iterator[Message]:
        self._run.loops += 1
        return _Loop(self._run, self._first)

    @overload
    def __getitem__(self, index: int) -> Message: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Message]: ...
    def __getitem__(self, index: Any) -> Any:
        run = self._run
        if isinstance(index, slice) and index.stop is None and index.step is None:
            start = index.start or 0
            if start >= 0:
                return _Watched(run, self._first + start)
        if isinstance(index, int) and index >= 0:
            run.look(self._first + index, in_loop=False)
            return run.messages[self._first + index]
        run.look_at_end()
        return list(run.messages[self._first :])[index]

    def __len__(self) -> int:
        self._run.look_at_end()
        return max(len(self._run.messages) - self._first, 0)

    def __bool__(self) -> bool:
        self._run.look(self._first, in_loop=False)
        return len(self._run.messages) > self._first

    def __eq__(self, other: object) -> bool:
        self._run.look_at_end()
        return list(self._run.messages[self._first :]) == other

    __hash__ = None  # type: ignore[assignment]


class _Loop(Iterator[Message]):
    def __init__(self, run: _Run, first: int):
        self._run = run
        self._next = first

    def __next__(self) -> Message:
        caller: Any = sys._getframe(1)
        if caller.f_code is LoopContext.__next__.__code__:
            caller = caller.f_back
        run = self._run
        number = self._next
        run.look(number, in_loop=caller.f_code.co_name == "root")
        if number >= len(run.messages):
            raise StopIteration
        self._next += 1
        return run.messages[number]
