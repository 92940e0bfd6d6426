"""Fine-tune large language models as fast as the hardware allows, and prove that they really trained."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from chronicals.config import ChronicalsConfig as ChronicalsConfig
    from chronicals.lora import LoRAConfig as LoRAConfig
    from chronicals.lora import apply_lora as apply_lora
    from chronicals.training import ChronicalsTrainer as ChronicalsTrainer

_HOME = {
    "ChronicalsConfig": "chronicals.config",
    "ChronicalsTrainer": "chronicals.training",
    "LoRAConfig": "chronicals.lora",
    "apply_lora": "chronicals.lora",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'chronicals' has no attribute {name!r}; it offers {', '.join(__all__)}")
    return getattr(import_module(_HOME[name]), name)
