"""What a token sees: earlier tokens of its document alone, within the window, the same with a
cache and without.
"""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface, StaticCache

from chronicals.moe.attention import LatentAttention
from chronicals.moe.model import CACHE
from comparison import equal
from mixtures import WINDOW, in_fp64, mixture, token_ids

LENGTH = 4 * WINDOW + 1
IMPLEMENTATIONS = ["sdpa", "eager"]


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


@pytest.fixture(autouse=True)
def _softmax_in_fp64(monkeypatch):
    """Of what is in fp64; transformers' eager attention asks for fp32."""
    usual = F.softmax

    def softmax(x, dim, dtype=None):
        return usual(x, dim, dtype=torch.promote_types(x.dtype, dtype or x.dtype))

    monkeypatch.setattr(F, "softmax", softmax)


def stepwise(model, ids, chunk=1, cache=None, **given):
    """Logits of all tokens, so many at a time."""
    found = []
    for part in ids.split(chunk, 1):
        out = model(part, **{CACHE: cache}, use_cache=True, **given)
        cache = out[CACHE]
        found.append(out.logits)
    return torch.cat(found, 1)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kinds", ["both", "sliding_attention", "full_attention"])
def test_no_token_changes_an_earlier_one(implementation, kinds, seed):
    """By a bit: with experts that are computed token by token, so that no other token's choice
    changes a product's shape.
    """
    layers = {} if kinds == "both" else {"layer_types": [kinds] * 4}
    model = mixture(seed, **layers)
    model.set_attn_implementation(implementation)
    model.set_experts_implementation("batched_mm")
    ids = token_ids(1, LENGTH)
    for j in (1, WINDOW - 1, WINDOW, 2 * WINDOW + 1, LENGTH - 1):
        other = ids.clone()
        other[0, j] = 2 + (other[0, j] - 1) % 59
        first = model(ids).logits
        second = model(other).logits
        assert equal(first[:, :j], second[:, :j])
        assert not equal(first[:, j], second[:, j])


def test_a_sliding_layer_sees_its_window(seed):
    """One layer of it: token j reaches the tokens up to j + W - 1, and no further."""
    model = mixture(seed, num_hidden_layers=1, layer_types=["sliding_attention"])
    ids = token_ids(1, LENGTH)
    model.set_experts_implementation("batched_mm")
    other = ids.clone()
    other[0, 3] = 2 + (other[0, 3] - 1) % 59
    changed = (model(ids).logits != model(other).logits).any(-1)[0]
    assert changed[3] and changed[3 + WINDOW - 1] and not changed[3 + WINDOW :].any()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("chunk", [1, 3, WINDOW + 2])
def test_steps_are_one_shot(implementation, chunk, seed):
    """Beyond the window, with a prompt in pieces of any size."""
    model = in_fp64(mixture(seed))
    ids = token_ids(2, LENGTH)
    model.set_attn_implementation(implementation)
    assert (stepwise(model, ids, chunk) - model(ids).logits).abs().max() <= 1e-10


def test_steps_are_one_shot_with_a_static_cache(seed):
    model = in_fp64(mixture(seed))
    ids = token_ids(2, LENGTH)
    cache = StaticCache(config=model.config, max_cache_len=LENGTH + 3)
    assert (stepwise(model, ids, cache=cache) - model(ids).logits).abs().max() <= 1e-10


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_padding_on_the_left_changes_nothing(implementation, seed):
    """But for cosines and sines of other positions, which are in fp32."""
    model = in_fp64(mixture(seed))
    pad = 5
    model.set_attn_implementation(implementation)
    short = token_ids(1, LENGTH - pad)
    long = token_ids(1, LENGTH)
    ids = torch.cat((torch.cat((torch.zeros(1, pad, dtype=torch.long), short), 1), long))
    mask = (torch.arange(LENGTH) >= torch.tensor([pad, 0])[:, None]).long()
    found = model(ids, attention_mask=mask).logits
    assert (found[0, pad:] - model(short).logits[0]).abs().max() <= 1e-5
    assert (found[1] - model(long).logits[0]).abs().max() <= 1e-5


