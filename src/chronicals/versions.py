"""Versions of other packages: the lowest supported ones, and the differences among supported ones.

The lowest versions are those of pyproject.toml and constraints-lowest.txt, with which the tests
pass. Each difference has a constant below, the version of transformers that made it; code that
depends on it calls ``transformers_before``.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable
from typing import Any

from packaging.version import Version

LOWEST_VERSIONS = {"torch": "2.11", "transformers": "5.17"}
"""Required packages, and the lowest version of each."""

LOWEST_OF_EXTRAS = {"peft": "0.19.1"}
"""Optional packages, and the lowest version of each.

transformers 5.17 itself works with PEFT from 0.19.1 on. Before 0.19, PEFT lost the sign of a
negative weight when it added adapters up.
"""

CACHE_RENAMED = "5.24"
"""First version whose models call the keys and values of earlier tokens ``cache``.

Before, arguments and outputs call them ``past_key_values``.
"""

QUANTIZER_SAYS_DTYPE = "5.21"
"""First version in which a quantizer decides the dtype of a tensor read from a checkpoint.

Its method is ``get_new_dtype``. Before, the dtype is that of the parameter, and renamed tensors
keep the dtype of the file. From this version on a tensor belongs to the longest pattern that
matches its name; before, to the first.
"""

ROUTERS_RECORDED = "5.19"
"""First version in which all classes record their router logits.

Before, DeepSeek's, GLM's and a dozen others do not.
"""

EXPERTS_SAY_PARALLEL = "5.18"
"""First version in which expert modules have a flag for experts divided over ranks.

The flag is ``_is_expert_parallel``.
"""


class VersionError(ImportError):
    """An installed package is older than the lowest version that chronicals runs with."""


def installed(package: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def is_older(version: str, lowest: str) -> bool:
    """Return whether a version comes before ``lowest``.

    A development build or pre-release counts as its release.
    """
    return Version(Version(version).base_version) < Version(lowest)


def why_too_old(extras: Iterable[str] = ()) -> str | None:
    """Return a message about the first package that is too old, with a remedy; None if none is.

    Args:
        extras: packages of ``LOWEST_OF_EXTRAS`` that are about to be used.
    """
    needed = LOWEST_VERSIONS | {package: LOWEST_OF_EXTRAS[package] for package in extras}
    for package, lowest in needed.items():
        version = installed(package)
        if version is not None and is_older(version, lowest):
            remedy = f"pip install --upgrade '{package}>={lowest}'"
            return f"{package} {version} is installed and {lowest} or newer is needed: {remedy}"
    return None


def check_versions(extras: Iterable[str] = ()) -> None:
    """Check that no required package, and none of ``extras``, is too old.

    Raises:
        VersionError: names the package, the version found and the one needed.
    """
    reason = why_too_old(extras)
    if reason is not None:
        raise VersionError(reason)


def check_versions_for(model: Any) -> None:
    """Check the required packages, and PEFT if it wraps the model."""
    check_versions(["peft"] if hasattr(model, "get_base_model") else [])


def transformers_before(version: str) -> bool:
    """Return whether the installed transformers is older than ``version``."""
    import transformers

    return is_older(transformers.__version__, version)


def remedy_for_routers() -> str:
    """Return the end of an error about missing router logits; empty if no version records them."""
    if not transformers_before(ROUTERS_RECORDED):
        return ""
    here = installed("transformers")
    return (
        f" (transformers {here} is installed, and from {ROUTERS_RECORDED} on all classes of it "
        "record them)"
    )
