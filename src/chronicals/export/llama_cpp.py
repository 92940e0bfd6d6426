"""llama.cpp as a client of the files that are written, through the package llama-cpp-python; the only file that knows it."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

PACKAGE = "llama-cpp-python"
GGML_F32 = 0
"""The type of the keys and values that it keeps, so that they are not rounded."""


def is_there() -> bool:
    return importlib.util.find_spec("llama_cpp") is not None


def require(what: str) -> None:
    """Raises ValueError where the package is missing.

    Args:
        what: needs it, in words that begin the message.
    """
    if not is_there():
        raise ValueError(f"{what} by llama.cpp itself, through {PACKAGE}, which is not installed: pip install {PACKAGE}")


@functools.cache
def heard() -> deque[str]:
    """The last things that llama.cpp said, which it would print otherwise."""
    import llama_cpp

    said: deque[str] = deque(maxlen=200)
    callback = llama_cpp.llama_log_callback(lambda level, text, _: said.append(text.decode(errors="replace")))
    llama_cpp.llama_log_set(callback, ctypes.c_void_p(0))
    _callbacks.append(callback)
    return said


_callbacks: list[Any] = []
"""Kept, for llama.cpp holds only their addresses."""


def quantise(given: Path, target: Path, file_type: int, importance: Mapping[str, np.ndarray] | None = None) -> None:
    """Let llama.cpp write a file whose weights have other types.

    Args:
        given: a file in F32 or 16 bits.
        file_type: of ``gguf.LlamaFileType``.
        importance: fp32 ``[in]`` by the name of a tensor in the file: the mean square of what each column is multiplied with.

    Raises:
        ValueError: llama.cpp refuses; the message has its last words.
    """
    import llama_cpp

    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype, options.nthread = file_type, 0
    values = {name.encode(): np.ascontiguousarray(x, np.float32) for name, x in (importance or {}).items()}
    entries = (llama_cpp.llama_model_imatrix_data * (len(values) + 1))()  # the last one has no name, and ends the list
    for entry, (name, x) in zip(entries, values.items()):
        entry.name, entry.data, entry.size = name, x.ctypes.data_as(ctypes.POINTER(ctypes.c_float)), x.size
    if values:
        options.imatrix = ctypes.cast(entries, ctypes.POINTER(llama_cpp.llama_model_imatrix_data))
    said = heard()
    said.clear()
    failed = llama_cpp.llama_model_quantize(str(given).encode(), str(target).encode(), ctypes.byref(options))
    if failed:
        words = [line.strip() for line in "".join(said).splitlines() if "error" in line.lower() or "missing" in line.lower()]
        raise ValueError(f"{target.name}: llama.cpp cannot quantise this model: {words[-1] if words else f'error {failed}'}")


class LlamaCpp:
    """A file, loaded by llama.cpp on the CPU.

    Args:
        tokens: positions, at least as many as are evaluated at once.
        vocabulary_only: without weights, to tokenise.
        adapter: a file that is added to the weights.
    """

    def __init__(self, path: Path, tokens: int = 512, vocabulary_only: bool = False, adapter: Path | None = None):
        from llama_cpp import Llama

        heard()
        options: dict[str, Any] = {"vocab_only": True} if vocabulary_only else {
            "n_ctx": tokens, "n_batch": tokens, "logits_all": True, "flash_attn": False, "type_k": GGML_F32, "type_v": GGML_F32,
            "lora_path": None if adapter is None else str(adapter),
        }  # fmt: skip
        self.model = Llama(str(path), n_gpu_layers=0, verbose=False, **options)

    def ids(self, text: str, special: bool = True) -> list[int]:
        """Of a text, with the tokens in front that the file asks for, but not a second beginning."""
        begins = self.model.metadata.get("tokenizer.ggml.bos_token_id")
        named = "" if begins is None else self.model._model.token_get_text(int(begins))
        asked = self.model.metadata.get("tokenizer.ggml.add_bos_token") == "true"
        twice = bool(named) and text.startswith(named)
        return list(self.model.tokenize(text.encode(), add_bos=asked and not twice, special=special))

    def logits(self, ids: list[int]) -> np.ndarray:
        """fp32 ``[len(ids), V]``."""
        self.model.reset()
        self.model.eval(ids)
        return np.array(self.model.scores[: len(ids)], np.float32)

    def ends(self, token: int) -> bool:
        """Whether generation ends at a token."""
        import llama_cpp

        return bool(llama_cpp.llama_vocab_is_eog(self.model._model.vocab, token))
