"""The plain arms: a run computed by transformers and torch alone, as a reference.

Each document is a row, attention is that of transformers, and the loss is divided once by the
counts of the step. Nothing is shared with the training path:

- The model and the objective's frozen models are created anew from their class and configuration.
- Adapters are two products in a hook, or one in the weight if a class reads the weight instead of
  calling the layer.
- The loss is the objective's definition, from the model's own logits in fp32.
- The update is torch's AdamW, with learning rates from the definition of the schedule.
- Documents and their trained tokens come from the store, not from a Batch.
- If the configuration asks for a router loss, the class computes it, with each pack's documents as
  the padded rows of one batch.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from chronicals.config import ChronicalsConfig, ConfigurationError
from chronicals.models import SCORE, beside_text, is_within, score_of
from chronicals.models.classifier import classifier_of
from chronicals.models.router_loss import SWITCH, asks_for_router_loss, read_router_loss
from chronicals.objectives import Objective, ScoredDocument
from chronicals.objectives.terms import AnswerFacts
from chronicals.quantization import packed_experts
from chronicals.verification.comparison import plain_name
from chronicals.verification.plain_adapters import PlainAdapters, adapter_fields
from chronicals.verification.quantised import (
    dense_weight,
    multiply_as,
    quantised_layers,
    weights_of_experts,
)

ROW_TOKENS = 4096
LOGITS = 2**28
"""Limits of a forward pass: tokens of padded rows, and elements of logits.

