"""Predict the experts of a mixture, with its own or with distilled heads, and measure the recall.

The recall is the share of the chosen experts that were predicted.

On disk: ``predictor.safetensors`` (the heads, and copies of the routers they build on) and
``predictor.json``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from chronicals.moe.lookahead.choosing import Choice
from chronicals.moe.lookahead.heads import LayerAhead, TokenAhead
from chronicals.moe.lookahead.recording import Recorded
from chronicals.moe.routers import mixture_layers
from chronicals.standard_json import to_json

WEIGHTS = "predictor.safetensors"
SAID = "predictor.json"
_VERSION = 2
PLAIN = Choice()


@dataclass(frozen=True)
class HeadSizes:
    """Sizes of the heads.

    Attributes:
        furthest: the largest distance in layers.
        tokens: the largest distance in tokens; 0 for no token-ahead head.
        rank: rank of the layer-ahead heads, and width of the token-ahead head.
    """

    furthest: int = 3
    tokens: int = 2
    rank: int = 64

    def __post_init__(self) -> None:
        for name, least in (("furthest", 0), ("tokens", 0), ("rank", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least {least}")


class ExpertPredictor(nn.Module):
    """Predictor of the experts of L layers.

    Args:
        gates: ``[E, D]``, the router weight of each layer; copied and not trained.
        biases: ``[E]`` or None for each layer, the router biases.
        choice: the rule by which the routers choose experts.
        corrections: ``[E]`` or None for each layer, the score corrections.
    """

    gates: Tensor
    biases: Tensor
    corrections: Tensor

    def __init__(
        self,
        gates: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        sizes: HeadSizes,
        choice: Choice = PLAIN,
        corrections: Sequence[Tensor | None] = (),
    ):
        super().__init__()
        self.sizes = sizes
        self.choice = choice
        self.register_buffer("gates", torch.stack([gate.detach().float() for gate in gates]))
        for name, given in (
            ("biases", biases),
            ("corrections", corrections or [None] * len(gates)),
        ):
            found = [
                gates[0].new_zeros(len(gates[0])) if values is None else values.detach()
                for values in given
            ]
            self.register_buffer(name, torch.stack([values.float() for values in found]))
        layers, experts, width = self.gates.shape
        self.layer_ahead = LayerAhead(layers, width, experts, sizes.furthest, sizes.rank)
        self.token_ahead = (
            TokenAhead(layers, width, experts, sizes.tokens, sizes.rank) if sizes.tokens else None
        )

    @classmethod
    def beside(cls, model: Any, sizes: HeadSizes, choice: Choice = PLAIN) -> Self:
        """Create new heads for ``model`` on its device; at first they predict by gate reuse.

        Args:
            model: a mixture-of-experts model.
            sizes: sizes of the heads.
            choice: the rule by which its routers choose, from ``Choice.found``.
        """
        layers = mixture_layers(model)
        corrections = [layer.correction if choice.corrected else None for layer in layers]
        made = cls(
            [layer.gate for layer in layers],
            [layer.bias for layer in layers],
            sizes,
            choice,
            corrections,
        )
        return made.to(layers[0].gate.device)

    @classmethod
    def within(cls, model: Any) -> Self:
        """Wrap the heads of a native model; the parameters are shared with it."""
        decoder = model.get_decoder()
        config = model.config
        made = cls.beside(
            model,
            HeadSizes(config.lookahead_layers or 0, config.lookahead_tokens, config.lookahead_rank),
        )
        if decoder.layer_ahead is not None:
            made.layer_ahead = decoder.layer_ahead
        made.token_ahead = decoder.token_ahead
        return made

    def layers(self, layer: int, features: Tensor) -> Tensor:
        """Predict the logits of layer ``layer`` and the n - 1 after it, ``[..., n, E]``.

        Args:
            layer: index of the layer that predicts.
            features: ``[..., D]``, the normed input of layer ``layer``.
        """
        return self.layer_ahead(layer, features, self.gates.unbind(), self.biases.unbind())

    def reuse(self, layer: int, features: Tensor) -> Tensor:
        """Predict like ``layers``, but by gate reuse only."""
        n = self.layer_ahead.distances(layer)
        x = features.to(self.gates.dtype)
        return (
            torch.einsum("...d,ned->...ne", x, self.gates[layer : layer + n])
            + self.biases[layer : layer + n]
        )

    def tokens(self, hidden: Tensor, next_embedding: Tensor) -> Tensor:
        """Predict the logits of all layers for the next K tokens, ``[..., K, L, E]``.

        Args:
            hidden: ``[..., D]``, the last hidden state of a token.
            next_embedding: ``[..., D]``, the embedding of the token after it.

        Raises:
            ValueError: there is no token-ahead head.
        """
        if self.token_ahead is None:
            raise ValueError("tokens=0: there is no head that predicts the experts of later tokens")
        return self.token_ahead(hidden, next_embedding)

    def save(self, folder: Path, about: Mapping[str, Any]) -> None:
        """Write the heads and ``predictor.json`` to ``folder``.

        Args:
            folder: created if missing.
            about: further entries of ``predictor.json``, such as the training data and the recalls.
        """
        folder.mkdir(parents=True, exist_ok=True)
        save_file(
            {name: value.cpu().contiguous() for name, value in self.state_dict().items()},
            folder / WEIGHTS,
        )
        sizes: dict[str, int] = {
            name: getattr(self.sizes, name) for name in ("furthest", "tokens", "rank")
        }
        shape = dict(zip(("layers", "num_experts", "hidden_size"), self.gates.shape))
        said = {"version": _VERSION, **shape, **sizes, "choice": asdict(self.choice), **about}
        (folder / SAID).write_text(to_json(said, indent=1))

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Load the heads from ``folder``.

        Raises:
            ValueError: there is no predictor, or one of another version.
        """
        try:
            said = json.loads((folder / SAID).read_text())
            weights = load_file(folder / WEIGHTS)
        except (OSError, json.JSONDecodeError, SafetensorError) as error:
            raise ValueError(
                f"{folder}: no predictor is there ({error}); make one with chronicals moe "
                "predict-train"
            ) from None
        if said.get("version") != _VERSION:
            raise ValueError(
                f"{folder / SAID}: version {said.get('version')}, known is {_VERSION}; train the "
                "heads again"
            )
        sizes = HeadSizes(said["furthest"], said["tokens"], said["rank"])
        made = cls(
            weights["gates"].unbind(), [None] * said["layers"], sizes, Choice(**said["choice"])
        )
        made.load_state_dict(weights)
        return made


