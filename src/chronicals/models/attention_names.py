"""Classes that ask by what name they attend: under a name they do not know they compute something else.

Sparse attention is chosen by a mask that such a class makes for ``("eager", "sdpa")``; for any other name it leaves the
choice to the implementation, which would have to know it. What hangs on ``"eager"`` alone a twin shows, which is eager.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from types import CodeType

from torch import nn
from transformers import PreTrainedModel

ATTRIBUTE, KNOWN = "_attn_implementation", "sdpa"


def who_asks(modules: Iterable[nn.Module]) -> str:
    """The class among those of ``modules`` whose code compares what it attends with to SDPA; empty if there is none."""
    return next((cls.__name__ for cls in dict.fromkeys(map(type, modules)) if _asks(cls)), "")


def _asks(cls: type) -> bool:
    own = [part for part in cls.__mro__ if part not in PreTrainedModel.__mro__]
    return any(ATTRIBUTE in code.co_names and _names(code, KNOWN) for part in own for code in _codes(part))


def _codes(cls: type) -> Iterator[CodeType]:
    for value in vars(cls).values():
        code = getattr(inspect.unwrap(getattr(value, "__func__", value)), "__code__", None)
        if isinstance(code, CodeType):
            yield code


def _names(code: CodeType, name: str) -> bool:
    return any(name == value or (isinstance(value, (tuple, frozenset)) and name in value) for value in code.co_consts)
