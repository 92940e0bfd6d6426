"""Trained rows of an embedding beside adapters, beside the real PEFT, both ways; and of a head
that is the same weight.
"""

import copy
import json
from pathlib import Path

import pytest
import torch
from adapted import changed, close, gpt2, llama, logits, randomise, tokens, train_on
from safetensors.torch import load_file, save_file

import families
import runs
import tiny
from chronicals.batch import IGNORED
from chronicals.export.merge import MergeError, merge
from chronicals.lora import (
    LoRAConfig,
    add_adapter,
    apply_lora,
    load_adapter,
    merge_and_unload,
    save_adapter,
    without_adapters,
)
from chronicals.lora.tokens import TrainedTokens, trained_tokens
from chronicals.models import load_model, present, read_head
from chronicals.objectives import build_objective
from chronicals.patching import patch_parts
from comparison import equal

peft = pytest.importorskip("peft")

SOME = [7, 299, 0, 41]


def gemma(seed=0, **changes):
    """Tied, its embedding is scaled and its logits are capped."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "head_dim": 8,
    }
    sizes |= {
        "num_key_value_heads": 2,
        "vocab_size": 300,
        "final_logit_softcapping": 5.0,
        "pad_token_id": 0,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Gemma2ForCausalLM(Gemma2Config(**{**sizes, **changes})).eval()


def gemma3(seed=0):
    """The scale is in the class of its embedding."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "head_dim": 8,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Gemma3ForCausalLM(
            Gemma3TextConfig(**sizes, num_key_value_heads=2, vocab_size=300, pad_token_id=0)
        ).eval()


def tied(seed=0, **changes):
    return llama(seed, tie_word_embeddings=True, **changes)


CASES = {
    "untied": (llama, SOME),
    "tied": (tied, SOME),
    "tied, both named": (tied, {"embed_tokens": SOME, "lm_head": SOME}),
    "embedding and head, other tokens": (llama, {"embed_tokens": SOME, "lm_head": [2, 3]}),
    "the head alone": (llama, {"lm_head": SOME}),
    "gpt2": (gpt2, SOME),
    "scaled and capped": (gemma, SOME),
    "scaled in its class": (gemma3, SOME),
}


def ours(case="tied", **fields):
    build, wanted = CASES[case]
    targets = ["c_attn"] if build is gpt2 else ["q_proj", "down_proj"]
    model = apply_lora(
        build(), LoRAConfig(4, 12, 0.0, targets, trainable_token_indices=wanted, **fields)
    ).eval()
    randomise(model)
    return model


def with_them(ids=None):
    """Token ids in which the trained ones occur."""
    ids = tokens() if ids is None else ids
    ids[:, 1::3] = torch.tensor(SOME)[torch.randint(0, len(SOME), ids[:, 1::3].shape)]
    return ids


@pytest.mark.parametrize("case", CASES)
def test_there_and_back(tmp_path, case):
    """Ours in PEFT, PEFT's in ours: equal logits, and equal ones after the same training."""
    model = ours(case)
    ids = with_them()
    bare = logits(CASES[case][0](), ids)
    expected = train_on(model, ids)
    save_adapter(model, tmp_path / "ours")
    other = peft.PeftModel.from_pretrained(
        CASES[case][0](), tmp_path / "ours", is_trainable=True
    ).eval()
    assert changed(expected, bare) and close(logits(other, ids), expected)
    counts = [sum(p.numel() for p in m.parameters() if p.requires_grad) for m in (model, other)]
    assert counts[0] == counts[1]
    assert close(
        train_on(other, ids),
        train_on(load_adapter(CASES[case][0](), tmp_path / "ours").eval(), ids),
        1e-3,
    )
    other.save_pretrained(tmp_path / "theirs")
    again = load_adapter(CASES[case][0](), tmp_path / "theirs").eval()
    assert close(logits(again, ids), logits(other, ids))
    assert close(train_on(again, ids), train_on(other, ids), 1e-3)


