"""What tests of patching share: every warning is told again, and plans are made of other parts."""

import pytest

from chronicals.log_once import LOGGED
from chronicals.patching import plan


@pytest.fixture(autouse=True)
def untold():
    """Let each test be told what is said once a process."""
    LOGGED.clear()


@pytest.fixture
def planned_with(monkeypatch):
    """Let plans be made anew with other parts: ``planned_with(decoder_layer, MLPHalf=wrong)``."""

    def exchange(owner, **parts):
        for name, part in {**parts, "PLANS": {}}.items():
            monkeypatch.setattr(plan if name == "PLANS" else owner, name, part)

    return exchange
