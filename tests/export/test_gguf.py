"""GGUF files: every family, type and tokenizer as the model has them, and as llama.cpp reads
them where it is installed.
"""

import json
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

import gguf_models
import tiny
from chronicals.export import NotExpressible, NotProved, export, gguf, llama_cpp
from chronicals.export.gguf import GGUFModel
from chronicals.export.source import PROBES, SourceModel
from chronicals.formats.gguf import writer
from chronicals.formats.gguf.families import FAMILIES, family_of
from chronicals.formats.gguf.reader import GGUFFile
from chronicals.formats.gguf.tensors import RestoredTensors, pieces_of
from chronicals.formats.gguf.tokenizer import vocabulary_of
from chronicals.formats.gguf.vocabulary import BY_EXPRESSIONS
from chronicals.formats.gguf.writer import LLAMA_CPP_KINDS, WEIGHT_TYPES, plan_gguf
from chronicals.models import load_model
from chronicals.saving import SavedModel
from comparison import equal


def saved(folder, model, tokenizer=None):
    model.save_pretrained(folder)
    (tokenizer or tiny.tokenizer()).save_pretrained(folder)
    return folder


def source(folder):
    return SourceModel(SavedModel.find(folder), folder)


def written(folder, kind="f32"):
    """A file of the model in a folder, and its pieces."""
    given = source(folder)
    GGUFModel(kind).write(given, folder / "model.gguf")
    return (
        given,
        GGUFFile(folder / "model.gguf"),
        plan_gguf(given.config, given.tensors, kind),
    )


# --- families
# --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", gguf_models.MODELS)
def test_every_family_is_proved(name, tmp_path, let_return):
    """By the reader of files alone, which says that llama.cpp was not asked."""
    let_return(llama_cpp, is_there=False)
    (exported,) = export(saved(tmp_path, gguf_models.build(name)), "gguf-f32")
    compared = {check.name: check for check in exported.proof.checks}
    assert compared["weights in F32"].value <= 1e-6 and compared["every weight is there"].passed
    assert compared["ids and logits"].passed is None
    # llama.cpp rotates gpt-oss a little otherwise than it was trained
    assert ("positions" in compared) == (name == "gpt_oss")
    assert exported.path.exists() and not list(exported.path.parent.glob(".export-*"))


@pytest.mark.llama_cpp
@pytest.mark.parametrize("name", gguf_models.MODELS)
def test_llama_cpp_computes_every_family(name, tmp_path):
    """Its logits are torch's to fp32's roundings, or else the file is not kept."""
    (exported,) = export(saved(tmp_path, gguf_models.build(name)), "gguf-f32")
    compared = {check.name: check for check in exported.proof.checks}
    assert compared["logits beside torch with the file's weights"].client == "llama.cpp"


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", gguf_models.MODELS)
def test_what_is_read_back_is_the_model(name, tmp_path):
    """The file's weights in transformers' class give the model's logits."""
    model = gguf_models.build(name)
    given, file, planned = written(saved(tmp_path / "model", model))
    shapes = {name: stored.shape for name, stored in given.tensors.items()}
    found = RestoredTensors(planned.pieces, shapes, file.read)
    for tensor_name in found:
        assert torch.allclose(found[tensor_name], given.tensors[tensor_name].read(), atol=1e-6), (
            tensor_name
        )


