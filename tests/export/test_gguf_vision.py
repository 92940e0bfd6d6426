"""Models of images and text in every format: the language part, what reads images, and what
shows that they are the model.
"""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import runs
import tiny
import vision_models
from chronicals.export import NotExpressible, NotProved, export, gguf_vision
from chronicals.export.export import ExportError
from chronicals.formats.gguf import vision
from chronicals.formats.gguf.reader import GGUFFile
from chronicals.formats.gguf.tensors import TensorPiece
from chronicals.formats.tensor_names import StoredNames, language_name, vision_name
from chronicals.models import load_model
from chronicals.training import ChronicalsTrainer
from comparison import equal

every_family = pytest.mark.parametrize("name", vision_models.MODELS)

MEAN = [0.3, 0.4, 0.5]
STD = [0.2, 0.25, 0.3]
AROUND = ["<fake_token_around_image>", "<global-img>", "<row_1_col_1>"]
"""Tokens that SmolVLM and Idefics 3 have around images, as well as a double line break."""

WIDE = {"hidden_size": 128, "intermediate_size": 256}


def saved(folder, name, model=None, processor="preprocessor_config.json", **sizes):
    """A model's folder, with a processor's file as transformers 4 or 5 writes it."""
    model = model or vision_models.build(name, **sizes)
    model.save_pretrained(folder)
    tokenizer = tiny.tokenizer()
    if name in ("smolvlm", "idefics3"):
        tokenizer.add_special_tokens({"additional_special_tokens": AROUND})
        tokenizer.add_tokens(["\n\n"])
    tokenizer.save_pretrained(folder)
    said = {"image_mean": MEAN, "image_std": STD, "size": {"longest_edge": 56}}
    (folder / processor).write_text(
        json.dumps(said if processor.startswith("pre") else {"image_processor": said})
    )
    return folder


def checks(exported):
    return {check.name: check for check in exported.proof.checks}


# --- both files
# --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@every_family
def test_the_language_part_and_what_reads_images_are_proved(name, tmp_path):
    """By the reader of files."""
    language, eyes = export(saved(tmp_path / "model", name), "gguf-f32", tmp_path / "out")
    assert [language.format, eyes.format] == ["gguf-f32", "mmproj-f32"]
    assert [path.name for path in sorted((tmp_path / "out").glob("*.gguf"))] == [
        "mmproj-model-f32.gguf",
        "model-f32.gguf",
    ]
    assert language.serve.endswith(f"model-f32.gguf --mmproj {eyes.path}")
    found = checks(eyes)
    assert found["weights in F32"].value <= 1e-6 and found["every tensor is there"].passed


@pytest.mark.llama_cpp
@every_family
def test_llama_cpp_reads_an_image_as_the_model_does(name, tmp_path):
    """To what its tables of GELU round."""
    language, eyes = export(saved(tmp_path, name), "gguf-f32")
    found = checks(eyes)
    assert found["embeddings of an image"].value <= 1e-3
    assert (
        found["logits behind an image"].passed
        and checks(language)["logits beside torch with the file's weights"].passed
    )


@pytest.mark.slow
@pytest.mark.sample(2)
@every_family
def test_in_16_bits(name, tmp_path):
    """What quantised language parts come with; a processor's settings are read as transformers 5
    writes them, too.
    """
    exported = export(saved(tmp_path, name, processor="processor_config.json"), "gguf-q8_0")
    assert exported[1].path.name == f"mmproj-{tmp_path.name}-f16.gguf"
    file = GGUFFile(exported[1].path)
    kinds = {tensor: file.type_of(tensor) for tensor in file.tensors}
    assert kinds["v.patch_embd.weight"] == kinds["v.blk.0.attn_q.weight"] == "F16"
    assert {
        kinds[tensor]
        for tensor in kinds
        if "ln1" in tensor or "bias" in tensor or "position" in tensor
    } == {"F32"}


