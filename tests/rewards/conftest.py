import pytest

import reward_examples
from chronicals.config import ChronicalsConfig
from chronicals.rewards import build_rewards


@pytest.fixture
def rewards_of():
    """Builds the rewards of entries, whose processes end with the test."""
    built = []

    def build(*entries, **fields):
        fields = {"reward_timeout": 5.0, **fields}
        built.append(build_rewards(ChronicalsConfig(rewards=list(entries), **fields)))
        return built[-1]

    yield build
    for rewards in built:
        rewards.close()
    reward_examples.calls.clear()
