"""Adapters that travel between us and the real PEFT, both ways."""

import json

import pytest
import torch
from adapted import MODELS, TARGETS, changed, close, llama, logits, randomise, tokens
from safetensors.torch import load_file, save_file

from chronicals.lora import LoRAConfig, adapters, apply_lora, load_adapter, save_adapter
from chronicals.models import BASE_ROWS
from chronicals.versions import is_older
from comparison import equal

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture
def peft():
    return pytest.importorskip("peft")


def ours(name="llama", **options):
    """A model with trained adapters, and what the bare model is."""
    options = {"rank": 4, "alpha": 12, "target_modules": TARGETS[name], **options}
    model = apply_lora(MODELS[name](), LoRAConfig(**options)).eval()
    randomise(model)
    return model


def theirs(peft, name="llama", **options):
    """The same from PEFT."""
    options = {
        "r": 4,
        "lora_alpha": 12,
        "target_modules": TARGETS[name],
        "fan_in_fan_out": name == "gpt2",
        **options,
    }
    model = peft.get_peft_model(MODELS[name](), peft.LoraConfig(**options)).eval()
    randomise(model)
    return model


OURS = [
    {},
    {"use_rslora": True},
    {"use_dora": True},
    {"use_dora": True, "target_modules": None},
    {"target_modules": None},
    {"alpha": 2.5, "rank": 3},
    {"target_modules": ["lm_head"]},
]


@pytest.mark.parametrize("options", OURS, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_peft_loads_ours(peft, tmp_path, name, options):
    model = ours(name, **options)
    ids = tokens()
    save_adapter(model, tmp_path)
    loaded = peft.PeftModel.from_pretrained(MODELS[name](), tmp_path).eval()
    bare = logits(MODELS[name](), ids)
    expected = logits(model, ids)
    assert changed(expected, bare)
    assert close(logits(loaded, ids), expected)
    if options.get("target_modules") != [
        "lm_head"
    ]:  # which is the embedding too: merging would change that
        assert close(logits(loaded.merge_and_unload(), ids), expected)


PEFTS = [
    {},
    {"use_dora": True},
    {"use_dora": True, "target_modules": "all-linear", "use_rslora": True},
    {"use_rslora": True},
    {"lora_dropout": 0.4},
    {"target_modules": "all-linear"},
    {"target_modules": ["lm_head"]},
    {"target_modules": r".*\.1\..*"},
    {"r": 3, "lora_alpha": 7},
]


@pytest.mark.parametrize("options", PEFTS, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_we_load_pefts(peft, tmp_path, name, options):
    if str(options.get("target_modules", "")).startswith("."):
        options = {"target_modules": r".*\.1\..*(q_proj|down_proj|c_attn|c_fc)"}
    model = theirs(peft, name, **options)
    ids = tokens()
    model.save_pretrained(tmp_path)
    loaded = MODELS[name]()
    bare = logits(loaded, ids)
    assert load_adapter(loaded, tmp_path) is loaded
    expected = logits(model, ids)
    assert changed(expected, bare)
    assert close(logits(loaded.eval(), ids), expected)
    assert loaded.chronicals_lora.dropout == options.get("lora_dropout", 0.0)


EXCLUDED = {
    "a path": (["q_proj", "v_proj"], ["model.layers.0.self_attn.v_proj"], 3),
    "the end of one": (["q_proj", "down_proj"], ["1.mlp.down_proj"], 3),
    "an expression": ("all-linear", r".*mlp.*", 8),
    "what is no linear layer": (
        r".*layers\.0\.mlp.*",
        [f"layers.0.mlp{name}" for name in ("", ".act_fn", ".up_proj")],
        2,
    ),
}


@pytest.mark.parametrize("case", EXCLUDED)
def test_excluded_modules_are_not_adapted(peft, tmp_path, case):
    wanted, excluded, count = EXCLUDED[case]
    model = theirs(peft, target_modules=wanted, exclude_modules=excluded)
    ids = tokens()
    model.save_pretrained(tmp_path)
    loaded = load_adapter(llama(), tmp_path)
    assert len(list(adapters(loaded))) == count
    assert close(logits(loaded.eval(), ids), logits(model, ids))
    save_adapter(loaded, tmp_path / "again")
    assert close(logits(load_adapter(llama(), tmp_path / "again").eval(), ids), logits(model, ids))


def test_an_adapted_head_over_another_base_is_refused(peft, tmp_path):
    """PEFT writes the head's own weight beside its adapter."""
    theirs(peft, target_modules=["lm_head"]).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="another weight for lm_head"):
        load_adapter(llama(seed=1), tmp_path)


@pytest.mark.parametrize("name", MODELS)
def test_there_and_back_is_bit_equal(peft, tmp_path, name):
    model = ours(name)
    ids = tokens()
    save_adapter(model, tmp_path / "ours")
    peft.PeftModel.from_pretrained(MODELS[name](), tmp_path / "ours").save_pretrained(
        tmp_path / "theirs"
    )
    again = load_adapter(MODELS[name](), tmp_path / "theirs")
    for (path, a), (other, b) in zip(adapters(model), adapters(again), strict=True):
        assert path == other and equal(a.lora_A, b.lora_A) and equal(a.lora_B, b.lora_B)
    assert equal(logits(model.eval(), ids), logits(again.eval(), ids))


def test_what_is_written(tmp_path):
    model = ours(use_rslora=True, dropout=0.1)
    setattr(model, BASE_ROWS, 300)
    save_adapter(model, tmp_path / "deep" / "folder", base_model="somebody/model")
    folder = tmp_path / "deep" / "folder"
    described = json.loads((folder / CONFIG).read_text())
    expected = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "somebody/model",
        "r": 4,
        "lora_alpha": 12,
        "lora_dropout": 0.1,
        "use_rslora": True,
        "use_dora": False,
        "bias": "none",
        "fan_in_fan_out": False,
    }
    assert {name: described[name] for name in expected} == expected
    names = {
        f"base_model.model.{path}.lora_{m}.weight" for path, _ in adapters(model) for m in "AB"
    }
    assert set(load_file(folder / WEIGHTS)) == names
    assert sorted(path.name for path in folder.iterdir()) == [CONFIG, WEIGHTS]


