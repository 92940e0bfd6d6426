"""Register our models in transformers' Auto classes, without importing transformers.

``register_auto_classes`` is called when chronicals is imported. Our classes are registered as soon as
transformers' modules with the tables are imported and none of its modules is being imported. If
that is not so yet, an import hook (a finder in front of Python's own) registers them after a module
has run.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

logger = logging.getLogger(__name__)

_CONFIGURATION_TABLES = "transformers.models.auto.configuration_auto"
_MODEL_TABLES = "transformers.models.auto.modeling_auto"
_OUR_MODELS = "chronicals.moe"
_WATCHED_PREFIXES = ("transformers.", f"{_OUR_MODELS}.")

_waiting = {"configuration", "models"}
"""Tables in which our classes are not registered yet."""


def register_auto_classes() -> None:
    """Register our classes now, or as soon as possible. Calling it again changes nothing."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    _register()


def _register() -> None:
    """Register what can be registered now.

    A failure is logged and does not stop the import of transformers.
    """
    for name, module in list(sys.modules.items()):
        spec = getattr(module, "__spec__", None) if name.startswith(_WATCHED_PREFIXES) else None
        if getattr(spec, "_initializing", False):
            return  # our modules may need it; the next module that has run tries again
    try:
        if "configuration" in _waiting and _CONFIGURATION_TABLES in sys.modules:
            _waiting.discard("configuration")
            auto = sys.modules[_CONFIGURATION_TABLES]
            ours = importlib.import_module(f"{_OUR_MODELS}.configuration")
            auto.AutoConfig.register(
                ours.ChronicalsMoeConfig.model_type, ours.ChronicalsMoeConfig, exist_ok=True
            )
        if "models" in _waiting and _MODEL_TABLES in sys.modules:
            _waiting.discard("models")
            auto = sys.modules[_MODEL_TABLES]
            ours = importlib.import_module(f"{_OUR_MODELS}.model")
            config = ours.ChronicalsMoeConfig
            auto.AutoModel.register(config, ours.ChronicalsMoeModel, exist_ok=True)
            auto.AutoModelForCausalLM.register(config, ours.ChronicalsMoeForCausalLM, exist_ok=True)
            auto.AutoModelForSequenceClassification.register(
                config, ours.ChronicalsMoeForSequenceClassification, exist_ok=True
            )
    except ImportError as error:
        _waiting.clear()
        logger.warning(
            "chronicals_moe: the Auto classes of transformers do not know this model: %s", error
        )


class _Finder(MetaPathFinder):
    """Finder that wraps the loaders of watched modules, to register after they have run."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not _waiting or not name.startswith(_WATCHED_PREFIXES):
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _After(spec.loader)
                return spec
        return None


class _After(Loader):
    """A loader that registers our classes when its module has run."""

    def __init__(self, loader: Any):
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        if spec is not None:  # hide this loader from code that reads the spec
            spec.loader = module.__loader__ = self.loader
        self.loader.exec_module(module)
        if spec is not None:
            # The module has run; Python itself notes that only after this method.
            spec._initializing = False  # type: ignore[attr-defined]
        _register()