def test_what_is_written_is_what_peft_writes(tmp_path):
    wanted = {
        "r": 4,
        "lora_alpha": 12,
        "target_modules": ["q_proj", "down_proj"],
        "trainable_token_indices": SOME,
    }
    peft.get_peft_model(tied(), peft.LoraConfig(**wanted)).save_pretrained(tmp_path / "theirs")
    save_adapter(ours(), tmp_path / "ours")
    one, two = (
        json.loads((tmp_path / who / "adapter_config.json").read_text())
        for who in ("ours", "theirs")
    )
    assert one["trainable_token_indices"] == two["trainable_token_indices"] == SOME
    stored = [load_file(tmp_path / who / "adapter_model.safetensors") for who in ("ours", "theirs")]
    assert {n: t.shape for n, t in stored[0].items()} == {n: t.shape for n, t in stored[1].items()}


@pytest.mark.parametrize("case", CASES)
def test_only_these_rows_are_trained(case):
    model = ours(case)
    ids = with_them()
    plain = CASES[case][0]()
    train_on(model, ids)
    merged = merge_and_unload(copy.deepcopy(model))
    wanted = CASES[case][1]
    lists = wanted if isinstance(wanted, dict) else {"embed_tokens": wanted, "wte": wanted}
    ends = {
        "embed_tokens": "get_input_embeddings",
        "wte": "get_input_embeddings",
        "lm_head": "get_output_embeddings",
    }
    for name, asked in lists.items():
        before, after = (getattr(m, ends[name])().weight for m in (plain, merged))
        others = [row for row in range(300) if row not in asked]
        assert equal(before[others], after[others])
        assert all(
            not equal(before[row], after[row]) for row in asked if row != 0 or name == "lm_head"
        )
    if isinstance(wanted, dict) and "embed_tokens" not in wanted:
        assert equal(plain.get_input_embeddings().weight, merged.get_input_embeddings().weight)


@pytest.mark.parametrize("case", CASES)
def test_merged_off_and_back(case):
    model = ours(case)
    ids = with_them()
    bare = logits(CASES[case][0](), ids)
    expected = train_on(model, ids)
    with without_adapters(model):
        assert close(logits(model, ids), bare, 1e-6)
    assert equal(logits(model, ids), expected)
    head = model.get_output_embeddings()
    assert close(logits(merge_and_unload(model), ids), expected)
    assert (
        not any(isinstance(module, TrainedTokens) for module in model.modules())
        and head is not None
    )
    weights = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    assert (weights[0] is weights[1]) == bool(model.config.tie_word_embeddings)


@pytest.mark.parametrize("case", CASES)
def test_the_loss_without_whole_logits_has_the_models_gradients(case):
    """Through the head's tensors and through the model's own logits: the same loss, the same
    gradients, of rows too.
    """
    model = ours(case).double().train()
    for layer in model.modules():
        if isinstance(layer, TrainedTokens) and layer.lora_tokens is not None:
            torch.nn.init.normal_(layer.lora_tokens, std=0.3)
    batch = families.documents_batch()
    ids = with_them(batch.input_ids[None] % 300)[0]
    targets = torch.where(batch.targets == IGNORED, batch.targets, ids.roll(-1))
    batch = batch.__class__(**{**vars(batch), "input_ids": ids, "targets": targets})
    found = []
    for fused in (True, False):
        presented = present(model, fused_head=fused)
        assert (presented.head is not None) == fused
        with presented.attending_documents():
            loss = build_objective(runs.config(Path("unused")))(presented, batch)[
                "cross_entropy"
            ].sum
        model.zero_grad()
        loss.backward()
        found.append(
            (
                loss.detach(),
                {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None},
            )
        )
    (one, first), (two, second) = found
    assert torch.allclose(one, two, rtol=1e-9) and first.keys() == second.keys()
    assert any("lora_tokens" in name for name in first)
    for name in first:
        assert first[name].norm() > 0 and torch.allclose(
            first[name], second[name], rtol=1e-7, atol=1e-12
        ), name


