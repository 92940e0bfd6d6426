"""Arms with adapters, over 16 or 4 bits: the same base and the same adapters in each of them."""

import sys
from types import ModuleType, SimpleNamespace

import made
import pytest
import torch
from peers import names, trl, unsloth
from peers.models import load_for_peers
from peers.names import missing_packages_of

import families
import tiny
from chronicals.benchmark.arms import ours
from chronicals.benchmark.arms.weights import (
    load_dequantised,
    load_in_4_bits,
    prepare_work,
    start_of,
    starting_values,
    with_peft,
)
from chronicals.benchmark.measurement import ArmPlan
from chronicals.benchmark.plan import plan_work
from chronicals.benchmark.shapes import byte_tokenizer
from chronicals.benchmark.work import STEP_CONTENT_FIELDS
from chronicals.cli import benchmark as command
from chronicals.config import ConfigurationError
from chronicals.lora import adapters
from chronicals.models import load_model
from chronicals.quantization import NF4, Experts4bit, Linear4bit
from comparison import equal

UNEVEN_FIELDS = {
    "lora_rank_pattern": {"q_proj": 3},
    "lora_alpha_pattern": {"down_proj": 5},
    "lora_layers": [1],
    "use_dora": True,
}


def planned(folder, mode="lora", model=None, **changes):
    """A work with weights in 128 columns: of others bitsandbytes' products are wrong on a CPU."""
    work = made.work(folder, mode=mode, **{"lora_rank": 4, "lora_alpha": 6, **changes})
    byte_tokenizer().save_pretrained(work.model)
    (model or tiny.llama(intermediate_size=128)).save_pretrained(work.model)
    prepare_work(work)
    return work


def values(model):
    """Scale, A, B and lengths of each adapter, of ours or PEFT's."""
    found = {
        path: (a.scale, a.lora_A, a.lora_B, getattr(a, "lora_magnitude_vector", None))
        for path, a in adapters(model)
    }
    for path, layer in model.named_modules():
        if isinstance(getattr(layer, "scaling", None), dict):
            lengths = (
                layer.lora_magnitude_vector["default"].weight
                if len(layer.lora_magnitude_vector)
                else None
            )
            of = (
                layer.scaling["default"],
                layer.lora_A["default"].weight,
                layer.lora_B["default"].weight,
                lengths,
            )
            found[path.removeprefix("base_model.model.")] = of
    return found


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["lora", "qlora"])
@pytest.mark.parametrize(
    "changes", [{}, UNEVEN_FIELDS, {"use_rslora": True}], ids=["even", "uneven", "rslora"]
)
@pytest.mark.parametrize("of", ["row", "variant"])
def test_ours_and_pefts_adapters_are_the_same(tmp_path, mode, changes, of):
    work = planned(tmp_path, mode, **(changes if of == "row" else {}))
    given = {} if of == "row" else changes
    mine = (load_in_4_bits if mode == "qlora" else load_model)(work.model, torch.float32)
    ours._attach(mine, work, work.config(**given))
    theirs = with_peft(load_for_peers(work, torch.float32), work, **given)
    one = values(mine)
    two = values(theirs)
    assert one.keys() == two.keys() and len(one) == (7 if "lora_layers" in changes else 14)
    for path, (scale, a, b, lengths) in one.items():
        assert (
            scale == pytest.approx(two[path][0])
            and equal(a, two[path][1])
            and equal(b, two[path][2])
        ), path
        assert a.abs().max() > 0 and len(a) == (
            3 if "q_proj" in path and "lora_rank_pattern" in changes else 4
        )
        assert (lengths is None) == (two[path][3] is None) == ("use_dora" not in changes)
        assert lengths is None or torch.allclose(lengths, two[path][3].to(lengths), rtol=1e-5), path


@pytest.mark.slow
def test_a_variant_with_the_same_matrices_starts_as_the_row_does(tmp_path):
    work = planned(tmp_path)
    row = start_of(work, work.config())
    for changes in ({"use_dora": True}, {"lora_alpha": 1.0}, {"lora_dropout": 0.5}):
        assert all(
            equal(x, row[name]) for name, x in start_of(work, work.config(**changes)).items()
        )
    wider = starting_values(work, work.config(lora_rank=8))
    assert wider.keys() == row.keys() and all(
        x.shape != row[name].shape for name, x in wider.items()
    )
    assert work.other_adapters({"use_dora": True, "lora_alpha": 6, "memory": []}) == {
        "use_dora": True
    }


