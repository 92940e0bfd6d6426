"""What shows that an mmproj file is what reads images in the model: read back by the package gguf,
and an image by llama.cpp.

The image is random and as large as the model takes images, so that nobody resizes it. Its
embeddings, and the logits of the token behind a text with it, are compared with those of
transformers with the weights of the file.
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

from chronicals.export import gguf, gguf_vision, llama_cpp
from chronicals.export.gguf_file import File
from chronicals.export.llama_cpp import Seen
from chronicals.export.proof import Check, Proof, relative_error
from chronicals.export.source import Source
from chronicals.export.weight_files import NewTensor, StoredTensor, write_tensors
from chronicals.models.gguf_families import family_of
from chronicals.models.gguf_tensors import Restored

logger = logging.getLogger(__name__)

BOUNDS = {"f32": 1e-3, "f16": 5e-3}
"""Of llama.cpp's embeddings and logits, where GELU is a table of fp16."""

DISORDER = (
    "llama.cpp puts CLIP's class token behind the patches, which shifts their positions and drops "
    "the first (llama.cpp#25814): "
    "images are read worse than by transformers until that is mended there; the file is right"
)

BEFORE = "What is this: "
AFTER = " Answer in a word."

POSITIONS = 2048
"""Tokens of a text with an image, at most."""

GRID = (8, 10)
"""Patches of an image of a family that takes any size: more than a window, and not square."""


def prove(source: Source, file: Path, kind: str, proof: Proof) -> None:
    """Read it back, by the package gguf and, where it is there, by llama.cpp."""
    written = File(file)
    tensors = gguf_vision.tensors_of(source)
    pieces = gguf_vision.pieces_of(tensors)
    proof.equal(
        "settings", gguf.READER, _plain(gguf_vision.settings_of(source)), _said(source, written)
    )
    proof.equal(
        "every tensor is there",
        gguf.READER,
        sorted(piece.name for piece in pieces),
        sorted(written.tensors),
    )
    left = sorted({s.name for s in source.beside_language} - {s.name for s in tensors.values()})
    if left:
        proof.not_run(
            f"{len(left)} tensors that images do not go through", gguf.READER, ", ".join(left[:3])
        )
    if proof.failed:
        return
    found = written.restored(pieces, {name: stored.shape for name, stored in tensors.items()})
    _prove_weights(tensors, found, written, proof)
    if not llama_cpp.is_there():
        reason = f"{llama_cpp.PACKAGE} is not installed: pip install {llama_cpp.PACKAGE}"
        proof.not_run("embeddings of an image", "llama.cpp", reason)
        return
    with tempfile.TemporaryDirectory(dir=file.parent) as place:
        language = "f32" if source.dtype == torch.float32 else "f16"
        gguf.write(source, Path(place) / "language.gguf", language)
        model = _in_torch(source, tensors, found, Path(place))
        _prove_image(source, model, file, Path(place) / "language.gguf", BOUNDS[kind], proof)


def _plain(settings: dict[str, Any]) -> dict[str, Any]:
    """As the file holds them: numbers in fp32."""
    return {key: _single(value) for key, value in settings.items()}


def _single(value: Any) -> Any:
    if isinstance(value, list):
        return [_single(one) for one in value]
    return float(np.float32(value)) if isinstance(value, float) else value


def _said(source: Source, written: File) -> dict[str, Any]:
    """Settings that the file has, by the names of ``gguf_vision.settings_of``."""
    return {key: _single(written.value(_whole_key(key))) for key in gguf_vision.settings_of(source)}


def _whole_key(key: str) -> str:
    """The key that one of gguf's methods writes."""
    import gguf as package

    class Recorder(package.GGUFWriter):
        def __init__(self) -> None:
            self.keys: list[str] = []

        def add_key_value(self, key: str, *_: Any, **__: Any) -> None:
            self.keys.append(key)

        def add_array(self, key: str, *_: Any) -> None:
            self.keys.append(key)

    if "." in key:
        return key
    recorder = Recorder()
    getattr(recorder, f"add_{key}")(1)
    return recorder.keys[0]


def _prove_weights(
    tensors: dict[str, StoredTensor], found: Restored, written: File, proof: Proof
) -> None:
    worst: dict[str, tuple[float, str]] = {}
    for name in found:
        kind = written.type_of(found.pieces[name][0].name)
        error = relative_error(found[name], tensors[name].read())
        worst[kind] = max(worst.get(kind, (0.0, name)), (error, name))
    for kind, (error, name) in worst.items():
        proof.bounded(f"weights in {kind}", gguf.READER, error, gguf.ERRORS[kind], name)


def _in_torch(
    source: Source, tensors: dict[str, StoredTensor], found: Restored, folder: Path
) -> Any:
    """The model, with the file's weights where it reads images."""
    ours = {stored.name: name for name, stored in tensors.items()}

    def made(stored: StoredTensor) -> NewTensor:
        if stored.name not in ours:
            return NewTensor(stored.name, stored.dtype, stored.shape, lambda: stored)
        return NewTensor(
            stored.name, "F32", stored.shape, partial(found.__getitem__, ours[stored.name])
        )

    write_tensors(
        folder / "model.safetensors", [made(stored) for stored in source.tensors.values()]
    )
    source.config.save_pretrained(folder)
    return source.load(folder)


