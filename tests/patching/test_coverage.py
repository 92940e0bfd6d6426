"""Every architecture in transformers' causal-LM mapping: patched or left alone, nothing changes.
The table is a number.
"""

import random

import pytest

from patching.architectures import architectures, cover

ALWAYS = [
    "Llama",
    "Qwen3",
    "Gemma2",
    "Mixtral",
    "GptOss",
    "GPT2",
    "OPT",
    "JetMoe",
    "Bloom",
    "Mamba",
]
SAMPLE = 5
"""So many others are taken in the ordinary run; all of them in the long one."""

BUILT = 120
WHOLE = 70
"""At least so many come from a tiny configuration, and at least so many have all parts replaced."""


def sample(seed):
    others = sorted(set(architectures()) - set(ALWAYS))
    return [*ALWAYS, *random.Random(seed).sample(others, SAMPLE)]


def assert_nothing_changed(line):
    assert line.reason or line.equal, (
        f"{line.name}: differs by {line.worst:.1e}, {line.beyond:.1e} beyond rounding, "
        f"{line.exact:.1e} in fp64; "
        f"generation equal: {line.generation}\n{line.report}"
    )


@pytest.mark.slow
def test_a_sample_of_the_architectures(seed):
    lines = [cover(name) for name in sample(seed)]
    for line in lines:
        assert_nothing_changed(line)
    by_name = {line.name: line for line in lines}
    assert not [name for name in ALWAYS if by_name[name].reason], (
        "one that was built before cannot be built"
    )
    assert all(by_name[name].whole for name in ("Llama", "Qwen3", "Gemma2"))


@pytest.mark.long
def test_every_architecture():
    lines = [cover(name) for name in architectures()]
    for line in lines:
        assert_nothing_changed(line)
    assert sum(not line.reason for line in lines) >= BUILT
    assert sum(line.whole for line in lines) >= WHOLE
