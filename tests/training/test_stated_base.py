"""What a run's folder states of the model is read off the model: however the base came to be
what it is, it is loaded and merged as it was trained over."""

import json
import shutil

import pytest
import torch
from torch import nn

import generic_bitsandbytes  # noqa: F401
import runs
import tiny
from chronicals.export import export
from chronicals.export.merge import REPORT, merge
from chronicals.models import load_model, quantise_layers
from chronicals.models.base_format import BaseFormat, FourBits
from chronicals.models.loading import load_base
from chronicals.quantization import Linear4bit, Packed
from chronicals.saving import CheckpointError, SavedModel
from comparison import equal

IDS = torch.arange(1, 41).view(2, 20)
QUICK = {"mixed_precision": "fp32", "max_steps": 1, "trackers": [], "lora_dropout": 0.0}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Of weights so large that 4 bits change what the model answers."""
    folder = tmp_path_factory.mktemp("stated") / "base"
    tiny.llama(initializer_range=0.2).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


def train(folder, **given):
    return runs.train(folder, rows=tiny.chat_rows(8), **given)


@torch.no_grad()
def answers(model):
    return model.eval()(input_ids=IDS.to(next(model.parameters()).device)).logits.float().cpu()


def by_bitsandbytes(place, device="cpu", **options):
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    asked = BitsAndBytesConfig(**{"load_in_4bit": True, **options})
    model = AutoModelForCausalLM.from_pretrained(
        place, dtype=torch.float32, device_map={"": device}, quantization_config=asked
    )
    return model.train()


def in_other_blocks(place):
    """Some layers in blocks of 128 whose scales are not quantised, others left."""
    model = load_model(place, torch.float32)
    for path, layer in list(model.named_modules()):
        if type(layer) is nn.Linear and path.endswith(("q_proj", "down_proj")):
            model.set_submodule(
                path, Linear4bit(Packed.of(layer.weight.detach(), block=128, nested=False))
            )
    return model


def with_pefts(model, name="default", **options):
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, pefts(**options), adapter_name=name)


def pefts(**options):
    from peft import LoraConfig

    return LoraConfig(
        **{"r": 4, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM", **options}
    )


def with_effect(model):
    """Adapters that change what the model answers."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return model


NF4 = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
WAYS = {
    "load_model": lambda place: load_model(place, torch.float32, quantization="nf4"),
    "quantise_layers": lambda place: quantised(load_model(place, torch.float32)),
    "other blocks, some layers": in_other_blocks,
    "bitsandbytes, NF4": lambda place: by_bitsandbytes(place, **NF4),
    "bitsandbytes, FP4": by_bitsandbytes,
    "bitsandbytes, some layers": lambda place: by_bitsandbytes(
        place, llm_int8_skip_modules=["lm_head", "down_proj"], **NF4
    ),
}


def quantised(model):
    quantise_layers(model)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_base_in_4_bits_is_loaded_and_merged_as_it_was(tmp_path, place, way):
    model = WAYS[way](place)
    result = train(tmp_path, model=model, use_lora=True, **QUICK)
    live = answers(model)
    plain = answers(load_model(place, torch.float32))
    saved = SavedModel.find(result.model_dir)
    assert BaseFormat.read(saved.about["base"]) == BaseFormat.of(model) is not None
    assert (answers(saved.model(torch.float32)) - live).norm() <= 1e-4 * live.norm()
    merge(result.model_dir, tmp_path / "merged")
    assert (
        answers(load_model(tmp_path / "merged", torch.float32)) - live
    ).norm() <= 1e-4 * live.norm()
    assert (plain - live).norm() >= 1e-2 * live.norm(), "4 bits make a difference"


@pytest.mark.slow
def test_pefts_adapters_over_4_bits_are_too(tmp_path, place):
    model = with_pefts(by_bitsandbytes(place, **NF4))
    result = train(tmp_path, model=model, **QUICK)
    live = answers(model)
    assert (
        answers(SavedModel.find(result.model_dir).model(torch.float32)) - live
    ).norm() <= 1e-4 * live.norm()
    merge(result.model_dir, tmp_path / "merged")
    assert (
        answers(load_model(tmp_path / "merged", torch.float32)) - live
    ).norm() <= 1e-4 * live.norm()


@pytest.mark.slow
def test_layers_in_8_bits_are_stated_and_not_merged(tmp_path, place):
    there = 0 if torch.cuda.is_available() else "cpu"
    model = by_bitsandbytes(place, there, load_in_4bit=False, load_in_8bit=True)
    result = train(tmp_path, model=model, use_lora=True, **QUICK)
    saved = SavedModel.find(result.model_dir)
    live = answers(model)
    assert BaseFormat.read(saved.about["base"]).in_8_bits
    assert (answers(saved.model(torch.float32)) - live).norm() <= 1e-2 * live.norm()
    with pytest.raises(
        ValueError,
        match="trained over layers that transformers quantised by bitsandbytes in 8 bits",
    ):
        merge(result.model_dir, tmp_path / "merged")


