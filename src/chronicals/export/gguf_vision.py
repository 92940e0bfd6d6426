"""The second GGUF file of a model of images and text, with the part that reads images (mmproj).

The file is read back by the package gguf, and an image by llama.cpp. The image is random and as
large as the model takes images, so that nobody resizes it. Its embeddings, and the logits of the
token behind a text with it, are compared with those of transformers with the weights of the file.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from chronicals.export import llama_cpp
from chronicals.export.artefact import ArtefactFormat
from chronicals.export.gguf import (
    GGUF_READER,
    ROUNDING_FACTOR,
    GGUFModel,
    as_rounded,
    prove_weights,
    without_epsilon,
)
from chronicals.export.llama_cpp import Seen
from chronicals.export.proof import Check, Proof, relative_error
from chronicals.export.source import SourceModel
from chronicals.export.whole import in_dtype
from chronicals.formats.gguf.families import family_of
from chronicals.formats.gguf.reader import GGUFFile, require_gguf
from chronicals.formats.gguf.tensors import RestoredTensors
from chronicals.formats.gguf.vision import (
    processor_of,
    vision_pieces,
    vision_settings,
    vision_tensors,
    vision_type_of,
    write_projector,
)
from chronicals.formats.gguf.writer import bytes_of
from chronicals.formats.weight_files import NewTensor, write_tensors

logger = logging.getLogger(__name__)

IMAGE_BOUNDS = {"f32": 1e-3, "f16": 5e-3}
"""Bounds on the error of llama.cpp's embeddings and logits, where GELU is a table of fp16."""

CLASS_TOKEN_NOTE = (
    "llama.cpp puts CLIP's class token behind the patches, which shifts their positions and drops "
    "the first (llama.cpp#25814): "
    "images are read worse than by transformers until that is mended there; the file is right"
)

TEXT_BEFORE = "What is this: "
TEXT_AFTER = " Answer in a word."

MAX_TOKENS = 2048
"""Longest text with an image."""

IMAGE_PATCHES = (8, 10)
"""Size of the image for a family that takes any: more than a window, and not square."""


class GGUFProjector(ArtefactFormat):
    """A file in GGUF, its ``kind`` one of ``PROJECTOR_TYPES``, beside that of the language part."""

    prefix = "mmproj-"
    extension = ".gguf"
    served_by = "llama-server -m LANGUAGE.gguf --mmproj {artefact}"

    def size(self, source: SourceModel) -> int:
        """Return the bytes of the file's tensors."""
        require_gguf()
        pieces = vision_pieces(vision_tensors(source.config, source.beside_language))
        return sum(bytes_of(piece, vision_type_of(piece, self.kind)) for piece in pieces)

    def write(self, source: SourceModel, aside: Path) -> None:
        """Write the file.

        Raises:
            NotExpressible: it has no form for the model.
            ValueError: the package gguf is missing.
        """
        require_gguf()
        settings = vision_settings(source.config, source.folder)
        # Those that images go through, by the names of their modules below ``model``.
        tensors = vision_tensors(source.config, source.beside_language)
        write_projector(aside, settings, vision_pieces(tensors), tensors, self.kind)

    def prove(self, source: SourceModel, aside: Path, proof: Proof) -> None:
        """Read the file back, by the package gguf and, if it is installed, by llama.cpp."""
        written = GGUFFile(aside)
        tensors = vision_tensors(source.config, source.beside_language)
        pieces = vision_pieces(tensors)
        settings = vision_settings(source.config, source.folder)
        expected = {key: _in_fp32(value) for key, value in settings.items()}
        read = {key: _in_fp32(written.value(key)) for key in settings}
        proof.equal("settings", GGUF_READER, expected, read)
        names = sorted(piece.name for piece in pieces)
        proof.equal("every tensor is there", GGUF_READER, names, sorted(written.tensors))
        used = {stored.name for stored in tensors.values()}
        unused = sorted({stored.name for stored in source.beside_language} - used)
        if unused:
            count = f"{len(unused)} tensors that images do not go through"
            proof.not_run(count, GGUF_READER, ", ".join(unused[:3]))
        if proof.failed:
            return
        shapes = {name: stored.shape for name, stored in tensors.items()}
        restored = RestoredTensors(pieces, shapes, written.read)
        prove_weights(tensors, restored, written, proof)
        if not llama_cpp.is_there():
            proof.not_run("embeddings of an image", "llama.cpp", llama_cpp.NOT_INSTALLED)
            return
        with tempfile.TemporaryDirectory(dir=aside.parent) as place:
            language = Path(place) / "language.gguf"
            GGUFModel("f32" if source.dtype == torch.float32 else "f16").write(source, language)
            # The model with the file's weights in the part that reads images.
            modules = {stored.name: name for name, stored in tensors.items()}
            new_tensors = []
            for stored in source.tensors.values():
                new = in_dtype(stored, stored.dtype)
                if stored.name in modules:
                    values = partial(restored.__getitem__, modules[stored.name])
                    new = NewTensor(stored.name, "F32", stored.shape, values)
                new_tensors.append(new)
            write_tensors(Path(place) / "model.safetensors", new_tensors)
            source.config.save_pretrained(place)
            model = source.load(Path(place))
            _prove_image(source, model, aside, language, IMAGE_BOUNDS[self.kind], proof)


