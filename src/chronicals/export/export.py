"""A trained model in the formats that others serve, each proved before it gets its name."""

from __future__ import annotations

import logging
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
from chronicals.formats.part_names import reads_images
from chronicals.models import score_of
from chronicals.saving import SavedModel, save_model, text_files

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Format:
    """A way to write a model.

    Attributes:
        prefix, suffix: of the artefact's name.
        write: the artefact, at a path.
        prove: adds what was compared to a proof.
        size: bytes that it takes, about.
    """

    suffix: str
    write: Callable[[Source, Path], None]
    prove: Callable[[Source, Path, Proof], None]
    size: Callable[[Source], int]
    prefix: str = ""

    def name(self, model: str) -> str:
        """Of the artefact of a model."""
        return f"{self.prefix}{model}{self.suffix}"


def _whole(kind: str) -> Format:
    width = {"bf16": 2, "fp16": 2, "fp32": 4}[kind]
    return Format(
        f"-{kind}",
        lambda source, aside: whole.write(source, aside, kind),
        lambda source, aside, proof: whole.prove(source, aside, kind, proof),
        lambda source: width * sum(_values(source)),
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


def _values(source: Source) -> list[int]:
    found = []
    for stored in source.tensors.values():
        count = 1
        for n in stored.shape:
            count *= n
        found.append(count)
    return found


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
"""By the name that ``--to`` takes."""


class ExportError(ValueError):
    """Nothing was written; the message says what to do."""


@dataclass(frozen=True)
class Exported:
    """An artefact that was proved.

    Attributes:
        card: what its model card says.
        serve: the command by which a server takes it, for a shell; None where none does.
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

    An artefact is written aside. It is renamed once everything that could be compared agrees; what
    could not be compared, because a client is not installed, is named in the proof,
    ``NAME.proof.json`` beside the artefact.

    Args:
        model: the folder of a run, a checkpoint, an adapter, a model, or a hub name; or a model in
            memory, saved first.
        to: names of ``FORMATS``. GGUF of a model of images and text comes with an ``mmproj`` file
            for what reads images.
        output: folder for the artefacts; by default ``export`` in the model's folder, or for a hub
            name ``NAME-export`` here.
        base_model: of an adapter, where it does not say or has moved.
        tokenizer: of a model in memory, which needs one.
        name: what the artefacts' names begin with; by default the model folder's, or ``model``.
        data: held-out rows, as ``chronicals evaluate`` takes them, on which the losses of the base,
            the trained and the exported model are reported.
        importance: rows over which the importance of each column of a weight is measured, for what
            llama.cpp quantises.
        vllm_python: the interpreter of an environment with vLLM, which then loads what it can
            serve.
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
    asked = [to] if isinstance(to, str) else list(to)
    if unknown := [one for one in asked if one not in FORMATS]:
        raise ExportError(f"to={unknown[0]!r}: no such format; there are {', '.join(FORMATS)}")
    named, folder = _place(model, name, output)
    if not isinstance(model, (str, Path)) and tokenizer is None:
        raise ExportError(
            "tokenizer=None: a model in memory is exported with its tokenizer; give it"
        )
    targets = {one: folder / FORMATS[one].name(named) for one in asked}
    for one, target in targets.items():
        if target.exists():
            raise ExportError(
                f"{target}: is there already (--to {one}); delete it, or give another --output"
            )
    _check_no_score(model, base_model)
    folder.mkdir(parents=True, exist_ok=True)
    named_paths = {"data": data, "importance": importance, "vllm_python": vllm_python}
    given = {key: None if path is None else str(path) for key, path in named_paths.items()}
    with (
        without_bars(),
        workspace(folder) as place,
        opened(
            _stored(model, tokenizer, place), base_model, place, set(asked) == {"adapter"}, **given
        ) as source,
    ):
        eyes = _eyes(source, asked, folder, named)
        if eyes is not None and not eyes[1].exists():
            targets |= dict([eyes])
        _check_room(source, list(targets), folder)
        beside = None if eyes is None else eyes[1]
        made = [_one(one, target, source, place, ollama, beside) for one, target in targets.items()]
    if push_to_hub is not None:
        address = push(push_to_hub, [exported.path for exported in made], made[0].card)
        logger.info("uploaded to %s", address)
    return made


def _eyes(
    source: Source, asked: Sequence[str], folder: Path, named: str
) -> tuple[str, Path] | None:
    """Format and path of what llama.cpp needs beside the language part of a model of images and
    text, where that is asked for.

    Raises:
        NotExpressible: it has no form for this model.
        ExportError: it is there already, and is not this model's.
    """
    kinds = {
        one.removeprefix("gguf-")
        for one in asked
        if one.startswith("gguf-") and one != "gguf-adapter"
    }
    if not kinds or not reads_images(source.config):
        return None
    gguf_vision.settings_of(source)  # so that what is refused is refused before anything is written
    given = next((one for one in asked if one.startswith("mmproj-")), None)
    one = given or ("mmproj-f32" if kinds == {"f32"} else "mmproj-f16")
    target = folder / FORMATS[one].name(named)
    if target.exists():
        proof = Proof({})
        FORMATS[one].prove(source, target, proof)
        if proof.failed:
            raise ExportError(
                f"{target}: is there already and is not this model's ({proof.failed[0]}); delete it"
            )
        logger.info("%s: is there already, and is still what reads this model's images", target)
    return one, target


def _place(model: Any, name: str | None, output: str | Path | None) -> tuple[str, Path]:
    """What artefacts are called, and the folder that they are in."""
    if not isinstance(model, (str, Path)):
        named = name or "model"
        return named, Path(f"{named}-export" if output is None else output)
    there = Path(model)
    named = name or (there.resolve().name if there.exists() else str(model).rpartition("/")[2])
    beside = there / EXPORTS if there.is_dir() else Path(f"{named}-export")
    return named, beside if output is None else Path(output)


def _check_no_score(model: Any, base_model: str | None) -> None:
    """Raises ExportError where it is a reward model, which predicts no tokens."""
    if not isinstance(model, (str, Path)):
        if score_of(model) is not None:
            raise ExportError(
                "model: is a reward model, and what export writes are language models; save it "
                "with save_model"
            )
    elif (saved := SavedModel.find(model, base_model)).is_scored():
        raise ExportError(reward_model_refusal(saved))


def _stored(model: Any, tokenizer: Any, place: Path) -> str | Path:
    """Where the model is; one in memory is saved to ``place``."""
    if isinstance(model, (str, Path)):
        return model
    save_model(place / "live", model, text_files(model, tokenizer), {})
    return place / "live"


def _check_room(source: Source, asked: Sequence[str], folder: Path) -> None:
    """Raises ExportError where the disk has too little."""
    needed = sum(FORMATS[one].size(source) for one in asked)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ExportError(
            f"output={str(folder)!r}: {', '.join(asked)} take {needed / 2**30:.2f} GiB, the disk "
            f"has {free / 2**30:.2f}; free "
            "some, or give a folder on another one (--output)"
        )


def _one(
    asked: str, target: Path, source: Source, place: Path, ollama: bool, eyes: Path | None
) -> Exported:
    chosen = FORMATS[asked]
    aside = place / target.name
    about: dict[str, Any] = {
        "format": asked,
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
    text = card(source, target.name, asked, proof)
    if aside.is_dir():
        (aside / "README.md").write_text(text)
    aside.rename(target)
    proof.write(target.with_name(f"{target.name}{PROOF}"))
    if ollama and asked.startswith("gguf"):
        text, guessed = modelfile(source, target)
        target.with_name(f"{target.stem}.Modelfile").write_text(text)
        if guessed:
            logger.warning("%s: %s", target.stem, guessed)
    return Exported(asked, target, proof, text, serving.command(asked, target, source, eyes))
