"""Lets transformers' Auto classes know our own models, without importing transformers before
somebody else does.

``install`` is called when chronicals is imported. It registers our classes (``AutoConfig.register``
and those of the models) when the modules of transformers that hold the tables have been imported,
and none of it is being imported: at once where that is so, else by a finder before Python's own,
which runs our function after the module's.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

logger = logging.getLogger(__name__)

CONFIGURATIONS = "transformers.models.auto.configuration_auto"
MODELS = "transformers.models.auto.modeling_auto"
OURS = "chronicals.moe"
WATCHED = ("transformers.", f"{OURS}.")
_waiting = {"configuration", "models"}


def install() -> None:
    """Register now, or as soon as that is possible. Calling it again changes nothing."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    _register()


def _register() -> None:
    """What can be registered by now; whoever imports transformers is not stopped by a failure of
    ours.
    """
    try:
        _register_what_is_there()
    except ImportError as error:
        _waiting.clear()
        logger.warning(
            "chronicals_moe: the Auto classes of transformers do not know this model: %s", error
        )


def _register_what_is_there() -> None:
    if any(_is_partial(name) for name in list(sys.modules) if name.startswith(WATCHED)):
        return  # ours may need it, and the next to be whole asks again
    if "configuration" in _waiting and CONFIGURATIONS in sys.modules:
        _waiting.discard("configuration")
        auto = sys.modules[CONFIGURATIONS]
        ours = importlib.import_module(f"{OURS}.configuration")
        auto.AutoConfig.register(
            ours.ChronicalsMoeConfig.model_type, ours.ChronicalsMoeConfig, exist_ok=True
        )
    if "models" in _waiting and MODELS in sys.modules:
        _waiting.discard("models")
        auto = sys.modules[MODELS]
        ours = importlib.import_module(f"{OURS}.model")
        auto.AutoModel.register(ours.ChronicalsMoeConfig, ours.ChronicalsMoeModel, exist_ok=True)
        auto.AutoModelForCausalLM.register(
            ours.ChronicalsMoeConfig, ours.ChronicalsMoeForCausalLM, exist_ok=True
        )
        scored = ours.ChronicalsMoeForSequenceClassification
        auto.AutoModelForSequenceClassification.register(
            ours.ChronicalsMoeConfig, scored, exist_ok=True
        )


def _is_partial(name: str) -> bool:
    """Whether the module is being imported right now."""
    module = sys.modules.get(name)
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


class _Finder(MetaPathFinder):
    """Finds what is watched as the other finders do, with a loader that registers afterwards."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not _waiting or not name.startswith(WATCHED):
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _After(spec.loader, _register)
                return spec
        return None


class _After(Loader):
    """A loader that calls ``then`` when its module has run."""

    def __init__(self, loader: Any, then: Callable[[], None]):
        self.loader = loader
        self.then = then

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        if spec is not None:  # as if we had not been there, for whoever reads it
            spec.loader = module.__loader__ = self.loader
        self.loader.exec_module(module)
        if spec is not None:
            spec._initializing = False  # type: ignore[attr-defined]  # it has run; Python itself says so just after us
        self.then()
