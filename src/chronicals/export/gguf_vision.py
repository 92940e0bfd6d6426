"""What reads images, as the second GGUF file (``mmproj``) that llama.cpp takes beside the language
part's.

Names of settings and tensors are those of the package ``gguf``. What llama.cpp's graph of a
projector does in one way only is compared with the model's configuration; a model that does it
otherwise is refused.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from chronicals.export.gguf_file import fill, require_gguf
from chronicals.export.part_names import reads_images, vision_name
from chronicals.export.source import Source
from chronicals.export.weight_files import StoredTensor
from chronicals.models.gguf_families import NotExpressible, Settings
from chronicals.models.gguf_tensors import Piece

TYPES = {"f32": "F32", "f16": "F16"}
"""Names of files by the type of most of their weights, in ``gguf.GGMLQuantizationType``."""

PROCESSORS = ("preprocessor_config.json", "processor_config.json")
"""Files that say how an image becomes numbers; the second, which has it in ``image_processor``,
counts more.
"""

FEATURE_LAYER = "clip.vision.feature_layer"
"""The layer whose output is projected: a key of llama.cpp that the package has no name for."""

WINDOW = 112
"""Pixels of a side of Qwen2.5-VL's windows, which llama.cpp does not read from the file."""

BIGGEST = 560
"""What upstream names as the size of images for families that take any."""

SCALE = 1 / 255
"""What a pixel's value is multiplied with."""

BLOCK = r"(?:encoder\.layers|blocks)\.(?P<block>\d+)\."
ROLES = {
    r"(?:(?:vision_tower|vision_model)\.embeddings\.patch_embedding|visual\.patch_embed\.proj)": "V_ENC_EMBD_PATCH",
    r"(?:vision_tower|vision_model)\.embeddings\.position_embedding": "V_ENC_EMBD_POS",
    r"vision_tower\.embeddings\.class_embedding": "V_ENC_EMBD_CLS",
    r"vision_tower\.pre_layrnorm": "V_PRE_NORM",
    r"(?:vision_tower|vision_model)\.post_layernorm": "V_POST_NORM",
    rf".+\.{BLOCK}(?:layer_norm1|norm1)": "V_ENC_INPUT_NORM",
    rf".+\.{BLOCK}(?:layer_norm2|norm2)": "V_ENC_POST_ATTN_NORM",
    rf".+\.{BLOCK}self_attn\.q_proj": "V_ENC_ATTN_Q",
    rf".+\.{BLOCK}self_attn\.k_proj": "V_ENC_ATTN_K",
    rf".+\.{BLOCK}self_attn\.v_proj": "V_ENC_ATTN_V",
    rf".+\.{BLOCK}(?:self_attn\.out_proj|attn\.proj)": "V_ENC_ATTN_O",
    rf".+\.{BLOCK}mlp\.gate_proj": "V_ENC_FFN_GATE",
    rf".+\.{BLOCK}mlp\.(?:fc1|up_proj)": "V_ENC_FFN_UP",
    rf".+\.{BLOCK}mlp\.(?:fc2|down_proj)": "V_ENC_FFN_DOWN",
    r"visual\.merger\.ln_q": "V_POST_NORM",
    r"visual\.merger\.mlp\.(?P<number>[02])": "V_MMPROJ",
    r"multi_modal_projector\.mm_input_projection": "V_MM_INP_PROJ",
    r"multi_modal_projector\.mm_soft_emb_norm": "V_MM_SOFT_EMB_NORM",
    r"connector\.modality_projection\.proj": "V_MMPROJ_FC",
}
"""``gguf.MODEL_TENSOR`` of a tensor, by its name without the suffix."""

LLAVA = {"multi_modal_projector.linear_1": 0, "multi_modal_projector.linear_2": 2}
"""LLaVA's projector, whose layers are numbered as in its first programs: the activation between
them is 1.
"""

QKV = re.compile(rf"visual\.{BLOCK}attn\.qkv")
IN_FULL = ("v.position_embd.weight", "v.class_embd")
"""Tensors that are fp32 in every file, as norms, biases and vectors are."""


@dataclass(frozen=True)
class Vision:
    """How what reads images in a kind of model becomes a file.

    Attributes:
        projector: as llama.cpp calls it.
        check: raises ``NotExpressible``.
        settings: of a configuration and its processor, beside those that all have; names of gguf's
            methods without ``add_``, or whole keys.
        leaves_out: whether a tensor of this name is not part of what images go through.
    """

    projector: str
    check: Callable[[Any], None]
    settings: Callable[[Any, Mapping[str, Any]], Settings]
    leaves_out: Callable[[Any, str], bool] = lambda config, name: False