@pytest.mark.slow
def test_a_second_language_part_takes_the_first_ones_eyes(tmp_path):
    folder = saved(tmp_path / "model", "llava")
    out = tmp_path / "out"
    first = export(folder, "gguf-f16", out)
    second = export(folder, "gguf-q8_0", out)
    assert [len(first), len(second)] == [2, 1] and second[0].serve.endswith(str(first[1].path))
    other = saved(tmp_path / "other", "llava")
    with pytest.raises(
        ExportError,
        match=r"mmproj-model-f16.gguf: is there already and is not this model's .* delete it",
    ):
        export(other, "gguf-bf16", out, name="model")


def test_what_reads_images_may_be_asked_for_alone(tmp_path):
    (exported,) = export(saved(tmp_path, "gemma3"), "mmproj-f32")
    assert exported.path.name == f"mmproj-{tmp_path.name}-f32.gguf" and "--mmproj" in exported.serve


# --- names, by another map than the writer's
# ----------------------------------------------------------------------------


def written(folder, name):
    """The file of a model, and the weights that it is of."""
    (exported,) = export(saved(folder, name), "mmproj-f32")
    return GGUFFile(exported.path), load_file(folder / "model.safetensors")


def test_the_parts_of_qwen(tmp_path):
    file, weights = written(tmp_path, "qwen2_5_vl")
    kernel = weights["visual.patch_embed.proj.weight"]
    for n, target in enumerate(("v.patch_embd.weight", "v.patch_embd.weight.1")):
        assert equal(file.read(target), kernel[:, :, n])
    for n, letter in enumerate("qkv"):
        for end in ("weight", "bias"):
            whole = weights[f"visual.blocks.2.attn.qkv.{end}"]
            assert equal(file.read(f"v.blk.2.attn_{letter}.{end}"), whole[32 * n : 32 * (n + 1)])
    same = {
        "v.blk.3.attn_out.bias": "blocks.3.attn.proj.bias",
        "v.blk.0.ffn_gate.weight": "blocks.0.mlp.gate_proj.weight",
        "v.blk.0.ffn_down.weight": "blocks.0.mlp.down_proj.weight",
        "v.post_ln.weight": "merger.ln_q.weight",
        "mm.0.weight": "merger.mlp.0.weight",
        "mm.2.bias": "merger.mlp.2.bias",
        "v.blk.1.ln2.weight": "blocks.1.norm2.weight",
    }
    assert all(equal(file.read(target), weights[f"visual.{own}"]) for target, own in same.items())
    assert (
        file.value("clip.projector_type") == "qwen2.5vl_merger"
        and file.value("clip.vision.n_wa_pattern") == 2
    )
    assert file.value("clip.use_silu") is True and file.value("general.type") == "mmproj"
    assert file.value("clip.vision.image_mean") == pytest.approx(MEAN)


def test_the_parts_of_gemma(tmp_path):
    file, weights = written(tmp_path, "gemma3")
    norm = weights["multi_modal_projector.mm_soft_emb_norm.weight"]
    assert equal(file.read("mm.soft_emb_norm.weight"), norm + 1)
    projection = weights["multi_modal_projector.mm_input_projection_weight"]
    assert equal(file.read("mm.input_projection.weight"), projection)
    assert equal(
        file.read("v.blk.1.ffn_up.weight"), weights["vision_tower.encoder.layers.1.mlp.fc1.weight"]
    )
    assert equal(file.read("v.post_ln.weight"), weights["vision_tower.post_layernorm.weight"])
    assert file.value("clip.vision.projector.scale_factor") == 2 and not any(
        "head" in name for name in file.tensors
    )


@pytest.mark.parametrize("name", ["smolvlm", "idefics3"])
def test_the_parts_of_idefics(name, tmp_path):
    file, weights = written(tmp_path, name)
    assert equal(
        file.read("mm.model.fc.weight"), weights["model.connector.modality_projection.proj.weight"]
    )
    own = weights["model.vision_model.embeddings.position_embedding.weight"]
    assert equal(file.read("v.position_embd.weight"), own)
    assert (
        file.value("clip.vision.preproc_image_size") == 56
        and file.value("clip.projector_type") == "idefics3"
    )


