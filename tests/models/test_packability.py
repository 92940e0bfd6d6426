"""Which classes respect documents that lie end to end: the proof, and what it must not touch.
Documents longer than a model has positions, or than it was made for.
"""

import contextlib
import logging

import pytest
import torch

import runs
import tiny
from chronicals.models import check_positions, present, prove_packability, why_neighbours_matter
from chronicals.models.packability import DOCUMENT_LENGTHS, twin_config
from chronicals.patching.plan import plan_for
from comparison import equal
from families import FAMILIES, PACKABLE, PADDED, VOCABULARY, build, configuration, randomise


@pytest.mark.parametrize("family", [*PACKABLE, "gpt_oss"])
def test_packable_families_are_proved(family):
    proof = prove_packability(build(family))
    assert proof.packed and proof.head_proved, proof.reason
    assert not proof.reason


def test_the_proof_is_against_the_definition_whatever_the_version_takes_by_default():
    """Some versions of transformers take SDPA for Gemma 2, which leaves its softcap out."""
    proof = prove_packability(build("gemma2", attn_implementation=None, initializer_range=0.05))
    assert proof.packed, proof.reason


@pytest.mark.parametrize("family", PADDED)
def test_recurrent_convolutional_and_alibi_families_are_refused(family):
    proof = prove_packability(build(family))
    assert not proof.packed and proof.head_proved
    assert "packed documents change each other's hidden states" in proof.reason


@pytest.mark.parametrize("family", ["llama", "mamba"])
def test_the_reason_is_logged_by_name(family, caplog):
    model = build(family)
    present(model)
    said = [
        record.message.split(":")[0]
        for record in caplog.records
        if record.name.startswith("chronicals")
    ]
    assert said == ([] if family == "llama" else ["MambaForCausalLM takes padded rows, not packs"])


def test_the_models_own_tensors_and_the_random_state_are_not_touched():
    model = build("llama", initializer_range=0.021)  # a configuration that is not proved yet
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.random.get_rng_state()
    implementation = model.config._attn_implementation
    assert prove_packability(model).packed
    assert equal(torch.random.get_rng_state(), state)
    assert model.config._attn_implementation == implementation
    assert all(equal(value, before[name]) for name, value in model.state_dict().items())


SURROUNDINGS = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "default device": lambda: torch.device("meta"),
}


@pytest.mark.parametrize("number, surroundings", enumerate(SURROUNDINGS))
def test_the_proof_does_not_depend_on_where_it_is_made(number, surroundings):
    """It is kept for the whole process: one made in an evaluation must not hold for a training."""
    model = build("llama", initializer_range=0.03 + number / 1000)
    with SURROUNDINGS[surroundings]():
        proof = prove_packability(model)
    assert proof.packed and proof.head_proved, proof.reason


def test_the_proof_does_not_depend_on_the_default_type():
    model = build("llama", initializer_range=0.04)
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        proof = prove_packability(model)
    finally:
        torch.set_default_dtype(usual)
    assert proof.packed and proof.head_proved, proof.reason


@pytest.mark.slow
def test_a_model_without_storage_can_be_proved():
    with torch.device("meta"):
        model = build(
            "llama", random=False, hidden_size=8192, num_hidden_layers=80, intermediate_size=28672
        )
    assert prove_packability(model).packed


def test_a_proof_is_made_once(record_calls):
    from chronicals.models import packability

    model = build("qwen2", initializer_range=0.022)
    first = prove_packability(model)
    built = record_calls(packability, "build_twin")
    assert prove_packability(build("qwen2", initializer_range=0.022)) is first and not built
    prove_packability(build("qwen2", initializer_range=0.023))
    assert len(built) == 1


def test_the_twin_is_small_but_of_every_layer_type():
    config = configuration(
        "gemma3", num_hidden_layers=26, hidden_size=2304, vocab_size=262144, sliding_window=4096
    )
    assert len(set(config.layer_types)) == 2
    twin = twin_config(config)
    assert (
        set(twin.layer_types) == set(config.layer_types)
        and twin.num_hidden_layers == len(twin.layer_types) == 2
    )
    assert (twin.hidden_size, twin.vocab_size, twin.sliding_window) == (64, 97, 5)
    assert (config.hidden_size, config.num_hidden_layers) == (2304, 26), (
        "the model's own configuration is changed"
    )