@pytest.mark.slow
def test_weights_are_quantised_again_from_the_type_that_they_had(tmp_path, place):
    """A run in bf16 of a model that was given in fp32 quantised it before it was cast."""
    model = load_model(place, torch.float32)
    given = {**QUICK, "mixed_precision": "bf16"}
    result = train(tmp_path, model=model, quantization="nf4", **given)
    codes = {name: p for name, p in model.named_parameters() if p.dtype == torch.uint8}
    read = SavedModel.find(result.model_dir).model(torch.float32)
    assert codes and all(equal(x.cpu(), read.get_parameter(name)) for name, x in codes.items())
    other = SavedModel.find(result.model_dir).model(torch.bfloat16, quantization="nf4")
    assert all(equal(x.cpu(), other.get_parameter(name)) for name, x in codes.items()), (
        "asked for 4 bits again"
    )


@pytest.mark.slow
def test_a_run_that_is_trained_further_keeps_its_base(tmp_path, place):
    first = train(
        tmp_path / "first", model=load_model(place, torch.float32), quantization="nf4", **QUICK
    )
    model = SavedModel.find(first.model_dir).model(torch.float32)
    second = train(tmp_path / "second", model=model, **QUICK)
    live = answers(model)
    saved = SavedModel.find(second.model_dir)
    assert (answers(saved.model(torch.float32)) - live).norm() <= 1e-5 * live.norm()
    merge(second.model_dir, tmp_path / "merged")
    assert (
        answers(load_model(tmp_path / "merged", torch.float32)) - live
    ).norm() <= 1e-4 * live.norm()


def in_older_words(folder):
    """What this folder of a run would state had an older version written it."""
    for file, inside in (
        (folder / "chronicals.json", ()),
        (folder.parent / "state.json", ("about",)),
    ):
        if file.exists():
            content = stated = json.loads(file.read_text())
            for name in inside:
                stated = stated[name]
            stated["base"] = {"quantization": "nf4", "mixed_precision": "fp32"}
            file.write_text(json.dumps(content))
    (folder / "generation_config.json").unlink(missing_ok=True)


@pytest.mark.slow
def test_a_run_of_an_older_version_is_loaded_merged_and_resumed(tmp_path, place, let_return):
    def trained(folder, steps, **changes):
        model = load_model(place, torch.float32, quantization="nf4")
        given = {
            **QUICK,
            "max_steps": steps,
            "save_steps": 1,
            "lr_scheduler": "constant",
            "warmup_steps": 0,
        }
        return model, train(tmp_path / folder, model=model, quantization="nf4", **given, **changes)

    model, result = trained("whole", 2)
    live = answers(model)
    merge(result.model_dir, tmp_path / "merged")
    in_older_words(result.model_dir)
    assert (
        answers(SavedModel.find(result.model_dir).model(torch.float32)) - live
    ).norm() <= 1e-5 * live.norm()
    merge(result.model_dir, tmp_path / "again")
    one, two = (
        load_model(tmp_path / name, torch.float32).state_dict() for name in ("merged", "again")
    )
    assert all(equal(value, two[name]) for name, value in one.items())
    checkpoint = "run/checkpoints/step-00000001"
    shutil.copytree(tmp_path / "whole" / checkpoint, tmp_path / "parts" / checkpoint)
    from chronicals.training.run import checkpoint as module

    let_return(module, check_checkpoint=None)  # whose manifest is of what it stated before
    in_older_words(tmp_path / "parts" / checkpoint / "model")
    resumed, _ = trained("parts", 2, resume=True)
    assert equal(answers(resumed), live)


def test_another_base_is_refused(tmp_path, place):
    result = train(tmp_path, model=in_other_blocks(place), use_lora=True, save_steps=1, **QUICK)
    from chronicals.saving.model_files import save_model

    save_model(tmp_path / "packed", load_model(place, torch.float32, quantization="nf4"), {}, {})
    with pytest.raises(
        ValueError,
        match=r"is another base than .* \(.* is NF4 in blocks of 128.* there, NF4 in blocks of 64",
    ):
        SavedModel.find(result.model_dir, str(tmp_path / "packed")).model(torch.float32)
    with pytest.raises(
        CheckpointError,
        match=r"trained over another base \(NF4 in blocks of 128 there, nothing is quantised",
    ):
        train(
            tmp_path,
            model=load_model(place, torch.float32),
            use_lora=True,
            resume=True,
            **{**QUICK, "max_steps": 2},
        )