def _prove_image(
    source: Source, model: Any, file: Path, language: Path, bound: float, proof: Proof
) -> None:
    image = image_for(source.config)
    processor = gguf_vision.processor_of(source.folder)
    inputs = inputs_of(source.config, image, processor)
    try:
        seen = llama_cpp.see(file, language, BEFORE, image, AFTER, POSITIONS)
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
            disordered = embeddings_of(model, inputs)
        if relative_error(theirs, disordered) < error:
            proof.reported(
                "embeddings that change as the class token comes last", "llama.cpp", error, DISORDER
            )
            logger.warning("%s: %s", file.name, DISORDER)
            error = relative_error(theirs, disordered)
            expected = disordered
            order = _class_token_last(model)
    with order:
        with gguf.as_rounded(model, "f32"):
            rounded = relative_error(embeddings_of(model, inputs), expected)
        limit = max(bound, gguf.OF_ROUNDING * rounded)
        proof.bounded(
            "embeddings of an image",
            "llama.cpp",
            error,
            limit,
            f"{image.shape[1]} x {image.shape[0]} pixels",
        )
        _prove_logits(source, model, seen, inputs, bound, proof)


def _prove_logits(
    source: Source, model: Any, seen: Seen, inputs: dict[str, Tensor], bound: float, proof: Proof
) -> None:
    """Of the token behind a text with the image; not where the image is enlarged to be cut into
    pieces.
    """
    largest = gguf_vision.settings_of(source).get("vision_preproc_image_size", 0)
    if seen.logits is None or largest > getattr(source.config.vision_config, "image_size", largest):
        reason = (
            f"the image becomes {len(seen.images)} pieces, each resized; its last one is compared"
        )
        proof.not_run("logits behind an image", "llama.cpp", reason)
        return
    theirs = torch.from_numpy(seen.logits)
    expected = _logits(source.config, model, seen, inputs)
    with gguf.as_rounded(model, "f32"):
        rounded = relative_error(_logits(source.config, model, seen, inputs), expected)
    error = relative_error(theirs, expected)
    if family_of(source.text_config).loses_epsilon:
        with gguf.without_epsilon(model):
            error = min(error, relative_error(theirs, _logits(source.config, model, seen, inputs)))
    limit = max(bound, gguf.OF_ROUNDING * rounded)
    proof.bounded("logits behind an image", "llama.cpp", error, source.at_least(limit))


@contextmanager
def _class_token_last(model: Any) -> Iterator[None]:
    """Within: CLIP's class token stands behind the patches, and positions stay where they were
    (llama.cpp#25814).
    """
    embeddings = model.model.vision_tower.embeddings

    def moved(module: Any, given: Any, out: Tensor) -> Tensor:
        places = module.position_embedding.weight
        return (out - places).roll(-1, dims=1) + places

    hook = embeddings.register_forward_hook(moved)
    try:
        yield
    finally:
        hook.remove()


def image_for(config: Any) -> np.ndarray:
    """Random pixels, uint8 ``[height, width, 3]``."""
    part = config.vision_config
    size = getattr(part, "image_size", None)
    shape = (size, size) if size else tuple(part.patch_size * n for n in GRID)
    return np.random.default_rng(0).integers(0, 256, (*shape, 3), dtype=np.uint8)


def inputs_of(config: Any, image: np.ndarray, processor: dict[str, Any]) -> dict[str, Tensor]:
    """Arguments of transformers' models for an image that needs no resizing."""
    mean, std = (
        torch.tensor(processor[name]).view(3, 1, 1) for name in ("image_mean", "image_std")
    )
    pixels = (torch.from_numpy(image).permute(2, 0, 1).float() / 255 - mean) / std
    part = config.vision_config
    if not hasattr(part, "spatial_merge_size"):
        several = config.model_type in ("idefics3", "smolvlm")  # which take several images a text
        return {"pixel_values": pixels[None, None] if several else pixels[None]}
    side = part.patch_size
    merged = part.spatial_merge_size
    twice = part.temporal_patch_size
    rows, columns = (n // side for n in pixels.shape[1:])
    cut = pixels.view(3, rows // merged, merged, side, columns // merged, merged, side)
    patches = cut.permute(1, 4, 2, 5, 0, 3, 6)[:, :, :, :, :, None].expand(
        -1, -1, -1, -1, -1, twice, -1, -1
    )
    return {
        "pixel_values": patches.reshape(rows * columns, -1),
        "image_grid_thw": torch.tensor([[1, rows, columns]]),
    }


@torch.no_grad()
def embeddings_of(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """fp32 ``[n, D]`` in host memory: what transformers puts in the place of an image's tokens."""
    device = next(model.parameters()).device
    out = model.get_image_features(
        **{name: x.to(device) for name, x in inputs.items()}
    ).pooler_output
    found = torch.cat(list(out)) if isinstance(out, (list, tuple)) else out
    return found.flatten(0, -2).float().cpu()


@torch.no_grad()
def _logits(config: Any, model: Any, seen: Seen, inputs: dict[str, Tensor]) -> Tensor:
    """fp32 ``[V]`` of the token behind the same ids."""
    image = next(
        n
        for name in ("image_token_id", "image_token_index")
        if (n := getattr(config, name, None)) is not None
    )
    ids = list(seen.texts[0])
    kinds = [0] * len(seen.texts[0])
    for found, text in zip(seen.images, seen.texts[1:], strict=True):
        ids += [image] * len(found) + text
        kinds += [1] * len(found) + [0] * len(text)
    named = {"qwen2_5_vl": "mm_token_type_ids", "gemma3": "token_type_ids"}.get(config.model_type)
    given = {
        "input_ids": torch.tensor([ids]),
        **inputs,
        **({named: torch.tensor([kinds])} if named else {}),
    }
    if len(seen.images) > 1:
        given["pixel_values"] = inputs["pixel_values"].expand(-1, len(seen.images), -1, -1, -1)
    device = next(model.parameters()).device
    out = model(**{name: x.to(device) for name, x in given.items()}, use_cache=False)
    return out.logits[0, -1].float().cpu()
