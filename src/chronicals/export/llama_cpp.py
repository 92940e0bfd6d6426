"""llama.cpp as a client of the files that are written, through the package llama-cpp-python; the only file that knows it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np

PACKAGE = "llama-cpp-python"
GGML_F32 = 0
"""The type of the keys and values that it keeps, so that they are not rounded."""


def is_there() -> bool:
    return importlib.util.find_spec("llama_cpp") is not None


class LlamaCpp:
    """A file, loaded by llama.cpp on the CPU.

    Args:
        tokens: positions, at least as many as are evaluated at once.
        vocabulary_only: without weights, to tokenise.
    """

    def __init__(self, path: Path, tokens: int = 512, vocabulary_only: bool = False):
        from llama_cpp import Llama

        options: dict[str, Any] = {"vocab_only": True} if vocabulary_only else {
            "n_ctx": tokens, "n_batch": tokens, "logits_all": True, "flash_attn": False, "type_k": GGML_F32, "type_v": GGML_F32,
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
