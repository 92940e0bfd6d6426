"""``chronicals push``: what is uploaded of a run, an adapter, a merged model and an export, and
what is refused.
"""

import importlib.util
import shutil

import huggingface_hub
import pytest
import torch
import yaml
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError
from safetensors.torch import load

import runs
import tiny
from chronicals.cli import main
from chronicals.export import Check, Proof, merge, push_saved
from chronicals.export.hub import UploadError
from chronicals.models import load_model
from hub import Hub

httpx = importlib.import_module("httpx2" if importlib.util.find_spec("httpx2") else "httpx")

TOKEN = "hf_secretSecretSecret"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    tiny.llama().save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\nCard of the base.\n")
    return folder


@pytest.fixture(scope="module")
def run(base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapted")
    model = load_model(base, torch.float32)
    runs.train(
        folder, model=model, use_lora=True, lora_rank=4, max_steps=2, use_fused_kernels=False
    )
    return folder / "run"


@pytest.fixture
def hub(monkeypatch, let_return):
    let_return(huggingface_hub, get_token=TOKEN)
    return Hub().take_the_place(monkeypatch)


@pytest.fixture
def command(monkeypatch, capsys):
    """Runs ``chronicals push`` in this process."""

    def push(*arguments):
        monkeypatch.setenv("COLUMNS", "200")
        with pytest.raises(SystemExit) as ended:
            main(["push", *map(str, arguments)])
        said = capsys.readouterr()
        return ended.value.code, said.out, said.err

    return push


def local_paths(hub, *places):
    """Names of uploaded files in which one of the paths stands."""
    return [
        name for name, text in hub.files.items() for place in places if str(place).encode() in text
    ]


def test_a_run_is_uploaded_as_a_private_model_with_a_card(run, base, hub, command):
    code, out, err = command(run, "someone/mine")
    assert code == 0, err
    assert (
        hub.made == {"someone/mine": True} and "private https://huggingface.co/someone/mine" in out
    )
    assert load(hub.files["adapter_model.safetensors"])
    assert {"adapter_config.json", "chronicals.json", "tokenizer.json", "README.md"} <= set(
        hub.files
    )
    assert "manifest.json" not in hub.files  # its sums are of the files here
    assert not any(name.startswith(("checkpoints", "metrics", "model/")) for name in hub.files)
    text = hub.files["README.md"].decode()
    head = yaml.safe_load(text.split("---")[1])
    assert head["library_name"] == "peft" and head["license"] == "apache-2.0"
    assert (
        "| 2 | " in text and "Compared" not in text
    )  # the curve, and no table of comparisons that nobody made
    assert local_paths(hub, base, run) == []


def test_an_adapter_over_a_folder_says_what_others_miss(run, base, hub, command):
    _, out, _ = command(run, "someone/mine")
    assert (
        "--base-model NAME" in out
        and hub.json("adapter_config.json")["base_model_name_or_path"] == base.name
    )
    _, out, _ = command(run / "model", "someone/mine", "--base-model", "someone/base")
    assert (
        "--base-model" not in out
        and hub.json("adapter_config.json")["base_model_name_or_path"] == "someone/base"
    )
    assert "base_model: someone/base" in hub.files["README.md"].decode()


def test_a_merged_model_has_a_card_of_its_own(run, base, hub, tmp_path):
    merge(run, tmp_path / "merged")
    (tmp_path / "merged" / "export").mkdir()
    (tmp_path / "merged" / "export" / "other.gguf").write_text("an artefact of its own")
    done = push_saved(tmp_path / "merged", "lab/merged", public=True)
    assert hub.made == {"lab/merged": False} and done.paths == [tmp_path / "merged"]
    assert (
        "model.safetensors" in hub.files
        and "merge.json" not in hub.files
        and "export/other.gguf" not in hub.files
    )
    text = hub.files["README.md"].decode()
    assert "Card of the base" not in text and f"Trained from `{base.name}`" in text
    assert local_paths(hub, base, run, tmp_path) == []


def test_artefacts_go_with_their_proofs(run, hub, command, tmp_path):
    proof = Proof(
        {"format": "gguf-f16", "model": str(run / "model"), "base": "someone/base"},
        [Check("weights", "gguf", True)],
    )
    for name in ("mine-f16.gguf", "mine-q8_0.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
        proof.write(tmp_path / f"{name}.proof.json")
    assert command(tmp_path, "mine")[0] == 0
    assert {*hub.files} == {path.name for path in tmp_path.iterdir()} | {"README.md"}
    assert local_paths(hub, run) == [] and hub.json("mine-f16.gguf.proof.json")["model"] == "model"
    text = hub.files["README.md"].decode()
    assert (
        "library_name: gguf" in text and "| weights | gguf | equal |" in text and "| 2 | " in text
    )
    hub.files.clear()
    assert command(tmp_path / "mine-f16.gguf", "mine")[0] == 0
    assert {*hub.files} == {"mine-f16.gguf", "mine-f16.gguf.proof.json", "README.md"}


def refusal(status):
    request = httpx.Request("POST", "https://huggingface.co")
    return HfHubHTTPError(
        f"{status} for {TOKEN}\nmore", response=httpx.Response(status, request=request)
    )


REFUSALS = {
    "none": (
        LocalTokenNotFoundError("none"),
        "there is no login on this machine; log in with 'hf auth login', or set",
    ),
    "expired": (
        refusal(401),
        "the hub does not accept the token of the login; log in anew with 'hf auth login'",
    ),
    "others": (refusal(403), "the login may not write there: the name is somebody else's, or"),
    "name": (HFValidationError("no such name"), "no such name; give another name, as OWNER/NAME"),
    "server": (refusal(500), "the upload failed: 500 for …"),
    "connection": (httpx.ConnectError("no route"), "the upload failed: no route"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_is_one_line_without_the_token(run, hub, command, name):
    hub.refusal, words = REFUSALS[name]
    code, out, err = command(run, "someone/mine")
    assert code == 1 and f"error someone/mine: {words}" in err
    assert err.count("\n") == 1 and TOKEN not in out + err


def test_the_name_of_somebody_else_is_refused_before_anything_is_made(run, hub, command):
    code, _, err = command(run, "other/mine")
    assert code == 1 and not hub.made and not hub.files
    assert (
        "other/mine: belongs to 'other', and the login is of 'someone'; give someone/mine" in err
        and err.count("\n") == 1
    )


OTHERWISE = [(False, [], "give --public"), (True, ["--public"], "leave --public out")]


@pytest.mark.parametrize(("private", "flags", "words"), OTHERWISE)
def test_a_repository_that_is_there_must_be_as_asked(run, hub, command, private, flags, words):
    hub.there["someone/mine"] = private
    code, _, err = command(run, "someone/mine", *flags)
    assert code == 1 and words in err and not hub.files and err.count("\n") == 1


def test_a_folder_with_neither_model_nor_artefact_is_refused(run, hub, command, tmp_path):
    shutil.copy(run / "model" / "adapter_config.json", tmp_path)  # without weights
    code, _, err = command(tmp_path, "someone/mine")
    assert (
        code == 1
        and "holds neither a model nor an artefact of an export; name the folder of a run" in err
    )
    assert err.count("\n") == 1
    with pytest.raises(UploadError, match="there is no such folder"):
        push_saved(tmp_path / "missing", "someone/mine")
    assert not hub.made
