"""Weights are divided unasked where they do not fit a card, if they can be; else the run stays
as it is, and says why.
"""

import pytest
import torch
from transformers import OPTConfig, OPTForCausalLM

import gguf_files
import runs
import tiny
from chronicals.config import ConfigurationError
from chronicals.lora import LoRAConfig, apply_lora
from chronicals.models import present, quantise_layers
from chronicals.models.loading import load_model
from chronicals.policies import Facts, cuda_graphs, decide, facts
from chronicals.policies.divided_weights import check_divisible
from chronicals.policies.exclusions import conditions, why_excluded
from chronicals.policies.sharding import choose_sharding, why_stays_whole

LORA = {"use_lora": True, "lora_rank": 4}
SMALL = 1 << 20
"""Bytes of a card that nothing fits."""


def on_small_cards(config, model, ranks=4):
    return Facts(config, model, ranks, total=SMALL)


def opt(layerdrop):
    sizes = {
        "hidden_size": 64,
        "word_embed_proj_dim": 64,
        "ffn_dim": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    return OPTForCausalLM(
        OPTConfig(vocab_size=300, max_position_embeddings=128, layerdrop=layerdrop, **sizes)
    )


REFUSING = [
    ({"memory": ["offload_activations"]}, "tells activations from weights"),
    ({"memory": ["reduce_in_backward"]}, "sums gradients by itself"),
    ({"use_fp8": True}, "quantises weights that are whole"),
    (
        {**LORA, "use_fp8": True, "memory": ["offload_frozen_weights"]},
        "quantises weights that are whole",
    ),
    ({"use_8bit_optimizer": True}, "would cut blocks of 8-bit states"),
    ({"use_cuda_graphs": True}, "weights are gathered for each layer"),
    ({"use_torch_compile": True}, "weights are gathered for each layer"),
    ({"router": {"anchor": 0.1}}, "replays tokens through whole weights"),
]


@pytest.mark.parametrize(("fields", "words"), REFUSING, ids=[words for _, words in REFUSING])
def test_what_the_user_set_keeps_weights_whole(tmp_path, fields, words):
    model = tiny.llama(hidden_size=72, intermediate_size=88)
    config = runs.config(tmp_path, **fields)
    assert choose_sharding(on_small_cards(config, model)) == "optimizer"
    assert words in why_stays_whole(on_small_cards(config, model))
    assert choose_sharding(on_small_cards(runs.config(tmp_path), model)) == "weights"


def test_graphs_that_the_user_set_leave_adapters_their_divided_base(tmp_path):
    model = tiny.llama(hidden_size=72, intermediate_size=88)
    assert (
        choose_sharding(on_small_cards(runs.config(tmp_path, use_cuda_graphs=True, **LORA), model))
        == "weights"
    )
    assert all(p.requires_grad for p in model.parameters()), "a choice changes nothing of the model"


@pytest.mark.slow
def test_graphs_over_divided_weights_are_those_of_frozen_ones_on_cards(tmp_path, let_return):
    """Not of trained ones, which FSDP gathers, nor by gloo, which works on the host."""

    def why_not(backend="nccl", **fields):
        let_return(cuda_graphs.dist, is_initialized=True)
        let_return(cuda_graphs.dist, get_backend=backend)
        let_return(facts, input_device=torch.device("cuda"))
        model = tiny.llama()
        if fields:
            apply_lora(model, LoRAConfig(rank=2))
        config = runs.config(tmp_path, sharding="weights", **fields)
        asked = Facts(config, model, 2, backend=cuda_graphs.FLASH[0])
        graphs = cuda_graphs.CudaGraphs()
        return why_excluded(graphs.name, conditions(asked), asked) or graphs.why_not(asked)

    assert why_not(**LORA) is None
    assert why_not() == "weights are gathered for each layer"
    assert "gloo, which works on the host" in why_not("gloo", **LORA)


def test_weights_that_their_class_keeps_in_fp32_stay_whole(tmp_path):
    model = tiny.llama()
    model._keep_in_fp32_modules_strict = ["norm"]
    assert (
        choose_sharding(on_small_cards(runs.config(tmp_path, mixed_precision="bf16"), model))
        == "optimizer"
    )


@pytest.mark.slow
def test_a_decision_says_why_weights_stay_whole(tmp_path, let_return):
    let_return(facts, card_memory=SMALL)
    config = runs.config(tmp_path, memory=["reduce_in_backward"], check_memory=False)
    made = decide(Facts.of(config, present(tiny.llama()), ranks=4))["sharding"]
    assert (
        made.how != "weights"
        and "not divided though they do not fit a card whole: it sums gradients" in made.reason
    )
    optimizer = config.replace(sharding="optimizer")
    asked = decide(Facts.of(optimizer, present(tiny.llama()), ranks=4))["sharding"]
    assert "not divided" not in asked.reason
    free = decide(
        Facts.of(runs.config(tmp_path, check_memory=False), present(tiny.llama()), ranks=4)
    )["sharding"]
    assert "not divided" not in free.reason


def divisible(model, config, ranks):
    """Whether weights are divided unasked, which is refused by name where it is asked for."""
    chosen = choose_sharding(on_small_cards(config, model, ranks))
    try:
        model.requires_grad_(not config.use_lora)
        check_divisible(Facts(config, model, ranks), ranks)
    except ConfigurationError as error:
        return chosen, str(error)
    return chosen, None


@pytest.mark.parametrize("fields", [{}, LORA], ids=["full", "LoRA"])
def test_layers_that_each_process_skips_at_random_are_not_divided(tmp_path, fields):
    """Ranks would gather different layers at a time, of one size: wrong weights, or no end."""
    config = runs.config(tmp_path, **fields)
    assert divisible(opt(0.0), config, 2) == ("weights", None)
    chosen, words = divisible(opt(0.5), config, 2)
    assert chosen == "optimizer" and "OPTForCausalLM skips layers at random" in words


@pytest.mark.slow
def test_weights_of_a_gguf_file_are_not_divided(tmp_path):
    pytest.importorskip("gguf")
    model = load_model(gguf_files.write(tmp_path, tiny.llama(), "q8_0"), torch.float32)
    chosen, words = divisible(model, runs.config(tmp_path, **LORA), 2)
    assert chosen == "optimizer"
    assert (
        words.startswith("sharding='weights': weights in Q8_0 of GGUF stay")
        and "sharding='optimizer'" in words
    )


@pytest.mark.slow
@pytest.mark.parametrize("nf4", [False, True], ids=["16 bit", "NF4"])
def test_a_number_that_divides_no_layer_divides_nothing(tmp_path, nf4):
    model = tiny.llama(hidden_size=256, intermediate_size=512)
    config = runs.config(tmp_path, **LORA)
    if nf4:
        quantise_layers(model)
    assert divisible(model, config, 2) == ("weights", None)
    chosen, words = divisible(model, config, 3)
    assert (
        chosen == "optimizer"
        and "no frozen linear layer of its decoder layers has rows that can be divided by 3"
        in words
    )


@pytest.mark.parametrize("sharding", ["none", "optimizer"])
def test_a_share_of_weights_that_are_not_divided_is_refused(sharding, tmp_path):
    config = runs.config(tmp_path, sharding=sharding, sharding_ranks=2)
    with pytest.raises(
        ConfigurationError,
        match=f"sharding_ranks=2: no weights are divided with sharding='{sharding}'; set",
    ):
        decide(Facts.of(config, present(tiny.llama()), ranks=4))
    free = decide(
        Facts.of(runs.config(tmp_path, sharding_ranks=2), present(tiny.llama()), ranks=4)
    )["sharding"]
    assert "in each process; sharding_ranks=2 is of weights that are divided" in free.reason
