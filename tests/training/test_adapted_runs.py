"""Runs with adapters end to end: what a run leaves, on disk and in memory, is the model that it
trained.
"""

import copy
import shutil

import pytest
import torch

import runs
import tiny
from chronicals.generation import load_trained
from chronicals.lora import load_adapter
from chronicals.models import load_model
from chronicals.training.run.evaluation import evaluate_data
from comparison import equal

ROWS = [
    {
        "messages": [
            {"role": "user", "content": f"<alpha> {n}"},
            {"role": "assistant", "content": f"<beta> {n} <gamma>"},
        ]
    }
    for n in range(30)
]
ADDED = ["<alpha>", "<beta>", "<gamma>"]


def with_added_tokens(folder, seed, tied=False, dtype=torch.float32):
    """A base from a folder, and its tokenizer, with three tokens more than its files have."""
    if not (folder / "base").exists():
        tiny.llama(tie_word_embeddings=tied).save_pretrained(folder / "base")
    model = load_model(folder / "base", dtype)
    tokenizer = tiny.tokenizer()
    tokenizer.add_tokens([f"<{n}>" for n in range(300 - len(tokenizer))] + ADDED)
    torch.manual_seed(seed)
    model.resize_token_embeddings(len(tokenizer))
    return model, tokenizer


def wrapped(model):
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))


def train(folder, model, tokenizer, resume=False, **changes):
    from chronicals.training import ChronicalsTrainer

    fields = {"learning_rate": 1e-2, "use_lora": True, "save_steps": 3, "trackers": [], **changes}
    return ChronicalsTrainer(model, tokenizer, runs.config(folder, **fields)).train(
        ROWS, resume=resume
    )


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("whose", ["ours", "peft"])
def test_a_run_with_added_tokens_is_read_and_resumed(tmp_path, whose, tied):
    if whose == "peft":
        pytest.importorskip("peft")
    lora = {"lora_rank": 8} if whose == "ours" else {"use_lora": False}

    def fresh(seed):
        model, tokenizer = with_added_tokens(tmp_path, seed, tied)
        return (model if whose == "ours" else wrapped(model)), tokenizer

    model, tokenizer = fresh(1)
    train(tmp_path, model, tokenizer, **lora)
    scored = runs.config(tmp_path, output_dir=tmp_path / "scored")
    live = evaluate_data(model, tokenizer, ROWS, scored).loss
    read = load_trained(tmp_path / "run")
    embedding = model.get_input_embeddings().weight
    there = read.model.to(embedding.device)
    assert evaluate_data(there, read.tokenizer, ROWS, scored).loss == pytest.approx(live, rel=1e-5)
    for folder in (tmp_path / "run" / "checkpoints").glob("*6"):
        folder.rename(tmp_path / "set-aside")
    other, tokenizer = fresh(2)
    assert not equal(other.get_input_embeddings().weight.to(embedding), embedding)
    train(tmp_path, other, tokenizer, resume=True, **lora)
    assert equal(other.get_input_embeddings().weight, model.get_input_embeddings().weight)
    assert evaluate_data(other, tokenizer, ROWS, scored).loss == live


@pytest.mark.slow
def test_after_a_run_the_model_is_copied_and_trained_on(tmp_path):
    """A second run goes on with the same adapters; a copy from between is what it was."""
    model, tokenizer = with_added_tokens(tmp_path, 1)
    train(tmp_path, model, tokenizer, lora_rank=8, output_dir=tmp_path / "first")
    scored = runs.config(tmp_path, output_dir=tmp_path / "scored")
    first = evaluate_data(model, tokenizer, ROWS, scored).loss
    kept = copy.deepcopy(model)
    train(
        tmp_path, model, tokenizer, lora_rank=8, learning_rate=2e-3, output_dir=tmp_path / "second"
    )
    second = evaluate_data(model, tokenizer, ROWS, scored).loss
    assert second < first and evaluate_data(kept, tokenizer, ROWS, scored).loss == first
    kept.save_pretrained(tmp_path / "kept")
    loaded = load_adapter(load_model(tmp_path / "base", torch.float32), tmp_path / "kept")
    assert evaluate_data(loaded, tokenizer, ROWS, scored).loss == pytest.approx(first, rel=1e-5)
    assert evaluate_data(model.merge_and_unload(), tokenizer, ROWS, scored).loss == pytest.approx(
        second, rel=1e-4
    )