TURNED_BY_NEIGHBOURS = ("llama", "mistral", "mixtral", "smollm3", "granite")
"""Families whose heads llama.cpp rotates by neighbouring elements, by the conversions of its own
script.
"""


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", [name for name in gguf_models.MODELS if "phi3" not in name])
def test_rows_of_queries_are_reordered_as_llama_cpp_rotates(name, tmp_path):
    """Element 2 i of a head in the file is element i of the model's, element 2 i + 1 is i +
    half: of weights and biases of q and k, and of nothing else."""
    model = gguf_models.build(name)
    given, file, _ = written(saved(tmp_path, model))
    dim = getattr(model.config, "head_dim", None) or 64 // 4
    own = {
        key: stored.read()
        for key, stored in given.tensors.items()
        if "layers.1.self_attn." in key and "_proj." in key
    }
    assert len(own) >= 4 + 4 * (name == "llama with biases")
    for key, ours in own.items():
        role, kind = key.split(".")[-2:]
        theirs = file.read(f"blk.1.attn_{IN_ATTENTION[role]}.{kind}")
        if (
            role in ("q_proj", "k_proj")
            and name.split(",")[0].split(" ")[0] in TURNED_BY_NEIGHBOURS
        ):
            heads = ours.unflatten(0, (-1, dim))
            ours = torch.stack([heads[:, : dim // 2], heads[:, dim // 2 :]], dim=2).reshape(
                ours.shape
            )
        assert equal(theirs, ours), key


IN_ATTENTION = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "output"}


def test_heads_are_described_as_the_model_has_them(tmp_path):
    """By llama.cpp's names of the settings."""
    _, file, _ = written(saved(tmp_path, gguf_models.build("llama 3")))
    expected = {
        "block_count": 2,
        "context_length": 256,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "vocab_size": 310,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 24,
        "attention.value_length": 24,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.dimension_count": 24,
        "rope.freq_base": 1e4,
    }
    for key, value in expected.items():
        assert file.value(f"llama.{key}") == pytest.approx(value), key
    assert file.value("general.file_type") == 0


OF_FAMILIES = {
    "granite": {
        "embedding_scale": 2.0,
        "residual_scale": 0.6,
        "attention.scale": 0.2,
        "logit_scale": 3.0,
    },
    "gemma2": {
        "attention.sliding_window": 16,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "mixtral": {"expert_count": 4, "expert_used_count": 2, "feed_forward_length": 96},
    "qwen2_moe": {
        "expert_count": 6,
        "expert_used_count": 2,
        "expert_feed_forward_length": 32,
        "expert_shared_feed_forward_length": 48,
    },
    "llama, linear": {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0},
    "llama, yarn": {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 64,
    },
    "gpt_oss": {
        "attention.sliding_window": 16,
        "expert_feed_forward_length": 96,
        "rope.scaling.yarn_beta_fast": 32.0,
        "rope.scaling.yarn_beta_slow": 1.0,
    },
    "phi3, longrope": {
        "rope.scaling.original_context_length": 256,
        "rope.scaling.attn_factor": (1 + np.log(2) / np.log(256)) ** 0.5,
    },
}
"""Settings of models of ``gguf_models.MODELS``, by llama.cpp's names of them."""


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", OF_FAMILIES)
def test_settings_of_a_family_have_its_names_of_them(name, tmp_path):
    _, file, _ = written(saved(tmp_path, gguf_models.build(name)))
    architecture = file.value("general.architecture")
    for key, value in OF_FAMILIES[name].items():
        found = file.value(f"{architecture}.{key}")
        assert found == (value if isinstance(value, str) else pytest.approx(value)), key


def test_norms_of_gemma_have_what_they_add(tmp_path):
    given, file, _ = written(saved(tmp_path, gguf_models.build("gemma2")))
    for ours, theirs in {
        "input_layernorm": "attn_norm",
        "pre_feedforward_layernorm": "ffn_norm",
    }.items():
        assert equal(
            file.read(f"blk.1.{theirs}.weight"),
            given.tensors[f"model.layers.1.{ours}.weight"].read() + 1,
        )
    assert file.value("gemma2.attn_logit_softcapping") == 50.0


def test_experts_are_stacked_in_their_order(tmp_path):
    given, file, _ = written(saved(tmp_path, gguf_models.build("qwen3_moe")))
    for ours, theirs in {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}.items():
        stack = file.read(f"blk.1.ffn_{theirs}_exps.weight")
        for number in range(6):
            assert equal(
                stack[number],
                given.tensors[f"model.layers.1.mlp.experts.{number}.{ours}.weight"].read(),
            )


def test_experts_of_gpt_oss_are_taken_apart(tmp_path):
    given, file, _ = written(saved(tmp_path, gguf_models.build("gpt_oss")))
    both = given.tensors["model.layers.1.mlp.experts.gate_up_proj"].read()
    assert equal(file.read("blk.1.ffn_gate_exps.weight"), both[:, :, ::2].transpose(1, 2))
    assert equal(file.read("blk.1.ffn_up_exps.weight"), both[:, :, 1::2].transpose(1, 2))
    bias = given.tensors["model.layers.1.mlp.experts.gate_up_proj_bias"].read()
    assert equal(file.read("blk.1.ffn_up_exps.bias"), bias[:, 1::2])
    down = given.tensors["model.layers.1.mlp.experts.down_proj"].read()
    assert equal(file.read("blk.1.ffn_down_exps.weight"), down.transpose(1, 2))
    sinks = given.tensors["model.layers.1.self_attn.sinks"].read()
    assert equal(file.read("blk.1.attn_sinks.weight"), sinks)


def test_frequencies_of_llama_3_are_divided(tmp_path):
    """What divides each frequency, by the formula of Llama 3.1's reference code."""
    _, file, _ = written(saved(tmp_path, gguf_models.build("llama 3")))
    rope = gguf_models.LLAMA3
    plain = 1.0 / rope["rope_theta"] ** (np.arange(0, 24, 2) / 24)
    wave = 2 * np.pi / plain
    smooth = (rope["original_max_position_embeddings"] / wave - 1.0) / (4.0 - 1.0)
    expected = np.where(wave < 16, 1.0, np.where(wave > 64, 8.0, 1 / ((1 - smooth) / 8.0 + smooth)))
    np.testing.assert_allclose(file.read("rope_freqs.weight").numpy(), expected, rtol=1e-5)


def test_a_tied_head_is_left_out(tmp_path):
    _, file, _ = written(saved(tmp_path, gguf_models.build("qwen2")))
    assert "output.weight" not in file.tensors and "token_embd.weight" in file.tensors


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        (
            "qwen2",
            {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 8},
            "layer_types=['full_attention', 'sliding_attention']",
        ),
        ("qwen3_moe", {"norm_topk_prob": False}, "norm_topk_prob=False"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, "mlp_only_layers=[1]"),
        ("gemma2", {"query_pre_attn_scalar": 20}, "query_pre_attn_scalar=20"),
        ("smollm3", {"no_rope_layers": [1, 0, 1, 1]}, "no_rope_layers=[1, 0, 1, 1]"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "rope_type='dynamic'",
        ),
        ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("olmoe", {"num_key_value_heads": 2}, "num_key_value_heads=2"),
    ],
)
def test_what_llama_cpp_computes_otherwise_is_refused(name, changes, said, tmp_path):
    with pytest.raises(NotExpressible) as error:
        export(saved(tmp_path, gguf_models.build(name, **changes)), "gguf-f16")
    assert said in str(error.value)
    assert not list((tmp_path / "export").iterdir())


