"""Versions of other packages: the lowest that chronicals runs with, and what differs among those it
admits, decided here.

The lowest versions are those of pyproject.toml and constraints-lowest.txt, with which the tests
pass. Each difference is named below by the version of transformers that made it; code that depends
on it asks ``transformers_before``.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable
from typing import Any

from packaging.version import Version

LOWEST = {"torch": "2.11", "transformers": "5.17"}
"""Packages without which nothing runs, and the lowest version of each."""

LOWEST_OF_EXTRAS = {"peft": "0.19.1"}
"""Packages that are needed only where something comes from them. transformers 5.17 itself works
with PEFT from 0.19.1 on; before 0.19, PEFT lost the sign of a negative weight where it adds
adapters up."""

CACHE_RENAMED = "5.24"
"""From here on arguments and outputs call the keys and values of earlier tokens ``cache``; before,
``past_key_values``."""

QUANTIZER_SAYS_DTYPE = "5.21"
"""From here on a quantizer says into which dtype a tensor of a checkpoint is cast
(``get_new_dtype``); before, it is cast to that of its parameter, but for tensors that are
renamed, which keep the dtype of the file. A tensor goes to the longest pattern that matches its
name; before, to the first."""

ROUTERS_RECORDED = "5.19"
"""From here on all classes record the logits of their routers; before, DeepSeek's, GLM's and a
dozen others do not."""

EXPERTS_SAY_PARALLEL = "5.18"
"""From here on a module of experts says that they are divided over ranks
(``_is_expert_parallel``).
"""


class VersionError(ImportError):
    """An installed package is older than the lowest version that chronicals runs with."""


def installed(package: str) -> str | None:
    """The version of an installed package; None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def is_older(version: str, lowest: str) -> bool:
    """Whether a version comes before ``lowest``, of which a development build or pre-release
    counts as the release.
    """
    return Version(Version(version).base_version) < Version(lowest)


def why_too_old(extras: Iterable[str] = ()) -> str | None:
    """The first package that is too old, the version found, the one needed and the remedy; None
    where none is.

    Args:
        extras: packages of ``LOWEST_OF_EXTRAS`` that are about to be used.
    """
    needed = LOWEST | {package: LOWEST_OF_EXTRAS[package] for package in extras}
    for package, lowest in needed.items():
        version = installed(package)
        if version is not None and is_older(version, lowest):
            remedy = f"pip install --upgrade '{package}>={lowest}'"
            return f"{package} {version} is installed and {lowest} or newer is needed: {remedy}"
    return None


def check_versions(extras: Iterable[str] = ()) -> None:
    """Raise where a package is too old for chronicals to be right, those of ``extras`` included.

    Raises:
        VersionError: names the package, the version found and the one needed.
    """
    reason = why_too_old(extras)
    if reason is not None:
        raise VersionError(reason)


def check_versions_for(model: Any) -> None:
    """As ``check_versions``, and of PEFT where the model is wrapped by it."""
    check_versions(["peft"] if hasattr(model, "get_base_model") else [])


def transformers_before(version: str) -> bool:
    """Whether the transformers that runs is older than ``version``."""
    import transformers

    return is_older(transformers.__version__, version)


def remedy_for_routers() -> str:
    """The end of an error about routers whose logits are not there: empty where no newer version
    records them.
    """
    if not transformers_before(ROUTERS_RECORDED):
        return ""
    here = installed("transformers")
    return (
        f" (transformers {here} is installed, and from {ROUTERS_RECORDED} on all classes of it "
        "record them)"
    )


def cache_name() -> str:
    """The name of arguments and outputs that hold the keys and values of earlier tokens."""
    return "past_key_values" if transformers_before(CACHE_RENAMED) else "cache"
