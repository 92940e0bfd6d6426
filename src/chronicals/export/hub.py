"""Upload of artefacts and stored models to the hub, and the model cards that it shows.

A card says base, data and settings of the training, its losses, and the artefact's proof. Only
huggingface_hub reads the user's login.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import yaml

from chronicals.config.recipe import METRICS_FILE
from chronicals.export.artefact import EXPORTS, PROOF, proof_of
from chronicals.export.merge import REPORT
from chronicals.export.proof import Check, Proof
from chronicals.export.source import SourceModel
from chronicals.lora.peft_format import CONFIG_FILE
from chronicals.saving import MANIFEST, SavedModel
from chronicals.standard_json import to_json
from chronicals.training.run.model_card import CARD_FILE, SHOWN_FIELDS

NOT_UPLOADED = (CARD_FILE, MANIFEST, REPORT, f"{EXPORTS}/*", ".*")
"""Patterns of files that are not uploaded: they describe the local copy, or are artefacts
themselves.
"""

FILES_WITH_PATHS = (CONFIG_FILE, "chronicals.json")
"""Names of files that may hold local paths, in a folder or in those of named adapters."""

CURVE_POINTS = 8
"""Steps of the curve of losses that are shown."""


class UploadError(ValueError):
    """The upload was ended; the artefacts are where they were written."""


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


def hub_card(source: SourceModel, name: str, kind: str, proof: Proof) -> str:
    """Return a card in Markdown, with the front matter that the hub reads.

    Paths of this machine are not in it; data in files have only their names.
    """
    folders = list(Path(source.saved.place).parents)[:3]
    run = next((folder for folder in folders if (folder / METRICS_FILE).exists()), None)
    recipe: dict[str, Any] = {}  # of a run that was started from the command line
    if run is not None and (run / "resume.yaml").exists():
        recipe = yaml.safe_load((run / "resume.yaml").read_text()) or {}
    base = str(source.saved.base or recipe.get("model") or "")
    is_local = Path(base).exists()
    library = "gguf" if kind.startswith(("gguf", "mmproj")) else "transformers"
    head: dict[str, Any] = {"library_name": "peft" if kind == "adapter" else library}
    if base and not is_local:
        head["base_model"] = base
    if source.licence:
        head["license"] = source.licence
    objective = source.saved.about.get("taught", {}).get("objective", "fine-tuned")
    head["tags"] = ["chronicals", str(objective)]
    parts = [f"---\n{yaml.safe_dump(head, sort_keys=False)}---", f"# {name}", f"Format: `{kind}`."]
    if base:
        parts.append(f"Trained from `{Path(base).name if is_local else base}` with chronicals.")
    parts += _training_section(recipe)
    if run is not None:
        parts += _loss_section(run)
    if proof.checks:
        lines = ["## Compared with the trained model", ""]
        lines += ["| compared | client | result | measure | bound |", "|---|---|---|---|---|"]
        for check in proof.checks:
            if check.passed is None:
                result = "not run" if check.value is None else "reported"
            else:
                result = "equal" if check.passed else "differs"
            numbers = ["" if x is None else f"{x:.2e}" for x in (check.value, check.bound)]
            lines.append(f"| {' | '.join([check.name, check.client, result, *numbers])} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _training_section(recipe: Mapping[str, Any]) -> list[str]:
    """Return a recipe's data, without folders of this machine, and its main settings.

    Empty if it has none of them.
    """
    data = recipe.get("data") or []
    names = []
    for entry in [data] if isinstance(data, str) else data:
        path = entry if isinstance(entry, str) else entry.get("path", "")
        names.append(Path(path).name if Path(path).is_absolute() else path)
    rows = [f"| data | {', '.join(names)} |"] if names else []
    for field in SHOWN_FIELDS:
        if recipe.get(field) is not None:
            rows.append(f"| {field} | {recipe[field]} |")
    if not rows:
        return []
    return ["\n".join(["## Training", "", "| | |", "|---|---|", *rows])]


def _loss_section(run: Path) -> list[str]:
    """Return a run's training losses, with the last held-out loss; empty if it logged none."""
    logged = [json.loads(line) for line in (run / METRICS_FILE).read_text().splitlines()]
    steps = [line for line in logged if "loss" in line]
    evaluations = [line for line in logged if "eval_loss" in line]
    if not steps:
        return []
    chosen = steps[:: max(1, len(steps) // CURVE_POINTS)]
    if chosen[-1] is not steps[-1]:
        chosen.append(steps[-1])
    rows = ["## Loss", "", "| step | training loss |", "|---|---|"]
    rows += [f"| {line['step']} | {line['loss']:.4f} |" for line in chosen]
    if evaluations:
        last = evaluations[-1]
        rows += ["", f"Held-out loss after step {last['step']}: {last['eval_loss']:.4f}."]
    return ["\n".join(rows)]


def upload(
    name: str,
    artefacts: Sequence[Path],
    text: str,
    private: bool | None = None,
    *,
    called: str | None = None,
    base: str | None = None,
) -> str:
    """Upload artefacts to a repository, which is made if it does not exist.

    Of local paths in our JSON files only the last part is uploaded.

    Args:
        name: ``owner/name``, or a name of the user's own.
        artefacts: a folder's files go to the top of the repository if it is the only one, else into
            a folder of its name.
        text: content of README.md, the model card.
        private: the repository must be private (True) or public (False); None makes a new one
            private and leaves an existing one unchanged.
        called: beginning of errors; by default the argument of ``export``.
        base: name of the base that uploaded adapters get, in place of the one in their files.

    Returns:
        The address of the repository.

    Raises:
        UploadError: there is no login, the name cannot be had, or the upload failed.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    with _errors_in_one_line(called or f"push_to_hub={name!r}"):
        login = api.whoami()
        owner, sign, short = name.partition("/")
        owners = [login["name"], *(organisation["name"] for organisation in login.get("orgs", []))]
        if sign and owner.lower() not in [one.lower() for one in owners]:
            raise UploadError(
                f"belongs to {owner!r}, and the login is of {login['name']!r}; give "
                f"{login['name']}/{short}, or log in as somebody who may write there ('hf auth "
                "login')"
            )
        address = api.create_repo(name, private=private is not False, exist_ok=True)
        if private is not None:
            # An existing repository stays as it is.
            is_private = bool(api.repo_info(address.repo_id).private)
            if private and not is_private:
                raise UploadError(
                    "is there already and is public; give public=True, or another name"
                )
            if is_private and not private:
                raise UploadError(
                    "is there already and is private; make it public in the hub's settings, or "
                    "leave public=True out"
                )
        for artefact in artefacts:
            _upload_artefact(api, address.repo_id, artefact, len(artefacts) == 1, base)
        api.upload_file(
            repo_id=address.repo_id, path_or_fileobj=text.encode(), path_in_repo=CARD_FILE
        )
    return str(address)


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
    artefacts = [place] if proof_of(place).exists() else []
    if not artefacts and place.is_dir():
        saved = SavedModel.find(place)
        weights = saved.beside or Path(saved.place)
        has_config = saved.adapted or (weights / "config.json").exists()
        if has_config and (any(weights.rglob("*.safetensors")) or any(weights.rglob("*.bin"))):
            if base_model is not None:
                saved = SavedModel.find(place, base_model)
            kind = "adapter" if saved.adapted else "model"
            text = hub_card(_card_source(saved), name.rpartition("/")[2], kind, Proof({}))
            address = upload(name, [weights], text, not public, called=name, base=base_model)
            names_folder = saved.adapted and saved.base and Path(saved.base).exists()
            return Pushed(address, [weights], Path(str(saved.base)) if names_folder else None)
        proofs = sorted(place.glob(f"*{PROOF}"))
        named = [proof.with_name(proof.name.removesuffix(PROOF)) for proof in proofs]
        artefacts = [artefact for artefact in named if artefact.exists()]
    if not artefacts:
        raise UploadError(
            f"{folder}: holds neither a model nor an artefact of an export; name the folder of a "
            "run, or write one: chronicals export RUN --to merged"
        )
    if base_model is not None:
        raise UploadError(
            f"base_model={base_model!r}: an artefact names its base already; leave it out"
        )
    # The card that an export wrote into its folder, or one made of a file's proof.
    card_file = artefacts[0] / CARD_FILE
    if card_file.exists():
        text = card_file.read_text()
    else:
        about = json.loads(proof_of(artefacts[0]).read_text())
        checks = [Check(**check) for check in about.pop("checks")]
        source = _card_source(replace(SavedModel.find(about["model"]), base=about["base"]))
        text = hub_card(source, artefacts[0].name, about["format"], Proof(about, checks))
    address = upload(name, artefacts, text, not public, called=name)
    return Pushed(address, artefacts)


def _upload_artefact(
    api: Any, repository: str, artefact: Path, alone: bool, base: str | None
) -> None:
    """Upload a file or a folder, and the proof beside it."""
    if artefact.is_dir():
        place = "" if alone else artefact.name
        rewritten = [file for name in FILES_WITH_PATHS for file in artefact.rglob(name)]
        names = [str(file.relative_to(artefact)) for file in rewritten]
        api.upload_folder(
            repo_id=repository,
            folder_path=artefact,
            path_in_repo=place,
            ignore_patterns=[*NOT_UPLOADED, *names],
        )
        for file, name in zip(rewritten, names, strict=True):
            if Path(name).parts[0] != EXPORTS:
                target = f"{place}/{name}".strip("/")
                api.upload_file(
                    repo_id=repository,
                    path_or_fileobj=_without_paths(file, base),
                    path_in_repo=target,
                )
    else:
        api.upload_file(repo_id=repository, path_or_fileobj=artefact, path_in_repo=artefact.name)
    proof = proof_of(artefact)
    if proof.exists():
        api.upload_file(
            repo_id=repository, path_or_fileobj=_without_paths(proof), path_in_repo=proof.name
        )


def _without_paths(file: Path, base: str | None = None) -> bytes:
    """Return a JSON file's content with the last part of absolute paths.

    Args:
        file: the JSON file.
        base: replaces the base of an adapter.
    """
    content = _with_last_parts(json.loads(file.read_text()))
    if base is not None and file.name == CONFIG_FILE:
        content["base_model_name_or_path"] = base
    return to_json(content, indent=1).encode()


def _with_last_parts(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_last_parts(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_with_last_parts(part) for part in value]
    if isinstance(value, str) and Path(value).is_absolute():
        return Path(value).name
    return value


@contextmanager
def _errors_in_one_line(called: str) -> Iterator[None]:
    """Turn errors of the hub and of the connection into one line with a remedy and no token."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError

    # The base class is the HTTP client's own error: no connection, a time-out.
    http_error = cast(type[Exception], HfHubHTTPError.__mro__[1])
    try:
        yield
    except UploadError as error:
        raise UploadError(f"{called}: {error}") from None
    except LocalTokenNotFoundError:
        raise UploadError(
            f"{called}: there is no login on this machine; log in with 'hf auth login', or set "
            "HF_TOKEN"
        ) from None
    except HFValidationError as error:
        raise UploadError(
            f"{called}: {_first_line(error)}; give another name, as OWNER/NAME"
        ) from None
    except HfHubHTTPError as error:
        reason = f"the upload failed: {_first_line(error)}"
        if error.response.status_code == 401:
            reason = (
                "the hub does not accept the token of the login; log in anew with 'hf auth "
                "login', or renew HF_TOKEN"
            )
        elif error.response.status_code == 403:
            reason = (
                "the login may not write there: the name is somebody else's, or the token may "
                "only read; give another name, or log in with a token that may write ('hf auth "
                "login')"
            )
        raise UploadError(f"{called}: {reason}") from None
    except (http_error, OSError) as error:
        raise UploadError(f"{called}: the upload failed: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    """Return the first line of an error's message, without the token of the login."""
    from huggingface_hub import get_token

    text = str(error)
    token = get_token()
    if token:
        text = text.replace(token, "…")
    return text.strip().partition("\n")[0]


def _card_source(saved: SavedModel) -> SourceModel:
    """Return the source of a card; a merged model has the base that its report names."""
    place = Path(saved.place)
    report = place / REPORT
    if report.exists():
        saved = replace(saved, base=json.loads(report.read_text())["base"])
    base = Path(saved.base) if saved.base is not None else place
    return SourceModel(saved, base if base.is_dir() else place)
