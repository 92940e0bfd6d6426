"""Upload of artefacts to the hub, with the user's login, which only huggingface_hub reads."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from chronicals.export.merge import REPORT
from chronicals.export.workspace import EXPORTS, PROOF
from chronicals.lora.peft_format import CONFIG_FILE
from chronicals.saving import MANIFEST
from chronicals.standard_json import to_json

CARD_FILE = "README.md"
"""The file that the hub shows as a model's card."""

NOT_UPLOADED = (CARD_FILE, MANIFEST, REPORT, f"{EXPORTS}/*", ".*")
"""Patterns of files that are not uploaded: they describe the local copy, or are artefacts
themselves.
"""

FILES_WITH_PATHS = (CONFIG_FILE, "chronicals.json")
"""Names of files that may hold local paths, in a folder or in those of named adapters."""


class UploadError(ValueError):
    """The upload was ended; the artefacts are where they were written."""


def push(
    name: str,
    artefacts: Sequence[Path],
    card: str,
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
        card: content of README.md.
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
        _check_owner(api, name)
        address = api.create_repo(name, private=private is not False, exist_ok=True)
        if private is not None:
            _check_visibility(api, address.repo_id, private)
        for artefact in artefacts:
            _upload(api, address.repo_id, artefact, len(artefacts) == 1, base)
        api.upload_file(
            repo_id=address.repo_id, path_or_fileobj=card.encode(), path_in_repo=CARD_FILE
        )
    return str(address)


def _upload(api: Any, repository: str, artefact: Path, alone: bool, base: str | None) -> None:
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
    proof = artefact.with_name(f"{artefact.name}{PROOF}")
    if proof.exists():
        api.upload_file(
            repo_id=repository, path_or_fileobj=_without_paths(proof), path_in_repo=proof.name
        )


def _without_paths(file: Path, base: str | None = None) -> bytes:
    """Return a JSON file's content with the last part of absolute paths.

    Args:
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


def _check_owner(api: Any, name: str) -> None:
    """Raise UploadError if the owner is neither the user nor one of their organisations."""
    login = api.whoami()
    owner, sign, short = name.partition("/")
    owners = [login["name"], *(organisation["name"] for organisation in login.get("orgs", []))]
    if sign and owner.lower() not in [one.lower() for one in owners]:
        raise UploadError(
            f"belongs to {owner!r}, and the login is of {login['name']!r}; give "
            f"{login['name']}/{short}, or log in as somebody who may write there ('hf auth login')"
        )


def _check_visibility(api: Any, repository: str, private: bool) -> None:
    """Raise UploadError if an existing repository is public or private against ``private``."""
    is_private = bool(api.repo_info(repository).private)
    if private and not is_private:
        raise UploadError("is there already and is public; give public=True, or another name")
    if is_private and not private:
        raise UploadError(
            "is there already and is private; make it public in the hub's settings, or leave "
            "public=True out"
        )


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
        raise UploadError(f"{called}: {_refusal(error)}") from None
    except (http_error, OSError) as error:
        raise UploadError(f"{called}: the upload failed: {_first_line(error)}") from None


def _refusal(error: Any) -> str:
    """Return the reason for which the hub refused a request, and a remedy."""
    status = error.response.status_code
    if status == 401:
        return (
            "the hub does not accept the token of the login; log in anew with 'hf auth login', "
            "or renew HF_TOKEN"
        )
    if status == 403:
        return (
            "the login may not write there: the name is somebody else's, or the token may only "
            "read; give another name, or "
            "log in with a token that may write ('hf auth login')"
        )
    return f"the upload failed: {_first_line(error)}"


def _first_line(error: Exception) -> str:
    """Return the first line of an error's message, without the token of the login."""
    from huggingface_hub import get_token

    text = str(error)
    token = get_token()
    if token:
        text = text.replace(token, "…")
    return text.strip().partition("\n")[0]