def test_a_padded_batch_generates_what_each_does_alone(seed):
    model = mixture(seed)
    pad = 5
    long = token_ids(1, LENGTH)
    ids = torch.cat((torch.nn.functional.pad(long[:, pad:], (pad, 0)), long))
    mask = (torch.arange(LENGTH) >= torch.tensor([pad, 0])[:, None]).long()
    options = {"max_new_tokens": 2 * WINDOW, "do_sample": False, "eos_token_id": None}
    both = model.generate(ids, attention_mask=mask, **options)
    for row, start in ((0, pad), (1, 0)):
        alone = model.generate(long[:, start:], **options)
        assert equal(both[row, start:], alone[0])


def flash_like(module, query, key, value, attention_mask, scaling=None, sliding_window=None, **_):
    """What FlashAttention computes of a mask [B, n] of the first n keys, or of none: causal,
    from the last query and key on.
    """
    if attention_mask is not None:
        key, value = (x[:, :, : attention_mask.shape[1]] for x in (key, value))
    queries = query.shape[2]
    keys = key.shape[2]
    groups = module.num_key_value_groups
    at = torch.arange(keys - queries, keys)[:, None]
    of = torch.arange(keys)
    seen = (of <= at) & (of > at - (sliding_window or keys + 1))
    if attention_mask is not None:
        seen = seen & attention_mask.bool()[:, None, None]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    scores = (query @ key.mT * scaling).masked_fill(~seen, float("-inf"))
    return (scores.softmax(-1).nan_to_num(0.0) @ value).transpose(1, 2), None


@pytest.fixture
def flash():
    """The name of an attention that gets FlashAttention's masks, whose kernels are not for the
    CPU.
    """
    name = "by_lengths"
    masks = AttentionMaskInterface._global_mapping
    AttentionInterface.register(name, flash_like)
    AttentionMaskInterface.register(name, masks["flash_attention_2"])
    yield name
    AttentionInterface._global_mapping.pop(name)
    masks.pop(name)


@pytest.mark.parametrize("implementation", ["sdpa", "eager", "flash"])
@pytest.mark.parametrize("cache", [None, "static"])
def test_decoding_padded_texts_makes_no_keys_of_earlier_tokens(
    implementation, cache, seed, flash, monkeypatch
):
    model = mixture(seed)
    pad = 5
    model.set_attn_implementation(flash if implementation == "flash" else implementation)
    long = token_ids(1, LENGTH)
    ids = torch.cat((torch.nn.functional.pad(long[:, pad:], (pad, 0)), long))
    mask = (torch.arange(LENGTH) >= torch.tensor([pad, 0])[:, None]).long()
    options = {
        "max_new_tokens": WINDOW,
        "do_sample": False,
        "eos_token_id": None,
        "disable_compile": True,
    }
    expected = [
        model.generate(long[:, start:], **options, use_cache=False)[0] for start in (pad, 0)
    ]
    project = type(model.model.layers[0].self_attn.kv_b_proj).forward
    made = []
    for layer in model.model.layers:
        if (own := getattr(layer.self_attn, "kv_b_proj", None)) is not None:
            own.forward = partial(lambda own, x: made.append(x.shape[1]) or project(own, x), own)
    both = model.generate(ids, attention_mask=mask, cache_implementation=cache, **options)
    assert (
        set(made) == {LENGTH if cache is None else LENGTH + WINDOW - 1} and len(made) == 2
    )  # layers; the prompt alone
    for row, start in ((0, pad), (1, 0)):
        assert equal(both[row, start:], expected[row])