def test_refilling_a_model_that_has_these_adapters(tmp_path):
    model = ours()
    ids = tokens()
    save_adapter(model, tmp_path)
    expected = logits(model, ids)
    randomise(model)
    assert not close(logits(model, ids), expected)
    load_adapter(model, tmp_path)
    assert equal(logits(model, ids), expected)


@pytest.mark.parametrize("other", [{"alpha": 24}, {"use_rslora": True}], ids=str)
def test_refilling_adapters_of_another_scale(tmp_path, other):
    """The values fit, but alone they are another adapter: the scale must come along, or it must
    be refused.
    """
    model = ours(**other)
    ids = tokens()
    save_adapter(model, tmp_path)
    fresh = ours()
    try:
        load_adapter(fresh, tmp_path)
    except ValueError:
        return
    assert close(logits(fresh, ids), logits(model, ids))
    save_adapter(fresh, tmp_path / "again")
    assert json.loads((tmp_path / "again" / CONFIG).read_text()) == json.loads(
        (tmp_path / CONFIG).read_text()
    )


# --- what is refused
# -----------------------------------------------------------------------------------------------

UNSUPPORTED = {
    "another method": {"peft_type": "IA3"},
    "no method": {"peft_type": None},
    "whole layers": {"modules_to_save": ["norm"]},
    "biases of the base": {"bias": "all"},
    "biases of lora": {"bias": "lora_only"},
    "bias of B": {"lora_bias": True},
    "layers several times": {"layer_replication": [[0, 2], [1, 2]]},
    "pooled inputs": {"use_qalora": True},
    "block-diagonal": {"use_bdlora": {"nblocks": 2}},
    "velora": {"velora_config": {"scale": 1.0}},
    "monteclora": {"monteclora_config": {"num_samples": 2}},
    "arrow": {"arrow_config": {"top_k": 2}},
    "kasa": {"kasa_config": {"beta": 1.0}},
    "megatron's layers": {"megatron_config": {"hidden_size": 64}},
    "active after some tokens": {"alora_invocation_tokens": [5, 6]},
    "a base changed by corda": {"init_lora_weights": "corda"},
}


def edit(folder, **changes):
    path = folder / CONFIG
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_unsupported_kinds_are_refused_by_name(tmp_path, case):
    """Loaded as plain LoRA they would be another adapter without a word."""
    save_adapter(ours(), tmp_path)
    edit(tmp_path, **UNSUPPORTED[case])
    model = llama()
    field = next(iter(UNSUPPORTED[case]))
    with pytest.raises(ValueError, match="bias" if field in ("bias", "lora_bias") else field):
        load_adapter(model, tmp_path)
    assert not list(adapters(model)) and all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("options", [{"init_lora_weights": "mica"}], ids=str)
