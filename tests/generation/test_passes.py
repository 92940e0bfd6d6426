"""Passes of the modules of many families over pages: greedy text is that of transformers."""

import copy
from dataclasses import replace

import pytest
import torch
import transformers

import families
import mixtures
from chronicals.generation.engine import Engine, why_not_served
from chronicals.generation.layout import CacheLayout
from chronicals.generation.passes import Latents, Probe, attending_pages, run_pass
from chronicals.generation.requests import Request
from chronicals.generation.schedule import EngineSettings, Prompt
from chronicals.kernels import paged_attention
from chronicals.kernels.mxfp4 import MXFP4_BLOCK
from chronicals.lora import LoRAConfig, apply_lora
from chronicals.lora.layers import linear_adapters
from chronicals.patching import patch_model, patch_parts
from chronicals.patching.decoder_layer import runs
from chronicals.quantization import (
    MXFP4,
    Blocks,
    Linear4bit,
    Packed,
    PackedExperts,
    PackedStorage,
    packed_layers,
)
from interpreted import counted_launches, kernels_run, only_interpreted

LENGTHS = (3, 29, 17, 16, 32, 1, 25, 40, 9, 7, 11, 33, 31, 2, 5, 19, 38)
NEW = 8
PAGE = 4


def prompts():
    return [torch.randint(1, families.VOCABULARY, (n,)).tolist() for n in LENGTHS]