def test_positions_at_which_queries_grow_lie_within_the_twins_documents():
    rope = {
        **configuration("ministral3").rope_parameters,
        "original_max_position_embeddings": 16384,
    }
    twin = twin_config(configuration("ministral3", hidden_size=2304, rope_parameters=rope))
    assert twin.rope_parameters["original_max_position_embeddings"] < max(DOCUMENT_LENGTHS)
    assert rope["original_max_position_embeddings"] == 16384


LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "factor": 4.0,
}
LONG["original_max_position_embeddings"] = 16


@pytest.mark.parametrize(
    ("family", "rope", "fields"),
    [
        ("phi3", LONG, {"original_max_position_embeddings": 16}),
        (
            "llama",
            {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
            {"max_position_embeddings": 16},
        ),
    ],
)
def test_frequencies_that_follow_the_longest_document_are_told_where_they_do(family, rope, fields):
    model = build(family, rope_parameters=rope, **fields).eval()
    short = torch.randint(1, 61, (1, 7))
    long = torch.randint(1, 61, (1, 17))
    beside = {}
    for width in (16, 17):
        rows = torch.cat((torch.nn.functional.pad(short, (0, width - 7)), long[:, :width]))
        states = model.model(
            input_ids=rows, attention_mask=(rows > 0).long(), use_cache=False
        ).last_hidden_state
        beside[width] = states[0, :7]
    alone = model.model(input_ids=short, use_cache=False).last_hidden_state[0]
    assert torch.allclose(beside[16], alone, atol=1e-5) and not torch.allclose(
        beside[17], alone, atol=1e-3
    )
    assert not why_neighbours_matter(model.config, 16)
    assert f"rope_type {rope['rope_type']}" in (reason := why_neighbours_matter(model.config, 17))
    assert "max_seq_length=16" in reason
    assert not why_neighbours_matter(configuration("llama"), 10**6)


@pytest.mark.parametrize("name", ["Electra", "RemBert"])
def test_a_head_that_takes_other_states_than_the_decoder_gives_is_not_understood(name):
    import transformers

    config = getattr(transformers, f"{name}Config")(is_decoder=True)
    with torch.device("meta"):
        model = getattr(transformers, f"{name}ForCausalLM")(config)
    assert not prove_packability(model).head_proved


@pytest.mark.slow
def test_no_cards_random_state_is_touched(record_calls):
    seeded = record_calls(torch.cuda, "manual_seed_all")
    plan_for(build("llama", initializer_range=0.0217))
    assert prove_packability(build("llama", initializer_range=0.0217)).packed and not seeded


def subclass(**methods):
    """A class of its own made from Llama's."""
    from transformers import LlamaForCausalLM

    return type("Changed", (LlamaForCausalLM,), methods)


def leaking_decoder(model, leak):
    """``model`` with a decoder whose last hidden states hear of the token before, whosever that
    is.
    """
    decoder = model.model
    own = decoder.forward

    def forward(**inputs):
        out = own(**inputs)
        before = torch.nn.functional.pad(out.last_hidden_state[:, :-1], (0, 0, 1, 0))
        out.last_hidden_state = out.last_hidden_state + leak * before
        return out

    decoder.forward = forward


@pytest.mark.parametrize("leak", [0.0, 1e-3, 1.0])
def test_a_small_leak_between_neighbours_is_seen(leak):
    def __init__(self, config):
        super(cls, self).__init__(config)
        leaking_decoder(self, leak)

    cls = subclass(__init__=__init__)
    proof = prove_packability(randomise(cls(configuration("llama"))))
    assert proof.packed == (leak == 0)
    assert ("change each other's" in proof.reason) == (leak != 0)


def test_a_class_whose_attention_never_hears_of_bounds_is_refused():
    """As one that swallows what it does not know."""

    def __init__(self, config):
        super(cls, self).__init__(config)
        own = self.model.forward

        def forward(input_ids, position_ids=None, use_cache=None, **_):
            return own(input_ids=input_ids, position_ids=position_ids, use_cache=use_cache)

        self.model.forward = forward

    cls = subclass(__init__=__init__)
    proof = prove_packability(randomise(cls(configuration("llama"))))
    assert not proof.packed
    assert (
        "does not take document bounds" in proof.reason
        and "does not pass document bounds on" in proof.reason
    )


def seeing_ahead():
    """A model of BERT's family as it is pretrained, and Gemma 3 as it makes embeddings."""
    from transformers import BertConfig, BertLMHeadModel

    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "vocab_size": 61,
    }
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    yield lambda ahead: BertLMHeadModel(BertConfig(**sizes, **quiet, is_decoder=not ahead))
    yield lambda ahead: build("gemma3", use_bidirectional_attention=ahead)


