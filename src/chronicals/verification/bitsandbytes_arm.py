"""A comparison arm without our code, for a base in 4 bits: transformers, bitsandbytes and PEFT.

The base is loaded from its checkpoint with a ``BitsAndBytesConfig``. The adapters are PEFT's, with
the run's A and B at every step. Unlike our own arms, it shows that the quantised weights are those
that other libraries make of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from importlib.util import find_spec
from typing import Any

import torch

from chronicals.config import ChronicalsConfig
from chronicals.lora.peft_format import CHANGED
from chronicals.models import (
    QUANTISED_FROM,
    load_by_bitsandbytes,
    missing_for_bitsandbytes,
    score_of,
)
from chronicals.quantization import packed_experts, packed_weight
from chronicals.quantization.bitsandbytes import weight_of_layer
from chronicals.quantization.nf4 import SCALE_TENSORS
from chronicals.verification.comparison import plain_name
from chronicals.verification.plain_adapters import adapter_fields, rank_and_scale
from chronicals.verification.quantised import (
    AGREES,
    dense_weight,
    quantised_layers,
    weights_of_experts,
)
from chronicals.verification.reference import PlainArm

ARM = "transformers + bitsandbytes + PEFT"

OF_ROUNDING = 0.13
"""Relative distance that rounding explains; NF4 in blocks of 64 changes Gaussian numbers by 0.09.
"""

_NAMES = ("lora_A", "lora_B", "lora_magnitude_vector")
"""Names of an adapter's trained tensors."""


class BitsAndBytesNotRun(Exception):
    """Reason why this arm cannot run; the message continues a sentence."""


class BitsAndBytesArm(PlainArm):
    """A transformers model with bitsandbytes layers and PEFT adapters.

    Args:
        model: the user's model, before the run changes it. Its layers are in 4 bits, in our format
            or that of bitsandbytes.
        fp32: the fp32 arm; this arm has trained weights of the same names.
        config: configuration of the run.

    Attributes:
        differs: relative distance of a weight from ours by path, for weights that differ by more
            than rounding.
        notes: what this arm copies from our model.

    Raises:
        BitsAndBytesNotRun: a package is missing, the checkpoint is unknown or cannot be loaded this
            way, or the model is not the one in the checkpoint.
    """

    def __init__(self, model: Any, fp32: PlainArm, config: ChronicalsConfig):
        missing = list(missing_for_bitsandbytes())
        if find_spec("peft") is None:
            missing.append("peft")
        if missing:
            raise BitsAndBytesNotRun(f"{', '.join(missing)}: not installed")
        if score_of(model) is not None:
            raise BitsAndBytesNotRun(
                "the model is a reward model, whose classifier PEFT adapts otherwise"
            )
        self.device = fp32.device
        self.alone = False
        self.router_loss = fp32.router_loss
        self.objective = fp32.objective
        self.frozen = fp32.frozen
        base, experts = _load(model, config, self.device)
        self.differs, close = _differing(base, model, {*fp32.trained, *experts})
        self.differs |= {name: off for name, off in experts.items() if off > OF_ROUNDING}
        self.notes = []
        if close:
            self.notes.append(
                f"{ARM}: {close} layers have codes or scales that ours round otherwise; it takes "
                "ours"
            )
        if experts:
            self.notes.append(
                f"{ARM}: that library has no stacked experts; it takes the values of ours in 16 "
                "or 32 bit"
            )
        self.model = _adapted(base, fp32, adapter_fields(model, config))
        self.autocast = torch.float16 if config.mixed_precision == "fp16" else None
        # PEFT's parameters by our names.
        theirs = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        names = {}
        for name in fp32.trained:
            path, _, last = name.rpartition(".")
            if last in _NAMES:
                names[name] = f"base_model.model.{path}.{last}.default.weight"
            else:
                names[name] = f"base_model.model.{path}.modules_to_save.default.{last}"
        wrong = set(names.values()) ^ theirs.keys()
        if wrong:
            raise BitsAndBytesNotRun(f"PEFT trains something else: {min(wrong)}")
        self.trained = {name: theirs[own] for name, own in names.items()}
        self.model.train()
        if self.device.type == "cuda" and getattr(base, "supports_gradient_checkpointing", False):
            self.model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )


@torch.no_grad()
def _load(
    model: Any, config: ChronicalsConfig, device: torch.device
) -> tuple[Any, dict[str, float]]:
    """Load the checkpoint of a model with bitsandbytes' layers and our values of experts.

    Returns:
        The loaded model; and by name the relative distance of the experts in 4 bits, whose
        dequantised values it takes, from the values in the checkpoint.
    """
    place = str(getattr(model.config, "_name_or_path", "") or "")
    if getattr(model, CHANGED, False) or not place:
        raise BitsAndBytesNotRun("the model in memory has no checkpoint that it could load")
    kind = getattr(model, "plain_class", type(model))
    quantised = quantised_layers(model).values()
    layers = [weight for weight in map(packed_weight, quantised) if weight is not None]
    nested = all(_packed(layer).scales.absmax2 is not None for layer in quantised)
    products = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[
        config.mixed_precision
    ]
    try:
        own = getattr(model, QUANTISED_FROM, next(iter(model.parameters())).dtype)
        base = load_by_bitsandbytes(kind, place, own, device, nested, products=products)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        raise BitsAndBytesNotRun(f"{place}: {' '.join(str(error).split())}") from error
    if layers and layers[0].dtype != own:
        # Our models do the same if they are cast after quantisation: dense weights get the dtype,
        # and packed ones are dequantised to it.
        for parameter in base.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(layers[0].dtype)
        for layer in quantised_layers(base).values():
            layer.weight.quant_state.dtype = layers[0].dtype  # type: ignore[union-attr]
    found = {}
    for path, experts in packed_experts(model):
        for name, values in weights_of_experts(plain_name(path), experts).items():
            parameter = base.get_parameter(name)
            off = (values - parameter).float().norm() / parameter.float().norm().clamp(min=1e-30)
            found[name] = float(off)
            parameter.copy_(values)
    return base, found


@torch.no_grad()
def _differing(base: Any, model: Any, trained: Collection[str]) -> tuple[dict[str, float], int]:
    """Compare the weights of bitsandbytes' layers with ours.

    A number half-way between two codes is rounded by the last bit of a scale, so two correct
    quantisers may disagree there. That changes gradients by more than fp32 rounding does. Layers
    that differ by this only therefore take our codes.

    Args:
        base: with bitsandbytes' layers.
        model: ours.
        trained: names of weights that may differ from the checkpoint, and of experts.

    Returns:
        The relative distance of the weights that differ by more than rounding, by path; and the
        number of layers that took our codes.

    Raises:
        BitsAndBytesNotRun: the sets of 4-bit layers differ, other weights differ, or a layer does
            not multiply by the weight that its codes and scales represent.
    """
    theirs = quantised_layers(base)
    ours = quantised_layers(model)
    found = dict[str, float]()
    close = 0
    if theirs.keys() != ours.keys():
        raise BitsAndBytesNotRun(
            f"its layers in 4 bits are others: {', '.join(sorted(theirs.keys() ^ ours.keys())[:2])}"
        )
    named = {name.replace(".base_layer.", "."): value for name, value in model.named_parameters()}
    for name, value in base.named_parameters():
        if name.removesuffix(".weight") in ours or name in trained:
            continue
        own = named.get(name)
        # Equal after a cast to the narrower dtype.
        is_same = own is not None and (
            torch.equal(value, own.to(value)) or torch.equal(value.to(own), own)
        )
        if not is_same:
            raise BitsAndBytesNotRun(f"{name} of the model is not that of its checkpoint")
    for path, layer in theirs.items():
        read = weight_of_layer(layer).dense().float()
        own_dense = dense_weight(path, ours[path])
        off = _off(dense_weight(path, layer), read)
        if off:
            raise BitsAndBytesNotRun(
                f"its {path} does not multiply by the weight that its codes stand for (off by "
                f"{off:.1%}), as bitsandbytes on a "
                "CPU where inputs are no multiple of a block"
            )
        off = _off(own_dense, read)
        if off:
            found[path] = off
        elif not torch.equal(own_dense, read):
            # The layer takes our codes and scales.
            packed = _packed(ours[path])
            place = weight_of_layer(layer)
            place.codes.copy_(packed.codes.view(-1))
            for name in SCALE_TENSORS:
                scale = getattr(place.scales, name)
                if scale is not None:
                    scale.copy_(getattr(packed.scales, name))
            close += 1
    return found, close


def _packed(layer: Any) -> Any:
    """Return the packed weight of a layer of either library."""
    own = packed_weight(layer)
    return weight_of_layer(layer) if own is None else own


def _off(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return the relative distance, or 0 if it is at most ``AGREES``."""
    off = float((ours - theirs).norm() / theirs.norm().clamp(min=1e-30))
    return 0.0 if off <= AGREES else off


def _adapted(base: Any, fp32: PlainArm, fields: Mapping[str, Any]) -> Any:
    """Attach PEFT's adapters at the paths of the fp32 arm's adapters."""
    import peft

    paths = [name.removesuffix(".lora_A") for name in fp32.trained if name.endswith(".lora_A")]
    shapes = {path: rank_and_scale(fields, path) for path in paths}
    (rank, scale) = shapes[paths[0]]
    keys = {path: path.replace(".", r"\.") for path in paths}
    described = peft.LoraConfig(
        r=rank,
        lora_alpha=scale * rank,
        lora_dropout=0.0,
        bias="none",
        target_modules=paths,
        use_dora=fields["use_dora"],
        rank_pattern={keys[path]: own for path, (own, _) in shapes.items()},
        alpha_pattern={keys[path]: own * factor for path, (own, factor) in shapes.items()},
        modules_to_save=fields["modules_to_save"],
        task_type="CAUSAL_LM",
    )
    try:
        return peft.get_peft_model(base, described)
    except (TypeError, ValueError) as error:
        raise BitsAndBytesNotRun(f"PEFT does not adapt these layers: {error}") from error