Logits and attention weights of all these tokens exist at once. A single document is never split.
"""


class MaskedDocument(NamedTuple):
    """A single document, with the prompt that it shares with others in front.

    Attributes:
        ids, trained: as ``TokenStore.whole_document`` returns them.
        side, label: values of these columns of the store.
        answer: of an answer that the model has drawn.
    """

    ids: np.ndarray
    trained: np.ndarray
    side: int = 0
    label: int = -1
    answer: AnswerFacts | None = None


Item = list[MaskedDocument]


def count_targets(document: MaskedDocument) -> int:
    """Return the number of trained tokens, without the first, which nothing predicts."""
    return int(document.trained[1:].sum())


def count_items(packs: Sequence[Sequence[Item]]) -> dict[str, int]:
    """Return the counts that a step's sums are divided by, computed anew from its items.

    The names are those of ``Step.counts``.
    """
    items = [item for pack in packs for item in pack]
    firsts = []
    for item in items:
        firsts.append(next(document for document in item if document.side == 0))
    targets = sum(count_targets(document) for item in items for document in item)
    good = sum(d.label == 1 for d in firsts)
    # Answers to another prompt, stored with a judged answer.
    mismatched = sum(d.side == 1 and d.label >= 0 for item in items for d in item)
    return {
        "targets": targets,
        "weight": targets,
        "first_targets": sum(count_targets(document) for document in firsts),
        "items": len(items),
        "good_items": good,
        "bad_items": len(items) - good,
        "packs": len(packs),
        "mismatched_items": mismatched,
    }


class PlainArm:
    """A plain transformers model, with plain adapters if the run has adapters.

    Args:
        model: the user's model, before the run changes it; its class, configuration and weights are
            used.
        device: where to compute.
        config: configuration of the run; its LoRA fields say what is adapted.
        objective: objective of the run; its definition is minimised.
        alone: if true, each document has its own forward pass, instead of padded rows.
        usual_attention: if true, use transformers' default attention instead of eager. On a GPU it
            does not store the scores, so it rounds at the same places as every fused attention.

    Raises:
        ConfigurationError: the class cannot be created with eager attention, or a quantised layer
            does more than multiply by a weight.

    Attributes:
        pad_token_id: of a reward model, whose class takes the score of the last token that is not
            padding; None for a language model.
    """

    pad_token_id: int | None = None

    def __init__(
        self,
        model: Any,
        device: torch.device,
        config: ChronicalsConfig,
        objective: Objective,
        alone: bool = False,
        usual_attention: bool = False,
    ):
        self.device = device
        self.alone = alone
        self.objective = objective
        self.usual_attention = usual_attention
        self.model = _fresh(model, device, usual_attention)
        self.frozen: dict[str, nn.Module] = {}
        self.router_loss = (
            read_router_loss(model).coefficient if asks_for_router_loss(model) else 0.0
        )
        self.trained: dict[str, nn.Parameter] = {}
        self.autocast: torch.dtype | None = None
        score = score_of(model)
        if score is not None:
            self.pad_token_id = score.pad_token_id
            if self.router_loss:
                raise ConfigurationError(
                    f"objective='reward': {type(model).__name__} adds a router loss, and "
                    "transformers' classifier has none to "
                    f"compare with; load the model with {SWITCH}=False"
                )
        if config.use_lora or hasattr(model, "chronicals_lora"):
            adapters = PlainAdapters(self.model, device)
            fields = adapter_fields(model, config)
            whole = [*(fields["modules_to_save"] or ()), *([] if score is None else [SCORE])]
            adapters.attach({**fields, "modules_to_save": whole})
            self.trained = adapters.trained
        else:
            towers = beside_text(model)
            asked = {
                name: p.requires_grad and not is_within(name, towers)
                for name, p in model.named_parameters()
            }
            for name, parameter in self.model.named_parameters():
                parameter.requires_grad_(asked[name])
                if asked[name]:
                    self.trained[name] = parameter
        self.model.train()
        if device.type == "cuda" and getattr(self.model, "supports_gradient_checkpointing", False):
            self.model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )

    def take_frozen(self, frozen: Mapping[str, Any], own_types: bool) -> None:
        """Create the objective's frozen models anew.

        Args:
            frozen: transformers models by name.
            own_types: if true, keep their dtypes instead of fp32.

        Raises:
            ConfigurationError: one has adapters, or cannot be created with eager attention.
        """
        for name, model in frozen.items():
            if any("lora_" in path for path, _ in model.named_parameters()):
                raise ConfigurationError(
                    f"{name}: has adapters, which the plain arms would leave out; verify with the "
                    "whole model that chronicals "
                    "merge makes of it"
                )
            plain = _fresh(model, self.device, self.usual_attention)
            if own_types:
                take_types(plain, model)
            self.frozen[name] = plain.eval().requires_grad_(False)

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Copy fp32 values into the trained weights; weights that are not given stay unchanged."""
        for name, parameter in self.trained.items():
            if name in weights:
                parameter.copy_(weights[name])

    def differentiate(
        self, packs: Sequence[Sequence[Item]], counts: Mapping[str, float], scale: float = 1.0
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Run forward and backward over a whole step.

        Args:
            packs: the items of each pack.
            counts: counts of the step, by name.
            scale: loss scale (fp16).

        Returns:
            Each item's part of the loss, with its part of the router loss, times the number of
            targets of the step, float64 ``[items]`` on the host; and the gradients by name, in
            their own dtype, without the loss scale.
        """
        items = [item for pack in packs for item in pack]
        found = torch.zeros(len(items), dtype=torch.float64)
        known = self._known(items, counts)
        lengths = []
        for item in items:
            lengths.append(max(len(document.ids) for document in item))
        order = sorted(range(len(items)), key=lambda row: -lengths[row])
        tokens = min(ROW_TOKENS, LOGITS // self.model.get_input_embeddings().weight.shape[0])
        while order:
            # As many items as the limits allow when they are padded to the longest.
            many = 1 if self.alone else max(1, tokens // lengths[order[0]])
            rows = order[:many]
            order = order[many:]
            of_items = []
            with self._products():
                for scored in self._scored([items[row] for row in rows]):
                    terms = self.objective.item_definition(scored, known).values()
                    parts = [
                        term.coefficient * term.sum / (counts[term.per] or 1)
                        for term in terms
                        if term.coefficient
                    ]
                    of_items.append(torch.stack(parts).sum())
                losses = torch.stack(of_items)
            (losses.sum() * scale).backward()
            found[rows] = losses.detach().double().cpu() * counts["targets"]
        if self.router_loss:
            found += self._router_losses(packs, scale) * counts["targets"] / len(items)
        gradients = {name: p.grad for name, p in self.trained.items() if p.grad is not None}
        for parameter in self.trained.values():
            parameter.grad = None
        if scale != 1.0:
            gradients = {name: gradient.float() / scale for name, gradient in gradients.items()}
        return found, gradients

    @torch.no_grad()
    def _known(self, items: Sequence[Item], counts: Mapping[str, float]) -> dict[str, Tensor]:
        """Return what the objective must know of the whole step, ``[1]`` by name."""
        if type(self.objective).known_definition is Objective.known_definition:
            return {}
        sums: dict[str, Tensor] = {}
        for item in items:
            with self._products():
                (scored,) = self._scored([item])
                found = self.objective.known_definition(scored)
            for name, term in found.items():
                sums[name] = sums.get(name, 0.0) + term.sum / (counts[term.per] or 1)
        return {name: total[None] for name, total in sums.items()}

    def _router_losses(self, packs: Sequence[Sequence[Item]], scale: float) -> float:
        """Backpropagate the class's own router loss, averaged over packs, and return its value."""
        value = 0.0
        for pack in packs:
            counted = []
            for document in (document for item in pack for document in item):
                is_mismatched = document.side == 1 and document.label >= 0
                if not is_mismatched and count_targets(document):
                    counted.append(document)
            if counted:
                ids, mask, _ = self._rows(counted)
                with self._products():
                    out = self.model(
                        input_ids=ids,
                        attention_mask=mask,
                        use_cache=False,
                        output_router_logits=True,
                        logits_to_keep=1,
                    )
                if (
                    out.get("aux_loss") is None
                ):  # the configuration has the fields, the class no such loss
                    return 0.0
                loss = out.aux_loss * (self.router_loss / len(packs))
                (loss * scale).backward()
                value += float(loss.detach())
        return value

    def _rows(self, documents: list[MaskedDocument]) -> tuple[Tensor, Tensor, Tensor]:
        """Return token ids, attention mask and a bool mask of trained tokens, a row a document."""
        width = max(len(document.ids) for document in documents)
        ids = torch.full((len(documents), width), self.pad_token_id or 0)
        mask = torch.zeros_like(ids)
        trained = torch.zeros(len(documents), width, dtype=torch.bool)
        for row, (tokens, marks, *_) in enumerate(documents):
            ids[row, : len(tokens)] = torch.from_numpy(tokens.astype(np.int64))
            trained[row, 1 : len(tokens)] = torch.from_numpy(marks[1:].astype(bool))
            mask[row, : len(tokens)] = 1
        return ids.to(self.device), mask.to(self.device), trained.to(self.device)

    def _scored(self, items: list[Item]) -> list[list[ScoredDocument]]:
        """Run the documents of some items in one forward pass."""
        documents = [document for item in items for document in item]
        ids, mask, trained = self._rows(documents)
        logits = self.model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        scored = []
        if self.pad_token_id is not None:  # the class gives scores [N, 1]
            nothing = logits.new_zeros(0, 0)
            for document, score in zip(documents, logits.float().squeeze(-1).unbind()):
                one = ScoredDocument(nothing, nothing, {}, document.side, document.label, score)
                scored.append(one)
        else:
            with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
                frozen = {
                    name: model(input_ids=ids, attention_mask=mask, use_cache=False).logits
                    for name, model in self.frozen.items()
                }
            for row, document in enumerate(documents):
                at = trained[row, 1:]
                targets = ids[row, 1:][at]
                theirs = {name: other[row, :-1][at] for name, other in frozen.items()}
                one = ScoredDocument(
                    logits[row, :-1][at],
                    targets,
                    theirs,
                    document.side,
                    document.label,
                    answer=document.answer,
                )
                scored.append(one)
        rest = iter(scored)
        by_item = []
        for item in items:
            by_item.append([next(rest) for _ in item])
        return by_item

    def _products(self) -> AbstractContextManager:
        if not self.autocast:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.autocast)