def vision_of(config: Any) -> Vision:
    """Raises NotExpressible where a model of images and text has no form here, or not with such
    a configuration.
    """
    if not reads_images(config):
        raise NotExpressible(
            f"model_type={config.model_type!r}: reads no images, so there is no mmproj; take --to "
            "gguf-f16"
        )
    found = FAMILIES.get(config.model_type)
    if found is None:
        raise NotExpressible(
            f"model_type={config.model_type!r}: what reads its images has no proved form in GGUF "
            "here; there are "
            f"{', '.join(FAMILIES)}. Export merged weights (--to merged) and convert those with "
            "llama.cpp's own script"
        )
    found.check(config)
    return found


def processor_of(folder: Path) -> dict[str, Any]:
    """How an image becomes numbers, as the files beside a model say.

    Raises:
        NotExpressible: they do not say it, or llama.cpp would do it otherwise.
    """
    found: dict[str, Any] = {}
    for name in PROCESSORS:
        if (folder / name).exists():
            said = json.loads((folder / name).read_text())
            found |= said | said.get("image_processor", {})
    for name in ("image_mean", "image_std"):
        if not isinstance(found.get(name), list) or len(found[name]) != 3:
            raise NotExpressible(
                f"{name}={found.get(name)!r}: {' and '.join(PROCESSORS)} must have one number for "
                "each colour; copy them from "
                f"the model that was trained to {folder}"
            )
    scaled = math.isclose(found.get("rescale_factor", SCALE), SCALE, rel_tol=1e-6)
    if False in (scaled, found.get("do_normalize", True), found.get("do_rescale", True)):
        raise NotExpressible(
            f"do_normalize={found.get('do_normalize')}, "
            f"rescale_factor={found.get('rescale_factor')}: llama.cpp divides by 255 "
            "and normalises; export merged weights (--to merged)"
        )
    return found


def settings_of(source: Source) -> Settings:
    """Everything that the file says."""
    vision = vision_of(source.config)
    processor = processor_of(source.folder)
    part = source.config.vision_config
    return {
        "clip_has_vision_encoder": True,
        "clip_projector_type": vision.projector,
        "vision_projection_dim": source.text_config.hidden_size,
        "vision_image_size": getattr(part, "image_size", BIGGEST),
        "vision_patch_size": part.patch_size,
        "vision_embedding_length": part.hidden_size,
        "vision_feed_forward_length": part.intermediate_size,
        "vision_block_count": getattr(part, "num_hidden_layers", None) or part.depth,
        "vision_head_count": getattr(part, "num_attention_heads", None) or part.num_heads,
        "vision_image_mean": processor["image_mean"],
        "vision_image_std": processor["image_std"],
        **vision.settings(source.config, processor),
    }


def tensors_of(source: Source) -> dict[str, StoredTensor]:
    """What images go through, by the names of its modules below ``model``.

    Raises:
        NotExpressible: a tensor belongs to no part that is known.
    """
    vision = vision_of(source.config)
    found = {}
    for stored in source.beside_language:
        name = vision_name(stored.name)
        if name is None:
            raise NotExpressible(
                f"{stored.name}: belongs to neither the language part nor what reads images"
            )
        if not vision.leaves_out(source.config, name) and not name.endswith(
            ".position_ids"
        ):  # which are counted, not trained
            found[name] = stored
    return found


def pieces_of(tensors: Mapping[str, StoredTensor]) -> list[Piece]:
    """Tensors of the file.

    Raises:
        NotExpressible: GGUF has no place for one.
    """
    return [
        piece for name, stored in tensors.items() for piece in _pieces_of_one(name, stored.shape)
    ]