def mixtral(**changes):
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        **tiny.llama().config.to_dict(),
        "model_type": "mixtral",
    }
    return MixtralForCausalLM(MixtralConfig(**{name: sizes[name] for name in SIZES}, **changes))


SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "num_local_experts",
    "num_experts_per_tok",
)


def share_of(model, end):
    held = sum(p.numel() for name, p in model.named_parameters() if name.endswith(end))
    return f"{100 * held / sum(p.numel() for p in model.parameters()):.0f}% of all weights"


@pytest.mark.slow
@pytest.mark.parametrize("adapted", [None, "gate_up_proj"])
def test_experts_that_stay_frozen_are_named(tmp_path, caplog, adapted):
    """Each of their weights, of all layers: adapters of one are none of the other."""
    model = mixtral()
    runs.train(
        tmp_path,
        model=model,
        use_lora=True,
        max_steps=1,
        trackers=[],
        lora_dropout=0.0,
        lora_target_parameters=adapted and f"experts.{adapted}",
    )
    for name in ("gate_up_proj", "down_proj"):
        share = share_of(model, f".{name}")  # adapters included
        told = (
            f"frozen: model.layers.0.mlp.experts.{name} (layers 0-1), {share}; "
            f"lora_target_parameters={name} adapts them"
        )
        assert (told in caplog.text) == (name != adapted), caplog.text


@pytest.mark.slow
def test_experts_that_a_user_froze_are_named(tmp_path, caplog):
    model = mixtral()
    model.model.layers[1].mlp.experts.down_proj.requires_grad_(False)
    share = share_of(model, "layers.1.mlp.experts.down_proj")
    runs.train(tmp_path, model=model, max_steps=1, trackers=[])
    assert (
        f"experts are frozen and not trained: model.layers.1.mlp.experts.down_proj, {share}"
        in caplog.text
    )
    assert "gate_up_proj" not in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize(
    "targets",
    [{"target_modules": ["q_proj"]}, {"target_parameters": ["experts.gate_up_proj"]}],
    ids=str,
)
def test_so_too_where_the_adapters_are_pefts(tmp_path, caplog, targets):
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(
        mixtral(), peft.LoraConfig(r=2, **{"target_modules": [], **targets})
    )
    runs.train(tmp_path, model=model, max_steps=1, trackers=[])
    told = "experts have no adapters and stay frozen: model.layers.0.mlp.experts"
    assert f"{told}.down_proj (layers 0-1)" in caplog.text
    assert (f"{told}.gate_up_proj (layers 0-1)" in caplog.text) == ("target_modules" in targets)


@pytest.mark.slow
@pytest.mark.parametrize("use_lora", [False, True])
@pytest.mark.parametrize("way", ["PeftModel", "transformers"])
def test_frozen_adapters_of_peft_have_a_remedy_that_works(tmp_path, way, use_lora):
    peft = pytest.importorskip("peft")
    with_added_tokens(tmp_path, 1)
    wrapped(load_model(tmp_path / "base", torch.float32)).save_pretrained(tmp_path / "adapter")
    if way == "PeftModel":
        frozen = peft.PeftModel.from_pretrained(
            load_model(tmp_path / "base", torch.float32), tmp_path / "adapter"
        )
    else:
        import transformers

        frozen = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match=r"PEFT's adapters are frozen, .*is_trainable=True"):
        runs.train(tmp_path, model=frozen, use_lora=use_lora, trackers=[])
    learning = peft.PeftModel.from_pretrained(
        load_model(tmp_path / "base", torch.float32), tmp_path / "adapter", is_trainable=True
    )
    assert runs.train(tmp_path, model=learning, max_steps=1, trackers=[]).coverage.moved


@pytest.mark.slow
def test_adapters_that_would_not_learn_or_not_be_saved_are_refused(tmp_path):
    peft = pytest.importorskip("peft")
    merged = wrapped(tiny.llama())
    merged.merge_adapter()
    with pytest.raises(ValueError, match=r"merged into the weights .*unmerge_adapter\(\)"):
        runs.train(tmp_path, model=merged, trackers=[])
    injected = peft.inject_adapter_in_model(
        peft.LoraConfig(r=2, target_modules=["q_proj"]), tiny.llama()
    )
    with pytest.raises(ValueError, match="PEFT's adapters could not be saved by LlamaForCausalLM"):
        runs.train(tmp_path, model=injected, trackers=[])
    ours = (
        runs.train(tmp_path, model=(model := tiny.llama()), use_lora=True, max_steps=1, trackers=[])
        and model
    )
    with pytest.raises(ValueError, match="unfreeze lora_A and lora_B of its adapters"):
        runs.train(
            tmp_path, model=ours.requires_grad_(False), output_dir=tmp_path / "more", trackers=[]
        )


