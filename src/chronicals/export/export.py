"""Export of a trained model to formats that others serve, each proved before it gets its name."""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chronicals.export import (
    adapter,
    compressed_tensors,
    gguf,
    gguf_adapter,
    gguf_proof,
    gguf_vision,
    nf4,
    serving,
    vision_proof,
    whole,
)
from chronicals.export.card import card
from chronicals.export.hub import push
from chronicals.export.merge import reward_model_refusal
from chronicals.export.ollama import modelfile
from chronicals.export.progress import without_bars
from chronicals.export.proof import Proof
from chronicals.export.source import Source, opened
from chronicals.export.workspace import EXPORTS, PROOF, workspace
from chronicals.formats.gguf.vision import PROJECTOR_TYPES
from chronicals.formats.gguf.writer import LLAMA_CPP_KINDS, WEIGHT_TYPES
from chronicals.formats.tensor_names import reads_images
from chronicals.models import score_of
from chronicals.saving import SavedModel, save_model, text_files

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Format:
    """A way to write a model.

    Attributes:
        suffix: of the artefact's name.
        write: writes the artefact to a path.
        prove: adds the checks of an artefact to a proof.
        size: returns about how many bytes it takes.
        prefix: of the artefact's name.
    """

    suffix: str
    write: Callable[[Source, Path], None]
    prove: Callable[[Source, Path, Proof], None]
    size: Callable[[Source], int]
    prefix: str = ""

    def name(self, model: str) -> str:
        """Return the name of a model's artefact."""
        return f"{self.prefix}{model}{self.suffix}"


def _whole(kind: str) -> Format:
    width = {"bf16": 2, "fp16": 2, "fp32": 4}[kind]
    return Format(
        f"-{kind}",
        lambda source, aside: whole.write(source, aside, kind),
        lambda source, aside, proof: whole.prove(source, aside, kind, proof),
        lambda source: width * sum(math.prod(x.shape) for x in source.tensors.values()),
    )


def _gguf(kind: str) -> Format:
    return Format(
        f"-{kind}.gguf",
        lambda source, aside: gguf.write(source, aside, kind),
        lambda source, aside, proof: gguf_proof.prove(source, aside, kind, proof),
        lambda source: gguf.size(source, kind),
    )


def _mmproj(kind: str) -> Format:
    return Format(
        f"-{kind}.gguf",
        lambda source, aside: gguf_vision.write(source, aside, kind),
        lambda source, aside, proof: vision_proof.prove(source, aside, kind, proof),
        lambda source: gguf_vision.size(source, kind),
        "mmproj-",
    )


def _compressed(name: str) -> Format:
    layout = compressed_tensors.LAYOUTS[name]
    return Format(
        f"-{name}",
        lambda source, aside: compressed_tensors.write(source, aside, layout),
        lambda source, aside, proof: compressed_tensors.prove(source, aside, layout, proof),
        lambda source: compressed_tensors.size(source, layout),
    )


FORMATS: dict[str, Format] = {
    "merged": _whole("bf16"),
    "merged-fp16": _whole("fp16"),
    "merged-fp32": _whole("fp32"),
    "adapter": Format("-adapter", adapter.write, adapter.prove, adapter.size),
    "gguf-adapter": Format(
        "-adapter.gguf", gguf_adapter.write, gguf_adapter.prove, gguf_adapter.size
    ),
    "nf4": Format("-nf4", nf4.write, nf4.prove, nf4.size),
    **{name: _compressed(name) for name in compressed_tensors.LAYOUTS},
    **{f"gguf-{kind}": _gguf(kind) for kind in (*WEIGHT_TYPES, *LLAMA_CPP_KINDS)},
    **{f"mmproj-{kind}": _mmproj(kind) for kind in PROJECTOR_TYPES},
}
"""Formats by the names that ``--to`` takes."""


class ExportError(ValueError):
    """Nothing was written; the message says what to do."""


@dataclass(frozen=True)
class Exported:
    """An artefact that was proved.

    Attributes:
        format: its name in ``FORMATS``.
        path: of the file or folder.
        card: the text of its model card.
        serve: shell command by which a server loads it; None if none does.
    """

    format: str
    path: Path
    proof: Proof
    card: str
    serve: str | None