def take_types(plain: nn.Module, model: Any) -> None:
    """Cast every weight of ``plain`` to its dtype in ``model``.

    Quantised ones get the dtype of their products.
    """
    types = {plain_name(name): parameter.dtype for name, parameter in model.named_parameters()}
    for path, experts in packed_experts(model):
        path = plain_name(path)
        types |= {f"{path}.{name}": experts.dtype for name in experts.stacked}
    quantised = quantised_layers(model)
    for name, parameter in plain.named_parameters():
        name = name.replace("parametrizations.weight.original", "weight")
        if name.removesuffix(".weight") not in quantised:
            parameter.data = parameter.data.to(types[name])
    for path, layer in quantised.items():
        multiply_as(layer, plain.get_submodule(path))


def _fresh(model: Any, device: torch.device, usual_attention: bool) -> Any:
    """Return a model of the same class, configuration and weights in fp32, without dropout.

    Attention is eager, or SDPA if the usual one is asked for and the class has it. For a model with
    a score, the class is the classifier.
    """
    # SDPA omits the cap on attention scores that some classes have.
    capped = getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None
    sdpa = usual_attention and bool(getattr(model, "_supports_sdpa", False)) and not capped
    score = score_of(model)
    kind, config = (
        (type(model), copy.deepcopy(model.config)) if score is None else classifier_of(model)
    )
    config._attn_implementation = "sdpa" if sdpa else "eager"
    config._experts_implementation = "eager"
    try:
        with torch.device(device):
            fresh = kind(config).float()
    except (TypeError, ValueError, NotImplementedError) as error:
        raise ConfigurationError(
            f"model: {type(model).__name__} cannot be made with eager attention ({error}), which "
            "the plain arms need; "
            "verify a model of the same family that can"
        ) from error
    without_dropout(fresh)
    if score is not None:
        # Else the token of padding has no gradient where an answer has it.
        fresh.get_input_embeddings().padding_idx = None
    weights = {
        plain_name(name): tensor
        for name, tensor in model.state_dict().items()
        if ".lora_" not in name
    }
    quantised = quantised_layers(model)
    for path in quantised:  # of which a state dictionary has the format, too
        weights = {
            name: x
            for name, x in weights.items()
            if not name.startswith(f"{path}.") or name == f"{path}.bias"
        }
    for path, experts in packed_experts(model):
        path = plain_name(path)
        weights = {name: x for name, x in weights.items() if not name.startswith(f"{path}.")}
        weights |= weights_of_experts(path, experts)
    if score is not None:
        weights = {name: x for name, x in weights.items() if name in fresh.state_dict()}
    missing = fresh.load_state_dict(weights, strict=not quantised).missing_keys
    assert set(missing) == {f"{path}.weight" for path in quantised}, missing
    for path, layer in quantised.items():
        fresh.get_submodule(path).weight.data = dense_weight(path, layer)
    return fresh