@pytest.mark.slow
@pytest.mark.parametrize("whose", ["ours", "peft"])
def test_a_base_of_a_relative_path_is_found_from_elsewhere(tmp_path, monkeypatch, whose):
    import transformers

    with_added_tokens(tmp_path, 1)
    tiny.tokenizer().save_pretrained(tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    base = transformers.AutoModelForCausalLM.from_pretrained("base", dtype=torch.float32)
    if whose == "peft":
        pytest.importorskip("peft")
        base = wrapped(base)
    runs.train(tmp_path, model=base, use_lora=whose == "ours", max_steps=1, trackers=[])
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert load_trained(tmp_path / "run").model.config._name_or_path == str(tmp_path / "base")
    (tmp_path / "base").rename(tmp_path / "moved")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    moved = rf"{tmp_path}/run/model: its base {tmp_path}/base: there is no such folder.*give base_model \(--base-model\)"
    with pytest.raises(ValueError, match=moved):
        load_trained(tmp_path / "run")
    assert load_trained(tmp_path / "run", base_model=str(tmp_path / "moved")).model


@pytest.mark.slow
def test_adapters_over_weights_that_a_run_changed_name_no_base(tmp_path):
    """The folder that the model came from holds other weights, and an adapter over those is
    another model.
    """
    tiny.llama().save_pretrained(tmp_path / "base")
    model = load_model(tmp_path / "base", torch.float32)
    runs.train(tmp_path, model=model, max_steps=1, trackers=[])
    runs.train(
        tmp_path,
        model=model,
        use_lora=True,
        max_steps=1,
        trackers=[],
        output_dir=tmp_path / "second",
    )
    with pytest.raises(
        ValueError,
        match=r"does not say which model it belongs to; give base_model \(--base-model\)",
    ):
        load_trained(tmp_path / "second")
    assert load_trained(tmp_path / "second", base_model=str(tmp_path / "run" / "model")).model


def values(folder):
    from safetensors.torch import load_file

    return load_file(folder / "adapter_model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_a_run_from_starting_values_goes_on_bit_by_bit(tmp_path, init):
    """What is saved is right on the original base; a resumed run ends where one without a break
    ends, also where the decomposition would come out otherwise: its values are those of the
    checkpoint."""
    tiny.llama().save_pretrained(tmp_path / "base")
    options = {"lora_init": init, "lora_rank": 3, "lora_dropout": 0.0, "mixed_precision": "bf16"}

    def fresh(dtype=torch.bfloat16):
        return load_model(tmp_path / "base", dtype), tiny.tokenizer()

    whole = tmp_path / "whole"
    broken = tmp_path / "broken"
    train(whole, *fresh(), **options)
    first = "run/checkpoints/step-00000003"
    shutil.copytree(whole / first, broken / first)
    from chronicals.lora import starting_values

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(starting_values, "largest_parts", lambda *_: pytest.fail("computed again"))
        train(broken, *fresh(), resume=True, **options)
    once, twice = (values(folder / "run" / "model") for folder in (whole, broken))
    assert once.keys() == twice.keys() and all(equal(once[name], twice[name]) for name in once)
    model = load_trained(whole / "run").model
    ids = torch.randint(0, 300, (2, 9))
    peft = pytest.importorskip("peft")
    loaded_in = model.get_input_embeddings().weight.dtype  # bf16 on a card
    theirs = peft.PeftModel.from_pretrained(fresh(loaded_in)[0], whole / "run" / "model")
    with torch.no_grad():
        got, expected, bare = (
            m.float()(input_ids=ids).logits for m in (model.to("cpu"), theirs, fresh(loaded_in)[0])
        )
    assert (got - expected).abs().max() < 0.02 * expected.abs().max()
    assert (expected - bare).abs().max() > 0.05 * bare.abs().max()
