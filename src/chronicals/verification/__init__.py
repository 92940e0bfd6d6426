"""Comparison of a run with fp32, tests of the kernels on this machine, and machine facts."""

from typing import Any

from chronicals.verification.machine import inspect_machine, missing_extras, untested_versions
from chronicals.versions import check_versions, why_too_old

if why_too_old() is None:  # else only what the doctor says of the machine is there
    from chronicals.verification.self_test import SelfTest, self_test
    from chronicals.verification.verify import Verification, verify

__all__ = [
    "SelfTest",
    "Verification",
    "inspect_machine",
    "missing_extras",
    "self_test",
    "untested_versions",
    "verify",
]


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    """Raise an error; if a package is too old for ``name`` to exist, it says which."""
    check_versions()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