def test_the_parts_of_llava(tmp_path):
    """The last layer but one is projected: neither the last nor the norm behind it is in the
    file.
    """
    file, weights = written(tmp_path, "llava")
    same = {"mm.0": "linear_1", "mm.2": "linear_2"}
    for target, own in same.items():
        assert equal(file.read(f"{target}.weight"), weights[f"multi_modal_projector.{own}.weight"])
    assert equal(file.read("v.class_embd"), weights["vision_tower.embeddings.class_embedding"])
    assert equal(file.read("v.pre_ln.bias"), weights["vision_tower.pre_layrnorm.bias"])
    assert file.value("clip.vision.block_count") == 2 and file.value(
        "clip.vision.feature_layer"
    ) == [2]
    assert not any(name.startswith(("v.post_ln", "v.blk.2")) for name in file.tensors)


OLDER = {
    "qwen2_5_vl": [("model.", "model.language_model."), ("visual.", "model.visual.")],
    "gemma3": [("vision_tower.", "vision_tower.vision_model.")],
    "llava": [
        ("language_model.model.", "model.language_model."),
        ("vision_tower.", "model.vision_tower."),
        ("multi_modal_projector.", "model.multi_modal_projector."),
        ("language_model.lm_head.", "lm_head."),
    ],
}
"""Other beginnings that versions of transformers gave to the same names."""


