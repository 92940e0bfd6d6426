"""Tiny models of images and text, as large as llama.cpp's vision part takes them: random weights
in all places.
"""

from functools import partial
from typing import Any

import torch
import transformers

import families
from chronicals.models import is_within

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 310,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 0,
}
SIGLIP = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 14,
}


def qwen2_5_vl(**sizes: Any) -> Any:
    """Four layers of vision, every second of which sees the whole image."""
    text = {**SIZES, **sizes}
    pairs = text["hidden_size"] // text["num_attention_heads"] // 2
    rope = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [pairs // 2, pairs // 4, pairs // 4],
    }
    vision = {
        "depth": 4,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "out_hidden_size": text["hidden_size"],
        "patch_size": 14,
        "spatial_merge_size": 2,
        "window_size": 112,
        "fullatt_block_indexes": [1, 3],
    }
    ids = {
        "image_token_id": 309,
        "video_token_id": 308,
        "vision_start_token_id": 307,
        "vision_end_token_id": 306,
    }
    config = transformers.Qwen2_5_VLConfig(
        text_config={**text, "rope_parameters": rope},
        vision_config=vision,
        tie_word_embeddings=False,
        **ids,
    )
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def gemma3(**sizes: Any) -> Any:
    """Six layers, the first five of which have a window; 4 x 4 patches become 2 x 2 tokens."""
    text = {
        **SIZES,
        "num_hidden_layers": 6,
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "sliding_window": 16,
        **sizes,
    }
    ids = {"image_token_index": 309, "boi_token_index": 308, "eoi_token_index": 307}
    config = transformers.Gemma3Config(
        text_config=transformers.Gemma3TextConfig(**text),
        vision_config={**SIGLIP, "image_size": 56},
        mm_tokens_per_image=4,
        **ids,
    )
    return transformers.Gemma3ForConditionalGeneration(config)


def smolvlm(**sizes: Any) -> Any:
    config = transformers.SmolVLMConfig(
        text_config={"model_type": "llama", **SIZES, **sizes},
        vision_config={**SIGLIP, "image_size": 56},
        scale_factor=2,
        image_token_id=309,
        tie_word_embeddings=False,
    )
    return transformers.SmolVLMForConditionalGeneration(config)


def idefics3(**sizes: Any) -> Any:
    config = transformers.Idefics3Config(
        text_config={"model_type": "llama", **SIZES, **sizes},
        vision_config={**SIGLIP, "image_size": 56},
        scale_factor=2,
        image_token_id=309,
        tie_word_embeddings=False,
    )
    return transformers.Idefics3ForConditionalGeneration(config)


def llava(text: str = "Llama", **sizes: Any) -> Any:
    """CLIP, whose last layer but one is taken."""
    given = {**SIZES, **({"sliding_window": None} if text == "Mistral" else {}), **sizes}
    config = transformers.LlavaConfig(
        text_config=getattr(transformers, f"{text}Config")(**given),
        vision_config=transformers.CLIPVisionConfig(
            **{**SIGLIP, "num_hidden_layers": 3, "image_size": 56}
        ),
        image_token_id=309,
    )
    return transformers.LlavaForConditionalGeneration(config)


MODELS: dict[str, Any] = {
    "qwen2_5_vl": qwen2_5_vl,
    "gemma3": gemma3,
    "smolvlm": smolvlm,
    "idefics3": idefics3,
    "llava": llava,
    "llava, mistral": partial(llava, "Mistral"),
}

TOWERS = {
    "qwen2_5_vl": ["model.visual"],
    "gemma3": ["model.multi_modal_projector", "model.vision_tower"],
    "smolvlm": ["model.connector", "model.vision_model"],
    "idefics3": ["model.connector", "model.vision_model"],
    "llava": ["model.multi_modal_projector", "model.vision_tower"],
    "llava, mistral": ["model.multi_modal_projector", "model.vision_tower"],
}
"""Modules of each that read no text."""


def build(name: str, **sizes: Any) -> Any:
    """In evaluation mode, in fp32; ``sizes`` are the language part's."""
    model = MODELS[name](**sizes).float().eval()
    families.randomise(model)
    with torch.no_grad():  # so that it matters in what reads images where attention looks
        for path, parameter in model.named_parameters():
            if is_within(path, TOWERS[name]) and path.endswith(
                ("qkv.weight", "q_proj.weight", "k_proj.weight")
            ):
                parameter.mul_(4)
        for parameter in model.get_decoder().parameters() if name == "gemma3" else ():
            parameter.mul_(
                0.1 if parameter.ndim == 1 else 1.0
            )  # norms add one: larger ones make much of roundings
    return model
