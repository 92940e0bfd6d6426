"""Fine-tune large language models as fast as the hardware allows, and prove that they really trained."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from chronicals.auto_classes import install as _register_models

__version__ = "0.1.0"

if TYPE_CHECKING:
    from chronicals.config import ChronicalsConfig as ChronicalsConfig
    from chronicals.lora import LoRAConfig as LoRAConfig
    from chronicals.lora import apply_lora as apply_lora
    from chronicals.patching import PatchReport as PatchReport
    from chronicals.patching import patch_model as patch_model
    from chronicals.patching import unpatch_model as unpatch_model
    from chronicals.training import ChronicalsTrainer as ChronicalsTrainer

_HOME = {
    "ChronicalsConfig": "chronicals.config",
    "ChronicalsTrainer": "chronicals.training",
    "LoRAConfig": "chronicals.lora",
    "PatchReport": "chronicals.patching",
    "apply_lora": "chronicals.lora",
    "patch_model": "chronicals.patching",
    "unpatch_model": "chronicals.patching",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'chronicals' has no attribute {name!r}; it offers {', '.join(__all__)}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    """The public names, so that tab completion offers them before they are imported."""
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])


_register_models()
