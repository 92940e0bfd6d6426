"""Export of a trained model to formats that others serve, each proved before it gets its name."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import shlex
import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from chronicals.export.adapter import AdapterFolder, GGUFAdapter
from chronicals.export.artefact import EXPORTS, ArtefactFormat, proof_of, workspace
from chronicals.export.compressed_tensors import LAYOUTS, CompressedTensors
from chronicals.export.gguf import GGUFModel
from chronicals.export.gguf_vision import GGUFProjector
from chronicals.export.hub import hub_card, upload
from chronicals.export.merge import reward_model_refusal
from chronicals.export.nf4 import NF4Folder
from chronicals.export.ollama import modelfile
from chronicals.export.proof import NotProved, Proof
from chronicals.export.source import SourceModel, opened
from chronicals.export.whole import WholeModel
from chronicals.formats.gguf.vision import PROJECTOR_TYPES, vision_settings
from chronicals.formats.gguf.writer import LLAMA_CPP_KINDS, WEIGHT_TYPES
from chronicals.formats.tensor_names import reads_images
from chronicals.models import score_of
from chronicals.saving import SavedModel, save_model, text_files

logger = logging.getLogger(__name__)


FORMATS: dict[str, ArtefactFormat] = {
    "merged": WholeModel("bf16"),
    "merged-fp16": WholeModel("fp16"),
    "merged-fp32": WholeModel("fp32"),
    "adapter": AdapterFolder("adapter"),
    "gguf-adapter": GGUFAdapter("adapter"),
    "nf4": NF4Folder("nf4"),
    **{kind: CompressedTensors(kind, layout) for kind, layout in LAYOUTS.items()},
    **{f"gguf-{kind}": GGUFModel(kind) for kind in (*WEIGHT_TYPES, *LLAMA_CPP_KINDS)},
    **{f"mmproj-{kind}": GGUFProjector(kind) for kind in PROJECTOR_TYPES},
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
    stem, folder = _stem_and_folder(model, name, output)
    targets = _targets(formats, stem, folder)
    _check_model(model, base_model, tokenizer)
    folder.mkdir(parents=True, exist_ok=True)
    fields = {"data": data, "importance": importance, "vllm_python": vllm_python}
    paths = {key: None if path is None else str(path) for key, path in fields.items()}
    apart = set(formats) == {"adapter"}
    with _without_bars(), workspace(folder) as place:
        if not isinstance(model, (str, Path)):
            save_model(place / "live", model, text_files(model, tokenizer), {})
            model = place / "live"
        with opened(model, base_model, place, apart, **paths) as source:
            projector = None
            projector_format = _projector_format(source, formats)
            if projector_format is not None:
                projector = folder / FORMATS[projector_format].name(stem)
                if projector.exists():
                    _check_projector(projector_format, source, projector)
                else:
                    targets[projector_format] = projector
            _check_disk(folder, targets, source)
            artefacts = [
                _export_one(format_name, target, source, place, ollama, projector)
                for format_name, target in targets.items()
            ]
    if push_to_hub is not None:
        paths_to_push = [artefact.path for artefact in artefacts]
        logger.info("uploaded to %s", upload(push_to_hub, paths_to_push, artefacts[0].card))
    return artefacts


def _targets(formats: Sequence[str], stem: str, folder: Path) -> dict[str, Path]:
    """Return the file or folder to write for each format.

    Raises:
        ExportError: there is no such format, or one of them is there already.
    """
    targets: dict[str, Path] = {}
    for name in formats:
        if name not in FORMATS:
            known = ", ".join(FORMATS)
            raise ExportError(f"to={name!r}: no such format; there are {known}")
        targets[name] = folder / FORMATS[name].name(stem)
    for name, target in targets.items():
        if target.exists():
            raise ExportError(
                f"{target}: is there already (--to {name}); delete it, or give another --output"
            )
    return targets


def _check_model(model: Any, base_model: str | None, tokenizer: Any) -> None:
    """Check that a model can be exported; arguments as of ``export``.

    Raises:
        ExportError: it is a reward model, or in memory and given without its tokenizer.
    """
    if isinstance(model, (str, Path)):
        refusal = reward_model_refusal(SavedModel.find(model, base_model))
        if refusal is not None:
            raise ExportError(refusal)
        return
    if tokenizer is None:
        raise ExportError(
            "tokenizer=None: a model in memory is exported with its tokenizer; give it"
        )
    if score_of(model) is not None:
        raise ExportError(
            "model: is a reward model, and what export writes are language models; save it with "
            "save_model"
        )


def _check_projector(format_name: str, source: SourceModel, projector: Path) -> None:
    """Check that a file which is there already reads this model's images.

    Raises:
        ExportError: it does not.
    """
    proof = Proof({})
    FORMATS[format_name].prove(source, projector, proof)
    if proof.failed:
        raise ExportError(
            f"{projector}: is there already and is not this model's ({proof.failed[0]}); delete it"
        )
    logger.info("%s: is there already, and is still what reads this model's images", projector)


def _check_disk(folder: Path, formats: Collection[str], source: SourceModel) -> None:
    """Check that the disk of a folder has room for artefacts.

    Raises:
        ExportError: it has not.
    """
    needed = sum(FORMATS[name].size(source) for name in formats)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ExportError(
            f"output={str(folder)!r}: {', '.join(formats)} take {needed / 2**30:.2f} GiB, the disk "
            f"has {free / 2**30:.2f}; free some, or give a folder on another one (--output)"
        )


def _projector_format(source: SourceModel, formats: Sequence[str]) -> str | None:
    """Return the format of the file by which llama.cpp reads images beside those asked for.

    None if no GGUF file of the model is asked for, or it reads no images.

    Raises:
        NotExpressible: it has no form for this model.
    """
    kinds = set()
    for name in formats:
        if name.startswith("gguf-") and name != "gguf-adapter":
            kinds.add(name.removeprefix("gguf-"))
    if not kinds or not reads_images(source.config):
        return None
    vision_settings(source.config, source.folder)  # refuses a model before anything is written
    for name in formats:
        if name.startswith("mmproj-"):
            return name
    return "mmproj-f32" if kinds == {"f32"} else "mmproj-f16"


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


def _export_one(
    format_name: str,
    target: Path,
    source: SourceModel,
    place: Path,
    ollama: bool,
    projector: Path | None,
) -> Exported:
    """Write an artefact aside, prove it, and give it its name.

    Args:
        format_name: a key of ``FORMATS``.
        target: its path.
        source: the exported model.
        place: folder in which it is made.
        ollama: also write a Modelfile for a GGUF file.
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
        if proof.failed:
            raise NotProved(
                f"{target}: is not the trained model, and was not kept: "
                f"{'; '.join(map(str, proof.failed))}"
            )
    except BaseException:  # Ctrl-C too: nothing that was not proved stays
        shutil.rmtree(aside) if aside.is_dir() else aside.unlink(missing_ok=True)
        raise
    for check in proof.checks:
        logger.debug("%s: %s", target.name, check)
    text = hub_card(source, target.name, format_name, proof)
    if aside.is_dir():
        (aside / "README.md").write_text(text)
    aside.rename(target)
    proof.write(proof_of(target))
    if ollama and format_name.startswith("gguf"):
        content, guessed = modelfile(source, target)
        target.with_name(f"{target.stem}.Modelfile").write_text(content)
        if guessed:
            logger.warning("%s: %s", target.stem, guessed)
    serve = chosen.command(source, target)
    if serve is not None and projector is not None and chosen.takes_projector:
        serve += f" --mmproj {shlex.quote(str(projector))}"
    return Exported(format_name, target, proof, text, serve)


@contextmanager
def _without_bars() -> Iterator[None]:
    """Hide the progress bars of transformers and compressed-tensors inside the context."""
    from transformers.utils import logging as transformers_logging

    were_shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    model_compressor: Any = None
    tqdm = None
    try:
        if importlib.util.find_spec("compressed_tensors") is not None:
            name = "compressed_tensors.compressors.model_compressors.model_compressor"
            model_compressor = importlib.import_module(name)
        # compressed-tensors 0.17 has no setting for its bars.
        tqdm = getattr(model_compressor, "tqdm", None)
        if tqdm is not None:
            model_compressor.tqdm = partial(tqdm, disable=True)
        yield
    finally:
        if tqdm is not None:
            model_compressor.tqdm = tqdm
        if were_shown:
            transformers_logging.enable_progress_bar()
