"""The part of a model that reads images, as the second GGUF file (``mmproj``) of llama.cpp.

llama.cpp takes that file beside the language part's. What its graph of a projector has built in is
compared with the model's configuration; a model with other values is refused.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chronicals.formats.gguf.reader import NotExpressible
from chronicals.formats.gguf.tensors import TensorPiece
from chronicals.formats.gguf.writer import add_settings, write_tensors_to
from chronicals.formats.tensor_names import reads_images, vision_name
from chronicals.formats.weight_files import StoredTensor

PROJECTOR_TYPES = {"f32": "F32", "f16": "F16"}
"""Kinds of files, and the type of most of their weights (``gguf.GGMLQuantizationType``)."""

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
"""Files that describe how an image becomes numbers; the second, which has it in
``image_processor``, wins.
"""

FEATURE_LAYER = "clip.vision.feature_layer"
"""Key of the layer whose output is projected, which the package gguf has no name for."""

QWEN_WINDOW = 112
"""Pixels of a side of Qwen2.5-VL's windows, which llama.cpp does not read from the file."""

LARGEST_IMAGE = 560
"""Size of images that llama.cpp's script names for families that take any size."""

PIXEL_SCALE = 1 / 255
"""Factor of a pixel's value."""

_BLOCK = r"(?:encoder\.layers|blocks)\.(?P<block>\d+)\."
VISION_TENSORS = {
    r"(?:(?:vision_tower|vision_model)\.embeddings\.patch_embedding|visual\.patch_embed\.proj)": "V_ENC_EMBD_PATCH",
    r"(?:vision_tower|vision_model)\.embeddings\.position_embedding": "V_ENC_EMBD_POS",
    r"vision_tower\.embeddings\.class_embedding": "V_ENC_EMBD_CLS",
    r"vision_tower\.pre_layrnorm": "V_PRE_NORM",
    r"(?:vision_tower|vision_model)\.post_layernorm": "V_POST_NORM",
    rf".+\.{_BLOCK}(?:layer_norm1|norm1)": "V_ENC_INPUT_NORM",
    rf".+\.{_BLOCK}(?:layer_norm2|norm2)": "V_ENC_POST_ATTN_NORM",
    rf".+\.{_BLOCK}self_attn\.q_proj": "V_ENC_ATTN_Q",
    rf".+\.{_BLOCK}self_attn\.k_proj": "V_ENC_ATTN_K",
    rf".+\.{_BLOCK}self_attn\.v_proj": "V_ENC_ATTN_V",
    rf".+\.{_BLOCK}(?:self_attn\.out_proj|attn\.proj)": "V_ENC_ATTN_O",
    rf".+\.{_BLOCK}mlp\.gate_proj": "V_ENC_FFN_GATE",
    rf".+\.{_BLOCK}mlp\.(?:fc1|up_proj)": "V_ENC_FFN_UP",
    rf".+\.{_BLOCK}mlp\.(?:fc2|down_proj)": "V_ENC_FFN_DOWN",
    r"visual\.merger\.ln_q": "V_POST_NORM",
    r"visual\.merger\.mlp\.(?P<number>[02])": "V_MMPROJ",
    r"multi_modal_projector\.mm_input_projection": "V_MM_INP_PROJ",
    r"multi_modal_projector\.mm_soft_emb_norm": "V_MM_SOFT_EMB_NORM",
    r"connector\.modality_projection\.proj": "V_MMPROJ_FC",
}
"""``gguf.MODEL_TENSOR`` of a tensor, by its name without the suffix."""

LLAVA_PROJECTOR = {"multi_modal_projector.linear_1": 0, "multi_modal_projector.linear_2": 2}
"""Layers of LLaVA's projector by index in its original module; 1 is the activation."""

_QKV = re.compile(rf"visual\.{_BLOCK}attn\.qkv")
FULL_PRECISION_VISION = ("v.position_embd.weight", "v.class_embd")
"""Tensors that are fp32 in every file, as norms, biases and vectors are."""


@dataclass(frozen=True)
class VisionFamily:
    """The form in GGUF of the part that reads images in a kind of model.

    Attributes:
        projector: llama.cpp's name.
        settings: computes those that not all families have, by their keys, from a configuration;
            raises ``NotExpressible`` for one that llama.cpp computes otherwise.
        expected: values that fields of ``vision_config`` must have, if they are there.
        expected_of_model: values that fields of the whole configuration must have.
        enlarged_key: of the size to which the processor enlarges an image before it is cut.
        leaves_out: returns whether images do not go through a tensor, from the configuration and
            the tensor's name.
    """

    projector: str
    settings: Callable[[Any], dict[str, Any]]
    expected: Mapping[str, Any] = field(default_factory=dict)
    expected_of_model: Mapping[str, Any] = field(default_factory=dict)
    enlarged_key: str | None = None
    leaves_out: Callable[[Any, str], bool] = lambda config, name: False


