"""The plain arms: transformers' own modules and attention, each document a row, one division by the
step's count.

Nothing here is shared with the path of training: the model is made anew from its class and
configuration, and so are the frozen models of the objective; adapters are two products in a hook
(or one in the weight, where a class reads that instead of calling the layer), the loss is the
objective's definition from the models' own logits in fp32, the update is torch's AdamW at the rates
that the schedules are defined by. Documents and what is trained in them come from the store, not
from a Batch. Where the configuration asks for a router loss, the class itself gives it, of each
pack's documents as the padded rows of one batch.
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
from chronicals.objectives import Objective, ScoredDocument, Terms
from chronicals.verification.modules import plain_name
from chronicals.verification.plain_adapters import PlainAdapters, adapter_fields
from chronicals.verification.quantised import (
    dense_weight,
    multiply_as,
    quantised_experts,
    quantised_layers,
    weights_of_experts,
)

ROW_TOKENS = 4096
LOGITS = 2**28
"""Tokens of padded rows in a forward pass, and elements of logits: whole logits, and whole
attention weights of so many tokens, exist at once. One document is never divided."""


class MaskedDocument(NamedTuple):
    """A document by itself, behind the prompt that it shares with others.

    Attributes:
        ids, trained: as ``TokenStore.whole_document`` gives them.
        side, label: of these columns of the store.
    """

    ids: np.ndarray
    trained: np.ndarray
    side: int = 0
    label: int = -1


Item = list[MaskedDocument]


def is_mismatched(document: MaskedDocument) -> bool:
    """Whether it is the answer to another prompt beside a judged one."""
    return document.side == 1 and document.label >= 0


def count_targets(document: MaskedDocument) -> int:
    """Its tokens that are trained; the first is predicted by none."""
    return int(document.trained[1:].sum())


def count_items(packs: Sequence[Sequence[Item]]) -> dict[str, int]:
    """What a step's sums are divided by, by the names of ``Step.counts``, counted anew from its
    items.
    """
    items = [item for pack in packs for item in pack]
    firsts = [next(document for document in item if document.side == 0) for item in items]
    targets = sum(count_targets(document) for item in items for document in item)
    good = sum(d.label == 1 for d in firsts)
    mismatched = sum(is_mismatched(document) for item in items for document in item)
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


def _divided(terms: Terms, counts: Mapping[str, float]) -> Tensor:
    """What an item adds to the loss of its step."""
    parts = [
        term.coefficient * term.sum / (counts[term.per] or 1)
        for term in terms.values()
        if term.coefficient
    ]
    return torch.stack(parts).sum()


class PlainArm:
    """A model of transformers as it comes, and plain adapters where the run has them.

    Args:
        model: the user's, whose class, configuration and weights are taken; before anything is done
            to it.
        device: where to compute.
        config: of the run; its LoRA fields say what is adapted.
        objective: of the run, whose definition is minimised.
        alone: every document in a forward pass of its own, instead of padded rows.
        usual_attention: the attention that transformers takes where nothing is said, instead of
            eager: on a card it keeps no scores, and so rounds where every attention that keeps none
            does.

    Raises:
        ConfigurationError: the class cannot be made with eager attention, or a quantised layer is
            no plain product.

    Attributes:
        pad_token_id: of a reward model, whose class takes the score of the last other token; None
            of a language model.
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
        self.model = _fresh(model, device, usual_attention and _takes_sdpa(model))
        self.frozen: dict[str, nn.Module] = {}
        self.router_loss = (
            read_router_loss(model).coefficient if asks_for_router_loss(model) else 0.0
        )
        self.trained: dict[str, nn.Parameter] = {}
        self.autocast: torch.dtype | None = None
        if (score := score_of(model)) is not None:
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

    def use_types_of(self, model: Any, autocast: torch.dtype | None) -> None:
        """Keep every weight in the type it has in ``model``, the run's, quantised ones in that
        of their products; gradients of several passes meet in fp32."""
        _take_types(self.model, model)
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                parameter.grad_dtype = torch.float32
        self.autocast = autocast

    def take_frozen(self, frozen: Mapping[str, Any], own_types: bool) -> None:
        """Make the objective's frozen models anew.

        Args:
            frozen: transformers' models by name.
            own_types: in the types that they have, instead of fp32.

        Raises:
            ConfigurationError: one has adapters, or cannot be made with eager attention.
        """
        for name, model in frozen.items():
            if any("lora_" in path for path, _ in model.named_parameters()):
                raise ConfigurationError(
                    f"{name}: has adapters, which the plain arms would leave out; verify with the "
                    "whole model that chronicals "
                    "merge makes of it"
                )
            plain = _fresh(model, self.device, self.usual_attention and _takes_sdpa(model))
            if own_types:
                _take_types(plain, model)
            self.frozen[name] = plain.eval().requires_grad_(False)

    @torch.no_grad()
    def take_bases(self, model: Any) -> None:
        """Take the weights of adapted layers from ``model``, the run's, whose adapters began
        with a part of them.
        """
        for path, layer in model.named_modules():
            if getattr(layer, "lora_start_A", None) is not None:
                own = self.model.get_submodule(path)
                own.get_parameter(
                    "parametrizations.weight.original"
                    if hasattr(own, "parametrizations")
                    else "weight"
                ).copy_(layer.base_layer.weight)

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Take fp32 values for what is trained; a weight that is not given is left as it was."""
        for name, parameter in self.trained.items():
            if name in weights:
                parameter.copy_(weights[name])

    def differentiate(
        self, packs: Sequence[Sequence[Item]], counts: Mapping[str, float], scale: float = 1.0
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Forward and backward over a whole step.

        Args:
            packs: the items of each pack.
            counts: of the step, by name.
            scale: factor on the loss while it is differentiated (fp16).

        Returns:
            Each item's part of the loss times all targets, float64 ``[items]`` on the host, with
            its part of the router loss; the gradients of the loss by name, in the types they come
            in, but for ``scale``.
        """
        items = [item for pack in packs for item in pack]
        found = torch.zeros(len(items), dtype=torch.float64)
        known = self._known(items, counts)
        for rows in self._forward_passes(
            [max(len(document.ids) for document in item) for item in items]
        ):
            with self._products():
                scored = self._scored([items[row] for row in rows])
                losses = torch.stack(
                    [
                        _divided(self.objective.item_definition(item, known), counts)
                        for item in scored
                    ]
                )
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
        """What the objective must know of the whole step, ``[1]`` by name."""
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

    def _forward_passes(self, lengths: list[int]) -> Iterator[list[int]]:
        """Items by decreasing length, as many together as the limits allow when padded to the
        longest.
        """
        tokens = min(ROW_TOKENS, LOGITS // self.model.get_input_embeddings().weight.shape[0])
        order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
        while order:
            many = 1 if self.alone else max(1, tokens // lengths[order[0]])
            yield order[:many]
            order = order[many:]

    def _router_losses(self, packs: Sequence[Sequence[Item]], scale: float) -> float:
        """Backward of the mean over the packs of what the class itself adds for its routers, and
        its value.
        """
        value = 0.0
        for pack in packs:
            own = (document for item in pack for document in item if not is_mismatched(document))
            counted = [document for document in own if count_targets(document)]
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
        """Ids, mask of what is no padding, and bool of what is trained: a row a document."""
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
        """The documents of some items, in one forward pass."""
        documents = [document for item in items for document in item]
        ids, mask, trained = self._rows(documents)
        logits = self.model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        if self.pad_token_id is not None:
            return self._with_scores(items, logits)
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            frozen = {
                name: model(input_ids=ids, attention_mask=mask, use_cache=False).logits
                for name, model in self.frozen.items()
            }
        at = trained[:, 1:]
        targets = ids[:, 1:]
        scored = iter(
            ScoredDocument(
                logits[row, :-1][at[row]],
                targets[row][at[row]],
                {name: theirs[row, :-1][at[row]] for name, theirs in frozen.items()},
                document.side,
                document.label,
            )
            for row, document in enumerate(documents)
        )
        return [[next(scored) for _ in item] for item in items]

    def _with_scores(self, items: list[Item], scores: Tensor) -> list[list[ScoredDocument]]:
        """The documents of some items with their scores ``[N, 1]``."""
        nothing = scores.new_zeros(0, 0)
        left = iter(scores.float().squeeze(-1).unbind())
        return [
            [ScoredDocument(nothing, nothing, {}, d.side, d.label, next(left)) for d in item]
            for item in items
        ]

    def _products(self) -> AbstractContextManager:
        return (
            torch.autocast(self.device.type, dtype=self.autocast)
            if self.autocast
            else nullcontext()
        )


def _take_types(plain: nn.Module, model: Any) -> None:
    """Keep every weight of ``plain`` in the type it has in ``model``, quantised ones in that of
    their products.
    """
    types = {plain_name(name): parameter.dtype for name, parameter in model.named_parameters()}
    for path, experts in quantised_experts(model).items():
        types |= {f"{path}.{name}": experts.dtype for name in experts.stacked}
    quantised = quantised_layers(model)
    for name, parameter in plain.named_parameters():
        name = name.replace("parametrizations.weight.original", "weight")
        if name.removesuffix(".weight") not in quantised:
            parameter.data = parameter.data.to(types[name])
    for path, layer in quantised.items():
        multiply_as(layer, plain.get_submodule(path))


def _takes_sdpa(model: Any) -> bool:
    """Whether torch's attention computes what the class does: not where scores are capped, which
    it leaves out.
    """
    capped = getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None
    return bool(getattr(model, "_supports_sdpa", False)) and not capped


def _fresh(model: Any, device: torch.device, sdpa: bool) -> Any:
    """A model of the same class, configuration and weights, in fp32, with eager attention or
    SDPA and without dropout; of one with a score the classifier."""
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
        fresh.get_input_embeddings().padding_idx = (
            None  # or the token has no gradient where an answer has it
        )
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
    for path, experts in quantised_experts(model).items():
        weights = {name: x for name, x in weights.items() if not name.startswith(f"{path}.")}
        weights |= weights_of_experts(path, experts)
    if score is not None:
        weights = {name: x for name, x in weights.items() if name in fresh.state_dict()}
    missing = fresh.load_state_dict(weights, strict=not quantised).missing_keys
    assert set(missing) == {f"{path}.weight" for path in quantised}, missing
    for path, layer in quantised.items():
        fresh.get_submodule(path).weight.data = dense_weight(path, layer)
    return fresh


def changed_buffers(model: nn.Module, fresh: nn.Module) -> list[str]:
    """In words what ``model`` holds beside its weights that its configuration does not give:
    rotary frequencies that were cast with the weights, by ``model.bfloat16()``, turn every
    position by a wrong angle."""
    own = dict(model.named_buffers())
    found = []
    for name, right in fresh.named_buffers():
        value = own.get(name)
        if value is None or not right.is_floating_point() or value.shape != right.shape:
            continue
        off = float((value.to(right) - right).abs().max() / right.abs().max().clamp(min=1e-30))
        if off > 1e-6:
            found.append(
                f"{name} is off by {off:.1e} from what the configuration gives, which the plain "
                "arms have: load the model "
                "in its type (dtype=…) instead of casting it"
            )
    return found


def without_dropout(model: nn.Module) -> list[str]:
    """Set every dropout of ``model`` to zero; in words what was not zero before.

    A dropout is a layer of that kind, or a number that a module keeps under a name with ``drop`` in
    it.
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
    """The learning rate of each step of a run of so many, as a share of the peak.

    In a warm-up of n steps it rises by 1 / n a step, to the peak; one that was not asked for takes
    a tenth of the run at most. Then it goes, with what is left of the steps, from the peak towards
    ``min_lr_ratio``, which the step after the last would have: along half a wave of the cosine, or
    in a line; wsd in a line over its share of all steps, and before that, as constant always, it
    stays.
    """
    warmup = (
        config.warmup_steps
        if "warmup_steps" in config.explicit
        else min(config.warmup_steps, steps // 10)
    )
    if config.warmup_ratio is not None:
        warmup = -int(-Fraction(str(config.warmup_ratio)) * steps // 1)
    rates = [(step + 1) / warmup for step in range(min(warmup, steps))]
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
    """torch's AdamW with states of its own over fp32 copies, which are set before every update.

    Args:
        weights: fp32 tensors by name.
        config: rates, decay, clipping.
        lora: whether these are adapters, so that B may learn faster.
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
        """One update of ``weights`` from the values ``before``; ``factor`` is of
        ``scheduled_rates``.
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
    """fp32 products in fp32, not in TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