@dataclass
class Recalls:
    """Mean recalls over the tokens of recordings.

    Attributes:
        k: experts per token.
        layer_ahead, layer_ahead_2k: recall among the first k and 2k experts that heads predict, by
            layer and distance.
        gate_reuse: the same among the first k that gate reuse predicts.
        token_ahead: by distance in tokens and layer; empty without such a head.
        tokens: number of tokens measured.
    """

    k: int
    layer_ahead: list[list[float]] = field(default_factory=list)
    layer_ahead_2k: list[list[float]] = field(default_factory=list)
    gate_reuse: list[list[float]] = field(default_factory=list)
    token_ahead: list[list[float]] = field(default_factory=list)
    tokens: int = 0

    def at(self, distance: int, name: str = "layer_ahead") -> list[float]:
        """Return the recalls at ``distance``, one for each layer that predicts so far ahead."""
        return [row[distance] for row in getattr(self, name) if len(row) > distance]

    def mean(self, distance: int, name: str = "layer_ahead") -> float:
        """Return the mean of the recalls at ``distance`` over the layers."""
        found = self.at(distance, name)
        return sum(found) / len(found)


@torch.no_grad()
def measure_recalls(predictor: ExpertPredictor, recordings: Iterable[Recorded], k: int) -> Recalls:
    """Measure the recalls of ``predictor`` on recordings with features.

    Raises:
        ValueError: the recordings hold no token.
    """
    sums = dict[tuple[str, int, int], Tensor]()
    counts = dict[tuple[str, int, int], int]()
    tokens = 0
    rule = predictor.choice

    def add(key: tuple[str, int, int], hit: Tensor) -> None:
        sums[key] = sums.get(key, torch.zeros((), device=hit.device)) + hit.sum()
        counts[key] = counts.get(key, 0) + len(hit)

    for recorded in recordings:
        tokens += len(recorded)
        recorded = recorded.to(predictor.gates.device)
        assert recorded.features is not None
        for layer, features in enumerate(recorded.features):
            heads = predictor.layers(layer, features)
            early = predictor.reuse(layer, features)
            for d in range(heads.shape[1]):
                aim = recorded.experts[layer + d]
                ours, theirs = (
                    rule.order(logits[:, d], predictor.corrections[layer + d])
                    for logits in (heads, early)
                )
                add(("layer_ahead", layer, d), hits(ours, aim, k))
                add(("layer_ahead_2k", layer, d), hits(ours, aim, min(2 * k, heads.shape[-1])))
                add(("gate_reuse", layer, d), hits(theirs, aim, k))
        if predictor.token_ahead is None:
            continue
        assert recorded.hidden is not None and recorded.embeddings is not None
        ahead = predictor.tokens(recorded.hidden[:-1], recorded.embeddings[1:])
        for distance in range(1, ahead.shape[1] + 1):
            there = recorded.follows(distance)
            for layer in range(ahead.shape[2]):
                logits = ahead[: len(recorded) - distance, distance - 1, layer]
                ours = rule.order(logits, predictor.corrections[layer])
                hit = hits(ours, recorded.experts[layer, distance:], k)
                add(("token_ahead", distance - 1, layer), hit[there])
    if not tokens:
        raise ValueError("there is no token to measure predictions on; give more data")
    found = Recalls(k, tokens=tokens)
    rows = dict[tuple[str, int], list[float]]()
    for name, row, column in sorted(sums):
        total = sums[name, row, column]
        if (name, row) not in rows:
            rows[name, row] = []
            getattr(found, name).append(rows[name, row])
        rows[name, row].append(float(total) / max(counts[name, row, column], 1))
    return found


def hits(predicted: Tensor, experts: Tensor, among: int) -> Tensor:
    """Return the share of the chosen experts that are among the first ``among`` predicted, ``[T]``.

    Args:
        predicted: ``[T, E]``; the largest are predicted first.
        experts: int64 ``[T, k]``, the chosen experts.
        among: number of experts that count as predicted.
    """
    first = predicted.topk(among, dim=-1).indices
    return (experts[..., None] == first[..., None, :]).any(-1).float().mean(-1)