@pytest.mark.slow
@pytest.mark.parametrize("name", OLDER)
def test_files_of_other_versions_have_the_same_parts(name, tmp_path):
    """The same two files come out of them."""
    folder = saved(tmp_path / "model", name)
    first = export(folder, "gguf-f32", tmp_path / "first")
    weights = load_file(folder / "model.safetensors")

    def older(own):
        return next(
            (new + own.removeprefix(old) for old, new in OLDER[name] if own.startswith(old)), own
        )

    save_file(
        {older(own): tensor for own, tensor in weights.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    second = export(folder, "gguf-f32", tmp_path / "second")
    for one, other in zip(first, second, strict=True):
        files = GGUFFile(one.path), GGUFFile(other.path)
        assert files[0].tensors.keys() == files[1].tensors.keys()
        assert all(
            equal(files[0].read(tensor), files[1].read(tensor)) for tensor in files[0].tensors
        )


def test_names_of_parts():
    assert (
        language_name("language_model.model.layers.0.mlp.up_proj") == "model.layers.0.mlp.up_proj"
    )
    assert (
        language_name("model.text_model.norm.weight")
        == language_name("model.norm.weight")
        == "model.norm.weight"
    )
    assert language_name("language_model.lm_head.weight") == "lm_head.weight"
    assert language_name("model.vision_tower.encoder.layers.0.mlp.fc1.weight") is None
    assert vision_name("vision_tower.vision_model.head.probe") == "vision_tower.head.probe"
    assert vision_name("model.visual.merger.ln_q.weight") == "visual.merger.ln_q.weight"
    there = StoredNames(["language_model.model.norm.weight", "h.0.weight", "lm_head.weight"])
    assert there.find("model.language_model.norm.weight") == "language_model.model.norm.weight"
    assert (
        there.find("transformer.h.0.weight") == "h.0.weight"
        and there.find("model.visual.norm.weight") is None
    )


# --- planted faults
# ----------------------------------------------------------------------------------------------------


def refused(folder, name, what):
    """An export is not kept, because of these checks."""
    with pytest.raises(NotProved) as error:
        export(saved(folder, name), "mmproj-f32")
    assert what in str(error.value), error.value
    assert not list((folder / "export").glob("*.gguf"))


def test_a_dropped_tensor_of_the_projector_is_found(tmp_path, plant):
    plant(
        gguf_vision,
        "write_projector",
        lambda right, target, settings, pieces, *rest: right(target, settings, pieces[:-1], *rest),
    )
    refused(tmp_path, "llava", "every tensor is there")


def with_pieces(plant, change):
    """The writer lays a piece out otherwise; what reads the file back does not."""

    def wrong(right, target, settings, pieces, *rest):
        right(target, settings, [change(piece) for piece in pieces], *rest)

    plant(gguf_vision, "write_projector", wrong)


def test_a_kernel_that_is_not_split_is_found(tmp_path, plant):
    """The first frame's half twice."""

    def change(piece: TensorPiece) -> TensorPiece:
        first = lambda given: given[0][:, :, 0]  # noqa: E731
        return replace(piece, forward=first) if piece.name.startswith("v.patch_embd") else piece

    with_pieces(plant, change)
    refused(tmp_path, "qwen2_5_vl", "weights in F32")


def test_mean_and_deviation_swapped_are_found(tmp_path, plant):
    saw = []

    def swapped(right, config, folder):
        found = right(config, folder)
        saw.append(1)
        if len(saw) > 1:  # the writer alone
            return found
        return found | {
            "clip.vision.image_mean": found["clip.vision.image_std"],
            "clip.vision.image_std": found["clip.vision.image_mean"],
        }

    plant(gguf_vision, "vision_settings", swapped)
    refused(tmp_path, "gemma3", "settings")


def swap(settings, one, other):
    return settings | {one: settings[other], other: settings[one]}


SEEN = "embeddings of an image, llama.cpp: FAILED"
WRONG = {
    "mean and deviation": (
        "gemma3",
        lambda found: swap(found, "clip.vision.image_mean", "clip.vision.image_std"),
    ),
    "activation": ("smolvlm", lambda found: found | {"clip.use_gelu": False}),
    "windows": ("qwen2_5_vl", lambda found: found | {"clip.vision.n_wa_pattern": 4}),
    "scale of the projector": (
        "idefics3",
        lambda found: found | {"clip.vision.attention.layer_norm_epsilon": 0.1},
    ),
    "layer": ("llava", lambda found: found | {vision.FEATURE_LAYER: [1]}),
}


@pytest.mark.llama_cpp
@pytest.mark.parametrize("fault", WRONG)
def test_an_image_shows_settings_that_writer_and_reader_both_have_wrong(fault, tmp_path, plant):
    name, change = WRONG[fault]
    plant(gguf_vision, "vision_settings", lambda right, *given: change(right(*given)))
    refused(tmp_path, name, SEEN)


@pytest.mark.llama_cpp
@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3"])
def test_an_image_shows_a_layout_that_writer_and_reader_both_have_wrong(name, tmp_path, plant):
    """Queries taken for keys; a norm without its one: back and forth they are right."""

    def wrong(right, own, shape):
        for piece in right(own, shape):
            if "mm_soft_emb_norm" in own:
                yield replace(
                    piece,
                    forward=lambda given: given[0],
                    backward=lambda read, own=own: [(own, ..., read)],
                )
            elif name == "qwen2_5_vl" and "attn_q." in piece.name:
                yield replace(piece, name=piece.name.replace("attn_q.", "attn_v."))
            elif name == "qwen2_5_vl" and "attn_v." in piece.name:
                yield replace(piece, name=piece.name.replace("attn_v.", "attn_q."))
            else:
                yield piece

    plant(vision, "_pieces_of_one", wrong)
    refused(tmp_path, name, SEEN)


@pytest.mark.llama_cpp
def test_a_vocabulary_without_the_tokens_around_images_is_refused(tmp_path):
    """With which llama.cpp would end the process at the first image."""
    folder = saved(tmp_path, "smolvlm")
    tiny.tokenizer().save_pretrained(folder)
    with pytest.raises(NotProved, match="tokens around an image that the vocabulary lacks"):
        export(folder, "mmproj-f32")


# --- what is refused
# ---------------------------------------------------------------------------------------------------


REFUSED = {
    "qwen2_5_vl": [
        ("window_size", 56),
        ("fullatt_block_indexes", [0, 3]),
        ("spatial_merge_size", 4),
    ],
    "gemma3": [("hidden_act", "gelu")],
    "smolvlm": [("hidden_act", "relu")],
    "llava": [("hidden_act", "relu")],
}


@pytest.mark.parametrize(
    ("name", "field", "value"), [(n, *pair) for n, pairs in REFUSED.items() for pair in pairs]
)
def test_what_llama_cpp_reads_otherwise_is_refused(name, field, value, tmp_path):
    folder = saved(tmp_path, name)
    change(folder, "vision_config", **{field: value})
    with pytest.raises(NotExpressible) as error:
        export(folder, "gguf-f16")
    assert f"{field}={value!r}: llama.cpp reads images of such a model otherwise" in str(
        error.value
    )
    assert not list((tmp_path / "export").iterdir())


def change(folder, part, **fields):
    config = json.loads((folder / "config.json").read_text())
    (config[part] if part else config).update(fields)
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("vision_feature_select_strategy", "full"),
        ("vision_feature_layer", [-2, -1]),
        ("multimodal_projector_bias", False),
    ],
)
def test_other_ways_of_llava_are_refused(field, value, tmp_path):
    folder = saved(tmp_path, "llava")
    change(folder, None, **{field: value})
    with pytest.raises(NotExpressible) as error:
        export(folder, "mmproj-f16")
    assert f"{field}={value!r}" in str(error.value)