def test_a_family_without_a_form_is_refused_by_name(tmp_path):
    import families

    with pytest.raises(
        NotExpressible,
        match="model_type='cohere': has no proved form in GGUF here; there are gemma2",
    ):
        export(saved(tmp_path, families.build("cohere", vocab_size=300)), "gguf-f16")


def test_a_window_that_llama_cpp_lacks_ends_the_context(tmp_path):
    _, file, _ = written(saved(tmp_path, gguf_models.build("mistral", sliding_window=48)))
    assert file.value("llama.context_length") == 48


# --- types
# -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", WEIGHT_TYPES)
def test_every_type(kind, tmp_path):
    (exported,) = export(saved(tmp_path, gguf_models.build("llama")), f"gguf-{kind}")
    types = exported.proof.about["types"]
    name = WEIGHT_TYPES[kind]
    of_the_head = {"Q8_0": 1} if kind.startswith(("q4", "q5")) else {}
    expected = (
        {"F32": 21} if kind == "f32" else {"F32": 5, name: 16 - len(of_the_head), **of_the_head}
    )
    assert types == dict(sorted(expected.items()))


@pytest.mark.parametrize("kind", [kind for kind in WEIGHT_TYPES if kind.startswith(("q4", "q5"))])
@pytest.mark.parametrize("tied", [True, False])
def test_the_head_has_more_bits_than_the_rest(tied, kind, tmp_path):
    """Where it is the embedding, too."""
    model = gguf_models.build("qwen2", tie_word_embeddings=tied)
    _, file, _ = written(saved(tmp_path, model), kind)
    kinds = {name: file.type_of(name) for name in file.tensors}
    assert kinds["token_embd.weight"] == ("Q8_0" if tied else WEIGHT_TYPES[kind])
    assert tied or kinds["output.weight"] == "Q8_0"
    assert kinds["blk.1.attn_q.weight"] == kinds["blk.1.ffn_down.weight"] == WEIGHT_TYPES[kind]


@pytest.mark.llama_cpp
@pytest.mark.parametrize("kind", ["q4_k_m", "q5_k_s"])
def test_a_tied_head_has_more_bits_in_what_llama_cpp_quantises(kind, tmp_path):
    given = source(saved(tmp_path, gguf_models.build("qwen2", **WIDE, tie_word_embeddings=True)))
    GGUFModel(kind).write(given, tmp_path / "model.gguf")
    file = GGUFFile(tmp_path / "model.gguf")
    assert file.type_of("token_embd.weight") in ("Q6_K", "Q8_0")
    assert file.type_of("blk.1.attn_q.weight") == kind[:4].upper()