def test_of_a_mixture_attention_is_adapted(tmp_path):
    """Its experts are no linear layers, and the row of a dense model names theirs."""
    work = planned(
        tmp_path, "lora", families.mixture("qwen3_moe", vocab_size=300, max_position_embeddings=512)
    )
    found = {name.split(".")[-3] for name in starting_values(work, work.config())}
    assert found == {"q_proj", "k_proj", "v_proj", "o_proj"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_reference_has_the_weights_that_the_codes_stand_for(tmp_path, dtype):
    work = planned(tmp_path, "qlora")
    plain = load_dequantised(work.model, dtype)
    packed = load_in_4_bits(work.model, dtype)
    sixteen = load_model(work.model, torch.float32)
    layers = 0
    for path, layer in packed.named_modules():
        if isinstance(layer, Linear4bit):
            weight = plain.get_submodule(path).weight
            layers = layers + 1
            assert weight.dtype == torch.float32 and equal(weight, layer.packed.dense().float())
            assert not equal(weight, sixteen.get_submodule(path).weight)
    assert layers == 14 and equal(plain.lm_head.weight, sixteen.lm_head.weight)


@pytest.mark.slow
def test_experts_have_the_same_values_in_every_arm(tmp_path):
    """Ours in 4 bits; the reference in fp32, and peers over bitsandbytes, which has no stacked
    experts, in 16.
    """
    sizes = {
        "hidden_size": 64,
        "head_dim": 16,
        "moe_intermediate_size": 64,
        "vocab_size": 300,
        "max_position_embeddings": 512,
    }
    work = planned(tmp_path, "qlora", families.mixture("qwen3_moe", **sizes))
    packed = {
        path: m
        for path, m in load_in_4_bits(work.model, torch.float32).named_modules()
        if isinstance(m, Experts4bit)
    }
    others = [load_dequantised(work.model, torch.float32)]
    others += (
        []
        if missing_packages_of("transformers", "qlora")
        else [load_for_peers(work, torch.float32)]
    )
    sixteen = load_model(work.model, torch.float32)
    assert len(packed) == 2
    for path, experts in packed.items():
        for name in experts.stacked:
            expected = experts.stack(name).dense()
            assert not equal(sixteen.get_parameter(f"{path}.{name}"), expected)
            assert all(equal(other.get_parameter(f"{path}.{name}"), expected) for other in others)


@pytest.mark.slow
def test_peers_have_bitsandbytes_layers(tmp_path):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    work = planned(tmp_path, "qlora")
    model = load_for_peers(work, torch.float32)
    ours_ = load_in_4_bits(work.model, torch.float32)
    theirs = {
        path
        for path, layer in model.named_modules()
        if isinstance(layer, bitsandbytes.nn.Linear4bit)
    }
    assert (
        theirs == {path for path, layer in ours_.named_modules() if isinstance(layer, Linear4bit)}
        and len(theirs) == 14
    )


@pytest.mark.slow
def test_what_a_step_reads_of_4_bits_is_counted(tmp_path):
    plain, packed = (planned(tmp_path / mode, mode).job() for mode in ("lora", "qlora"))
    assert plain.dequantised_bytes == 0 and packed.dequantised_bytes == NF4.bytes_a_value(4) + 4
    assert not plain.why_uncounted
    assert planned(tmp_path / "dora", use_dora=True).job().why_uncounted


# --- what is asked
# ------------------------------------------------------------------------------------------------------


def test_4_bits_are_a_mode_of_the_row():
    assert (
        command._recipe(None, {"load_in_4bit": True})[3]
        == command._recipe(None, {"quantization": "nf4"})[3]
        == "qlora"
    )
    assert {"quantization", "load_in_4bit"} <= STEP_CONTENT_FIELDS
    with pytest.raises(
        ConfigurationError,
        match="variant='quantization=nf4': quantization decides what a step holds",
    ):
        command._changes("quantization=nf4")


@pytest.mark.parametrize(
    ("mode", "fields", "message"),
    [
        ("lora", {"quantization": "nf4"}, "mode='lora' contradicts quantization='nf4'"),
        ("full", {"load_in_4bit": True}, "mode='full' contradicts load_in_4bit=True"),
        ("qlora", {"load_in_4bit": False}, "mode='qlora' contradicts load_in_4bit=False"),
        ("qlora", {"use_lora": False}, "mode='qlora' contradicts use_lora=False"),
        ("lora", {"lora_init": "pissa"}, "lora_init='pissa': not every arm has it"),
    ],
)
def test_what_contradicts_the_mode_is_named(tmp_path, mode, fields, message):
    with pytest.raises(ConfigurationError, match=message):
        plan_work(tmp_path, "tiny", "fixed", mode, fields, None, 2)


def test_packages_by_what_is_trained(let_return):
    let_return(names, find_spec=None)
    assert missing_packages_of("transformers", "full") == ["transformers"]
    assert missing_packages_of("transformers", "lora") == ["transformers", "peft"]
    in_4_bits = ["trl", "datasets", "peft", "bitsandbytes", "accelerate"]
    assert missing_packages_of("trl", "qlora") == in_4_bits


# --- Unsloth, whose interface is called and whose work is not done
# ------------------------------------------------------


@pytest.fixture
def asked(monkeypatch, let_return):
    """What its loader is asked for."""
    asked = {}

    class Loader:
        @staticmethod
        def from_pretrained(name, **given):
            asked.update(given)
            return tiny.llama(), None

        @staticmethod
        def get_peft_model(model, **given):
            asked.update(given)
            return model

        @staticmethod
        def for_training(model):
            pass

    module = ModuleType("unsloth")
    module.FastLanguageModel = module.FastModel = Loader
    monkeypatch.setitem(sys.modules, "unsloth", module)
    let_return(unsloth, start_from=None)
    return asked


@pytest.mark.parametrize(
    ("mode", "packed", "full"),
    [("full", False, True), ("lora", False, False), ("qlora", True, False)],
)
@pytest.mark.parametrize("recompute", [False, True])
def test_unsloth_is_asked_for_4_bits_where_the_row_has_them(
    tmp_path, asked, mode, packed, full, recompute
):
    unsloth.load(planned(tmp_path, mode), recompute)
    assert (asked["load_in_4bit"], asked["full_finetuning"]) == (packed, full)
    assert asked["use_gradient_checkpointing"] == ("unsloth" if recompute else False)


def test_unsloth_adapts_what_the_row_adapts(tmp_path, asked, let_return):
    """Of a mixture only attention: were experts named too, it would adapt their stacks."""
    start = {
        f"base_model.model.model.layers.0.self_attn.{name}.lora_A.weight": torch.ones(1)
        for name in ("q_proj", "o_proj")
    }
    let_return(unsloth, start_of=start)
    unsloth.load(planned(tmp_path, "lora"), False)
    assert asked["target_modules"] == ["o_proj", "q_proj"]


def test_unsloth_says_which_adapters_it_is_not_measured_with(asked):
    config = SimpleNamespace(
        use_dora=True, lora_rank_pattern={}, lora_alpha_pattern={}, lora_layers=None
    )
    with pytest.raises(
        ValueError, match="use_dora=True: it is measured with plain adapters of one rank"
    ):
        unsloth.load(SimpleNamespace(config=lambda: config), False)


def test_a_mixture_of_a_peer_has_no_router_loss(tmp_path):
    """TRL's trainer asks for one by the coefficient alone."""
    model = families.mixture("qwen3_moe", vocab_size=300, max_position_embeddings=512)
    work = planned(tmp_path, "lora", model)
    config = load_for_peers(work, torch.float32).config
    assert (config.output_router_logits, config.router_aux_loss_coef) == (False, 0.0)


@pytest.mark.parametrize(("mode", "mixture"), [("lora", True), ("full", True), ("lora", False)])
def test_trl_has_grouped_products_of_frozen_experts(
    tmp_path, monkeypatch, let_return, mode, mixture
):
    """Not Liger's, whose backward makes their gradients."""
    asked = {}
    model = (
        families.mixture("qwen3_moe", vocab_size=300, max_position_embeddings=512)
        if mixture
        else None
    )
    work = planned(tmp_path, mode, model)
    let_return(trl, device=torch.device("cuda"))
    let_return(trl, find_spec=True)
    monkeypatch.setattr(
        trl,
        "train_with_trainer",
        lambda *given, **options: asked.update(options, settings=given[4]),
    )
    trl.trl(work, ArmPlan(1, 0, out=tmp_path, began=0.0))
    assert asked["use_liger_kernel"]
    assert asked.get("liger_kernel_config") == (
        {"swiglu": False} if mode == "lora" and mixture else None
    )
    assert ("experts by grouped_mm" in asked["settings"]) == (mode == "lora" and mixture)