@pytest.mark.parametrize("model", seeing_ahead())
def test_a_model_that_sees_what_it_is_to_predict_is_refused(model):
    with pytest.raises(
        ValueError,
        match="sees the tokens that it is to predict.*is_decoder=True.*use_bidirectional_attention",
    ):
        present(model(True))
    assert present(model(False)) is not None


def test_a_head_that_does_more_than_it_says_is_not_understood(caplog):
    def forward(self, **inputs):
        out = super(cls, self).forward(**inputs)
        out.logits = out.logits * 2
        return out

    cls = subclass(forward=forward)
    model = randomise(cls(configuration("llama")))
    proof = prove_packability(model)
    assert proof.packed and not proof.head_proved
    assert present(model).head is None
    assert "the head of Changed could not be proved" in caplog.text


def test_a_class_that_cannot_be_made_small_is_taken_padded(caplog):
    def __init__(self, config):
        if config.num_hidden_layers != 9:
            raise RuntimeError("only 9 layers will do")
        super(cls, self).__init__(config)

    cls = subclass(__init__=__init__)
    model = cls(configuration("llama", num_hidden_layers=9))
    reason = "a small twin could not be run (RuntimeError: only 9 layers will do)"
    assert reason in prove_packability(model).reason
    presented = present(model)
    assert not presented.packed and presented.head is None
    assert (
        len(caplog.records) == 1
        and f"nothing could be proved of the class, as {reason}" in caplog.text
    )
    assert all(cost in caplog.text for cost in ("padded rows", "whole logits", "its own attention"))


def runs_with(model, length):
    try:
        model.eval()(input_ids=torch.randint(1, VOCABULARY, (1, length)), use_cache=False)
    except (IndexError, RuntimeError):
        return False
    return True


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_is_refused_where_it_fails_by_itself(family, caplog):
    model = build(family)
    fails = not runs_with(model, 129)
    state = torch.get_rng_state()
    caplog.clear()
    check_positions(model, 128)
    assert not caplog.text
    with (
        pytest.raises(ValueError, match="up to 129: set max_seq_length to at most 128")
        if fails
        else contextlib.nullcontext()
    ):
        check_positions(model, 129)
    stretched = family in ("ministral3", "gpt_oss")
    told = hasattr(model.config, "max_position_embeddings") and not fails and not stretched
    assert (
        "made for 128 positions (max_position_embeddings), documents have up to 129" in caplog.text
    ) == told
    assert fails == (family == "gpt2") and equal(state, torch.get_rng_state())


def test_pefts_wrapping_is_looked_through():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(build("gpt2"), peft.LoraConfig(r=2, target_modules=["c_attn"]))
    with pytest.raises(ValueError, match="GPT2LMHeadModel is made for 128 positions.*at most 128"):
        check_positions(model, 129)


def test_a_class_that_knows_no_bound_may_say_so_with_a_negative_one(caplog):
    model = build("llama")
    model.config.max_position_embeddings = -1
    check_positions(model, 1000)
    assert not caplog.text


def test_a_table_with_places_before_the_first_position():
    from transformers import OPTConfig, OPTForCausalLM

    sizes = {
        "hidden_size": 32,
        "ffn_dim": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "word_embed_proj_dim": 32,
    }
    model = OPTForCausalLM(OPTConfig(**sizes, vocab_size=VOCABULARY, max_position_embeddings=128))
    assert runs_with(model, 128) and not runs_with(model, 129)
    with pytest.raises(ValueError, match="OPTForCausalLM is made for 128 positions"):
        check_positions(model, 129)


@pytest.mark.parametrize(("longest", "told"), [(512, False), (513, True)])
def test_stretched_rotary_positions_reach_further(longest, told, caplog):
    rope = {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    check_positions(build("llama", rope_parameters=rope), longest)
    assert ("LlamaForCausalLM is made for 128 positions" in caplog.text) == told


@pytest.mark.slow
def test_a_run_tells_and_a_class_without_a_twin_is_taken(tmp_path, caplog):
    rows = [{"text": "the answer to life is forty two " * 9}]
    with caplog.at_level(logging.WARNING):
        short = tiny.llama(max_position_embeddings=64)
        runs.train(tmp_path, rows, model=short, max_steps=1, rope_scaling="off")
    assert "LlamaForCausalLM is made for 64 positions" in caplog.text
