"""Unsloth finds xformers for packed documents, and is left out where it would take one call a
document.
"""

import ctypes
import json
import sys
from types import ModuleType

import pytest
from peers import unsloth, unsloth_import


@pytest.mark.parametrize("installed", [True, False])
def test_the_runtime_of_cuda_12_is_loaded_from_its_wheel(
    tmp_path, monkeypatch, set_constants, installed
):
    runtime = tmp_path / "nvidia" / "cuda_runtime" / "lib" / "libcudart.so.12"
    loaded = []
    runtime.parent.mkdir(parents=True)
    if installed:
        runtime.touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    set_constants(ctypes, CDLL=loaded.append)
    unsloth_import.load_cuda_12_runtime()
    assert loaded == [str(runtime)] * installed


@pytest.mark.parametrize(
    ("mode", "data", "name", "prepared"),
    [
        ("lora", "ragged", "unsloth", True),
        ("lora", "ragged", "unsloth-recompute", True),
        ("lora", "ragged", "unsloth-compiled", False),
        ("lora", "fixed", "unsloth", False),  # torch's dense attention is faster
        ("qlora", "ragged", "unsloth", True),
        ("full", "ragged", "unsloth", False),
    ],
)
def test_only_packed_lora_needs_it(tmp_path, monkeypatch, mode, data, name, prepared):
    (tmp_path / "work.json").write_text(json.dumps({"mode": mode, "data": data}))
    ran = []
    monkeypatch.setattr(unsloth_import, "load_cuda_12_runtime", lambda: ran.append("xformers"))
    monkeypatch.setattr(unsloth_import.importlib, "import_module", ran.append)
    unsloth_import.import_unsloth(tmp_path, name)
    assert ran == [*(["xformers"] if prepared else []), "unsloth"]


@pytest.mark.parametrize(
    ("backend", "varlen", "expected"),
    [
        ("xformers", None, "xformers"),
        ("flash_varlen", None, "flash_varlen"),
        ("sdpa", object(), "torch varlen"),
        ("sdpa", None, None),
    ],
)
def test_one_call_a_document_has_no_speed(monkeypatch, backend, varlen, expected):
    dispatch = ModuleType("unsloth.utils.attention_dispatch")
    dispatch.SDPA = "sdpa"
    dispatch._TORCH_VARLEN_ATTN = varlen
    dispatch.select_attention_backend = lambda use_varlen: backend
    utils = ModuleType("unsloth.utils")
    utils.attention_dispatch = dispatch
    for module in (ModuleType("unsloth"), utils, dispatch):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    if expected:
        assert unsloth.packed_attention() == expected
    else:
        with pytest.raises(ValueError, match="xformers==0.0.35"):
            unsloth.packed_attention()