def test_unsupported_kinds_as_peft_writes_them(peft, tmp_path, options):
    if is_older(peft.__version__, "0.20"):
        pytest.skip("this PEFT has no such kind")
    model = peft.get_peft_model(
        llama(), peft.LoraConfig(r=4, target_modules=TARGETS["llama"], **options)
    )
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=next(iter(options))):
        load_adapter(llama(), tmp_path)


@pytest.mark.parametrize(
    "harmless",
    [{"init_lora_weights": True}, {"init_lora_weights": "gaussian"}, {"revision": "main"}],
    ids=str,
)
def test_harmless_fields_are_not_refused(tmp_path, harmless):
    model = ours()
    ids = tokens()
    save_adapter(model, tmp_path)
    edit(tmp_path, **harmless)
    assert equal(logits(load_adapter(llama(), tmp_path).eval(), ids), logits(model, ids))


def change_tensors(folder, change):
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"
LAST = FIRST.replace("layers.0", "layers.1")
BROKEN = {
    "missing at the end": (
        lambda t: t.pop(LAST),
        "layers.1.self_attn.q_proj.lora_B is missing or not",
    ),
    "missing": (lambda t: t.pop(FIRST), "layers.0.self_attn.q_proj.lora_B is missing or not"),
    "misshapen": (
        lambda t: t.update({FIRST: torch.zeros(3, 4)}),
        r"q_proj.lora_B is missing or not \(64, 4\)",
    ),
    "left over": (
        lambda t: t.update(stray=torch.zeros(1)),
        "holds 1 tensors that fit nothing, the first is stray",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_tensors_that_do_not_fit_are_refused(tmp_path, case):
    change, message = BROKEN[case]
    save_adapter(ours(), tmp_path)
    change_tensors(tmp_path, change)
    model = llama()
    with pytest.raises(ValueError, match=message):
        load_adapter(model, tmp_path)
    assert not list(adapters(model)) and not hasattr(model, "chronicals_lora")
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("case", BROKEN)
def test_a_refused_refill_changes_no_adapter(tmp_path, case):
    save_adapter(ours(), tmp_path)
    change_tensors(tmp_path, BROKEN[case][0])
    model = ours()
    before = {name: p.clone() for name, p in model.named_parameters()}
    with pytest.raises(ValueError, match=BROKEN[case][1]):
        load_adapter(model, tmp_path)
    assert all(equal(p, before[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("content", [None, "{", ""])
def test_an_unreadable_folder_is_named(tmp_path, content):
    if content is not None:
        (tmp_path / CONFIG).write_text(content)
    with pytest.raises(ValueError, match=f"{tmp_path}: no readable {CONFIG}"):
        load_adapter(llama(), tmp_path)


@pytest.mark.parametrize("field", ["r", "lora_alpha", "target_modules"])
def test_a_field_that_is_missing_is_named(tmp_path, field):
    save_adapter(ours(), tmp_path)
    edit(tmp_path, **{field: None})
    with pytest.raises(ValueError, match=f"{CONFIG}: {field} is missing"):
        load_adapter(llama(), tmp_path)


@pytest.mark.parametrize(
    "damage",
    [lambda whole: b"version https://git-lfs.github.com/spec/v1\n", lambda whole: whole[:-9]],
)
def test_damaged_weights_are_named_with_the_remedy(tmp_path, damage):
    save_adapter(ours(), tmp_path)
    file = tmp_path / WEIGHTS
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(
        ValueError, match=f"^{file}: cannot be read .*Git LFS pointer.*; download it again$"
    ):
        load_adapter(llama(), tmp_path)


def test_a_model_without_adapters_of_ours_has_none_to_save(tmp_path):
    peft = pytest.importorskip("peft")
    theirs = peft.get_peft_model(llama(), peft.LoraConfig(target_modules=["q_proj"]))
    for model, message in ((llama(), "has no adapters"), (theirs, "its own save_pretrained")):
        with pytest.raises(ValueError, match=message):
            save_adapter(model, tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()


def test_weights_that_are_not_there_are_named(tmp_path):
    save_adapter(ours(), tmp_path)
    (tmp_path / WEIGHTS).unlink()
    model = llama()
    with pytest.raises((ValueError, OSError), match=WEIGHTS):
        load_adapter(model, tmp_path)
    assert not list(adapters(model))


def test_an_adapter_of_another_model(tmp_path):
    save_adapter(ours("gpt2"), tmp_path)
    with pytest.raises(ValueError, match="matches no layer"):
        load_adapter(llama(), tmp_path)