def _in_fp32(value: Any) -> Any:
    """Round the numbers of a setting to fp32, in which files hold them."""
    if isinstance(value, list):
        return [_in_fp32(one) for one in value]
    return float(np.float32(value)) if isinstance(value, float) else value


def _prove_image(
    source: SourceModel, model: Any, file: Path, language: Path, bound: float, proof: Proof
) -> None:
    """Compare llama.cpp's embeddings of an image with transformers', then the logits behind it.

    Args:
        source: the exported model.
        model: with the weights of the file.
        file: that is proved.
        language: GGUF file of the language part.
        bound: on the relative error of embeddings and logits.
        proof: gets the checks.
    """
    part = source.config.vision_config
    side = getattr(part, "image_size", None)
    shape = (side, side) if side else tuple(part.patch_size * n for n in IMAGE_PATCHES)
    image = np.random.default_rng(0).integers(0, 256, (*shape, 3), dtype=np.uint8)
    inputs = image_inputs(source.config, image, processor_of(source.folder))
    try:
        seen = llama_cpp.see(file, language, TEXT_BEFORE, image, TEXT_AFTER, MAX_TOKENS)
    except ValueError as refused:
        proof.checks.append(Check("an image is read", "llama.cpp", False, detail=str(refused)))
        return
    lacking = sum(token < 0 for text in seen.texts for token in text)
    proof.equal("tokens around an image that the vocabulary lacks", "llama.cpp", 0, lacking)
    theirs = torch.from_numpy(seen.images[-1])
    expected = embeddings_of(model, inputs)
    error = relative_error(theirs, expected)
    order: AbstractContextManager[None] = nullcontext()
    if source.config.model_type == "llava":
        with _class_token_last(model):
            reordered = embeddings_of(model, inputs)
        if relative_error(theirs, reordered) < error:
            name = "embeddings that change as the class token comes last"
            proof.reported(name, "llama.cpp", error, CLASS_TOKEN_NOTE)
            logger.warning("%s: %s", file.name, CLASS_TOKEN_NOTE)
            error = relative_error(theirs, reordered)
            expected = reordered
            order = _class_token_last(model)
    with order:
        with as_rounded(model, "f32"):
            rounded = relative_error(embeddings_of(model, inputs), expected)
        limit = max(bound, ROUNDING_FACTOR * rounded)
        pixels = f"{image.shape[1]} x {image.shape[0]} pixels"
        proof.bounded("embeddings of an image", "llama.cpp", error, limit, pixels)
        _prove_logits_behind(source, model, seen, inputs, bound, proof)