def vision_family_of(config: Any) -> VisionFamily:
    """Return the family of a model of images and text.

    Raises:
        NotExpressible: it has no form here, or not with such a configuration.
    """
    if not reads_images(config):
        raise NotExpressible(
            f"model_type={config.model_type!r}: reads no images, so there is no mmproj; take --to "
            "gguf-f16"
        )
    family = VISION_FAMILIES.get(config.model_type)
    if family is None:
        raise NotExpressible(
            f"model_type={config.model_type!r}: what reads its images has no proved form in GGUF "
            "here; there are "
            f"{', '.join(VISION_FAMILIES)}. Export merged weights (--to merged) and convert those with "
            "llama.cpp's own script"
        )
    for part, expected in (
        (config.vision_config, family.expected),
        (config, family.expected_of_model),
    ):
        for name, value in expected.items():
            configured = getattr(part, name, value)
            _refuse(configured != value, f"{name}={configured!r}")
    family.settings(config)
    return family


def processor_of(folder: Path) -> dict[str, Any]:
    """Return the settings by which an image becomes numbers, of the files beside a model.

    Raises:
        NotExpressible: they lack it, or llama.cpp would do it otherwise.
    """
    processor: dict[str, Any] = {}
    for name in PROCESSOR_FILES:
        if (folder / name).exists():
            content = json.loads((folder / name).read_text())
            processor |= content | content.get("image_processor", {})
    for name in ("image_mean", "image_std"):
        if not isinstance(processor.get(name), list) or len(processor[name]) != 3:
            raise NotExpressible(
                f"{name}={processor.get(name)!r}: {' and '.join(PROCESSOR_FILES)} must have one number for "
                "each colour; copy them from "
                f"the model that was trained to {folder}"
            )
    scaled = math.isclose(processor.get("rescale_factor", PIXEL_SCALE), PIXEL_SCALE, rel_tol=1e-6)
    if False in (scaled, processor.get("do_normalize", True), processor.get("do_rescale", True)):
        raise NotExpressible(
            f"do_normalize={processor.get('do_normalize')}, "
            f"rescale_factor={processor.get('rescale_factor')}: llama.cpp divides by 255 "
            "and normalises; export merged weights (--to merged)"
        )
    return processor


def vision_settings(config: Any, folder: Path) -> dict[str, Any]:
    """Return all settings of the file, by their keys.

    Args:
        config: of a model of images and text.
        folder: of the model, with the files of its processor.

    Raises:
        NotExpressible: the model has no form here.
    """
    family = vision_family_of(config)
    processor = processor_of(folder)
    part = config.vision_config
    settings = {
        "clip.has_vision_encoder": True,
        "clip.projector_type": family.projector,
        "clip.vision.projection_dim": config.get_text_config().hidden_size,
        "clip.vision.image_size": getattr(part, "image_size", LARGEST_IMAGE),
        "clip.vision.patch_size": part.patch_size,
        "clip.vision.embedding_length": part.hidden_size,
        "clip.vision.feed_forward_length": part.intermediate_size,
        "clip.vision.block_count": getattr(part, "num_hidden_layers", None) or part.depth,
        "clip.vision.attention.head_count": getattr(part, "num_attention_heads", None)
        or part.num_heads,
        "clip.vision.image_mean": processor["image_mean"],
        "clip.vision.image_std": processor["image_std"],
        **family.settings(config),
    }
    if family.enlarged_key is not None:
        size = processor.get("size") or {}
        settings[family.enlarged_key] = size.get("longest_edge", part.image_size)
    return settings


