"""A checkpoint that its class does not fit is refused by name; what classes leave out by design
is not. A mistyped model is told at once: the hub is asked once, and not at all for what can be no
name there.
"""

import importlib.util
import json
import re
import time

import huggingface_hub
import pytest
import torch
import transformers
from huggingface_hub import constants
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError
from safetensors.torch import load_file, save_file

import families
import tiny
from chronicals.models import load_config, load_model, load_tokenizer
from chronicals.models.checkpoint_checks import check_exists
from comparison import equal


def changed(folder, change, model=None, **config):
    """A folder of a tiny Llama whose weights ``change`` has been at, and whose configuration
    says something else.
    """
    (model or tiny.llama()).save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    save_file(change(weights) or weights, folder / "model.safetensors", metadata={"format": "pt"})
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return folder


def without(*names):
    return lambda weights: {name: tensor for name, tensor in weights.items() if name not in names}


def with_also(*names):
    return lambda weights: weights | {name: torch.ones(3) for name in names}


Q = "model.layers.1.self_attn.q_proj"
REFUSED = {
    "a weight less": (
        without("lm_head.weight"),
        {},
        r"lm_head\.weight: not in the checkpoint, and would be drawn at random",
    ),
    "many less": (
        without(
            *(
                f"model.layers.{n}.mlp.{m}_proj.weight"
                for n in (0, 1)
                for m in ("up", "down", "gate")
            )
        ),
        {},
        r"model\.layers\.0\.mlp\.down_proj\.weight, .* and 2 others: not in",
    ),
    "other names": (
        lambda w: {name.replace("layers.1", "blocks.1"): t for name, t in w.items()},
        {},
        r"layers\.1\..* at random; model\.blocks\.1.*has no place",
    ),
    "a bias more": (
        with_also(f"{Q}.bias"),
        {},
        rf"{Q}\.bias: in the checkpoint, and LlamaForCausalLM has no place for it",
    ),
    "a layer more": (lambda _: None, {"num_hidden_layers": 1}, r"model\.layers\.1\..* no place"),
    "a part more": (with_also("score.weight"), {}, r"score\.weight: in the checkpoint"),
    "a bias more, of another class": (
        with_also(f"{Q}.bias"),
        {"architectures": ["LlamaForX"]},
        rf"{Q}\.bias: in the",
    ),
    "another shape": (
        lambda _: None,
        {"intermediate_size": 95},
        r"mlp.*\(.*96.* there, .*95.* here\).*of another shape",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_by_name(tmp_path, case):
    change, config, message = REFUSED[case]
    with pytest.raises(ValueError, match=rf"^model='{tmp_path}': .*{message}"):
        load_model(changed(tmp_path, change, **config), torch.float32)


FITS = {
    "rotary frequencies": (
        with_also("model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"),
        {},
    ),
    "masks": (with_also("model.layers.0.attn.masked_bias", "model.layers.0.attention.bias"), {}),
    "a classifier": (
        with_also("score.weight"),
        {"architectures": ["LlamaForSequenceClassification"]},
    ),
    "a vision tower": (
        with_also("tower.proj.weight", "model.visual.x"),
        {"architectures": ["XForConditionalGeneration"]},
    ),
    "layers that predict further": (
        with_also("mtp.fc.weight", "model.mtp_layers.0.norm.weight"),
        {},
    ),
    "further layers": (with_also("model.layers.2.enorm.weight"), {"num_nextn_predict_layers": 1}),
}


@pytest.mark.parametrize("case", FITS)
def test_what_is_left_out_by_design_is_not(tmp_path, case, caplog):
    change, config = FITS[case]
    model = load_model(changed(tmp_path, change, **config), torch.float32)
    assert equal(model.lm_head.weight, tiny.llama().lm_head.weight)
    assert ("leaves out" in caplog.text) == (case not in ("rotary frequencies", "masks"))


def test_a_tied_head_is_not_missing(tmp_path):
    model = load_model(
        changed(tmp_path, lambda _: None, tiny.llama(tie_word_embeddings=True)), torch.float32
    )
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("family", families.FAMILIES)
def test_what_save_pretrained_writes_fits(tmp_path, family, caplog):
    families.build(family).save_pretrained(tmp_path)
    load_model(tmp_path, torch.float32)
    assert "leaves out" not in caplog.text


def test_a_path_is_kept_absolute(tmp_path, monkeypatch):
    tiny.llama().save_pretrained(tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    assert load_model("base", torch.float32).config._name_or_path == str(tmp_path / "base")


def test_a_model_without_a_causal_head_is_told(tmp_path):
    transformers.T5Config(d_model=16, d_ff=16, num_layers=1, num_heads=1).save_pretrained(tmp_path)
    with pytest.raises(
        ValueError,
        match=f"^model='{tmp_path}': cannot be loaded: T5Config is of a model that is no causal",
    ):
        load_model(tmp_path, torch.float32)


httpx = importlib.import_module("httpx2" if importlib.util.find_spec("httpx2") else "httpx")
"""What this version of the hub's client sends its requests by."""


@pytest.fixture
def answers(monkeypatch, set_constants):
    """A hub that raises an error, or knows every model; how often it was asked."""

    def hub(error):
        asked = []

        def model_info(self, name, **options):
            asked.append(name)
            assert options["timeout"] <= 5
            if error is not None:
                raise error

        set_constants(constants, HF_HUB_OFFLINE=False)
        monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
        check_exists.cache_clear()
        return asked

    return hub


def http(kind, status=404):
    response = httpx.Response(status, request=httpx.Request("GET", "https://hub.invalid/api"))
    return kind("said by the hub", response=response)


@pytest.mark.parametrize("load", [load_config, load_tokenizer])
def test_a_mistyped_name_is_told_once_and_at_once(load, answers, tmp_path):
    asked = answers(http(RepositoryNotFoundError))
    began = time.monotonic()
    with pytest.raises(
        ValueError,
        match=r"^model='bsae': there is no such folder here, and no such model on the hub",
    ) as told:
        load("bsae")
    assert time.monotonic() - began < 5 and asked == ["bsae"] and "\n" not in str(told.value)


def test_a_hub_that_cannot_be_reached(answers):
    asked = answers(httpx.ConnectError("[Errno -2] Name or service not known"))
    message = (
        "model='owner/bsae': there is no such folder here, and the hub cannot be reached to "
        "look for the name there"
    )
    with pytest.raises(ValueError, match=f"^{message} .*Name or service not known"):
        load_config("owner/bsae")
    assert asked == ["owner/bsae"]


@pytest.mark.parametrize("name", ["./bsae", "/nowhere/bsae", "a/b/c", "~/bsae", "model folder"])
def test_what_can_be_no_hub_name_is_not_asked_for(name, answers):
    asked = answers(None)
    with pytest.raises(
        ValueError,
        match=re.escape(f"model={name!r}: there is no such folder here, and no hub name"),
    ):
        load_config(name)
    assert asked == []


@pytest.mark.parametrize(
    "error", [None, http(GatedRepoError, 403), http(HfHubHTTPError, 503)], ids=str
)
def test_what_leaves_it_open_is_left_to_whoever_loads(error, answers):
    asked = answers(error)
    check_exists("owner/name")
    check_exists("owner/name")
    assert asked == ["owner/name"]


def test_a_folder_is_not_asked_for(answers, tmp_path):
    asked = answers(http(RepositoryNotFoundError))
    tiny.llama().save_pretrained(tmp_path)
    assert load_config(tmp_path).vocab_size == 300 and asked == []


def test_offline_the_cache_alone_is_asked(answers, set_constants):
    asked = answers(http(RepositoryNotFoundError))
    set_constants(constants, HF_HUB_OFFLINE=True)
    check_exists("owner/name")
    assert asked == []


def test_an_error_of_ours_is_not_taken_for_the_hubs(answers):
    answers(TypeError("ours"))
    with pytest.raises(TypeError, match="ours"):
        check_exists("owner/name")
