"""The native mixture-of-experts model, router losses, and expert prediction for any mixture."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chronicals.moe.configuration import ChronicalsMoeConfig as ChronicalsMoeConfig
    from chronicals.moe.model import ChronicalsMoeForCausalLM as ChronicalsMoeForCausalLM
    from chronicals.moe.model import (
        ChronicalsMoeForSequenceClassification as ChronicalsMoeForSequenceClassification,
    )
    from chronicals.moe.model import ChronicalsMoeModel as ChronicalsMoeModel
    from chronicals.moe.model import Lookahead as Lookahead

_HOME = {
    "ChronicalsMoeConfig": "configuration",
    "ChronicalsMoeForCausalLM": "model",
    "ChronicalsMoeForSequenceClassification": "model",
    "ChronicalsMoeModel": "model",
    "Lookahead": "model",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    """Import ``name`` on first use, so that reading a configuration does not import the model."""
    if name not in _HOME:
        raise AttributeError(
            f"module 'chronicals.moe' has no attribute {name!r}; it offers {', '.join(__all__)}"
        )
    return getattr(import_module(f"chronicals.moe.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
