"""Fine-tune large language models as fast as the hardware allows, and prove that they trained."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from chronicals.auto_classes import register_auto_classes as _register_models
from chronicals.versions import check_versions as _check_versions

__version__ = "0.1.0"

if TYPE_CHECKING:
    from chronicals.config import ChronicalsConfig as ChronicalsConfig
    from chronicals.generation import load_trained as load_trained
    from chronicals.lora import LoRAConfig as LoRAConfig
    from chronicals.lora import apply_lora as apply_lora
    from chronicals.models import load_model as load_model
    from chronicals.patching import PatchReport as PatchReport
    from chronicals.patching import patch_model as patch_model
    from chronicals.patching import unpatch_model as unpatch_model
    from chronicals.patching.expert_offload import offload as offload
    from chronicals.training import Callback as Callback
    from chronicals.training import ChronicalsTrainer as ChronicalsTrainer
    from chronicals.training import TrainingResult as TrainingResult
    from chronicals.tuning import Tuner as Tuner

_HOME = {
    "Callback": "chronicals.training:Callback",
    "ChronicalsConfig": "chronicals.config:ChronicalsConfig",
    "ChronicalsTrainer": "chronicals.training:ChronicalsTrainer",
    "LoRAConfig": "chronicals.lora:LoRAConfig",
    "PatchReport": "chronicals.patching:PatchReport",
    "TrainingResult": "chronicals.training:TrainingResult",
    "Tuner": "chronicals.tuning:Tuner",
    "apply_lora": "chronicals.lora:apply_lora",
    "evaluate": "chronicals.training.run.evaluation:evaluate_data",
    "export": "chronicals.export:",
    "generate": "chronicals.generation:generate_answer",
    "load_model": "chronicals.models:load_model",
    "load_trained": "chronicals.generation:load_trained",
    "offload": "chronicals.patching.expert_offload:offload",
    "patch_model": "chronicals.patching:patch_model",
    "unpatch_model": "chronicals.patching:unpatch_model",
}
"""Module and attribute of each public name. ``export`` is the package of that name, which can be
called.
"""

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(
            f"module 'chronicals' has no attribute {name!r}; it offers {', '.join(__all__)}"
        )
    if name != "ChronicalsConfig":
        _check_versions()  # before anything of transformers is imported that an older one lacks
    module, _, attribute = _HOME[name].partition(":")
    home = import_module(module)
    return getattr(home, attribute) if attribute else home


def __dir__() -> list[str]:
    """Return the public names, so that tab completion offers them before they are imported."""
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])


_register_models()