def _prove_logits_behind(
    source: SourceModel,
    model: Any,
    seen: Seen,
    inputs: dict[str, Tensor],
    bound: float,
    proof: Proof,
) -> None:
    """Compare the logits of the token behind a text with the image.

    An image that is enlarged to be cut into pieces is left out.
    """
    settings = vision_settings(source.config, source.folder)
    largest = settings.get("clip.vision.preproc_image_size", 0)
    if seen.logits is None or largest > getattr(source.config.vision_config, "image_size", largest):
        reason = (
            f"the image becomes {len(seen.images)} pieces, each resized; its last one is compared"
        )
        proof.not_run("logits behind an image", "llama.cpp", reason)
        return
    theirs = torch.from_numpy(seen.logits)
    expected = _logits_behind(source.config, model, seen, inputs)
    with as_rounded(model, "f32"):
        rounded = relative_error(_logits_behind(source.config, model, seen, inputs), expected)
    error = relative_error(theirs, expected)
    if family_of(source.text_config).loses_epsilon:
        with without_epsilon(model):
            error = min(
                error, relative_error(theirs, _logits_behind(source.config, model, seen, inputs))
            )
    limit = max(bound, ROUNDING_FACTOR * rounded)
    proof.bounded("logits behind an image", "llama.cpp", error, source.at_least(limit))


@contextmanager
def _class_token_last(model: Any) -> Iterator[None]:
    """Move CLIP's class token behind the patches inside the context (llama.cpp#25814).

    Positions stay where they were.
    """
    embeddings = model.model.vision_tower.embeddings

    def move(module: Any, inputs: Any, out: Tensor) -> Tensor:
        positions = module.position_embedding.weight
        return (out - positions).roll(-1, dims=1) + positions

    hook = embeddings.register_forward_hook(move)
    try:
        yield
    finally:
        hook.remove()


def image_inputs(config: Any, image: np.ndarray, processor: dict[str, Any]) -> dict[str, Tensor]:
    """Return the arguments of transformers' models for an image that needs no resizing."""
    mean = torch.tensor(processor["image_mean"]).view(3, 1, 1)
    std = torch.tensor(processor["image_std"]).view(3, 1, 1)
    pixels = (torch.from_numpy(image).permute(2, 0, 1).float() / 255 - mean) / std
    part = config.vision_config
    if not hasattr(part, "spatial_merge_size"):
        takes_several = config.model_type in ("idefics3", "smolvlm")
        return {"pixel_values": pixels[None, None] if takes_several else pixels[None]}
    side = part.patch_size
    merged = part.spatial_merge_size
    frames = part.temporal_patch_size
    rows, columns = (n // side for n in pixels.shape[1:])
    cut = pixels.view(3, rows // merged, merged, side, columns // merged, merged, side)
    patches = cut.permute(1, 4, 2, 5, 0, 3, 6)[:, :, :, :, :, None].expand(
        -1, -1, -1, -1, -1, frames, -1, -1
    )
    return {
        "pixel_values": patches.reshape(rows * columns, -1),
        "image_grid_thw": torch.tensor([[1, rows, columns]]),
    }


@torch.no_grad()
def embeddings_of(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Return transformers' embeddings in place of an image's tokens, fp32 ``[n, D]``."""
    device = next(model.parameters()).device
    arguments = {name: x.to(device) for name, x in inputs.items()}
    features = model.get_image_features(**arguments).pooler_output
    if isinstance(features, (list, tuple)):
        features = torch.cat(list(features))
    return features.flatten(0, -2).float().cpu()


@torch.no_grad()
def _logits_behind(config: Any, model: Any, seen: Seen, inputs: dict[str, Tensor]) -> Tensor:
    """Return transformers' logits of the token behind the same ids, fp32 ``[V]``."""
    image = getattr(config, "image_token_id", None)
    if image is None:
        image = config.image_token_index
    ids = list(seen.texts[0])
    kinds = [0] * len(ids)
    for embeddings, text in zip(seen.images, seen.texts[1:], strict=True):
        ids += [image] * len(embeddings) + text
        kinds += [1] * len(embeddings) + [0] * len(text)
    arguments = {"input_ids": torch.tensor([ids]), **inputs}
    kinds_name = {"qwen2_5_vl": "mm_token_type_ids", "gemma3": "token_type_ids"}
    if config.model_type in kinds_name:
        arguments[kinds_name[config.model_type]] = torch.tensor([kinds])
    if len(seen.images) > 1:
        pixels = inputs["pixel_values"]
        arguments["pixel_values"] = pixels.expand(-1, len(seen.images), -1, -1, -1)
    device = next(model.parameters()).device
    arguments = {name: x.to(device) for name, x in arguments.items()}
    return model(**arguments, use_cache=False).logits[0, -1].float().cpu()