def export(
    model: Any,
    to: str | Sequence[str],
    output: str | Path | None = None,
    base_model: str | None = None,
    *,
    tokenizer: Any = None,
    name: str | None = None,
    data: str | Path | None = None,
    importance: str | Path | None = None,
    vllm_python: str | Path | None = None,
    ollama: bool = False,
    push_to_hub: str | None = None,
) -> list[Exported]:
    """Write a trained model in other formats, and read each back with its own client.

    An artefact is written aside, and renamed once all checks that could be run pass. Checks that
    could not be run, because a client is not installed, are named in the proof,
    ``NAME.proof.json`` beside the artefact.

    Args:
        model: the folder of a run, a checkpoint, an adapter, a model, or a hub name; or a model in
            memory, saved first.
        to: names of ``FORMATS``. GGUF of a model of images and text comes with an ``mmproj`` file
            for the part that reads images.
        output: folder for the artefacts; by default ``export`` in the model's folder, or for a hub
            name ``NAME-export`` here.
        base_model: of an adapter that does not name it, or whose base has moved.
        tokenizer: of a model in memory, which needs one.
        name: beginning of the artefacts' names; by default the model folder's, or ``model``.
        data: held-out rows, as ``chronicals evaluate`` takes them, on which the losses of the base,
            the trained and the exported model are reported.
        importance: rows over which the importance of each column of a weight is measured, for
            files that llama.cpp quantises.
        vllm_python: interpreter of an environment with vLLM, which then loads the artefacts that it
            can serve.
        ollama: also write a Modelfile for each GGUF file.
        push_to_hub: name of a repository on the hub, to which all artefacts are uploaded once they
            are proved; a new one is private.

    Raises:
        ExportError: there is no such format, an artefact is there already, it is a reward model, or
            the disk is too full.
        NotExpressible: a format has no form for this model; nothing of that format was written.
        UploadError: the hub does not take them; the artefacts stay.
        NotProved: an artefact is not the trained model; it was removed, those before it stay.
        ValueError: there is no such model, or its adapter cannot be merged.
    """
    formats = [to] if isinstance(to, str) else list(to)
    for format_name in formats:
        if format_name not in FORMATS:
            known = ", ".join(FORMATS)
            raise ExportError(f"to={format_name!r}: no such format; there are {known}")
    stem, folder = _stem_and_folder(model, name, output)
    if not isinstance(model, (str, Path)) and tokenizer is None:
        raise ExportError(
            "tokenizer=None: a model in memory is exported with its tokenizer; give it"
        )
    targets = {name: folder / FORMATS[name].name(stem) for name in formats}
    for format_name, target in targets.items():
        if target.exists():
            raise ExportError(
                f"{target}: is there already (--to {format_name}); delete it, or give another "
                "--output"
            )
    _check_no_score(model, base_model)
    folder.mkdir(parents=True, exist_ok=True)
    fields = {"data": data, "importance": importance, "vllm_python": vllm_python}
    paths = {key: None if path is None else str(path) for key, path in fields.items()}
    apart = set(formats) == {"adapter"}
    with without_bars(), workspace(folder) as place:
        saved = _saved(model, tokenizer, place)
        with opened(saved, base_model, place, apart, **paths) as source:
            projector = None
            projector_format = _projector_format(source, formats)
            if projector_format is not None:
                projector = folder / FORMATS[projector_format].name(stem)
                if projector.exists():
                    _check_projector(source, projector_format, projector)
                else:
                    targets[projector_format] = projector
            _check_room(source, list(targets), folder)
            artefacts = [
                _export_one(format_name, target, source, place, ollama, projector)
                for format_name, target in targets.items()
            ]
    if push_to_hub is not None:
        paths_to_push = [artefact.path for artefact in artefacts]
        logger.info("uploaded to %s", push(push_to_hub, paths_to_push, artefacts[0].card))
    return artefacts


