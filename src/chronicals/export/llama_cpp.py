"""llama.cpp as a client of the files that are written, through the package llama-cpp-python; the
only file that knows it.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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
        raise ValueError(
            f"{what} by llama.cpp itself, through {PACKAGE}, which is not installed: pip install "
            f"{PACKAGE}"
        )


@functools.cache
def heard() -> deque[str]:
    """The last things that llama.cpp said, which it would print otherwise."""
    import llama_cpp

    said: deque[str] = deque(maxlen=200)
    callback = llama_cpp.llama_log_callback(
        lambda level, text, _: said.append(text.decode(errors="replace"))
    )
    llama_cpp.llama_log_set(callback, ctypes.c_void_p(0))
    _callbacks.append(callback)
    return said


_callbacks: list[Any] = []
"""Kept, for llama.cpp holds only their addresses."""


def quantise(
    given: Path, target: Path, file_type: int, importance: Mapping[str, np.ndarray] | None = None
) -> None:
    """Let llama.cpp write a file whose weights have other types.

    Args:
        given: a file in F32 or 16 bits.
        file_type: of ``gguf.LlamaFileType``.
        importance: fp32 ``[in]`` by the name of a tensor in the file: the mean square of what each
            column is multiplied with; ``[E, in]`` of a tensor of experts.

    Raises:
        ValueError: llama.cpp refuses; the message has its last words.
    """
    import llama_cpp

    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = file_type
    options.nthread = 0
    values = {
        name.encode(): np.ascontiguousarray(x, np.float32) for name, x in (importance or {}).items()
    }
    entries = (
        llama_cpp.llama_model_imatrix_data * (len(values) + 1)
    )()  # the last one has no name, and ends the list
    for entry, (name, x) in zip(entries, values.items()):
        entry.name = name
        entry.data = x.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        entry.size = x.size
    if values:
        options.imatrix = ctypes.cast(entries, ctypes.POINTER(llama_cpp.llama_model_imatrix_data))
    said = heard()
    said.clear()
    failed = llama_cpp.llama_model_quantize(
        str(given).encode(), str(target).encode(), ctypes.byref(options)
    )
    if failed:
        words = [
            line.strip()
            for line in "".join(said).splitlines()
            if "error" in line.lower() or "missing" in line.lower()
        ]
        raise ValueError(
            f"{target.name}: llama.cpp cannot quantise this model: "
            f"{words[-1] if words else f'error {failed}'}"
        )


class LlamaCpp:
    """A file, loaded by llama.cpp on the CPU.

    Args:
        tokens: positions, at least as many as are evaluated at once.
        vocabulary_only: without weights, to tokenise.
        adapter: a file that is added to the weights.
    """

    def __init__(
        self,
        path: Path,
        tokens: int = 512,
        vocabulary_only: bool = False,
        adapter: Path | None = None,
    ):
        from llama_cpp import Llama

        heard()
        options: dict[str, Any] = (
            {"vocab_only": True}
            if vocabulary_only
            else {
                "n_ctx": tokens,
                "n_batch": tokens,
                "logits_all": True,
                "flash_attn": False,
                "type_k": GGML_F32,
                "type_v": GGML_F32,
                "lora_path": None if adapter is None else str(adapter),
            }
        )
        self.model = Llama(str(path), n_gpu_layers=0, verbose=False, **options)

    def ids(self, text: str, special: bool = True) -> list[int]:
        """Of a text, with the tokens in front that the file asks for, but not a second
        beginning.
        """
        begins = self.model.metadata.get("tokenizer.ggml.bos_token_id")
        named = "" if begins is None else self.model._model.token_get_text(int(begins))
        asked = self.model.metadata.get("tokenizer.ggml.add_bos_token") == "true"
        twice = bool(named) and text.startswith(named)
        return list(
            self.model.tokenize(text.encode(), add_bos=asked and not twice, special=special)
        )

    def logits(self, ids: list[int]) -> np.ndarray:
        """fp32 ``[len(ids), V]``."""
        self.model.reset()
        self.model.eval(ids)
        return np.array(self.model.scores[: len(ids)], np.float32)

    def ends(self, token: int) -> bool:
        """Whether generation ends at a token."""
        import llama_cpp

        return bool(llama_cpp.llama_vocab_is_eog(self.model._model.vocab, token))


@dataclass(frozen=True)
class Seen:
    """What llama.cpp made of a text with an image in it.

    Attributes:
        texts: token ids before, between and behind the pieces that a family cuts an image into; one
            more than those. -1 is a token that the family puts there and the vocabulary lacks.
        images: fp32 ``[n, D]`` each, what takes the place of token embeddings.
        logits: fp32 ``[V]`` of the token behind the text; None where a token is not there, or there
            are too few positions.
    """

    texts: list[list[int]]
    images: list[np.ndarray]
    logits: np.ndarray | None


PROGRAM = """
import importlib.util, json, sys
spec = importlib.util.spec_from_file_location("client", sys.argv[1])
client = importlib.util.module_from_spec(spec)
sys.modules["client"] = client
spec.loader.exec_module(client)
client.see_here(json.loads(sys.argv[2]))
"""


def see(
    projector: Path, language: Path, before: str, image: np.ndarray, after: str, tokens: int
) -> Seen:
    """A text with an image in it, read by llama.cpp in a process of its own, which it may end where
    something is wrong.

    Args:
        projector, language: the two files.
        image: uint8 ``[height, width, 3]``.
        tokens: positions, at most.

    Raises:
        ValueError: it cannot read it; the message has its last words.
    """
    with tempfile.TemporaryDirectory() as place:
        np.save(Path(place) / "image.npy", image)
        given = {
            "projector": str(projector),
            "language": str(language),
            "before": before,
            "after": after,
            "tokens": tokens,
        }
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }
        command = [sys.executable, "-c", PROGRAM, __file__, json.dumps({**given, "place": place})]
        ran = subprocess.run(
            command, env=environment, capture_output=True, text=True, errors="replace"
        )
        if ran.returncode:
            words = [
                line for line in ran.stderr.splitlines() if "Error: " in line or "GGML_" in line
            ]
            last = words[-1].strip() if words else f"it ended its process ({ran.returncode})"
            raise ValueError(f"{projector.name}: llama.cpp cannot read an image with it: {last}")
        said = json.loads((Path(place) / "seen.json").read_text())
        images = [np.load(Path(place) / f"{n}.npy") for n in range(said["images"])]
        logits = Path(place) / "logits.npy"
        return Seen(said["texts"], images, np.load(logits) if logits.exists() else None)


def see_here(given: Mapping[str, Any]) -> None:
    """``see`` in this process; what was seen is left in the folder ``place``."""
    place = Path(given["place"])
    client = LlamaCpp(Path(given["language"]), tokens=given["tokens"])
    seen = Eyes(Path(given["projector"]), client).see(
        given["before"], np.load(place / "image.npy"), given["after"]
    )
    for n, embeddings in enumerate(seen.images):
        np.save(place / f"{n}.npy", embeddings)
    if seen.logits is not None:
        np.save(place / "logits.npy", seen.logits)
    (place / "seen.json").write_text(json.dumps({"texts": seen.texts, "images": len(seen.images)}))
    os._exit(0)  # without what the client does at the end


class Eyes:
    """An mmproj file beside a language part, loaded by llama.cpp on the CPU.

    Raises:
        ValueError: it refuses the file; the message has its last words.
    """

    def __init__(self, projector: Path, language: LlamaCpp):
        import llama_cpp
        from llama_cpp import mtmd_cpp

        self.language = language
        said = heard()
        mtmd_cpp.mtmd_log_set(_callbacks[0], None)
        mtmd_cpp.mtmd_helper_log_set(_callbacks[0], None)
        said.clear()
        options = mtmd_cpp.mtmd_context_params_default()
        options.use_gpu = False
        options.print_timings = False
        options.warmup = False
        options.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self.context = mtmd_cpp.mtmd_init_from_file(
            str(projector).encode(), language.model._model.model, options
        )
        if self.context is None:
            raise ValueError(
                f"{projector.name}: llama.cpp cannot load it: "
                f"{' '.join(''.join(said).splitlines()[-3:])}"
            )

    def see(self, before: str, image: np.ndarray, after: str) -> Seen:
        """Read a text with an image in it.

        Args:
            image: uint8 ``[height, width, 3]``.
        """
        from llama_cpp import mtmd_cpp

        marker = mtmd_cpp.mtmd_default_marker().decode()
        text = f"{before}{marker}{after}".encode()
        given = mtmd_cpp.mtmd_input_text(
            text=text, text_len=len(text), add_special=True, parse_special=True
        )
        content = np.ascontiguousarray(image, np.uint8)
        pointer = content.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        bitmap = mtmd_cpp.mtmd_bitmap_init(image.shape[1], image.shape[0], pointer)
        chunks = mtmd_cpp.mtmd_input_chunks_init()
        try:
            bitmaps = (ctypes.c_void_p * 1)(bitmap)
            failed = mtmd_cpp.mtmd_tokenize(self.context, chunks, ctypes.byref(given), bitmaps, 1)
            if failed:
                size = f"{image.shape[1]} x {image.shape[0]} pixels"
                raise ValueError(f"llama.cpp cannot read an image of {size}: error {failed}")
            return self._seen(chunks)
        finally:
            mtmd_cpp.mtmd_input_chunks_free(chunks)
            mtmd_cpp.mtmd_bitmap_free(bitmap)

    def _seen(self, chunks: Any) -> Seen:
        from llama_cpp import mtmd_cpp

        texts: list[list[int]] = [[]]
        images = []
        for n in range(mtmd_cpp.mtmd_input_chunks_size(chunks)):
            chunk = mtmd_cpp.mtmd_input_chunks_get(chunks, n)
            if mtmd_cpp.mtmd_input_chunk_get_type(chunk) == mtmd_cpp.MTMD_INPUT_CHUNK_TYPE_IMAGE:
                images.append(self._encoded(chunk))
                texts.append([])
            else:
                texts[-1] += self._ids(chunk)
        whole = all(
            token >= 0 for text in texts for token in text
        )  # a token that is not there would end the process
        return Seen(texts, images, self._logits(chunks, iter(images)) if whole else None)

    def _ids(self, chunk: Any) -> list[int]:
        from llama_cpp import mtmd_cpp

        count = ctypes.c_size_t()
        found = mtmd_cpp.mtmd_input_chunk_get_tokens_text(chunk, ctypes.byref(count))
        return [int(found[n]) for n in range(count.value)]

    def _encoded(self, chunk: Any) -> np.ndarray:
        import llama_cpp
        from llama_cpp import mtmd_cpp

        failed = mtmd_cpp.mtmd_encode_chunk(self.context, chunk)
        if failed:
            raise ValueError(f"llama.cpp cannot encode an image: error {failed}")
        count = mtmd_cpp.mtmd_input_chunk_get_n_tokens(chunk)
        wide = llama_cpp.llama_model_n_embd(self.language.model._model.model)
        return np.ctypeslib.as_array(
            mtmd_cpp.mtmd_get_output_embd(self.context), (count, wide)
        ).copy()

    def _logits(self, chunks: Any, images: Iterator[np.ndarray]) -> np.ndarray | None:
        """Of the token behind everything, with embeddings as they were encoded."""
        import llama_cpp
        from llama_cpp import mtmd_cpp

        model = self.language.model
        if mtmd_cpp.mtmd_helper_get_n_tokens(chunks) > model.n_ctx():
            return None
        model.reset()
        model._ctx.kv_cache_clear()
        context = model._ctx.ctx
        past = llama_cpp.llama_pos(0)
        given = [
            mtmd_cpp.mtmd_input_chunks_get(chunks, n)
            for n in range(mtmd_cpp.mtmd_input_chunks_size(chunks))
        ]
        for chunk in given:
            if mtmd_cpp.mtmd_input_chunk_get_type(chunk) == mtmd_cpp.MTMD_INPUT_CHUNK_TYPE_IMAGE:
                values = next(images).ctypes.data_as(ctypes.POINTER(ctypes.c_float))
                failed = mtmd_cpp.mtmd_helper_decode_image_chunk(
                    self.context,
                    context,
                    chunk,
                    values,
                    past,
                    0,
                    model.n_batch,
                    ctypes.byref(past),
                    mtmd_cpp.mtmd_helper_post_decode_callback(),
                    None,
                )
            else:
                failed = mtmd_cpp.mtmd_helper_eval_chunk_single(
                    self.context,
                    context,
                    chunk,
                    past,
                    0,
                    model.n_batch,
                    chunk is given[-1],
                    ctypes.byref(past),
                )
            if failed:
                raise ValueError(f"llama.cpp cannot evaluate a text with an image: error {failed}")
        return np.ctypeslib.as_array(
            llama_cpp.llama_get_logits_ith(context, -1), (model.n_vocab(),)
        ).copy()
