"""Re-export the kernels under a module name that older scripts import, with their self-test."""

from chronicals.kernels import *  # noqa: F403
from chronicals.kernels import __all__ as KERNELS
from chronicals.verification import self_test

__all__ = [*KERNELS, "test_rmsnorm"]


def test_rmsnorm() -> None:
    """Compare RMSNorm with its definition in fp64 on this machine.

    Both forms are compared, alone and after a residual addition.

    Prints "RMSNorm test passed!".

    Raises:
        AssertionError: an error is larger than the plain operation's allows; the message names the
            kernel and both errors.
    """
    for result in self_test(only=("rmsnorm", "add_rmsnorm")):
        if not result.passed:
            raise AssertionError(
                f"{result.name} ({result.runs_as}): relative error {result.error:.2e} beside "
                f"{result.plain_error:.2e} of the "
                "plain operation"
            )
    print("RMSNorm test passed!")  # noqa: T201


test_rmsnorm.__test__ = False  # type: ignore[attr-defined]  # pytest collects functions of this name that a test imports