def _projector_format(source: Source, formats: Sequence[str]) -> str | None:
    """Return the format of the file that llama.cpp needs to read images, if GGUF files are asked for.

    Raises:
        NotExpressible: it has no form for this model.
    """
    kinds = set()
    for name in formats:
        if name.startswith("gguf-") and name != "gguf-adapter":
            kinds.add(name.removeprefix("gguf-"))
    if not kinds or not reads_images(source.config):
        return None
    gguf_vision.projector_settings(source)  # refuses a model before anything is written
    for name in formats:
        if name.startswith("mmproj-"):
            return name
    return "mmproj-f32" if kinds == {"f32"} else "mmproj-f16"


def _check_projector(source: Source, format_name: str, target: Path) -> None:
    """Raise ExportError if a file that reads images is not this model's."""
    proof = Proof({})
    FORMATS[format_name].prove(source, target, proof)
    if proof.failed:
        raise ExportError(
            f"{target}: is there already and is not this model's ({proof.failed[0]}); delete it"
        )
    logger.info("%s: is there already, and is still what reads this model's images", target)


def _stem_and_folder(model: Any, name: str | None, output: str | Path | None) -> tuple[str, Path]:
    """Return the beginning of the artefacts' names, and their folder."""
    if not isinstance(model, (str, Path)):
        stem = name or "model"
        return stem, Path(f"{stem}-export" if output is None else output)
    path = Path(model)
    stem = name or (path.resolve().name if path.exists() else str(model).rpartition("/")[2])
    if output is not None:
        return stem, Path(output)
    return stem, path / EXPORTS if path.is_dir() else Path(f"{stem}-export")


def _check_no_score(model: Any, base_model: str | None) -> None:
    """Raise ExportError for a reward model, which predicts no tokens."""
    if not isinstance(model, (str, Path)):
        if score_of(model) is not None:
            raise ExportError(
                "model: is a reward model, and what export writes are language models; save it "
                "with save_model"
            )
        return
    saved = SavedModel.find(model, base_model)
    if saved.is_scored():
        raise ExportError(reward_model_refusal(saved))


def _saved(model: Any, tokenizer: Any, place: Path) -> str | Path:
    """Return the name or folder of the model; one in memory is saved to ``place``."""
    if isinstance(model, (str, Path)):
        return model
    save_model(place / "live", model, text_files(model, tokenizer), {})
    return place / "live"


def _check_room(source: Source, formats: Sequence[str], folder: Path) -> None:
    """Raise ExportError if the disk has too little room."""
    needed = sum(FORMATS[name].size(source) for name in formats)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ExportError(
            f"output={str(folder)!r}: {', '.join(formats)} take {needed / 2**30:.2f} GiB, the disk "
            f"has {free / 2**30:.2f}; free some, or give a folder on another one (--output)"
        )


def _export_one(
    format_name: str,
    target: Path,
    source: Source,
    place: Path,
    ollama: bool,
    projector: Path | None,
) -> Exported:
    """Write an artefact aside, prove it, and give it its name.

    Args:
        projector: file that reads images, for the command that serves the artefact.
    """
    chosen = FORMATS[format_name]
    aside = place / target.name
    about: dict[str, Any] = {
        "format": format_name,
        "model": str(source.saved.place),
        "base": source.saved.base,
    }
    proof = Proof(about)
    try:
        chosen.write(source, aside)
        chosen.prove(source, aside, proof)
        proof.require(target)
    except Exception:
        shutil.rmtree(aside) if aside.is_dir() else aside.unlink(missing_ok=True)
        raise
    for check in proof.checks:
        logger.debug("%s: %s", target.name, check)
    text = card(source, target.name, format_name, proof)
    if aside.is_dir():
        (aside / "README.md").write_text(text)
    aside.rename(target)
    proof.write(target.with_name(f"{target.name}{PROOF}"))
    if ollama and format_name.startswith("gguf"):
        content, guessed = modelfile(source, target)
        target.with_name(f"{target.stem}.Modelfile").write_text(content)
        if guessed:
            logger.warning("%s: %s", target.stem, guessed)
    serve = serving.command(format_name, target, source, projector)
    return Exported(format_name, target, proof, text, serve)