@pytest.mark.slow
def test_rows_that_are_no_whole_blocks_are_16_bit(tmp_path):
    (exported,) = export(
        saved(tmp_path, gguf_models.build("llama", hidden_size=80, head_dim=20)), "gguf-q8_0"
    )
    assert exported.proof.about["types"] == {"F16": 14, "F32": 5, "Q8_0": 2}


@pytest.mark.slow
def test_weights_in_16_bits_are_read(tmp_path):
    saved(tmp_path, gguf_models.build("qwen2").bfloat16())
    (exported,) = export(tmp_path, "gguf-bf16")
    assert next(c for c in exported.proof.checks if c.name == "weights in BF16").value == 0.0


WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}


@pytest.mark.llama_cpp
@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", LLAMA_CPP_KINDS)
def test_types_that_llama_cpp_quantises(kind, tmp_path):
    """With an importance matrix over rows; its own bound is that of what it computes with the
    file's weights.
    """
    saved(tmp_path, gguf_models.build("llama", **WIDE))
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in tiny.chat_rows()))
    (exported,) = export(tmp_path, f"gguf-{kind}", importance=rows)
    assert not exported.proof.failed and "ids of a conversation" in {
        check.name for check in exported.proof.checks
    }
    assert [path.name for path in exported.path.parent.iterdir() if "whole" in path.name] == []


@pytest.mark.llama_cpp
def test_importance_moves_the_error_to_where_it_matters_less(tmp_path):
    """With all importance in some columns of a weight, those are nearer to what they were."""
    given = source(saved(tmp_path, gguf_models.build("llama", **WIDE)))
    GGUFModel("f32").write(given, tmp_path / "whole.gguf")
    weights = {
        "blk.0.attn_q.weight": np.where(np.arange(256) % 32 < 4, 1.0, 1e-4).astype(np.float32)
    }
    errors = []
    for name, importance in (("plain", None), ("weighed", weights)):
        llama_cpp.quantise(
            tmp_path / "whole.gguf", tmp_path / f"{name}.gguf", 12, importance
        )  # Q3_K_M
        files = GGUFFile(tmp_path / f"{name}.gguf"), GGUFFile(tmp_path / "whole.gguf")
        off = (files[0].read("blk.0.attn_q.weight") - files[1].read("blk.0.attn_q.weight"))[
            :, np.arange(256) % 32 < 4
        ]
        errors.append(float(off.norm()))
    assert errors[1] < 0.9 * errors[0]


def test_importance_is_the_mean_square_of_inputs(tmp_path):
    from chronicals.export.importance import importance_of

    model = gguf_models.build("qwen2")
    given = source(saved(tmp_path, model))
    pieces = plan_gguf(given.config, given.tensors, "f32").pieces
    documents = [[5, 7, 9], [11, 3]]
    found = importance_of(model, pieces, documents)
    with torch.no_grad():
        embedded = [model.model.embed_tokens(torch.tensor(ids)) for ids in documents]
        states = torch.cat([model.model.layers[0].input_layernorm(x) for x in embedded])
    np.testing.assert_allclose(
        found["blk.0.attn_q.weight"], states.square().mean(0).numpy(), rtol=1e-4
    )
    assert {
        "blk.1.ffn_down.weight",
        "blk.1.attn_output.weight",
    } <= found.keys() and "token_embd.weight" not in found


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_importance_of_experts_is_of_the_tokens_that_each_was_given(name, tmp_path, caplog):
    """By hand: what the first layer's router sends to each expert; both products, each expert by
    its number.
    """
    from chronicals.export.importance import importance_of

    caplog.set_level("INFO")
    model = gguf_models.build(name)
    given = source(saved(tmp_path, model))
    mlp = model.model.layers[0].mlp
    taken = []
    hook = mlp.experts.register_forward_pre_hook(lambda _, inputs: taken.append(inputs))
    documents = [[5, 7, 9], [11]]
    with torch.no_grad():
        for ids in documents:
            model(torch.tensor([ids]))
    hook.remove()
    found = importance_of(model, plan_gguf(given.config, given.tensors, "f32").pieces, documents)
    states, chosen = (torch.cat([inputs[n].flatten(0, -2) for inputs in taken]) for n in (0, 1))
    gate = found["blk.0.ffn_gate_exps.weight"]
    assert np.array_equal(gate, found["blk.0.ffn_up_exps.weight"]) and gate.shape == (
        len(mlp.experts.down_proj),
        64,
    )
    for number in range(len(gate)):
        own = states[(chosen == number).any(-1)]
        expected = own.square().mean(0) if len(own) else torch.ones(64)
        np.testing.assert_allclose(gate[number], expected.numpy(), rtol=1e-4)
    assert found["blk.1.ffn_down_exps.weight"].shape == (
        len(gate),
        32 if name == "qwen3_moe" else 96,
    )
    assert not any("gate_inp" in key or key.endswith("bias") for key in found)
    unseen = any((means == 1).all(-1).any() for key, means in found.items() if "_exps" in key)
    assert ("saw none of the rows" in caplog.text) == unseen


