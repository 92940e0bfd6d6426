"""LoRAConfig: the shape of the adapters."""

from __future__ import annotations

from dataclasses import dataclass

from chronicals.config.foreign import suggests_fields


@suggests_fields
@dataclass(frozen=True)
class LoRAConfig:
    """Low-rank adaptation (Hu et al., 2021, section 4.1): ``y = W x + s · B (A dropout(x))``.

    Attributes:
        rank: r, the rows of A and columns of B.
        alpha: ``s = alpha / rank``; with ``use_rslora`` ``alpha / sqrt(rank)`` (Kalajdzievski, 2023, theorem 3.2).
        dropout: probability with which an input of A is dropped in training.
        target_modules: names of linear layers (the last parts of their path), one regular expression for the whole
            path, or None for every linear layer but the head.
    """

    rank: int = 64
    alpha: float = 16
    dropout: float = 0.05
    target_modules: list[str] | str | None = None
    use_rslora: bool = False

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank={self.rank}: must be at least 1")
        if self.alpha <= 0:
            raise ValueError(f"alpha={self.alpha}: must be positive")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout}: must be at least 0 and below 1")

    @property
    def scale(self) -> float:
        return self.alpha / (self.rank**0.5 if self.use_rslora else self.rank)
