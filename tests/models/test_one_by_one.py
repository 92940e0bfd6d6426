"""Packs of classes whose attention takes no bounds of documents: it runs on one document after
the other.
"""

import pytest
import torch

import runs
import tiny
from chronicals.models import PresentedModel, one_by_one, present, presenting, prove_packability
from comparison import equal
from families import (
    LATENT,
    SIZES,
    build,
    distance,
    documents,
    documents_batch,
    minimax_m3,
    randomise,
)
from patching.architectures import architectures

SMALL = {
    **SIZES,
    **LATENT,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 16,
}
SMALL |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
SMALL |= {
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk": 3,
}  # of few heads, several keys have no score at all
SMALL |= {"experts_implementation": "eager", "attn_implementation": "eager"}

SPARSE = {
    "DeepseekV32": SMALL,
    "GlmMoeDsa": {**SMALL, "indexer_types": ["full", "shared", "full"]},
    "AXK2": SMALL,
}
"""Attention to the keys that an indexer chooses, fewer than a document has; of GLM a layer takes
those of the layer before.
"""


def sparse(name, **changes):
    if name not in architectures():
        pytest.skip(f"this transformers has no {name}")
    config, mapping = architectures()[name]
    return randomise(mapping[config](config(**{**SPARSE[name], **changes})).float().train())


def with_gradient(presented, batch):
    """Hidden states of the documents that have targets, and the gradient of the embedding."""
    with presented.attending_documents():
        states = presented.hidden_states(batch)
    kept = torch.cat([states[span] for span in documents(batch)])
    upstream = torch.randn(kept.shape, generator=torch.Generator().manual_seed(5))
    return kept.detach(), torch.autograd.grad(
        (kept * upstream).sum(), presented.model.get_input_embeddings().weight
    )[0]


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", SPARSE)
def test_packs_give_what_padded_rows_give(name, attention):
    model = sparse(name, attn_implementation=attention)
    batch = documents_batch()
    packed = with_gradient(PresentedModel(model, True, False, one_by_one=True), batch)
    padded = with_gradient(PresentedModel(model, False, False), batch)
    assert all(distance(*pair) < 1e-4 for pair in zip(packed, padded))


@pytest.mark.parametrize("name", SPARSE)
def test_such_a_class_is_proved_and_presented(name):
    proof = prove_packability(sparse(name, hidden_size=256))
    assert proof.packed and proof.one_by_one and proof.head_proved and not proof.reason, (
        proof.reason
    )
    assert not proof.sees_prompts
    presented = present(sparse(name, hidden_size=256))
    assert presented.packed and presented.one_by_one
    assert not present(sparse(name, hidden_size=256), shared_prompts=True).packed


@pytest.mark.slow
def test_attention_to_what_is_made_of_several_tokens_is_proved():
    """DeepSeek V4's compressors make a key of 4 tokens or of 128."""
    if "DeepseekV4" not in architectures():
        pytest.skip("this transformers has no DeepSeek V4")
    config, mapping = architectures()["DeepseekV4"]
    with torch.device("meta"):
        model = mapping[config](config(num_hidden_layers=4, vocab_size=61))
    proof = prove_packability(model)
    assert proof.packed and proof.one_by_one, proof.reason


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{}, {"hidden_size": 256, "head_dim": 64}])
def test_sparse_attention_is_proved(sizes):
    """Its class makes the mask of blocks by itself, whose blocks are shorter than the twin's
    rows, whatever the model's are.
    """
    model = minimax_m3(**sizes)
    assert model.config.index_block_size * model.config.index_topk_blocks > 2000
    proof = prove_packability(model)
    assert proof.packed and proof.one_by_one, proof.reason


def test_afterwards_and_in_between_the_model_attends_as_before():
    model = sparse("DeepseekV32")
    ids = torch.randint(1, 61, (2, 9))
    before = model(input_ids=ids, use_cache=False).logits
    presented = PresentedModel(model, True, False, one_by_one=True)
    with presented.attending_documents():
        with presented.attending_documents():
            pass
        with presented.attending_as_before():
            assert equal(model(input_ids=ids, use_cache=False).logits, before)
        assert any("forward" in vars(module) for module in model.modules())
    assert equal(model(input_ids=ids, use_cache=False).logits, before)
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_forward_that_somebody_replaced_is_refused():
    model = sparse("DeepseekV32")
    attention = one_by_one.attention_modules(model)[0]
    attention.forward = lambda *given, **named: type(attention).forward(attention, *given, **named)
    with pytest.raises(
        RuntimeError, match="DeepseekV32Attention was replaced.*documents would see each other"
    ):
        one_by_one.attend_one_by_one(model)


def test_attention_that_takes_no_mask_is_told(caplog):
    model = sparse("DeepseekV32", hidden_size=256)
    model.config._attn_implementation_internal = "flash_mla"
    assert not present(model).packed
    assert "attn_implementation=flash_mla; with eager or sdpa it takes packs" in caplog.text


@pytest.mark.slow
def test_a_run_in_packs_learns_what_one_in_padded_rows_does(tmp_path, let_return):
    vocabulary = len(tiny.tokenizer())
    changes = {
        "max_steps": 2,
        "max_seq_length": 64,
        "gradient_accumulation_steps": 1,
        "use_gradient_checkpointing": True,
    }
    trained = {}
    for way in ("packs", "padded rows"):
        if way == "padded rows":
            let_return(presenting, why_not_one_by_one="as the test wants")
        torch.manual_seed(3)
        model = sparse("GlmMoeDsa", vocab_size=vocabulary, indexer_types=["full", "shared", "full"])
        runs.train(tmp_path / way, model=model, **changes)
        trained[way] = runs.trajectory(tmp_path / way)
    for packed, padded in zip(trained["packs"], trained["padded rows"], strict=True):
        assert packed == pytest.approx(padded, rel=1e-4)


def test_other_attention_has_no_choice_of_its_own():
    assert not one_by_one.own_choice(build("llama"))