def _pieces_of_one(name: str, shape: tuple[int, ...]) -> Iterator[Piece]:
    import gguf

    stem, suffix = _split(name)
    if each := QKV.fullmatch(stem):
        rows = shape[0] // 3
        for n, role in enumerate(("V_ENC_ATTN_Q", "V_ENC_ATTN_K", "V_ENC_ATTN_V")):
            target = gguf.TENSOR_NAMES[gguf.MODEL_TENSOR[role]].format(bid=each["block"])
            yield _part(
                f"{target}{suffix}", name, (rows, *shape[1:]), (slice(n * rows, (n + 1) * rows),)
            )
    elif len(shape) == 5:  # a kernel over two frames of a film, between which an image stands still
        for n, end in enumerate(("", ".1")):
            yield _part(
                f"{_target(stem)}{suffix}{end}",
                name,
                (*shape[:2], *shape[3:]),
                (slice(None), slice(None), n),
            )
    else:
        added = 1.0 if stem.endswith("mm_soft_emb_norm") else 0.0
        yield Piece(
            f"{_target(stem)}{suffix}",
            tuple(shape),
            (name,),
            lambda given: given[0] + added,
            lambda written: [(name, ..., written - added)],
        )


def _split(name: str) -> tuple[str, str]:
    """A name and the suffix of its kind: a parameter that is no module's ends with ``_weight``,
    or has none.
    """
    found = re.fullmatch(r"(.+?)[._](weight|bias)", name)
    return (found[1], f".{found[2]}") if found else (name, "")


def _part(target: str, name: str, shape: tuple[int, ...], place: Any) -> Piece:
    return Piece(
        target,
        shape,
        (name,),
        lambda given: given[0][place],
        lambda written: [(name, place, written)],
    )


def _target(stem: str) -> str:
    import gguf

    if stem in LLAVA:
        return str(gguf.TENSOR_NAMES[gguf.MODEL_TENSOR.V_MMPROJ].format(bid=LLAVA[stem]))
    for pattern, role in ROLES.items():
        if found := re.fullmatch(pattern, stem):
            number = next((n for n in found.groupdict().values() if n is not None), None)
            return str(gguf.TENSOR_NAMES[gguf.MODEL_TENSOR[role]].format(bid=number))
    raise NotExpressible(f"{stem}: has no place in GGUF among what reads images")


def type_of(piece: Piece, kind: str) -> Any:
    """``gguf.GGMLQuantizationType`` of a tensor in a file of a type of ``TYPES``."""
    import gguf

    full = len(piece.shape) < 2 or piece.name in IN_FULL
    return gguf.GGMLQuantizationType["F32" if full else TYPES[kind]]