OF_EXPERTS = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}


@pytest.mark.llama_cpp
@pytest.mark.parametrize("kind", ["q4_k_m", "q2_k", "iq2_xs"])
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_experts_are_quantised_with_their_importance(name, kind, tmp_path):
    """iq2_xs, which llama.cpp refuses where a tensor has none, shows that it takes that of
    experts.
    """
    saved(tmp_path, gguf_models.build(name, **OF_EXPERTS))
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in tiny.chat_rows()))
    (exported,) = export(tmp_path, f"gguf-{kind}", importance=rows)
    assert not exported.proof.failed


@pytest.mark.llama_cpp
def test_importance_in_another_order_of_experts_is_found(tmp_path):
    """Each expert has all its importance in columns of its own, which are then nearer to what
    they were; in another order they are not."""
    given = source(saved(tmp_path, gguf_models.build("mixtral", **OF_EXPERTS)))
    GGUFModel("f32").write(given, tmp_path / "whole.gguf")
    name = "blk.0.ffn_up_exps.weight"
    own = np.arange(256)[None] % 16 // 2 == np.arange(4)[:, None]
    importance = np.where(own, 1.0, 1e-4).astype(np.float32)
    errors = {}
    for order, values in {"plain": None, "right": importance, "reversed": importance[::-1]}.items():
        weights = None if values is None else {name: values}
        llama_cpp.quantise(
            tmp_path / "whole.gguf", tmp_path / f"{order}.gguf", 12, weights
        )  # Q3_K_M
        files = GGUFFile(tmp_path / f"{order}.gguf"), GGUFFile(tmp_path / "whole.gguf")
        off = (files[0].read(name) - files[1].read(name)).permute(0, 2, 1)[torch.from_numpy(own)]
        errors[order] = float(off.norm())
    assert errors["right"] < 0.7 * errors["plain"] and errors["right"] < 0.7 * errors["reversed"]


def test_few_bits_need_rows(tmp_path):
    with pytest.raises(
        ValueError, match=r"gguf-iq2_xs: so few bits .* \(--importance your.jsonl\)"
    ):
        export(saved(tmp_path, gguf_models.build("llama", **WIDE)), "gguf-iq2_xs")


def test_llama_cpps_types_need_llama_cpp(tmp_path, let_return):
    let_return(llama_cpp, is_there=False)
    with pytest.raises(
        ValueError,
        match="gguf-q4_k_m: weights are quantised by llama.cpp itself, .* pip install "
        "llama-cpp-python",
    ):
        export(saved(tmp_path, gguf_models.build("llama", **WIDE)), "gguf-q4_k_m")


# --- tokenizers
# --------------------------------------------------------------------------------------------------------


TEXTS = ["def words(of): return 'it is 12345, we are 67'\n\n  and café"] * 40 + list(PROBES) * 5


