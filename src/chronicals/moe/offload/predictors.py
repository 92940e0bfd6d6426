"""Predictors by the names under which a call, a flag or a recipe asks for them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chronicals.moe.lookahead.predictor import SAID, WEIGHTS, ExpertPredictor
from chronicals.moe.offload.heads import FromHeads, check_fit
from chronicals.moe.offload.prediction import Predictor, Repeating
from chronicals.moe.routers import mixture_layers

LAST = "last"
"""Those that a layer chose last."""

NONE = "none"
"""None: copies begin when a layer has chosen."""

HEADS = "heads"
"""Those that the lookahead heads of a native model predict."""

NAMES = (LAST, NONE, HEADS)
"""Names of predictors; any other one is a folder with trained heads."""


@dataclass(frozen=True)
class NamedPredictor:
    """A predictor as it was asked for.

    Attributes:
        name: one of ``NAMES``, or a folder of ``chronicals moe predict-train``.
        field: how it is asked for, for messages: ``predictor`` or ``expert_predictor``. Two that
            differ in it alone are equal.
    """

    name: str
    field: str = dataclasses.field(default="predictor", compare=False)

    @property
    def words(self) -> str:
        """Name of the field and value, as messages begin."""
        return f"{self.field}={self.name!r}"

    def check_name(self) -> None:
        """Check that there is a predictor of that name, without a model.

        Raises:
            ValueError: it is neither one of ``NAMES`` nor a folder with heads.
        """
        files = (Path(self.name) / name for name in (SAID, WEIGHTS))
        if self.name not in NAMES and not all(file.exists() for file in files):
            raise ValueError(
                f"{self.words}: expected {', '.join(map(repr, NAMES))}, or a folder with trained "
                "heads (chronicals moe predict-train)"
            )

    def check(self, model: Any) -> None:
        """Check that there is a predictor of that name for a model.

        Raises:
            ValueError: there is none, or heads do not fit the model.
        """
        self.check_name()
        if self._has_heads:
            self._heads(model)

    def made(self, model: Any) -> Predictor | None:
        """Return the predictor for a model that is on its device; None for none.

        Raises:
            ValueError: as of ``check``.
        """
        self.check_name()
        if self._has_heads:
            return FromHeads(self._heads(model), model)
        return Repeating() if self.name == LAST else None

    def bytes(self, model: Any) -> int:
        """Return the bytes on the device beside the model: heads, and copies of the routers."""
        if not self._has_heads:
            return 0
        if self.name != HEADS:
            return (Path(self.name) / WEIGHTS).stat().st_size
        return sum(4 * layer.gate.numel() for layer in mixture_layers(model))

    @property
    def _has_heads(self) -> bool:
        return self.name not in (LAST, NONE)

    def _heads(self, model: Any) -> ExpertPredictor:
        """Return the heads of a folder, or a native model's own."""
        if self.name != HEADS:
            try:
                heads = ExpertPredictor.load(Path(self.name))
            except ValueError as error:
                raise ValueError(f"{self.words}: {error}") from None
        elif getattr(model.get_decoder(), "layer_ahead", None) is not None:
            heads = ExpertPredictor.within(model)
        else:
            raise ValueError(
                f"{self.words}: {type(model).__name__} has no heads of its own, as the native model "
                f"has; give a folder of chronicals moe predict-train, or {LAST!r}"
            )
        check_fit(heads, mixture_layers(model), model, self.words)
        return heads


def predictor_named(predictor: str | Path | Predictor | NamedPredictor | None) -> NamedPredictor:
    """Return how a predictor is asked for, given ``predictor=`` of ``chronicals.offload``.

    Raises:
        ValueError: there is none of this name.
    """
    if isinstance(predictor, NamedPredictor):
        named = predictor
    else:
        named = NamedPredictor(NONE if predictor is None else str(predictor))
    named.check_name()
    return named