def write(source: Source, target: Path, kind: str) -> None:
    """Write the file.

    Raises:
        NotExpressible: it has no form for the model.
        ValueError: the package gguf is missing.
    """
    require_gguf()
    import gguf

    settings = settings_of(source)
    tensors = tensors_of(source)
    pieces = pieces_of(tensors)
    writer = gguf.GGUFWriter(target, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH.MMPROJ])
    writer.add_type(gguf.GGUFType.MMPROJ)
    writer.add_file_type(gguf.LlamaFileType["ALL_F32" if kind == "f32" else "MOSTLY_F16"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for key, value in settings.items():
        if "." not in key:
            getattr(writer, f"add_{key}")(value)
        else:
            (writer.add_bool if isinstance(value, bool) else writer.add_array)(key, value)
    fill(writer, pieces, {piece.name: type_of(piece, kind) for piece in pieces}, tensors, {})


def size(source: Source, kind: str) -> int:
    """Bytes of the tensors."""
    require_gguf()
    return sum(
        int(np.prod(p.shape)) * (2 if type_of(p, kind).name == "F16" else 4)
        for p in pieces_of(tensors_of(source))
    )


# --- what llama.cpp does in one way only
# -------------------------------------------------------------------------------


def _refuse(wrong: bool, said: str) -> None:
    if wrong:
        raise NotExpressible(
            f"{said}: llama.cpp reads images of such a model otherwise; export merged weights "
            "(--to merged)"
        )


def _only(part: Any, **expected: Any) -> None:
    """Refuse a configuration that has another value of a field."""
    for name, value in expected.items():
        own = getattr(part, name, value)
        _refuse(own != value, f"{name}={own!r}")


def _qwen2_5_vl(config: Any) -> None:
    part = config.vision_config
    _only(
        part,
        hidden_act="silu",
        spatial_merge_size=2,
        temporal_patch_size=2,
        in_channels=3,
        window_size=WINDOW,
    )
    _refuse(_period(part) is None, f"fullatt_block_indexes={list(part.fullatt_block_indexes)}")


def _period(part: Any) -> int | None:
    """n where every n-th layer sees the whole image, and the others have windows."""
    found = list(part.fullatt_block_indexes)
    period = found[0] + 1 if found else 0
    return period if period and found == list(range(period - 1, part.depth, period)) else None


def _gemma3(config: Any) -> None:
    _only(
        config.vision_config,
        hidden_act="gelu_pytorch_tanh",
        model_type="siglip_vision_model",
        num_channels=3,
    )
    side = config.vision_config.image_size // config.vision_config.patch_size
    tokens = math.isqrt(config.mm_tokens_per_image)
    _refuse(
        tokens**2 != config.mm_tokens_per_image or side % tokens > 0,
        f"mm_tokens_per_image={config.mm_tokens_per_image}",
    )


def _idefics3(config: Any) -> None:
    _only(config.vision_config, hidden_act="gelu_pytorch_tanh", num_channels=3)


def _llava(config: Any) -> None:
    part = config.vision_config
    _only(
        config,
        projector_hidden_act="gelu",
        vision_feature_select_strategy="default",
        multimodal_projector_bias=True,
    )
    _only(part, model_type="clip_vision_model", num_channels=3)
    _refuse(part.hidden_act not in ("quick_gelu", "gelu"), f"hidden_act={part.hidden_act!r}")
    layer = config.vision_feature_layer
    known = isinstance(layer, int) and 0 < _feature_layer(config) <= part.num_hidden_layers
    _refuse(not known, f"vision_feature_layer={layer!r}")


def _feature_layer(config: Any) -> int:
    """How many layers images go through."""
    layer = config.vision_feature_layer
    return int(layer if layer >= 0 else config.vision_config.num_hidden_layers + 1 + layer)


# --- settings of some
# --------------------------------------------------------------------------------------------------


def _of_qwen2_5_vl(config: Any, processor: Mapping[str, Any]) -> Settings:
    return {
        "vision_use_silu": True,
        "vision_n_wa_pattern": _period(config.vision_config),
        "vision_attention_layernorm_eps": 1e-6,
        "vision_spatial_merge_size": config.vision_config.spatial_merge_size,
    }


def _of_gemma3(config: Any, processor: Mapping[str, Any]) -> Settings:
    part = config.vision_config
    pooled = part.image_size // part.patch_size // math.isqrt(config.mm_tokens_per_image)
    eps = part.layer_norm_eps
    return {
        "vision_use_gelu": True,
        "vision_attention_layernorm_eps": eps,
        "vision_projector_scale_factor": pooled,
    }


def _of_idefics3(config: Any, processor: Mapping[str, Any]) -> Settings:
    part = config.vision_config
    return {
        "vision_use_gelu": True,
        "vision_attention_layernorm_eps": part.layer_norm_eps,
        "vision_projector_scale_factor": config.scale_factor,
        "vision_preproc_image_size": (processor.get("size") or {}).get(
            "longest_edge", part.image_size
        ),
    }


def _of_llava(config: Any, processor: Mapping[str, Any]) -> Settings:
    """Neither of two activations named is CLIP's ``quick_gelu``."""
    part = config.vision_config
    layers = _feature_layer(config)
    return {
        "vision_use_gelu": part.hidden_act == "gelu",
        "vision_attention_layernorm_eps": part.layer_norm_eps,
        "vision_block_count": layers,
        FEATURE_LAYER: [layers],
        "clip.has_llava_projector": True,
    }


def _head_of_siglip(config: Any, name: str) -> bool:
    """What pools an image to one vector, which these models do not ask for."""
    return name.startswith(("vision_tower.head.", "vision_model.head."))


def _behind_the_feature_layer(config: Any, name: str) -> bool:
    block = re.match(r"vision_tower\.encoder\.layers\.(\d+)\.", name)
    return name.startswith("vision_tower.post_layernorm.") or (
        block is not None and int(block[1]) >= _feature_layer(config)
    )


FAMILIES: dict[str, Vision] = {
    "qwen2_5_vl": Vision("qwen2.5vl_merger", _qwen2_5_vl, _of_qwen2_5_vl),
    "gemma3": Vision("gemma3", _gemma3, _of_gemma3, _head_of_siglip),
    "smolvlm": Vision("idefics3", _idefics3, _of_idefics3, _head_of_siglip),
    "idefics3": Vision("idefics3", _idefics3, _of_idefics3, _head_of_siglip),
    "llava": Vision("mlp", _llava, _of_llava, _behind_the_feature_layer),
}
"""By ``model_type``."""
