"""Uploading what is stored already: a run's model, an adapter, a merged model, or artefacts of
an export.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from chronicals.export.card import card
from chronicals.export.hub import CARD, UploadError, push
from chronicals.export.merge import REPORT
from chronicals.export.proof import Check, Proof
from chronicals.export.source import Source
from chronicals.export.workspace import PROOF
from chronicals.saving import SavedModel


@dataclass(frozen=True)
class Pushed:
    """An upload that is done.

    Attributes:
        address: of the repository.
        paths: folders and files that were uploaded.
        local_base: the folder that an adapter names as its base, which others do not have; None
            where it names none.
    """

    address: str
    paths: list[Path]
    local_base: Path | None = None


def push_saved(
    folder: str | Path, name: str, public: bool = False, base_model: str | None = None
) -> Pushed:
    """Upload a model or the artefacts of an export as they are stored, with a model card.

    Args:
        folder: of a run, a checkpoint, an adapter, a model, or of artefacts of an export; or one
            artefact.
        name: ``owner/name`` on the hub, or a name of the user's own.
        public: whether everybody may read it; a repository that is there already must be as it is
            asked for.
        base_model: what an adapter is said to be of, where it was trained over a folder: the name
            of that model on the hub.

    Raises:
        UploadError: the folder holds nothing to upload, there is no login, the name cannot be had,
            or the upload failed.
    """
    place = Path(folder)
    if not place.exists():
        raise UploadError(
            f"{folder}: there is no such folder; name that of a run, an adapter, a model or an "
            "export"
        )
    if _proof_of(place).exists():
        artefacts = [place]
    elif (saved := _saved_in(place, base_model)) is not None:
        weights = saved.beside or Path(saved.place)
        local = (
            Path(saved.base) if saved.adapted and saved.base and Path(saved.base).exists() else None
        )
        text = card(
            _source(saved),
            name.rpartition("/")[2],
            "adapter" if saved.adapted else "model",
            Proof({}),
        )
        address = push(name, [weights], text, not public, called=name, base=base_model)
        return Pushed(address, [weights], local)
    else:
        artefacts = _artefacts_in(place)
    if not artefacts:
        raise UploadError(
            f"{folder}: holds neither a model nor an artefact of an export; name the folder of a "
            "run, or write one: "
            "chronicals export RUN --to merged"
        )
    if base_model is not None:
        raise UploadError(
            f"base_model={base_model!r}: an artefact names its base already; leave it out"
        )
    address = push(name, artefacts, _card_of(artefacts[0]), not public, called=name)
    return Pushed(address, artefacts)


def _proof_of(artefact: Path) -> Path:
    return artefact.with_name(f"{artefact.name}{PROOF}")


def _artefacts_in(folder: Path) -> list[Path]:
    """Artefacts that lie in a folder with their proofs."""
    if not folder.is_dir():
        return []
    named = [
        proof.with_name(proof.name.removesuffix(PROOF))
        for proof in sorted(folder.glob(f"*{PROOF}"))
    ]
    return [artefact for artefact in named if artefact.exists()]


def _saved_in(place: Path, base_model: str | None) -> SavedModel | None:
    """Return the model or adapter in a folder; None where there are no weights."""
    if not place.is_dir():
        return None
    saved = SavedModel.find(place)
    weights = saved.beside or Path(saved.place)
    described = saved.adapted or (weights / "config.json").exists()
    if not described or not any(
        any(weights.rglob(f"*.{ending}")) for ending in ("safetensors", "bin")
    ):
        return None
    return SavedModel.find(place, base_model) if base_model is not None else saved


def _source(saved: SavedModel) -> Source:
    """Return what a card is written of: a merged model is one of the base that its report names."""
    place = Path(saved.place)
    report = place / REPORT
    if report.exists():
        saved = replace(saved, base=json.loads(report.read_text())["base"])
    base = Path(saved.base) if saved.base is not None else place
    return Source(saved, base if base.is_dir() else place)


def _card_of(artefact: Path) -> str:
    """Return the card that an export wrote into its folder, or write that of a file from its
    proof.
    """
    written = artefact / CARD
    if written.exists():
        return written.read_text()
    about = json.loads(_proof_of(artefact).read_text())
    checks = [Check(**check) for check in about.pop("checks")]
    saved = replace(SavedModel.find(about["model"]), base=about["base"])
    return card(_source(saved), artefact.name, about["format"], Proof(about, checks))
