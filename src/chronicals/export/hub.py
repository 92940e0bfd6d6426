"""Uploading artefacts to the hub, with the token of the user's login, which is read by huggingface_hub alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


class UploadError(ValueError):
    """Nothing more was uploaded; the artefacts are where they were written."""


def push(name: str, artefacts: Sequence[Path], card: str, private: bool = True) -> str:
    """Upload artefacts to a repository, which is made if it is not there.

    Args:
        name: ``owner/name``, or a name of the user's own.
        artefacts: a folder's files go to the top of the repository if it is the only one, else into a folder of its name.
        card: becomes README.md.
        private: whether a new repository is.

    Returns:
        Its address.

    Raises:
        UploadError: there is no login, the name cannot be had, or the upload failed.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, OfflineModeIsEnabled

    api = HfApi()
    try:
        address = api.create_repo(name, private=private, exist_ok=True)
        for artefact in artefacts:
            if artefact.is_dir():
                place = "" if len(artefacts) == 1 else artefact.name
                api.upload_folder(
                    repo_id=address.repo_id, folder_path=artefact, path_in_repo=place, ignore_patterns=["README.md"]
                )
            else:
                api.upload_file(repo_id=address.repo_id, path_or_fileobj=artefact, path_in_repo=artefact.name)
            beside = artefact.with_name(f"{artefact.name}.proof.json")
            if beside.exists():
                api.upload_file(repo_id=address.repo_id, path_or_fileobj=beside, path_in_repo=beside.name)
        api.upload_file(repo_id=address.repo_id, path_or_fileobj=card.encode(), path_in_repo="README.md")
    except (LocalTokenNotFoundError, HFValidationError) as error:
        raise UploadError(
            f"push_to_hub={name!r}: {_first_line(error)}; log in with 'hf auth login', or give another name"
        ) from None
    except (HfHubHTTPError, OfflineModeIsEnabled, OSError) as error:
        raise UploadError(f"push_to_hub={name!r}: the upload failed: {_first_line(error)}") from None
    return str(address)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