def test_how_an_image_becomes_numbers_must_be_known(tmp_path):
    folder = saved(tmp_path, "llava")
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(
        NotExpressible,
        match=r"image_mean=None: preprocessor_config.json and .* copy them from the model",
    ):
        export(folder, "gguf-f16")
    said = {"image_mean": MEAN, "image_std": STD, "rescale_factor": 1.0}
    (folder / "preprocessor_config.json").write_text(json.dumps(said))
    with pytest.raises(NotExpressible, match="rescale_factor=1.0: llama.cpp divides by 255"):
        export(folder, "gguf-f16")


def test_other_families_are_refused_by_name(tmp_path):
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_heads": 2,
        "out_hidden_size": 64,
    }
    config = transformers.Qwen3VLConfig(
        text_config={**vision_models.SIZES, "head_dim": 16, "rope_parameters": rope},
        vision_config={**vision, "deepstack_visual_indexes": [0]},
        image_token_id=309,
    )
    folder = saved(
        tmp_path / "vl", "qwen3_vl", transformers.Qwen3VLForConditionalGeneration(config)
    )
    with pytest.raises(
        NotExpressible,
        match=r"model_type='qwen3_vl': what reads its images has no proved form in GGUF here",
    ):
        export(folder, "gguf-f16")
    tiny.llama().save_pretrained(tmp_path / "text")
    tiny.tokenizer().save_pretrained(tmp_path / "text")
    with pytest.raises(
        NotExpressible, match="model_type='llama': reads no images, so there is no mmproj"
    ):
        export(tmp_path / "text", "mmproj-f16")


# --- other formats
# -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=vision_models.MODELS)
def adapted(request, tmp_path_factory):
    """A run that trained adapters."""
    folder = tmp_path_factory.mktemp("adapted")
    heads = {"head_dim": 32, "query_pre_attn_scalar": 32} if request.param == "gemma3" else {}
    saved(folder / "base", request.param, **WIDE, **heads)
    (folder / "base" / "chat_template.json").write_text('{"chat_template": "{{ messages }}"}')
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "base")
    config = runs.config(folder, use_lora=True, trackers=[], max_steps=2, learning_rate=1e-3)
    ChronicalsTrainer(load_model(folder / "base", torch.float32), tokenizer, config).train(
        tiny.chat_rows()
    )
    return folder


@pytest.mark.slow
@pytest.mark.sample(3)
def test_merged_adapters_leave_what_reads_images(adapted, tmp_path):
    """Bit by bit, with what turns images into numbers; loaded by the same class."""
    (exported,) = export(adapted / "run", "merged-fp32", tmp_path)
    before, after = (
        load_file(folder / "model.safetensors") for folder in (adapted / "base", exported.path)
    )
    changed = {name for name in before if not equal(before[name], after[name])}
    assert (
        before.keys() == after.keys() and changed and all(language_name(name) for name in changed)
    )
    said = [
        (folder / "preprocessor_config.json").read_bytes()
        for folder in (adapted / "base", exported.path)
    ]
    assert said[0] == said[1]
    older = exported.path / "chat_template.json"  # which processors prefer to what was trained with
    assert (
        not older.exists()
        or json.loads(older.read_text())["chat_template"] == tiny.tokenizer().chat_template
    )
    classes = [
        type(transformers.AutoModelForImageTextToText.from_pretrained(f))
        for f in (adapted / "base", exported.path)
    ]
    assert classes[0] is classes[1]


