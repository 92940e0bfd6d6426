"""Experts of the tokens of answers, noted while these are drawn."""

import dataclasses

import pytest
import torch
from test_decode_graphs import EmulatedRecorder

import families
import mixtures
import tiny
from chronicals.generation import Engine, EngineSettings, Request, Sampling
from chronicals.models.routed_experts import called_for_experts, receiving

MODELS = {
    "native": lambda: mixtures.mixture(vocab_size=300, num_hidden_layers=2),
    "qwen3_moe": lambda: families.mixture("qwen3_moe", vocab_size=300),
}
PAGE_BYTES = 16 * 2 * 2 * 2 * 8 * 4
"""Of keys and values of the second model: tokens, layers, both, heads, width, fp32."""


def requests():
    """Prompts of several lengths, of which the first and the third ask for notes."""
    asked = (True, False, True)
    lengths = (5, 90, 23)
    return [
        Request(
            [(7 * number + place) % 290 + 4 for place in range(length)],
            11,
            Sampling(temperature=1.0, seed=3),
            answers=3,
            number=number,
            notes_experts=asked[number],
        )
        for number, length in enumerate(lengths)
    ]


@torch.no_grad()
def experts_of(model, ids):
    """The experts of each token of a whole text, ``[n, L, k]``."""
    with receiving(called_for_experts(model)) as found:
        model.get_decoder()(input_ids=torch.tensor([ids]), use_cache=False)
    return torch.stack(found, 1)


@pytest.mark.slow
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("memory", [None, 15 * PAGE_BYTES], ids=["room", "evictions"])
@pytest.mark.parametrize("name", MODELS)
def test_they_are_those_of_a_pass_over_the_whole_text(name, memory, graphs):
    model = MODELS[name]()
    settings = EngineSettings(memory, slots=4, steps_a_look=3)
    recorder = EmulatedRecorder() if graphs else None
    given = requests()
    engine = Engine(model, settings, recorder)
    answered = engine.generate(given)
    assert memory is None or name == "native" or engine.evictions
    assert recorder is None or recorder.replays
    for request, group in zip(given, answered):
        for answer in group:
            if not request.notes_experts:
                assert answer.experts is None
                continue
            length = len(request.prompt)
            whole = experts_of(model, [*request.prompt, *answer.tokens[:-1]])[length:]
            assert answer.experts.shape == (len(answer.tokens) - 1, 2, 2)
            assert torch.equal(answer.experts.long().sort(-1).values, whole.sort(-1).values)
    plain = [dataclasses.replace(request, notes_experts=False) for request in given]
    # Steps as graphs are padded, and a CPU's products of other numbers of rows have other bits.
    again = EmulatedRecorder() if graphs else None
    assert Engine(model, settings, again).generate(plain) == answered


def test_a_dense_model_has_none():
    ((answer,),) = Engine(tiny.llama().eval()).generate([Request([5, 6, 7], 3, notes_experts=True)])
    assert answer.experts is None and len(answer.tokens) == 3