def varied(model):
    """In evaluation mode, with biases that do not decide every token."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.mul_(0.05)
    model.generation_config.eos_token_id = None
    return model.eval()


def by_transformers(model, asked):
    texts = []
    for prompt in asked:
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, pad_token_id=0
        )
        texts.append(out[0, len(prompt) :].tolist())
    return texts


def probed(model):
    """What one token takes in each attention layer."""
    with attending_pages(model) as latents:
        probe = Probe(latents)
        run_pass(model, torch.zeros(3, dtype=torch.int64), torch.arange(3), probe)
    return probe.sizes


def as_small_as_possible(model, asked):
    """Sizes of an engine with room for the longest request alone.

    Chunks are short where layers have windows, so that one alone fills few places.
    """
    sizes = probed(model)
    windowed = any(one.window for one in sizes.values())
    settings = EngineSettings(None, PAGE, slots=6, chunk_tokens=5 if windowed else 50)
    layout = CacheLayout(sizes, torch.device("cpu"), settings)
    alone = [layout.alone(Prompt(Request(prompt, NEW), 0, NEW)) for prompt in asked]
    return replace(settings, cache_memory=max(map(layout.bytes, alone)))


def assert_like_transformers(model, asked):
    expected = by_transformers(model, asked)
    assert len({(*text,) for text in expected}) > 2, "every text is the same"
    engine = Engine(model, as_small_as_possible(model, asked))
    got = [answer.tokens for (answer,) in engine.generate([Request(ids, NEW) for ids in asked])]
    assert got == expected
    # an answer takes no more places behind its window than it was let in with
    has_whole = any(sizes.window is None for sizes in probed(model).values())
    assert bool(engine.evictions) == has_whole


SERVED = [*families.PACKABLE, *families.ROUTED, "native", "native, queries by a latent"]


def build(name):
    if name.startswith("native"):
        return varied(mixtures.mixture(q_lora_rank=8 if "latent" in name else None))
    if name in families.ROUTED:
        return varied(families.routed(name))
    return varied(families.build(name))


@pytest.mark.slow
@pytest.mark.sample(4)
@pytest.mark.parametrize("name", SERVED)
def test_greedy_text_is_that_of_transformers(name):
    model = build(name)
    assert not why_not_served(model, max(LENGTHS) + NEW)
    assert_like_transformers(model, prompts())


@only_interpreted
@pytest.mark.slow
@pytest.mark.interpreted
@pytest.mark.parametrize("name", ["gpt_oss", "gemma2", "native"])
def test_decoding_by_the_kernel_is_that_of_the_reference(name, record_calls):
    """Windows, sinks, softcaps and latents, each of some layer."""
    model = build(name)
    asked = [Request(prompt, 4) for prompt in prompts()[:4]]
    expected = Engine(model).generate(asked)
    launched = record_calls(paged_attention, "_paged_attention")
    with kernels_run():
        got = Engine(model).generate(asked)
    assert launched
    for (answer,), (other,) in zip(got, expected):
        assert answer.tokens == other.tokens
        assert answer.entropies == pytest.approx(other.entropies, abs=1e-4)


@pytest.mark.parametrize("name", ["DeepseekV2", "DeepseekV3", "native"])
def test_latent_layers_store_a_latent_and_one_rotary_key(name):
    stored = probed(build(name)).values()
    found = [(sizes.heads, sizes.key, sizes.latent, sizes.bytes) for sizes in stored]
    if name == "native":
        sizes = mixtures.SIZES
        rank = sizes["kv_lora_rank"]
        key = rank + sizes["qk_rope_head_dim"]
        sliding = 2, 8, 0, 4 * 2 * (8 + 8)
        assert found == [(1, key, rank, 4 * key), sliding] * 2
    else:
        assert found == [(1, 16, 8, 4 * 16)] * 2


def test_what_is_not_made_of_latents_is_stored_whole():
    """A class whose keys are not those of its expansion, as one that scales them would be."""
    model = build("DeepseekV3")
    module = model.model.layers[0].self_attn
    latents = Latents(model)
    latents.current[module] = torch.randn(3, 8)
    keys = latents.weight(module, 4) @ latents.current[module].T
    k, v = keys.permute(2, 0, 1).split([8, 8], -1)
    rotary = torch.randn(3, 1, 8).expand(-1, 4, -1)
    k = torch.cat((k, rotary), -1)
    assert latents.explain(module, k, v)
    assert not latents.explain(module, k * 1.2, v)
    assert not latents.explain(module, k + torch.randn_like(k), v)


def adapted(name):
    """With LoRA on every linear layer of attention and MLPs, which changes something."""
    model = apply_lora(build(name), LoRAConfig(rank=4, dropout=0.0))
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "lora_B" in parameter_name:
                parameter.normal_(std=0.2)
    return model.eval()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "DeepseekV3", "native"])
def test_a_model_that_is_trained_with_adapters_is_served_as_it_is(name):
    model = adapted(name)
    stores_latents = any(sizes.latent for sizes in probed(build(name)).values())
    assert any(sizes.latent for sizes in probed(model).values()) == stores_latents
    plain = by_transformers(build(name).eval(), prompts()[:2])
    asked = prompts()
    assert_like_transformers(model, asked)
    assert by_transformers(model, asked[:2]) != plain


@pytest.mark.slow
def test_a_base_in_four_bits_is_served_as_it_is():
    model = build("llama")
    asked = prompts()[:6]
    plain = by_transformers(model, asked)
    model = families.replaced(model, Linear4bit.of)
    assert by_transformers(model, asked) != plain
    engine = Engine(model, as_small_as_possible(model, asked))
    got = [answer.tokens for (answer,) in engine.generate([Request(ids, NEW) for ids in asked])]
    assert got == by_transformers(model, asked)


FUSED = ["llama", "qwen2", "qwen3", "gemma2", "gemma3", "olmo2", "granite", "gpt_oss"]


def before_and_after_fusing(model, engine, asked):
    """Answers to each prompt after the model's layers are fused, and those before."""
    requests = [Request(ids, NEW) for ids in asked]
    expected = engine.generate(requests)
    patch_parts(model, whole_layers=True)
    runs.clear()
    got = engine.generate(requests)
    assert runs.total() > NEW
    return [(answer, other) for (answer,), (other,) in zip(got, expected, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("adapters", [False, True], ids=["weights", "adapters"])
@pytest.mark.parametrize("name", FUSED)
def test_fused_layers_attend_to_pages(name, adapters):
    """Queries, keys and values by one product, and norms that add: as in training on packs."""
    model = adapted(name) if adapters else build(name)
    asked = prompts()
    engine = Engine(model, EngineSettings(page_size=PAGE, chunk_tokens=50))
    for answer, other in before_and_after_fusing(model, engine, asked):
        assert answer.tokens == other.tokens
        assert answer.log_probabilities == pytest.approx(other.log_probabilities)
        assert answer.entropies == pytest.approx(other.entropies, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("adapters", [False, True], ids=["weights", "adapters"])
@pytest.mark.parametrize("spare", [False, True], ids=["packed", "dense copies"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2"])
def test_packed_layers_run_fused_over_pages(name, spare, adapters):
    """By their codes, or by dense copies that have the adapters in their padding."""
    model = families.replaced(build(name), Linear4bit.of)
    if adapters:
        apply_lora(model, LoRAConfig(rank=4, dropout=0.0))
        for layer in (layer for _, layer in linear_adapters(model)):
            torch.nn.init.normal_(layer.lora_B, std=0.1)
    asked = prompts()[:6]
    settings = EngineSettings(page_size=PAGE, chunk_tokens=50)
    if not spare:
        settings = as_small_as_possible(model, asked)
    engine = Engine(model, settings)
    for answer, other in before_and_after_fusing(model, engine, asked):
        assert answer.tokens == other.tokens
        assert answer.log_probabilities == pytest.approx(other.log_probabilities, rel=1e-4)


@pytest.mark.parametrize("spare", [True, False], ids=["spare", "none spare"])
def test_a_fused_product_is_dequantised_once_where_memory_is_spare(spare, record_calls):
    """Into a copy that all steps read, which is dropped with the call."""
    model = families.replaced(build("llama"), Linear4bit.of)
    patch_parts(model, whole_layers=True)
    asked = prompts()[:2]
    settings = EngineSettings(page_size=PAGE) if spare else as_small_as_possible(model, asked)
    calls = record_calls(Packed, "into")
    counts = []
    for new in (2, 6):
        calls.clear()
        Engine(model, settings).generate([Request(ids, new) for ids in asked])
        counts.append(len(calls))
    probed_and_copied = 2 * sum(1 for _ in packed_layers(model))
    assert (counts[1] == counts[0] == probed_and_copied) == spare
    assert (counts[1] > counts[0]) == (not spare)
    calls.clear()
    probed(model)
    assert len(calls) == probed_and_copied / 2


@only_interpreted
@pytest.mark.slow
def test_weights_of_one_input_are_one_launch_in_each_step():
    """Four products a layer: queries, keys and values; output; gate and up; down."""
    sizes = {"hidden_size": 64, "intermediate_size": 128}
    model = varied(families.build("llama", **sizes)).bfloat16()
    model = families.replaced(model, Linear4bit.of)
    patch_parts(model, whole_layers=True)
    counts = []
    for new in (2, 3):
        with kernels_run(), counted_launches() as launches:
            Engine(model).generate([Request([5, 6, 7], new)])
        counts.append(launches)
    assert (counts[1] - counts[0])["_nf4_product_kernel"] == 4 * len(model.model.layers)


def in_mxfp4(matrix):
    """A weight of random codes and ordinary sizes in the shape of ``matrix``."""
    rows, columns = matrix.shape
    codes = torch.randint(0, 256, (rows * columns // 2,)).to(torch.uint8)
    scales = torch.randint(121, 125, (rows * columns // MXFP4_BLOCK,)).to(torch.uint8)
    return MXFP4(codes, scales, (rows, columns), matrix.dtype)


def in_gguf(matrix):
    """The weight rounded to Q8_0: an fp16 scale and 32 codes of 8 bits a block."""
    blocks = matrix.detach().float().view(-1, 32)
    scale = (blocks.abs().amax(1, keepdim=True) / 127).half()
    codes = (blocks / scale.float()).round().clamp(-127, 127).to(torch.int8)
    bytes_of_blocks = torch.cat([scale.view(torch.uint8), codes.view(torch.uint8)], 1)
    return Blocks.of(bytes_of_blocks.view(len(matrix), -1), "Q8_0", matrix.dtype)


EXPERTS = {"16 bit": None, "nf4": Packed.of, "mxfp4": in_mxfp4, "gguf": in_gguf}


@only_interpreted
@pytest.mark.slow
@pytest.mark.parametrize("format", EXPERTS)
def test_few_tokens_read_experts_in_place(format, must_not_call):
    """In two launches a layer of two products, also with adapters on experts. Each token of an
    answer is the likeliest by the same values in fp32, dequantised first, but for near ties.
    """
    sizes = {"hidden_size": 64, "moe_intermediate_size": 64, "head_dim": 16}
    config = transformers.Qwen3MoeConfig(
        **{**families.SIZES, **sizes, "num_experts": 4, "num_experts_per_tok": 2}
    )
    model = varied(families.randomise(transformers.Qwen3MoeForCausalLM(config)).bfloat16())
    if EXPERTS[format] is not None:
        for layer in model.model.layers:
            layer.mlp.experts = PackedExperts.of(layer.mlp.experts, EXPERTS[format])
    plain = copy.deepcopy(model)
    for layer in plain.model.layers:
        if isinstance(layer.mlp.experts, PackedExperts):
            layer.mlp.experts = layer.mlp.experts.plain()
    plain.float()
    patch_parts(model)
    must_not_call(PackedStorage, "filled", "all experts are dequantised")
    must_not_call(Packed, "dense", "all experts are dequantised")
    prompt = [5, 6, 7]
    with kernels_run(), counted_launches() as launches:
        ((answer,),) = Engine(model).generate([Request(prompt, 6)])
    products = launches["_few_tokens_kernel"]
    assert products and products % (2 * len(model.model.layers)) == 0
    assert not launches["_product_kernel"]
    with torch.no_grad():
        logits = plain(torch.tensor([[*prompt, *answer.tokens[:-1]]])).logits[0, len(prompt) - 1 :]
    chosen = logits.gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
    spread = logits.amax(1) - logits.amin(1)
    assert (logits.amax(1) - chosen <= 0.05 * spread).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma2", "native"])
def test_a_patched_model_is_served_as_it_is(name):
    model = build(name)
    patch_model(model.train())
    model.eval()
    assert_like_transformers(model, prompts())
    ids = torch.tensor([prompts()[1]])
    model.train()
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    assert loss.isfinite()


@pytest.mark.parametrize(
    "name, reason",
    [("mamba", "packed documents change each other's"), ("bloom", "packed documents change")],
)
def test_a_class_that_it_cannot_serve_is_told(name, reason):
    assert reason in why_not_served(families.build(name), 10)


def test_positions_that_change_with_the_longest_of_a_batch_are_not_served():
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    model = families.build("llama", rope_parameters=rope, max_position_embeddings=64)
    assert not why_not_served(model, 64) and "rope_type dynamic" in why_not_served(model, 65)


def test_an_instance_whose_head_or_layers_cannot_be_reached_is_told():
    model = build("llama")
    model.lm_head = torch.nn.Sequential(model.lm_head)
    assert "output layer of LlamaForCausalLM is Sequential" in why_not_served(model, 10)
    spread = build("llama")
    spread.hf_device_map = {"model.layers.0": 0, "model.layers.1": 1}
    assert why_not_served(spread, 10) == "its layers lie on several devices"