@pytest.mark.sample(3)
def test_adapters_by_themselves(adapted, tmp_path):
    peft, ours = export(adapted / "run", ["adapter", "gguf-adapter"], tmp_path)
    assert (peft.path / "preprocessor_config.json").exists() and checks(peft)[
        "logits beside the trained model's"
    ].passed
    assert checks(ours)["what is added"].passed


@pytest.mark.llama_cpp
def test_llama_cpp_adds_an_adapter_to_the_language_part(adapted, tmp_path):
    (exported,) = export(adapted / "run", "gguf-adapter", tmp_path)
    assert checks(exported)["logits beside the trained model's"].client == "llama.cpp"


@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", ["fp8", "int4", "nf4"])
def test_few_bits_are_the_language_parts(adapted, kind, tmp_path):
    """What reads images stays in 16 bits, and is named so where a server asks."""
    (exported,) = export(adapted / "run", kind, tmp_path)
    tensors = {
        name: x
        for file in exported.path.glob("*.safetensors")
        for name, x in load_file(file).items()
    }
    eyes = {name: x for name, x in tensors.items() if vision_name(name)}
    assert eyes and {x.dtype for x in eyes.values()} == {torch.bfloat16}
    expected = load_file(adapted / "base" / "model.safetensors")
    assert all(equal(x, expected[name].bfloat16()) for name, x in eyes.items())
    if kind != "nf4":
        ignored = json.loads((exported.path / "config.json").read_text())["quantization_config"][
            "ignore"
        ]
        assert any(vision_name(path) for path in ignored) and not any(
            ".layers." in (language_name(p) or "") for p in ignored
        )


def test_a_processors_own_template_is_the_trained_one(tmp_path):
    """A model that was trained whole, with a file that version 4 wrote: what reads it first
    finds the tokenizer's text.
    """
    folder = saved(tmp_path / "model", "llava")
    (folder / "chat_template.json").write_text('{"chat_template": "{{ messages }}"}')
    (exported,) = export(folder, "merged-fp32", tmp_path / "out")
    said = json.loads((exported.path / "chat_template.json").read_text())
    assert said == {"chat_template": tiny.tokenizer().chat_template}


@pytest.mark.slow
@pytest.mark.sample(2)
def test_a_run_of_adapters_becomes_both_files(adapted, tmp_path):
    language, eyes = export(adapted / "run", "gguf-f16", tmp_path)
    assert (
        eyes.format == "mmproj-f16"
        and checks(language)["merged weights beside the trained model"].passed
    )


@pytest.mark.llama_cpp
def test_importance_is_measured_in_the_language_part(tmp_path):
    folder = saved(tmp_path, "gemma3", hidden_size=256, intermediate_size=256)
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in tiny.chat_rows())
    )
    exported = export(folder, "gguf-q4_k_m", importance=tmp_path / "rows.jsonl")
    assert [one.format for one in exported] == ["gguf-q4_k_m", "mmproj-f16"] and np.isfinite(
        exported[0].proof.checks[-1].value
    )


@pytest.mark.parametrize("name", ["qwen2_5_vl", "smolvlm"])
def test_a_tied_head_is_the_embedding(name, tmp_path):
    model = vision_models.build(name)
    model.config.tie_word_embeddings = True
    language, _ = export(saved(tmp_path, name, type(model)(model.config).float()), "gguf-f32")
    assert "output.weight" not in GGUFFile(language.path).tensors


@pytest.mark.slow
def test_adapters_over_a_base_in_4_bits_are_merged(tmp_path):
    """Into what 4 bits stood for, which the language part's layers alone were."""
    saved(tmp_path / "base", "llava", **WIDE)
    model = load_model(tmp_path / "base", torch.float32, quantization="nf4")
    config = runs.config(tmp_path, use_lora=True, quantization="nf4", trackers=[], max_steps=2)
    ChronicalsTrainer(model, tiny.tokenizer(), config).train(tiny.chat_rows())
    (exported,) = export(tmp_path / "run", "merged-fp32")
    assert checks(exported)["logits beside the trained model's"].value <= 1e-5
    before, after = (
        load_file(folder / "model.safetensors") for folder in (tmp_path / "base", exported.path)
    )
    assert all(equal(before[name], after[name]) for name in before if vision_name(name))