def vision_tensors(config: Any, stored: Iterable[StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tensors that images go through, by the names of its modules below ``model``.

    Args:
        config: of a model of images and text.
        stored: all tensors that are not of the language part.

    Raises:
        NotExpressible: a tensor belongs to no part that is known.
    """
    family = vision_family_of(config)
    tensors = {}
    for tensor in stored:
        name = vision_name(tensor.name)
        if name is None:
            raise NotExpressible(
                f"{tensor.name}: belongs to neither the language part nor what reads images"
            )
        # Positions' ids are counted, not trained.
        if not family.leaves_out(config, name) and not name.endswith(".position_ids"):
            tensors[name] = tensor
    return tensors


def vision_pieces(tensors: Mapping[str, StoredTensor]) -> list[TensorPiece]:
    """Return the tensors of the file.

    Raises:
        NotExpressible: GGUF has no place for one.
    """
    pieces: list[TensorPiece] = []
    for name, stored in tensors.items():
        pieces += _pieces_of_one(name, stored.shape)
    return pieces


def _pieces_of_one(name: str, shape: tuple[int, ...]) -> Iterator[TensorPiece]:
    import gguf

    # A parameter that belongs to no module ends with "_weight", or has no such end.
    match = re.fullmatch(r"(.+?)[._](weight|bias)", name)
    stem, suffix = (match[1], f".{match[2]}") if match else (name, "")
    joined = _QKV.fullmatch(stem)
    if joined:
        rows = shape[0] // 3
        for n, role in enumerate(("V_ENC_ATTN_Q", "V_ENC_ATTN_K", "V_ENC_ATTN_V")):
            target = gguf.TENSOR_NAMES[gguf.MODEL_TENSOR[role]].format(bid=joined["block"])
            yield _piece_of_part(
                f"{target}{suffix}", name, (rows, *shape[1:]), (slice(n * rows, (n + 1) * rows),)
            )
    elif len(shape) == 5:  # a kernel over two frames of a film; an image is the same in both
        for n, end in enumerate(("", ".1")):
            yield _piece_of_part(
                f"{_target(stem)}{suffix}{end}",
                name,
                (*shape[:2], *shape[3:]),
                (slice(None), slice(None), n),
            )
    else:
        added = 1.0 if stem.endswith("mm_soft_emb_norm") else 0.0
        yield TensorPiece(
            f"{_target(stem)}{suffix}",
            tuple(shape),
            (name,),
            lambda sources: sources[0] + added,
            lambda written: [(name, ..., written - added)],
        )


def _piece_of_part(
    target: str, name: str, shape: tuple[int, ...], place: tuple[Any, ...]
) -> TensorPiece:
    """Return the piece that holds a part of a tensor, at an index into it."""
    return TensorPiece(
        target,
        shape,
        (name,),
        lambda sources: sources[0][place],
        lambda written: [(name, place, written)],
    )


def _target(stem: str) -> str:
    """Return the name in the file of a tensor, both without the suffix of its kind."""
    import gguf

    if stem in LLAVA_PROJECTOR:
        projector = gguf.TENSOR_NAMES[gguf.MODEL_TENSOR.V_MMPROJ]
        return str(projector.format(bid=LLAVA_PROJECTOR[stem]))
    for pattern, role in VISION_TENSORS.items():
        match = re.fullmatch(pattern, stem)
        if match:
            number = next((n for n in match.groupdict().values() if n is not None), None)
            return str(gguf.TENSOR_NAMES[gguf.MODEL_TENSOR[role]].format(bid=number))
    raise NotExpressible(f"{stem}: has no place in GGUF among what reads images")


def vision_type_of(piece: TensorPiece, kind: str) -> Any:
    """Return the ``gguf.GGMLQuantizationType`` of a tensor in a file of a kind."""
    import gguf

    is_full = len(piece.shape) < 2 or piece.name in FULL_PRECISION_VISION
    return gguf.GGMLQuantizationType["F32" if is_full else PROJECTOR_TYPES[kind]]


def write_projector(
    target: Path,
    settings: Mapping[str, Any],
    pieces: list[TensorPiece],
    tensors: Mapping[str, StoredTensor],
    kind: str,
) -> None:
    """Write the file.

    Args:
        target: file to write.
        settings: of ``vision_settings``.
        pieces: of ``vision_pieces``.
        tensors: of the model, by the names that pieces have for them.
        kind: of ``PROJECTOR_TYPES``.
    """
    import gguf

    writer = gguf.GGUFWriter(target, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH.MMPROJ])
    writer.add_type(gguf.GGUFType.MMPROJ)
    writer.add_file_type(gguf.LlamaFileType["ALL_F32" if kind == "f32" else "MOSTLY_F16"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    add_settings(writer, settings)
    types = {piece.name: vision_type_of(piece, kind) for piece in pieces}
    write_tensors_to(writer, pieces, types, tensors, {})


# --- families


def _refuse(wrong: bool, reason: str) -> None:
    if wrong:
        raise NotExpressible(
            f"{reason}: llama.cpp reads images of such a model otherwise; export merged weights "
            "(--to merged)"
        )


def _qwen2_5_vl_settings(config: Any) -> dict[str, Any]:
    part = config.vision_config
    # Every n-th layer sees the whole image, the others have windows: llama.cpp takes n alone.
    full = list(part.fullatt_block_indexes)
    period = full[0] + 1 if full else 0
    is_regular = period > 0 and full == list(range(period - 1, part.depth, period))
    _refuse(not is_regular, f"fullatt_block_indexes={full}")
    return {
        "clip.use_silu": True,
        "clip.vision.n_wa_pattern": period,
        "clip.vision.attention.layer_norm_epsilon": 1e-6,
        "clip.vision.spatial_merge_size": part.spatial_merge_size,
    }


def _gemma3_settings(config: Any) -> dict[str, Any]:
    part = config.vision_config
    side = part.image_size // part.patch_size
    tokens = math.isqrt(config.mm_tokens_per_image)
    _refuse(
        tokens**2 != config.mm_tokens_per_image or side % tokens > 0,
        f"mm_tokens_per_image={config.mm_tokens_per_image}",
    )
    return {
        "clip.use_gelu": True,
        "clip.vision.attention.layer_norm_epsilon": float(part.layer_norm_eps),
        "clip.vision.projector.scale_factor": side // tokens,
    }


def _idefics3_settings(config: Any) -> dict[str, Any]:
    return {
        "clip.use_gelu": True,
        "clip.vision.attention.layer_norm_epsilon": float(config.vision_config.layer_norm_eps),
        "clip.vision.projector.scale_factor": config.scale_factor,
    }


def _without_siglip_head(config: Any, name: str) -> bool:
    """Leave out the head that pools an image to one vector, which these models do not use."""
    return name.startswith(("vision_tower.head.", "vision_model.head."))


def _layers_of_llava(config: Any) -> int:
    """Return the number of layers that images go through."""
    layer = config.vision_feature_layer
    return int(layer if layer >= 0 else config.vision_config.num_hidden_layers + 1 + layer)


def _llava_settings(config: Any) -> dict[str, Any]:
    """Compute the settings of LLaVA; a file that names no activation has CLIP's quick_gelu."""
    part = config.vision_config
    _refuse(part.hidden_act not in ("quick_gelu", "gelu"), f"hidden_act={part.hidden_act!r}")
    layer = config.vision_feature_layer
    known = isinstance(layer, int) and 0 < _layers_of_llava(config) <= part.num_hidden_layers
    _refuse(not known, f"vision_feature_layer={layer!r}")
    layers = _layers_of_llava(config)
    return {
        "clip.use_gelu": part.hidden_act == "gelu",
        "clip.vision.attention.layer_norm_epsilon": float(part.layer_norm_eps),
        "clip.vision.block_count": layers,
        FEATURE_LAYER: [layers],
        "clip.has_llava_projector": True,
    }


def _without_later_layers(config: Any, name: str) -> bool:
    """Leave out the layers behind the one whose output is projected."""
    block = re.match(r"vision_tower\.encoder\.layers\.(\d+)\.", name)
    return name.startswith("vision_tower.post_layernorm.") or (
        block is not None and int(block[1]) >= _layers_of_llava(config)
    )


_IDEFICS3 = VisionFamily(
    "idefics3",
    _idefics3_settings,
    expected={"hidden_act": "gelu_pytorch_tanh", "num_channels": 3},
    enlarged_key="clip.vision.preproc_image_size",
    leaves_out=_without_siglip_head,
)

VISION_FAMILIES: dict[str, VisionFamily] = {
    "qwen2_5_vl": VisionFamily(
        "qwen2.5vl_merger",
        _qwen2_5_vl_settings,
        expected={
            "hidden_act": "silu",
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "in_channels": 3,
            "window_size": QWEN_WINDOW,
        },
    ),
    "gemma3": VisionFamily(
        "gemma3",
        _gemma3_settings,
        expected={
            "hidden_act": "gelu_pytorch_tanh",
            "model_type": "siglip_vision_model",
            "num_channels": 3,
        },
        leaves_out=_without_siglip_head,
    ),
    "smolvlm": _IDEFICS3,
    "idefics3": _IDEFICS3,
    "llava": VisionFamily(
        "mlp",
        _llava_settings,
        expected={"model_type": "clip_vision_model", "num_channels": 3},
        expected_of_model={
            "projector_hidden_act": "gelu",
            "vision_feature_select_strategy": "default",
            "multimodal_projector_bias": True,
        },
        leaves_out=_without_later_layers,
    ),
}
"""Entries by ``model_type`` of transformers."""
