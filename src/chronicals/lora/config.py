"""LoRAConfig: targets, ranks and kind of adapters."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from chronicals.config.foreign import suggests_fields
from chronicals.config.values import INITS, is_init


@suggests_fields
@dataclass(frozen=True)
class LoRAConfig:
    """Low-rank adaptation (Hu et al., 2021, section 4.1): ``y = W x + s · B (A dropout(x))``.

    Attributes:
        rank: r, the rows of A and columns of B.
        alpha: ``s = alpha / rank``; with ``use_rslora`` ``alpha / sqrt(rank)`` (Kalajdzievski,
            2023, theorem 3.2).
        dropout: probability with which an input of A is dropped in training.
        target_modules: names of linear layers (the last parts of their path), one regular
            expression for the whole path, or None for every linear layer but the head; the input
            embedding is adapted where it is named.
        target_parameters: names of parameters that are adapted by themselves, such as the weights
            of all experts of a layer in one tensor: the last parts of their path
            (``mlp.experts.down_proj``). With them ``target_modules`` may be empty.
        rank_pattern, alpha_pattern: ranks and alphas of some layers, by the end of their path or a
            regular expression for it, as PEFT reads them; the first that matches counts.
        layers: numbers of the decoder layers whose targets are adapted; None for all.
        use_dora: whether each row of the adapted weight has a trained length (Liu et al., 2024;
            ``magnitude.py``).
        init: where A and B start: ``default`` (A uniform, B zero), ``gaussian``, ``pissa``,
            ``pissa_niter_N`` or ``olora``, see ``starting_values``; or ``loftq``, see ``loftq.py``.
        trainable_token_indices: ids of tokens whose rows of the embedding are trained, and of the
            head where that is one weight with it; or lists of them by the names of embedding and
            head (``tokens.py``).
        modules_to_save: names of the embedding, the head, and heads that predict experts, if they
            are to be trained whole and saved with the adapters.
    """

    rank: int = 64
    alpha: float = 16
    dropout: float = 0.05
    target_modules: list[str] | str | None = None
    use_rslora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    layers: Collection[int] | None = None
    use_dora: bool = False
    init: str = "default"
    modules_to_save: Collection[str] | None = None
    trainable_token_indices: Sequence[int] | Mapping[str, Sequence[int]] | None = None
    target_parameters: Collection[str] | None = None

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank={self.rank}: must be at least 1")
        if self.alpha <= 0:
            raise ValueError(f"alpha={self.alpha}: must be positive")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout}: must be at least 0 and below 1")
        if not is_init(self.init):
            raise ValueError(f"init={self.init!r}: {INITS}")
        if self.use_dora and self.takes_from_weights:
            raise ValueError(
                f"use_dora=True with init={self.init!r}: lengths are of whole weights; leave one "
                "out"
            )
        if isinstance(self.target_parameters, str):
            raise ValueError(
                f"target_parameters={self.target_parameters!r}: give a list of names, also for one"
            )
        if self.target_parameters:
            # as in PEFT: such an adapter has no input of its own and no rows with a length
            for value, name, remedy in (
                (self.dropout, "dropout", "set dropout=0"),
                (self.use_dora, "use_dora", "leave use_dora out"),
                (self.takes_from_weights, "init", "leave init out"),
            ):
                if value:
                    raise ValueError(
                        f"{name}={getattr(self, name)!r} with "
                        f"target_parameters={list(self.target_parameters)!r}: adapters of "
                        f"parameters have none; {remedy}, or adapt linear layers alone "
                        "(target_modules)"
                    )
        elif self.target_modules == []:
            raise ValueError(
                "lora_target_modules='none': nothing would be trained; name layers, or leave it "
                "out for all linear ones"
            )
        for name, least in (("rank_pattern", 1), ("alpha_pattern", 0)):
            for key, value in getattr(self, name).items():
                if value < least or value == 0:
                    raise ValueError(
                        f"{name}: {key}={value}: must be {'at least 1' if least else 'positive'}"
                    )
                try:
                    re.compile(key)
                except re.error as error:
                    raise ValueError(f"{name}: {key!r} is no regular expression: {error}") from None

    @property
    def scale(self) -> float:
        """Factor s of the product ``B A``, without patterns."""
        return self.alpha / (self.rank**0.5 if self.use_rslora else self.rank)

    @property
    def takes_from_weights(self) -> bool:
        """True if adapters start with a part of the base's weights."""
        return self.init not in ("default", "gaussian", "loftq")

    def at(self, path: str) -> LoRAConfig:
        """Return the configuration of the layer at ``path``, with its rank and no patterns."""
        ranks = [rank for key, rank in self.rank_pattern.items() if _matches(key, path)]
        alphas = [alpha for key, alpha in self.alpha_pattern.items() if _matches(key, path)]
        rank = ranks[0] if ranks else self.rank
        alpha = alphas[0] if alphas else self.alpha
        return replace(self, rank=rank, alpha=alpha, rank_pattern={}, alpha_pattern={})

    def fitted(self, paths: Collection[str]) -> LoRAConfig:
        """Return the configuration without the keys of patterns that match none of these paths."""
        used = set()
        for key in (*self.rank_pattern, *self.alpha_pattern):
            if any(_matches(key, path) for path in paths):
                used.add(key)
        ranks = {key: rank for key, rank in self.rank_pattern.items() if key in used}
        alphas = {key: alpha for key, alpha in self.alpha_pattern.items() if key in used}
        return replace(self, rank_pattern=ranks, alpha_pattern=alphas)


def _matches(key: str, path: str) -> bool:
    """Return whether the key of a pattern is the end of a path or matches it.

    The rule is that of ``peft.utils.other.get_pattern_key``.
    """
    return re.match(rf"(.*\.)?({key})$", path) is not None
