"""A frozen embedding whose columns are on several ranks: what is looked up, when it stays whole,
and what a rank holds.
"""

import random
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import tiny
import two_processes
from chronicals.distributed import (
    EmbeddingInShards,
    Mesh,
    shard_embedding,
    shard_frozen,
    why_embedding_stays_whole,
)
from chronicals.lora import LoRAConfig, apply_lora
from chronicals.memory import decoder_layers
from chronicals.models import count_values, quantise_layers

sys.path.insert(0, str(Path(__file__).parent))
import embedding_ranks

CPU = torch.device("cpu")


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the processes would each take a card")
@pytest.mark.sample(1)
@pytest.mark.parametrize("count", [2, 4])
def test_ranks_look_up_what_is_in_the_whole(tmp_path, count):
    """To the bit; whether all look up as many tokens or not."""
    seed = random.randrange(2**31)
    for rank, found in enumerate(
        two_processes.saved(embedding_ranks.__file__, tmp_path, str(seed), count=count)
    ):
        for case, (got, expected) in found.items():
            assert got.dtype == expected.dtype and torch.equal(got, expected), (
                f"{case} on rank {rank}, {seed}"
            )


def lora(**fields):
    return apply_lora(tiny.llama(**fields.pop("sizes", {})), LoRAConfig(rank=2, **fields))


def hooked():
    model = lora()
    model.get_input_embeddings().register_forward_hook(lambda *_: None)
    return model


def resized():
    model = tiny.llama()
    model._chronicals_base_rows = 300
    model.resize_token_embeddings(310)
    return apply_lora(model, LoRAConfig(rank=2))


def normed():
    class Normed(nn.Embedding):
        def forward(self, ids):
            return nn.functional.normalize(super().forward(ids), dim=-1)

    model = tiny.llama()
    model.set_input_embeddings(Normed(300, 64))
    return apply_lora(model, LoRAConfig(rank=2))


WHOLE = {
    "all weights": (tiny.llama, "it is trained"),
    "tied": (
        lambda: lora(sizes={"tie_word_embeddings": True}),
        "another layer, as a head, has the same weight",
    ),
    "adapted": (lambda: lora(target_modules=["q_proj", "embed_tokens"]), "it has an adapter"),
    "trained tokens": (lambda: lora(trainable_token_indices=[3, 5]), "tokens that are trained"),
    "trained whole": (lambda: lora(modules_to_save=["embed_tokens"]), "it is trained"),
    "hooked": (hooked, "it has hooks"),
    "resized": (resized, "it has rows that its base lacks"),
    "normed": (normed, "Normed is more than a table of rows"),
    "columns": (lambda: lora(sizes={"hidden_size": 72}), "its 72 columns cannot be divided by 7"),
}


@pytest.mark.parametrize("kind", WHOLE)
def test_what_cannot_be_divided_stays_whole_and_says_why(kind):
    build, words = WHOLE[kind]
    model = build()
    layer = model.get_input_embeddings()
    assert words in why_embedding_stays_whole(model, 7) and words in shard_embedding(
        model, 0, 7, CPU
    )
    assert model.get_input_embeddings() is layer


def test_each_rank_has_its_own_columns_and_saves_none():
    whole = lora().get_input_embeddings().weight.detach()
    found = []
    for rank in range(4):
        model = lora()
        assert (
            shard_embedding(model, rank, 4, CPU) is None
            and shard_embedding(model, rank, 4, CPU) is None
        )
        layer = model.get_input_embeddings()
        assert isinstance(layer, EmbeddingInShards) and why_embedding_stays_whole(model, 4) is None
        assert not any("embed_tokens" in name for name in model.state_dict())
        assert model.bfloat16().get_input_embeddings().weight.dtype == torch.bfloat16
        found.append(layer.weight.float())
    assert torch.equal(torch.cat(found, 1), whole.bfloat16().float())


EIGHT_BILLION = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
GIB = 2**30


def frozen_bytes(model):
    """Of frozen weights, each storage once, and of the buffers that layers are gathered into."""
    tensors = [p for p in model.parameters() if not p.requires_grad]
    units = {module.unit for module in model.modules() if hasattr(module, "unit")}
    own = {id(p) for module in model.modules() if hasattr(module, "unit") for p in [module.weight]}
    beside = sum(
        b.nbytes
        for module in model.modules()
        if hasattr(module, "packed")
        for b in module.buffers(recurse=False)
    )
    gathered = 2 * max((len(unit.own) * unit.gathers.count for unit in units), default=0)
    return (
        sum(p.nbytes for p in tensors if id(p) not in own)
        + sum(len(unit.own) for unit in units)
        + beside
        + gathered
    )


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "at_least"), [("NF4", 1.9), ("16 bit", 6.1)])
def test_what_a_rank_of_two_holds_of_eight_billion(kind, at_least):
    """Less by half of the layers and of the embedding, but for two gathered layers: of NF4 1.68
    + 0.49 - 0.21 GiB.
    """
    with torch.device("meta"):
        model = tiny.llama(**EIGHT_BILLION).bfloat16()
    if kind == "NF4":
        quantise_layers(model)
    model.requires_grad_(False)
    whole = frozen_bytes(model)
    shard_frozen(decoder_layers(model), Mesh(0, 2), 2, torch.device("meta"), torch.bfloat16)
    layers_divided = frozen_bytes(model)
    assert shard_embedding(model, 0, 2, torch.device("meta")) is None
    saved = (whole - frozen_bytes(model)) / GIB
    assert saved >= at_least
    assert (whole - layers_divided) / GIB == pytest.approx(saved - 128256 * 4096 / GIB)
    if kind == "NF4":  # 1.43 where it was measured, of layers alone
        assert (whole - layers_divided) / GIB == pytest.approx(1.467, abs=0.002)


@pytest.mark.parametrize("kind", ["NF4", "16 bit"])
def test_weights_are_counted_as_all_ranks_have_them(kind):
    model = tiny.llama(hidden_size=256, intermediate_size=512, attention_bias=True).requires_grad_(
        False
    )
    whole = count_values(model)
    assert whole == sum(p.numel() for p in model.parameters())
    if kind == "NF4":
        quantise_layers(model)
    shard_frozen(decoder_layers(model), Mesh(0, 2), 2, torch.device("cpu"), torch.bfloat16)
    assert shard_embedding(model, 0, 2, torch.device("cpu")) is None
    assert count_values(model) == whole