def trained(pre, size=400, ignore_merges=False, normalizer=None, prefix=False):
    """A byte-level BPE tokenizer that splits by ``pre``."""
    bpe = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    bpe.pre_tokenizer = pre
    bpe.decoder = decoders.ByteLevel()
    if normalizer is not None:
        bpe.normalizer = normalizer
    special = ["<|end|>", "<|turn|>"]
    bpe.train_from_iterator(
        TEXTS,
        trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    found = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|end|>", pad_token="<|end|>")
    found.chat_template = (
        tiny.tokenizer()
        .chat_template.replace("<|im_end|>", "<|turn|>")
        .replace("<|im_start|>", "<|turn|>")
    )
    return found


def splits(expression):
    split = pre_tokenizers.Split(Regex(expression), "isolated")
    return pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


def by_name():
    found = {"gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False)}
    digits = pre_tokenizers.Digits(individual_digits=True)
    found["smollm"] = pre_tokenizers.Sequence([digits, found["gpt-2"]])
    for expressions, name in BY_EXPRESSIONS.items():
        found.setdefault(name, splits(expressions[0]))
    return found


SPLITS = [*dict.fromkeys(BY_EXPRESSIONS.values()), "dbrx"]


def splitting(name):
    """A tokenizer that llama.cpp knows by this name of its way to split texts."""
    pre = by_name()["llama-bpe" if name == "dbrx" else name]
    return trained(pre, ignore_merges=name == "llama-bpe")


@pytest.mark.parametrize("name", SPLITS)
def test_byte_level_tokenizers_by_how_they_split(name):
    tokenizer = splitting(name)
    found = vocabulary_of(tokenizer, 420, [0])
    assert (found.model, found.pre) == ("gpt2", name)
    assert found.tokens[len(tokenizer) :] == [f"[PAD{n}]" for n in range(len(tokenizer), 420)]


@pytest.mark.llama_cpp
@pytest.mark.parametrize("name", SPLITS)
def test_llama_cpp_splits_texts_as_the_tokenizer_does(name, tmp_path):
    export(
        saved(tmp_path, gguf_models.build("llama", vocab_size=420), splitting(name)), "gguf-f32"
    )  # proves ids


def from_characters(size=400):
    """BPE over characters with bytes for the rest, as Llama 2's and Gemma's ``tokenizer.json``."""
    bpe = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    bpe.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    bpe.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    special = ["<unk>", "<s>", "</s>", *(f"<0x{n:02X}>" for n in range(256))]
    bpe.train_from_iterator(
        [text.encode("ascii", "ignore").decode() for text in TEXTS],
        trainers.BpeTrainer(vocab_size=size, special_tokens=special, show_progress=False),
    )
    described = json.loads(bpe.to_str())
    described["added_tokens"] = [token for token in described["added_tokens"] if token["id"] < 3]
    bpe = Tokenizer.from_str(json.dumps(described))
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<unk>",
    )


def test_a_tokenizer_over_characters_with_bytes_for_the_rest():
    tokenizer = from_characters()
    found = vocabulary_of(tokenizer, len(tokenizer), [2])
    assert (found.model, found.pre, found.space_prefix) == ("llama", "default", True)
    assert found.types[:4] == [2, 3, 3, 6] and found.scores[5] == -5.0


@pytest.mark.llama_cpp
def test_llama_cpp_reads_a_tokenizer_over_characters(tmp_path):
    tokenizer = from_characters()
    export(
        saved(tmp_path, gguf_models.build("llama", vocab_size=len(tokenizer)), tokenizer),
        "gguf-f32",
    )  # proves ids


def around(tokenizer, begin, end):
    """The tokenizer with a token in front of each text, one behind it, both, or none."""
    pieces = [*["<|turn|>"] * begin, "$A", *["<|end|>"] * end]
    special = [("<|turn|>", 1), ("<|end|>", 0)]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=pieces, special_tokens=special
    )
    tokenizer.bos_token = "<|turn|>"
    return tokenizer


@pytest.mark.parametrize(
    ("begin", "end"), [(False, False), (True, False), (False, True), (True, True)]
)
def test_the_tokens_around_a_text_are_those_of_the_tokenizer(begin, end, tmp_path):
    """In ids, and in what the file says of each."""
    tokenizer = around(splitting("qwen2"), begin, end)
    ids = tokenizer("it is")["input_ids"]
    assert (ids[0] == 1, ids[-1] == 0) == (begin, end)
    _, file, _ = written(saved(tmp_path, gguf_models.build("llama", vocab_size=420), tokenizer))
    named = [file.value(f"tokenizer.ggml.add_{name}_token") for name in ("bos", "eos")]
    assert named == [begin, end]


@pytest.mark.llama_cpp
@pytest.mark.parametrize("begin", [True, False])
def test_llama_cpp_begins_texts_as_the_tokenizer_does(begin, tmp_path):
    tokenizer = around(splitting("qwen2"), begin, False)
    export(
        saved(tmp_path, gguf_models.build("llama", vocab_size=420), tokenizer), "gguf-f32"
    )  # proves ids