@pytest.mark.parametrize("case", ["tied", "embedding and head, other tokens"])
def test_in_a_patched_model(kernels, case):
    """Fused layers beneath; where the head has such rows its own logits stay."""
    build, wanted = CASES[case]
    model = build(vocab_size=300).double().train()
    apply_lora(
        model, LoRAConfig(4, 12, 0.0, ["q_proj", "down_proj"], trainable_token_indices=wanted)
    ).double()
    randomise(model)
    ids = with_them()
    plain = copy.deepcopy(model)
    assert patch_parts(model, whole_layers=True).counts()
    for each in (plain, model):
        each(input_ids=ids, labels=ids).loss.backward()
    for (name, own), (_, due) in zip(
        model.named_parameters(), plain.named_parameters(), strict=True
    ):
        if due.grad is not None:
            assert close(own.grad, due.grad), name


def test_no_copy_of_the_embedding():
    """The head is handed on as the stored weight and its rows; off, as the weight alone."""
    model = ours()
    head = read_head(model)
    assert head.table is model.get_input_embeddings().base_layer.weight and head.rows is not None
    assert equal(head.weight[SOME], head.rows.values) and head.rows.values.requires_grad
    with without_adapters(model):
        off = read_head(model)
        assert off.rows is None and off.weight is head.table


def test_refilled_bit_by_bit(tmp_path):
    model = ours("embedding and head, other tokens")
    ids = with_them()
    expected = train_on(model, ids)
    save_adapter(model, tmp_path)
    again = load_adapter(ours("embedding and head, other tokens"), tmp_path)
    assert equal(logits(again, ids), expected)
    with pytest.raises(ValueError, match="trainable_token_indices=.*the model's adapters have"):
        load_adapter(ours("untied"), tmp_path)