def test_what_is_merged_is_said_with_both_distances(tmp_path, place):
    """That to the values that the adapter was trained over, and that to what the base's files
    hold.
    """
    result = train(
        tmp_path,
        model=load_model(place, torch.float32),
        quantization="nf4",
        **QUICK,
        lora_target_modules=["q_proj"],
    )
    merged = merge(result.model_dir, tmp_path / "merged")
    report = json.loads((tmp_path / "merged" / REPORT).read_text())
    assert (
        merged.summands
        == report["sums_of"]
        == f"the dequantised NF4 values of {place} and the adapter {result.model_dir}"
    )
    files, written = (
        load_model(folder, torch.float32).state_dict() for folder in (place, tmp_path / "merged")
    )
    over = load_base(
        place, torch.float32, False, BaseFormat(None, None, FourBits(quantized_from="float32"))
    )
    for name, change in merged.changes.items():
        values = over.get_submodule(name.removesuffix(".weight")).packed.dense()
        added = (written[name] - values).norm() / values.norm()
        assert change.change == pytest.approx(float(added), rel=1e-3, abs=1e-6)
        moved = (written[name] - files[name]).norm() / files[name].norm()
        assert (
            change.from_files == pytest.approx(float(moved), rel=1e-5) and change.from_files > 0.05
        )
    changed = {name for name, change in merged.changes.items() if change.change}
    assert len(merged.changes) == 14 and changed == {
        name for name in merged.changes if "q_proj" in name
    }


@pytest.mark.slow
@pytest.mark.parametrize("way", ["other blocks, some layers", "bitsandbytes, NF4"])
def test_an_export_is_proved_beside_the_base_that_is_stated(tmp_path, place, way):
    """Each layer dequantised to the type of its own products, in the sums and in the model
    beside which they are proved.
    """
    model = WAYS[way](place)
    result = train(tmp_path, model=model, use_lora=True, **{**QUICK, "max_steps": 2})
    live = answers(model)
    (exported,) = export(result.model_dir, "merged-fp32", tmp_path / "artefacts")
    assert (answers(load_model(exported.path, torch.float32)) - live).norm() <= 1e-4 * live.norm()


# --- adapters of PEFT by name
# -------------------------------------------------------------------------------------------


def two_adapters(place, active):
    model = with_effect(with_pefts(load_model(place, torch.float32)))
    model.add_adapter("mine", pefts(r=2))
    model.base_model.set_adapter(active)
    return with_effect(model)


@pytest.mark.slow
@pytest.mark.parametrize("active", [["mine"], ["default"], ["default", "mine"]], ids=str)
def test_the_adapters_that_a_model_computes_with_are_loaded(tmp_path, place, active):
    pytest.importorskip("peft")
    model = two_adapters(place, active)
    result = train(tmp_path, model=model, **QUICK)
    saved = SavedModel.find(tmp_path / "run")
    live = answers(model)
    assert saved.about["active_adapters"] == active and saved.has_tokenizer()
    assert saved.tokenizer().get_vocab() == tiny.tokenizer().get_vocab()
    assert (answers(saved.model(torch.float32)) - live).norm() <= 1e-5 * live.norm()
    if len(active) > 1:
        with pytest.raises(
            ValueError, match="computes with the sum of 2 adapters of PEFT; load it"
        ):
            merge(result.model_dir, tmp_path / "merged")
        for form in ("merged", "adapter"):
            with pytest.raises(
                ValueError, match="computes with the sum of 2 adapters of PEFT; load it"
            ):
                export(result.model_dir, form, tmp_path / "artefacts")
    else:
        merge(result.model_dir, tmp_path / "merged")
        assert (
            answers(load_model(tmp_path / "merged", torch.float32)) - live
        ).norm() <= 1e-5 * live.norm()


@pytest.mark.slow
def test_an_adapter_of_another_name_is_found(tmp_path, place):
    model = with_pefts(load_model(place, torch.float32), "mine")
    train(tmp_path, model=model, **QUICK)
    live = answers(model)
    assert (
        answers(SavedModel.find(tmp_path / "run").model(torch.float32)) - live
    ).norm() <= 1e-5 * live.norm()


@pytest.mark.slow
def test_pefts_adapters_over_weights_that_a_run_changed_name_no_base(tmp_path, place, caplog):
    model = load_model(place, torch.float32)
    train(tmp_path / "first", model=model, **QUICK)
    train(tmp_path / "second", model=with_pefts(model), **QUICK)
    assert "so no base is named" in caplog.text
    with pytest.raises(ValueError, match="does not say which model it belongs to"):
        SavedModel.find(tmp_path / "second" / "run").model(torch.float32)


# --- where generation ends
# ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("whose", ["ours", "peft"])
def test_stop_tokens_of_the_model_are_saved_beside_adapters_and_merged(tmp_path, place, whose):
    model = load_model(place, torch.float32)
    model.generation_config.eos_token_id = [7]
    if whose == "peft":
        model = with_pefts(model)
    result = train(tmp_path, model=model, use_lora=whose == "ours", **QUICK)
    stops = model.generation_config.eos_token_id
    assert 7 in stops and len(stops) > 1
    assert (
        SavedModel.find(result.model_dir).model(torch.float32).generation_config.eos_token_id
        == stops
    )
    merge(result.model_dir, tmp_path / "merged")
    assert load_model(tmp_path / "merged", torch.float32).generation_config.eos_token_id == stops