def test_tokens_that_were_added_keep_their_kinds(tmp_path):
    tokenizer = tiny.tokenizer()
    tokenizer.add_tokens(["<tool>"], special_tokens=True)
    tokenizer.add_tokens(["plainword"])
    found = vocabulary_of(tokenizer, 310, [tokenizer.eos_token_id])
    special, plain = tokenizer.convert_tokens_to_ids(["<tool>", "plainword"])
    assert (found.types[special], found.types[plain], found.types[309]) == (3, 4, 5)
    export(saved(tmp_path, gguf_models.build("llama"), tokenizer), "gguf-f32")


def test_the_end_of_a_turn_is_named_beside_the_end_of_a_text(tmp_path):
    tokenizer = tiny.tokenizer()
    turn = tokenizer.convert_tokens_to_ids("<|im_end|>")
    end = tokenizer.eos_token_id
    _, file, _ = written(saved(tmp_path, gguf_models.build("llama")))
    assert (
        file.value("tokenizer.ggml.eos_token_id") == end
        and file.value("tokenizer.ggml.eot_token_id") == turn
    )
    several = vocabulary_of(tokenizer, 310, [end, turn, 7])
    assert several.special["eot"] == turn, "the first that ends a turn"


def test_a_file_says_its_name_and_licence(tmp_path):
    folder = saved(tmp_path / "a-model", gguf_models.build("llama"))
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\nA model.\n")
    _, file, _ = written(folder)
    assert (file.value("general.name"), file.value("general.license")) == ("a-model", "apache-2.0")


@pytest.mark.parametrize("kind", ["f32", "q8_0", "q4_0"])
def test_a_size_is_that_of_the_tensors(kind, tmp_path):
    """Of what llama.cpp quantises, that of the file it is made of and once more."""
    given, file, _ = written(saved(tmp_path, gguf_models.build("llama 3")), kind)
    assert GGUFModel(kind).size(given) == sum(tensor.n_bytes for tensor in file.tensors.values())
    assert GGUFModel("q4_k_m").size(given) == 2 * GGUFModel("f32").size(given)


@pytest.mark.parametrize(
    ("tokenizer", "said"),
    [
        (lambda: trained(splits("[a-z]+|[^a-z]+")), "splits texts by ['[a-z]+|[^a-z]+']"),
        (lambda: trained(pre_tokenizers.ByteLevel(add_prefix_space=True)), "add_prefix_space"),
        (
            lambda: PreTrainedTokenizerFast(
                tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, "a"))
            ),
            "'WordLevel'",
        ),
    ],
)
def test_tokenizers_that_llama_cpp_lacks_are_refused(tokenizer, said):
    with pytest.raises(NotExpressible) as error:
        vocabulary_of(tokenizer(), 500, [])
    assert said in str(error.value)


def test_more_tokens_than_rows_are_refused():
    with pytest.raises(NotExpressible, match="the embedding 290 rows; resize it first"):
        vocabulary_of(tiny.tokenizer(), 290, [])


def test_normalisation_is_reported(tmp_path):
    found = vocabulary_of(trained(by_name()["qwen2"], normalizer=normalizers.NFC()), 420, [])
    assert found.notes == ["llama.cpp does not normalise text, which the tokenizer does (NFC)"]


# --- planted faults
# ----------------------------------------------------------------------------------------------------


def edited(plant, **changes):
    """What is written of the vocabulary is another than what the model has."""

    def planted(right, target, planned, tensors, v, *rest):
        wrong = replace(v, **{name: change(v) for name, change in changes.items()})
        right(target, planned, tensors, wrong, *rest)

    plant(gguf, "write_gguf", planted)


