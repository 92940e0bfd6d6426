"""A mistyped model is told at once: the hub is asked once, and not at all for what can be no
name there.
"""

import importlib.util
import re
import time

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

import tiny
from chronicals.models import load_config, load_tokenizer
from chronicals.models.checkpoint_checks import check_exists

httpx = importlib.import_module("httpx2" if importlib.util.find_spec("httpx2") else "httpx")
"""What this version of the hub's client sends its requests by."""


def answers(monkeypatch, error):
    """A hub that raises an error, or knows every model; how often it was asked."""
    asked = []

    def model_info(self, name, **options):
        asked.append(name)
        assert options["timeout"] <= 5
        if error is not None:
            raise error

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    check_exists.cache_clear()
    return asked


def http(kind, status=404):
    response = httpx.Response(status, request=httpx.Request("GET", "https://hub.invalid/api"))
    return kind("said by the hub", response=response)


@pytest.mark.parametrize("load", [load_config, load_tokenizer])
def test_a_mistyped_name_is_told_once_and_at_once(load, monkeypatch, tmp_path):
    asked = answers(monkeypatch, http(RepositoryNotFoundError))
    began = time.monotonic()
    with pytest.raises(
        ValueError,
        match=r"^model='bsae': there is no such folder here, and no such model on the hub",
    ) as told:
        load("bsae")
    assert time.monotonic() - began < 5 and asked == ["bsae"] and "\n" not in str(told.value)


def test_a_hub_that_cannot_be_reached(monkeypatch):
    asked = answers(monkeypatch, httpx.ConnectError("[Errno -2] Name or service not known"))
    message = (
        "model='owner/bsae': there is no such folder here, and the hub cannot be reached to "
        "look for the name there"
    )
    with pytest.raises(ValueError, match=f"^{message} .*Name or service not known"):
        load_config("owner/bsae")
    assert asked == ["owner/bsae"]


@pytest.mark.parametrize("name", ["./bsae", "/nowhere/bsae", "a/b/c", "~/bsae", "model folder"])
def test_what_can_be_no_hub_name_is_not_asked_for(name, monkeypatch):
    asked = answers(monkeypatch, None)
    with pytest.raises(
        ValueError,
        match=re.escape(f"model={name!r}: there is no such folder here, and no hub name"),
    ):
        load_config(name)
    assert asked == []


@pytest.mark.parametrize(
    "error", [None, http(GatedRepoError, 403), http(HfHubHTTPError, 503)], ids=str
)
def test_what_leaves_it_open_is_left_to_whoever_loads(error, monkeypatch):
    asked = answers(monkeypatch, error)
    check_exists("owner/name")
    check_exists("owner/name")
    assert asked == ["owner/name"]


def test_a_folder_is_not_asked_for(monkeypatch, tmp_path):
    asked = answers(monkeypatch, http(RepositoryNotFoundError))
    tiny.llama().save_pretrained(tmp_path)
    assert load_config(tmp_path).vocab_size == 300 and asked == []


def test_offline_the_cache_alone_is_asked(monkeypatch):
    asked = answers(monkeypatch, http(RepositoryNotFoundError))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    check_exists("owner/name")
    assert asked == []


def test_an_error_of_ours_is_not_taken_for_the_hubs(monkeypatch):
    answers(monkeypatch, TypeError("ours"))
    with pytest.raises(TypeError, match="ours"):
        check_exists("owner/name")
