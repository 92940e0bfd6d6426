"""Models of images and text: the class that knows them is loaded, text trains, and what reads
images stays as it is.
"""

import pytest
import torch
import transformers

import runs
import tiny
from chronicals.generation import load_trained
from chronicals.lora import LoRAConfig, adapters, apply_lora
from chronicals.models import beside_text, load_model, read_processors
from chronicals.training import ChronicalsTrainer
from chronicals.training.run.evaluation import evaluate_data
from chronicals.verification import verify
from comparison import equal

TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 300,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 0,
}


def qwen3_vl():
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_heads": 2,
        "out_hidden_size": 32,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "deepstack_visual_indexes": [0],
    }
    ids = {
        "image_token_id": 299,
        "video_token_id": 298,
        "vision_start_token_id": 297,
        "vision_end_token_id": 296,
    }
    config = transformers.Qwen3VLConfig(
        text_config={**TEXT, "rope_parameters": rope}, vision_config=vision, **ids
    )
    return transformers.Qwen3VLForConditionalGeneration(config)


def llava():
    vision = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 28,
    }
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**{k: v for k, v in TEXT.items() if k != "head_dim"}),
        vision_config=transformers.CLIPVisionConfig(**vision, patch_size=14),
        image_token_id=299,
    )
    return transformers.LlavaForConditionalGeneration(config)


MODELS = {
    "qwen3_vl": (qwen3_vl, ["model.visual"]),
    "llava": (llava, ["model.multi_modal_projector", "model.vision_tower"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("name", MODELS)
def test_text_trains_and_what_reads_images_stays(tmp_path, name, lora, caplog):
    make, towers = MODELS[name]
    made = make()
    made.save_pretrained(tmp_path / "base")
    model = load_model(tmp_path / "base", torch.float32)
    assert type(model) is type(made) and sorted(beside_text(model)) == towers
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    config = runs.config(tmp_path, use_lora=lora, weight_decay=0.1, trackers=[])
    with caplog.at_level("INFO"):
        ChronicalsTrainer(model, tiny.tokenizer(), config).train(tiny.chat_rows())
    assert ("rows are text, so what reads none is frozen" in caplog.text) != lora and towers[
        0
    ] in caplog.text
    assert all(path.startswith(("model.language_model", "lm_head")) for path, _ in adapters(model))
    after = load_trained(tmp_path / "run")
    kept = after.model.state_dict()
    kept = {name: tensor for name, tensor in kept.items() if name.startswith(tuple(towers))}
    assert kept and all(equal(tensor, before[name]) for name, tensor in kept.items())
    scored = runs.config(tmp_path, output_dir=tmp_path / "scored")
    losses = [
        evaluate_data(m, tiny.tokenizer(), tiny.chat_rows(), scored).loss
        for m in (model, after.model, made)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and losses[0] < losses[2]


def test_layers_that_read_images_are_adapted_by_name():
    paths = [
        path
        for path, _ in adapters(apply_lora(llava(), LoRAConfig(rank=2, target_modules=["q_proj"])))
    ]
    assert {path.split(".")[1] for path in paths} == {"language_model", "vision_tower"}


def test_a_model_of_text_has_no_towers():
    assert not beside_text(tiny.llama())


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_such_a_run_is_verified(tmp_path, lora):
    config = runs.config(tmp_path, use_lora=lora, gradient_accumulation_steps=1)
    found = verify(llava(), tiny.tokenizer(), config, tiny.chat_rows(), steps=5)
    assert found.passed, found.failures


def test_how_images_become_tensors_goes_with_the_model(tmp_path):
    llava().save_pretrained(tmp_path / "base")
    for name in ("preprocessor_config.json", "processor_config.json"):
        (tmp_path / "base" / name).write_text('{"image_size": 28}')
    runs.train(
        tmp_path, model=load_model(tmp_path / "base", torch.float32), max_steps=1, trackers=[]
    )
    for name in ("preprocessor_config.json", "processor_config.json"):
        assert (tmp_path / "run" / "model" / name).read_text() == '{"image_size": 28}'


def from_transformers(name):
    return transformers.LlavaForConditionalGeneration.from_pretrained(name)


@pytest.mark.parametrize(
    "loader",
    [lambda name: load_model(name, torch.float32), from_transformers],
    ids=["ours", "theirs"],
)
def test_a_base_that_is_gone_loses_no_save(tmp_path, loader, caplog):
    """Its folder was moved: before the run, the files beside the weights are named as missing,
    unless it was read at load.
    """
    llava().save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "processor_config.json").write_text('{"image_size": 28}')
    model = loader(tmp_path / "base")
    (tmp_path / "base").rename(tmp_path / "moved")
    runs.train(tmp_path, model=model, max_steps=2, save_steps=1, trackers=[])
    warned = (
        "video_preprocessor_config.json cannot be read and will not be saved with the model"
        in caplog.text
    )
    for folder in (
        tmp_path / "run" / "model",
        tmp_path / "run" / "checkpoints" / "step-00000002" / "model",
    ):
        assert (folder / "chronicals.json").exists() and (
            folder / "processor_config.json"
        ).exists() != warned
    assert warned == (loader is from_transformers)


def test_the_revision_that_was_loaded_is_asked_for_its_files(monkeypatch):
    model = llava()
    asked = []
    model.config._name_or_path = "me/llava"
    model.config._commit_hash = "abc"
    monkeypatch.setattr(
        "chronicals.models.towers.cached_file", lambda *_, **given: asked.append(given["revision"])
    )
    read_processors(model)
    read_processors(model)
    assert asked == ["abc"] * 3
