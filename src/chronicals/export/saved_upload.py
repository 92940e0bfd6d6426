"""Upload of stored models: a run's model, an adapter, a merged model, or an export's artefacts."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from chronicals.export.card import card
from chronicals.export.hub import CARD_FILE, UploadError, push
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
        local_base: folder that an adapter names as its base, which others do not have, if any.
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
        public: everybody may read it; an existing repository must be public or private
            accordingly.
        base_model: name on the hub of the base of an adapter that was trained over a folder.

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
    artefacts = [place] if _proof_of(place).exists() else []
    if not artefacts:
        saved = _saved_in(place, base_model)
        if saved is not None:
            return _push_model(saved, name, public, base_model)
        artefacts = _artefacts_in(place)
    if not artefacts:
        raise UploadError(
            f"{folder}: holds neither a model nor an artefact of an export; name the folder of a "
            "run, or write one: chronicals export RUN --to merged"
        )
    if base_model is not None:
        raise UploadError(
            f"base_model={base_model!r}: an artefact names its base already; leave it out"
        )
    address = push(name, artefacts, _card_of(artefacts[0]), not public, called=name)
    return Pushed(address, artefacts)


def _push_model(saved: SavedModel, name: str, public: bool, base_model: str | None) -> Pushed:
    """Upload the folder of a model or an adapter."""
    weights = saved.beside or Path(saved.place)
    kind = "adapter" if saved.adapted else "model"
    text = card(_source(saved), name.rpartition("/")[2], kind, Proof({}))
    address = push(name, [weights], text, not public, called=name, base=base_model)
    names_folder = saved.adapted and saved.base and Path(saved.base).exists()
    return Pushed(address, [weights], Path(str(saved.base)) if names_folder else None)


def _proof_of(artefact: Path) -> Path:
    return artefact.with_name(f"{artefact.name}{PROOF}")


def _artefacts_in(folder: Path) -> list[Path]:
    """Return the artefacts in a folder that have their proofs beside them."""
    if not folder.is_dir():
        return []
    proofs = sorted(folder.glob(f"*{PROOF}"))
    artefacts = [proof.with_name(proof.name.removesuffix(PROOF)) for proof in proofs]
    return [artefact for artefact in artefacts if artefact.exists()]


def _saved_in(place: Path, base_model: str | None) -> SavedModel | None:
    """Return the model or adapter in a folder; None without weights."""
    if not place.is_dir():
        return None
    saved = SavedModel.find(place)
    weights = saved.beside or Path(saved.place)
    has_config = saved.adapted or (weights / "config.json").exists()
    has_weights = any(weights.rglob("*.safetensors")) or any(weights.rglob("*.bin"))
    if not has_config or not has_weights:
        return None
    return SavedModel.find(place, base_model) if base_model is not None else saved


def _source(saved: SavedModel) -> Source:
    """Return the source of a card; a merged model has the base that its report names."""
    place = Path(saved.place)
    report = place / REPORT
    if report.exists():
        saved = replace(saved, base=json.loads(report.read_text())["base"])
    base = Path(saved.base) if saved.base is not None else place
    return Source(saved, base if base.is_dir() else place)


def _card_of(artefact: Path) -> str:
    """Return the card that an export wrote into its folder, or one made of a file's proof."""
    written = artefact / CARD_FILE
    if written.exists():
        return written.read_text()
    about = json.loads(_proof_of(artefact).read_text())
    checks = [Check(**check) for check in about.pop("checks")]
    saved = replace(SavedModel.find(about["model"]), base=about["base"])
    return card(_source(saved), artefact.name, about["format"], Proof(about, checks))
