"""This run against fp32; whether the kernels compute what they should on this machine, and what it has."""

from chronicals.verification.machine import inspect_machine, missing_extras, untested_versions
from chronicals.verification.self_test import SelfTest, self_test
from chronicals.verification.verify import Verification, verify

__all__ = ["SelfTest", "Verification", "inspect_machine", "missing_extras", "self_test", "untested_versions", "verify"]


def __dir__() -> list[str]:
    return sorted(__all__)