def without_dropout(model: nn.Module) -> list[str]:
    """Set every dropout of ``model`` to zero, and return messages about those that were not zero.

    A dropout is a dropout layer, or a number stored in a module under a name that contains
    ``drop``.
    """
    found: dict[float, list[str]] = {}
    for path, layer in model.named_modules():
        names = (
            ["p"]
            if isinstance(layer, nn.Dropout)
            else [name for name in vars(layer) if "drop" in name]
        )
        for name in names:
            share = getattr(layer, name)
            if isinstance(share, float) and share:
                found.setdefault(share, []).append(f"{path}.{name}")
                setattr(layer, name, 0.0)
    return [
        f"dropout {share} in {len(places)} places ({places[0]}, …) is 0 here: the arms' masks "
        "would differ"
        for share, places in found.items()
    ]


def scheduled_rates(config: ChronicalsConfig, steps: int) -> list[float]:
    """Return the learning rate of each of ``steps`` steps, as a share of the peak.

    A warm-up of n steps rises by 1 / n per step, up to the peak; ``warmup_from_zero`` starts it one
    step later, at 0. A default warm-up takes at most a tenth of the run. Over the remaining steps
    the rate falls from the peak towards ``min_lr_ratio``, which the step after the last would have:
    along half a cosine wave, or linearly. ``wsd`` falls linearly over its share of all steps and is
    constant before. ``constant`` does not fall.
    """
    warmup = (
        config.warmup_steps
        if "warmup_steps" in config.explicit
        else min(config.warmup_steps, steps // 10)
    )
    if config.warmup_ratio is not None:
        warmup = -int(-Fraction(str(config.warmup_ratio)) * steps // 1)
    first = 0 if config.warmup_from_zero else 1
    rates = [(first + step) / warmup for step in range(min(warmup, steps))]
    falling: float = steps - warmup
    if config.lr_scheduler == "wsd":
        falling = min(falling, config.wsd_decay_ratio * steps)
    for left in range(steps - warmup, 0, -1):
        height = 1.0 if config.lr_scheduler == "constant" else min(1.0, left / falling)
        if config.lr_scheduler == "cosine":
            height = math.sin(math.pi / 2 * height) ** 2
        rates.append(config.min_lr_ratio + (1.0 - config.min_lr_ratio) * height)
    return rates


class PlainAdamW:
    """torch's AdamW with its own states over fp32 copies of weights, set before each update.

    Args:
        weights: fp32 tensors by name.
        config: learning rates, weight decay and clipping.
        lora: True if these are adapters, so that B may have a higher learning rate.
    """

    def __init__(self, weights: Mapping[str, Tensor], config: ChronicalsConfig, lora: bool):
        self.weights = {name: nn.Parameter(tensor.clone()) for name, tensor in weights.items()}
        self.clip = config.max_grad_norm
        faster = config.lora_plus_ratio if lora and config.use_lora_plus else 1.0
        groups: dict[tuple[float, float], list[nn.Parameter]] = {}
        for name, parameter in self.weights.items():
            peak = config.learning_rate * (faster if name.endswith("lora_B") else 1.0)
            groups.setdefault(
                (peak, config.weight_decay if parameter.ndim > 1 else 0.0), []
            ).append(parameter)
        self.optimizer = torch.optim.AdamW(
            [
                {"params": members, "peak": peak, "weight_decay": decay}
                for (peak, decay), members in groups.items()
            ],
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_epsilon,
        )

    def update(
        self, before: Mapping[str, Tensor], gradients: Mapping[str, Tensor], factor: float
    ) -> None:
        """Set the weights to ``before`` and update them once.

        Args:
            before: fp32 values by name.
            gradients: by name; a weight without one stays.
            factor: learning-rate factor, from ``scheduled_rates``.
        """
        with torch.no_grad():
            for name, parameter in self.weights.items():
                parameter.copy_(before[name])
                if name in gradients:  # a copy, since clipping writes into it
                    parameter.grad = gradients[name].to(torch.float32, copy=True)
        if self.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.weights.values(), self.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak"] * factor
        self.optimizer.step()
        self.optimizer.zero_grad()


@contextmanager
def exact_products() -> Iterator[None]:
    """Compute fp32 products in fp32, not TF32, in the context."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