FAULTS = {
    "template edited": (lambda m: edited(m, template=lambda v: v.template + " "), "chat template"),
    "eos missing": (lambda m: edited(m, special=lambda v: {"bos": 0}), "special tokens"),
    "begin doubled": (lambda m: edited(m, adds_bos=lambda v: True), "begins texts with BOS"),
    "end added": (lambda m: edited(m, adds_eos=lambda v: True), "ends texts with EOS"),
    "another kind": (lambda m: edited(m, model=lambda v: "llama"), "kind of tokenizer"),
    "another splitting": (lambda m: edited(m, pre=lambda v: "llama-bpe"), "splitting of texts"),
    "stale tokenizer": (
        lambda m: edited(
            m, tokens=lambda v: [*v.tokens[:-20], *v.tokens[-10:], *v.tokens[-20:-10]]
        ),
        "tokens",
    ),
    "merges lost": (lambda m: edited(m, merges=lambda v: v.merges[:-1]), "merges"),
    "unused tokens are words": (
        lambda m: edited(m, types=lambda v: [1] * len(v.types)),
        "types of tokens",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_of_the_vocabulary_are_found(name, tmp_path, plant):
    fault, said = FAULTS[name]
    fault(plant)
    found = failed(saved(tmp_path, gguf_models.build("llama")))
    assert said in found


def failed(folder, kind="f32"):
    """The checks that failed; nothing stays of the file."""
    with pytest.raises(NotProved) as error:
        export(folder, f"gguf-{kind}")
    assert not list((folder / "export").iterdir())
    return str(error.value)


def planted_when_written(plant, change):
    """A fault in the way from the model to the file, and not in the way back."""

    def write(right, target, planned, *rest):
        right(target, replace(planned, pieces=[change(piece) for piece in planned.pieces]), *rest)

    plant(gguf, "write_gguf", write)


@pytest.mark.slow
def test_experts_in_another_order_are_found(tmp_path, plant):
    def change(piece):
        return replace(piece, sources=piece.sources[::-1]) if "_exps" in piece.name else piece

    planted_when_written(plant, change)
    assert "weights in F32, gguf: FAILED" in failed(saved(tmp_path, gguf_models.build("mixtral")))


@pytest.mark.slow
def test_a_block_with_another_scale_is_found(tmp_path, plant):
    import gguf as library

    def quantize(right, values, kind):
        found = right(values, kind)
        if kind.name == "Q8_0":
            found = found.copy()
            found.reshape(-1)[1] ^= 0x04  # the exponent of the fp16 scale: twice or half of it
        return found

    plant(library.quants, "quantize", quantize)
    assert "weights in Q8_0" in failed(saved(tmp_path, gguf_models.build("llama")), "q8_0")


def test_a_head_beside_a_tied_embedding_is_found(tmp_path, plant):
    def write(right, target, planned, tensors, vocabulary, kind, about):
        planned.extra["output.weight"] = np.zeros((310, 64), np.float32)
        right(target, planned, tensors, vocabulary, kind, about)
        planned.extra.pop("output.weight")

    plant(gguf, "write_gguf", write)
    assert "nothing else is there" in failed(saved(tmp_path, gguf_models.build("qwen2")))


@pytest.mark.llama_cpp
@pytest.mark.parametrize(
    "name", ["q and k not reordered", "norm without its offset", "scaling of positions lost"]
)
def test_faults_in_both_directions_are_found_by_llama_cpp(name, tmp_path, monkeypatch):
    of, change = {
        "q and k not reordered": ("llama", {"reorders_heads": False}),
        "norm without its offset": ("gemma2", {"norm_offset": 0.0}),
        "scaling of positions lost": ("llama 3", {}),
    }[name]
    model = gguf_models.build(of)
    family = FAMILIES[model.config.model_type]
    monkeypatch.setitem(FAMILIES, model.config.model_type, replace(family, **change))
    if not change:
        monkeypatch.setattr(writer, "extra_tensors", lambda config: iter(()))
    assert "logits beside torch with the file's weights, llama.cpp: FAILED" in failed(
        saved(tmp_path, model)
    )


@pytest.mark.llama_cpp
def test_llama_cpp_goes_on_from_a_document_as_the_model_does(tmp_path):
    """Greedy tokens of a file in fp32."""
    from chronicals.export.llama_cpp import LlamaCpp

    folder = saved(tmp_path, gguf_models.build("qwen3"))
    (exported,) = export(folder, "gguf-f32")
    ids = tiny.tokenizer()("What does it do?")["input_ids"]
    client = LlamaCpp(exported.path)
    model = load_model(folder, torch.float32)
    for _ in range(12):
        expected = int(model(torch.tensor([ids])).logits[0, -1].argmax())
        assert int(client.logits(ids)[-1].argmax()) == expected
        ids = [*ids, expected]


def test_tensors_may_come_in_any_order(tmp_path):
    """Experts are told by their numbers."""
    model = gguf_models.build("mixtral")
    saved(tmp_path, model)
    given = source(tmp_path)
    names = list(given.tensors)
    random.shuffle(names)
    shapes = {name: given.tensors[name].shape for name in names}
    family = family_of(given.config)
    pieces = {piece.name: piece for piece in pieces_of(shapes, given.config, family)}
    found = pieces["blk.0.ffn_up_exps.weight"].sources
    assert found == tuple(
        f"model.layers.0.block_sparse_moe.experts.{n}.w3.weight" for n in range(4)
    )