@pytest.mark.slow
def test_generated_text_is_that_without_a_cache(seed):
    model = mixture(seed)
    ids = token_ids(1, WINDOW + 3)
    options = {"max_new_tokens": 3 * WINDOW, "do_sample": False, "eos_token_id": None}
    assert equal(model.generate(ids, **options), model.generate(ids, use_cache=False, **options))


@pytest.mark.parametrize("beams", [1, 3])
def test_beams_reorder_the_cache(beams, seed):
    model = mixture(seed)
    ids = token_ids(2, WINDOW + 3)
    options = {
        "max_new_tokens": WINDOW,
        "do_sample": False,
        "num_beams": beams,
        "eos_token_id": None,
    }
    assert equal(model.generate(ids, **options), model.generate(ids, use_cache=False, **options))


@pytest.mark.parametrize("given", ["position_ids", "cu_seq_lens_q", "both"])
def test_packed_documents_do_not_see_each_other(given, seed):
    model = in_fp64(mixture(seed))
    lengths = (WINDOW + 4, 1, 2 * WINDOW, 5)
    ids = token_ids(1, sum(lengths))
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    arguments = {"position_ids": positions, "cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
    if given != "both":
        arguments = {given: arguments[given]}
    packed = model(ids, use_cache=False, **arguments).logits.split(lengths, 1)
    for document, found in zip(ids.split(lengths, 1), packed):
        assert (found - model(document).logits).abs().max() <= 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("q_lora_rank", [None, 10])
@pytest.mark.parametrize("queries", [1, 2])
def test_absorbed_products_are_the_expanded_ones(q_lora_rank, queries, seed):
    model = mixture(seed, q_lora_rank=q_lora_rank).double()
    ids = token_ids(2, LENGTH)
    model.set_experts_implementation("eager")
    absorbed = stepwise(model, ids, queries)
    layers = [module for module in model.modules() if isinstance(module, LatentAttention)]
    assert layers and all(layer.absorbs_up_to >= queries for layer in layers)
    for layer in layers:
        layer.absorbs_up_to = 0
    expanded = stepwise(model, ids, queries)
    torch.testing.assert_close(absorbed, expanded, rtol=1e-5, atol=1e-5)


def test_decoding_makes_no_keys_of_earlier_tokens(seed):
    """The cache holds the latent and one rotary key of a token, and a step reads nothing wider."""
    model = mixture(seed)
    ids = token_ids(1, LENGTH)
    cache = model(ids, use_cache=True)[CACHE]
    config = model.config
    layer = cache.layers[0]
    assert layer.keys.shape == (1, 1, LENGTH, config.kv_lora_rank)
    assert layer.values.shape == (1, 1, LENGTH, config.qk_rope_head_dim)
    assert cache.layers[1].keys.shape[2] == WINDOW - 1
    model.model.layers[0].self_attn.kv_b_proj.forward = None  # calling it fails
    model(ids[:, -1:], **{CACHE: cache}, use_cache=True)


def test_absorbed_products_see_an_adapter(seed):
    """On the up-projection, which decoding reads as a matrix."""
    import chronicals

    model = mixture(seed)
    ids = token_ids(1, LENGTH)
    before = model(ids).logits.double()
    chronicals.apply_lora(
        model, chronicals.LoRAConfig(rank=2, alpha=8, dropout=0.0, target_modules=["kv_b_proj"])
    )
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.normal_()
    in_fp64(model.eval())
    after = model(ids).logits
    assert not torch.allclose(before, after) and (stepwise(model, ids) - after).abs().max() <= 1e-10


def test_positions_go_on_beyond_the_window(seed):
    """Defect of a cache that counts what it holds: the position of a step is that of all tokens
    seen.
    """
    model = mixture(seed, layer_types=["sliding_attention"] * 4)
    ids = token_ids(1, LENGTH)
    seen = []
    model.model.rotary_emb.register_forward_pre_hook(
        lambda module, given: seen.append(given[1].flatten().tolist())
    )
    stepwise(model, ids)
    assert seen == [[n] for n in range(LENGTH)]
