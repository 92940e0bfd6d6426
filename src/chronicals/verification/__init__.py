"""What this machine has, and whether the kernels compute what they should on it."""

from chronicals.verification.machine import inspect_machine
from chronicals.verification.self_test import SelfTest, self_test

__all__ = ["SelfTest", "inspect_machine", "self_test"]