def test_rows_that_are_missing_are_named(tmp_path):
    save_adapter(ours("untied"), tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    save_file(
        {name: tensor for name, tensor in load_file(file).items() if "token_adapter" not in name},
        file,
    )
    with pytest.raises(
        ValueError, match="embed_tokens.token_adapter.trainable_tokens_delta is missing or not"
    ):
        load_adapter(llama(), tmp_path)


def test_added_tokens(tmp_path):
    """Tokens that the base's files lack: the embedding is saved too, by PEFT's names, and read
    back over the base.
    """
    tiny.llama(tie_word_embeddings=True).save_pretrained(tmp_path / "base")

    def base():
        return load_model(tmp_path / "base", torch.float32).eval()

    model = base()
    model.resize_token_embeddings(303, mean_resizing=False)
    apply_lora(model, LoRAConfig(4, 12, 0.0, ["q_proj"], trainable_token_indices=[300, 302])).eval()
    ids = tokens()
    ids[:, ::3] = 302
    expected = train_on(model, ids)
    save_adapter(model, tmp_path / "ours")
    assert close(logits(load_adapter(base(), tmp_path / "ours").eval(), ids), expected)
    theirs = base()
    theirs.resize_token_embeddings(303, mean_resizing=False)
    other = peft.PeftModel.from_pretrained(theirs, tmp_path / "ours", is_trainable=True).eval()
    assert close(logits(other, ids), expected)
    other.save_pretrained(tmp_path / "theirs", save_embedding_layers=True)
    assert close(logits(load_adapter(base(), tmp_path / "theirs").eval(), ids), expected)
    merged = merge(tmp_path / "ours", tmp_path / "merged")
    assert "model.embed_tokens.weight" in merged.changes
    assert close(logits(load_model(tmp_path / "merged", torch.float32).eval(), ids), expected)


@pytest.mark.parametrize(
    "case", ["untied", "tied", "embedding and head, other tokens", "scaled and capped"]
)
def test_merged_from_files(tmp_path, case):
    model = ours(case)
    ids = with_them()
    expected = train_on(model, ids)
    CASES[case][0]().save_pretrained(tmp_path / "base")
    save_adapter(model, tmp_path / "adapter", base_model=str(tmp_path / "base"))
    merged = merge(tmp_path / "adapter", tmp_path / "merged")
    assert merged.changes["model.embed_tokens.weight"].change > 0
    assert close(logits(load_model(tmp_path / "merged", torch.float32).eval(), ids), expected)


def test_a_base_with_fewer_rows_is_refused_by_merging(tmp_path):
    save_adapter(ours("untied"), tmp_path / "adapter")
    llama(vocab_size=200).save_pretrained(tmp_path / "base")
    with pytest.raises(MergeError, match=r"model.embed_tokens.weight \(200, 64\); give the base"):
        merge(tmp_path / "adapter", tmp_path / "merged", base_model=str(tmp_path / "base"))


REFUSED = {
    "no such row": (
        llama,
        [300],
        "has 300 rows, and none is that of token 300; add it to the tokenizer",
    ),
    "a text": (llama, ["<a>"], "'<a>' is no token id"),
    "none": (llama, [], "no token is given"),
    "twice": (llama, [4, 5, 4], "token 4 stands twice"),
    "another layer": (llama, {"norm": [1]}, "'norm' is neither the embedding nor the head"),
    "two lists for one weight": (
        tied,
        {"embed_tokens": [1], "lm_head": [2]},
        "are one weight here",
    ),
    "the head of one weight": (tied, {"lm_head": [2]}, "are one weight here"),
    "an adapted head": (tied, SOME, "lm_head is trained by lora_target_modules"),
    "an embedding that is trained whole": (
        llama,
        SOME,
        "model.embed_tokens is trained by lora_target_modules",
    ),
    "a table that renormalises": (llama, SOME, "more than a table of rows"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_trained_is_refused(case):
    build, wanted, message = REFUSED[case]
    model = build()
    more = {"modules_to_save": ["embed_tokens"]} if "whole" in case else {}
    if "renormalises" in case:
        model.model.embed_tokens.max_norm = 1.0
    targets = ["lm_head"] if "adapted" in case else ["q_proj"]
    with pytest.raises(ValueError, match=message):
        apply_lora(model, LoRAConfig(4, 12, 0.0, targets, trainable_token_indices=wanted, **more))
    assert all(p.requires_grad for p in model.parameters()) and not hasattr(
        model, "chronicals_lora"
    )


def test_it_is_not_one_of_several(tmp_path):
    save_adapter(ours("untied"), tmp_path)
    with pytest.raises(ValueError, match="token"):
        add_adapter(llama(), "other", tmp_path)
    with pytest.raises(ValueError, match="trainable_token_indices"):
        add_adapter(ours("untied"), "other", tmp_path)


def test_a_copy_has_rows_of_its_own():
    model = ours()
    ids = with_them()
    twin = copy.deepcopy(model)
    before = logits(model, ids)
    train_on(twin, ids)
    assert equal(logits(model, ids), before)
    (_, rows), (_, other) = next(trained_tokens(model)), next(trained_tokens(twin))
    assert rows.values is not other.values and twin.get_output_embeddings().values is other.values


# --- runs
# ----------------------------------------------------------------------------------------------------------

FIELDS = {
    "use_lora": True,
    "lora_rank": 4,
    "lora_dropout": 0.0,
    "save_steps": 3,
    "trackers": [],
    "learning_rate": 1e-3,
}


def with_new_tokens(tie=True):
    """A tokenizer with two added tokens, rows with them, and a model that has rows for them."""
    tokenizer = tiny.tokenizer()
    rows = tiny.chat_rows()
    tokenizer.add_tokens(["<think>", "</think>"])
    for row in rows:
        row["messages"][1]["content"] = "<think> hm </think> " + row["messages"][1]["content"]
    return tokenizer, rows


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_trains_saves_and_resumes_them(tmp_path, precision):
    """A resumed run ends bit-equal; PEFT's model is the trained one; the other rows are those of
    the base.
    """
    import shutil

    from chronicals.training import ChronicalsTrainer

    tokenizer, rows = with_new_tokens()
    big = tiny.llama(vocab_size=len(tokenizer), tie_word_embeddings=True)
    big.save_pretrained(tmp_path / "base")
    kind = torch.bfloat16 if precision == "bf16" else torch.float32
    new = {
        "lora_trainable_tokens": ["<think>", tokenizer.convert_tokens_to_ids("</think>")],
        "mixed_precision": precision,
    }

    def train(folder, **more):
        model = load_model(tmp_path / "base", kind)
        ChronicalsTrainer(model, tokenizer, runs.config(folder, **FIELDS, **new)).train(
            rows, **more
        )
        return model

    whole = tmp_path / "whole"
    broken = tmp_path / "broken"
    model = train(whole)
    first = "run/checkpoints/step-00000003"
    shutil.copytree(whole / first, broken / first)
    train(broken, resume=True)
    once, twice = (
        load_file(folder / "run" / "model" / "adapter_model.safetensors")
        for folder in (whole, broken)
    )
    assert once.keys() == twice.keys() and all(equal(once[name], twice[name]) for name in once)
    name = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"
    ids = tokenizer.convert_tokens_to_ids(["<think>", "</think>"])
    assert once[name].dtype == torch.float32 and changed(
        once[name], big.get_input_embeddings().weight[ids]
    )
    base = load_model(tmp_path / "base", kind)
    some = torch.tensor([[5, ids[0], 9, ids[1], 7]])
    theirs = peft.PeftModel.from_pretrained(base, whole / "run" / "model").float().eval()
    assert close(
        logits(theirs, some),
        logits(model.float().eval(), some),
        1e-2 if precision == "bf16" else 1e-5,
    )
    assert equal(runs.weights(whole)[name], once[name])


@pytest.mark.slow
@pytest.mark.parametrize("tie", [True, False])
def test_the_run_is_the_plain_one(tmp_path, tie):
    """``verify``: losses, gradients and updates of the rows beside the plain arm's."""
    from chronicals.verification import verify

    tokenizer, rows = with_new_tokens()
    model = tiny.llama(vocab_size=len(tokenizer), tie_word_embeddings=tie)
    asked = (
        ["<think>"] if tie else {"embed_tokens": ["<think>", "</think>"], "lm_head": ["</think>"]}
    )
    found = verify(
        model, tokenizer, runs.config(tmp_path, **FIELDS, lora_trainable_tokens=asked), rows
    )
    assert not found.failures and any("lora_tokens" in row.module for row in found.gradients)


SAID = {
    "ids and texts": ("5, <a>,7", [5, "<a>", 7]),
    "the command line's": (["5", "<a>"], [5, "<a>"]),
    "one": (5, [5]),
    "by name": (
        {"embed_tokens": ["<a>"], "lm_head": "3,4"},
        {"embed_tokens": ["<a>"], "lm_head": [3, 4]},
    ),
}


@pytest.mark.parametrize("case", SAID)
def test_ways_to_say_them(tmp_path, case):
    said, meant = SAID[case]
    config = runs.config(tmp_path, use_lora=True, lora_trainable_tokens=said)
    assert config.lora_trainable_tokens == meant
    config.to_yaml(tmp_path / "recipe.yaml")
    assert type(config).from_yaml(tmp_path / "recipe.yaml").lora_trainable_tokens == meant


@pytest.mark.slow
def test_without_adapters_they_are_not_dropped_silently(tmp_path, caplog):
    runs.train(tmp_path, max_steps=1, lora_trainable_tokens=[5])
    assert "lora_trainable_tokens: set, but use_lora is off" in caplog.text


def test_a_text_that_is_no_token_is_refused(tmp_path):
    with pytest.raises(
        ValueError, match=r"lora_trainable_tokens='<nothing>': is \d+ tokens; add it"
    ):
        runs.train(tmp_path, **FIELDS, lora_trainable_tokens="<nothing>")
