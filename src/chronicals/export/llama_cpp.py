"""llama.cpp as a client that reads written files, through the package llama-cpp-python.

No other file imports that package.
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
NOT_INSTALLED = f"{PACKAGE} is not installed: pip install {PACKAGE}"
"""Reason why a check by llama.cpp was not run."""

GGML_F32 = 0
"""ggml's fp32, for the cache of keys and values, so that these are not rounded."""


def is_there() -> bool:
    """Return whether the package is installed."""
    return importlib.util.find_spec("llama_cpp") is not None


@functools.cache
def log_lines() -> deque[str]:
    """Return the last log messages of llama.cpp, which it would print otherwise."""
    import llama_cpp

    lines: deque[str] = deque(maxlen=200)
    callback = llama_cpp.llama_log_callback(
        lambda level, text, _: lines.append(text.decode(errors="replace"))
    )
    llama_cpp.llama_log_set(callback, ctypes.c_void_p(0))
    _callbacks.append(callback)
    return lines


_callbacks: list[Any] = []
"""Log callbacks, kept alive here since llama.cpp holds only their addresses."""


def quantise(
    source: Path, target: Path, file_type: int, importance: Mapping[str, np.ndarray] | None = None
) -> None:
    """Let llama.cpp write a file whose weights have other types.

    Args:
        source: a file in F32 or 16 bits.
        target: the new file.
        file_type: of ``gguf.LlamaFileType``.
        importance: by the name of a tensor in the file, fp32 ``[in]``: the mean square of each
            column's inputs; ``[E, in]`` for a tensor of experts.

    Raises:
        ValueError: llama.cpp refuses; the message has its last log line.
    """
    import llama_cpp

    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = file_type
    options.nthread = 0
    values = {
        name.encode(): np.ascontiguousarray(x, np.float32) for name, x in (importance or {}).items()
    }
    # The list ends with an entry without a name.
    entries = (llama_cpp.llama_model_imatrix_data * (len(values) + 1))()
    for entry, (name, x) in zip(entries, values.items()):
        entry.name = name
        entry.data = x.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        entry.size = x.size
    if values:
        options.imatrix = ctypes.cast(entries, ctypes.POINTER(llama_cpp.llama_model_imatrix_data))
    log = log_lines()
    log.clear()
    failed = llama_cpp.llama_model_quantize(
        str(source).encode(), str(target).encode(), ctypes.byref(options)
    )
    if failed:
        reason = f"error {failed}"
        for line in "".join(log).splitlines():
            if "error" in line.lower() or "missing" in line.lower():
                reason = line.strip()
        raise ValueError(f"{target.name}: llama.cpp cannot quantise this model: {reason}")


class LlamaCpp:
    """A file, loaded by llama.cpp on the CPU.

    Args:
        tokens: size of the context, and of a batch.
        vocabulary_only: weights are not loaded; the model only tokenises.
        adapter: GGUF file that is added to the weights.
    """

    def __init__(
        self,
        path: Path,
        tokens: int = 512,
        vocabulary_only: bool = False,
        adapter: Path | None = None,
    ):
        from llama_cpp import Llama

        log_lines()
        options: dict[str, Any] = {"vocab_only": True}
        if not vocabulary_only:
            options = {
                "n_ctx": tokens,
                "n_batch": tokens,
                "logits_all": True,
                "flash_attn": False,
                "type_k": GGML_F32,
                "type_v": GGML_F32,
                "lora_path": None if adapter is None else str(adapter),
            }
        self.model = Llama(str(path), n_gpu_layers=0, verbose=False, **options)

    def ids(self, text: str, special: bool = True) -> list[int]:
        """Return the token ids of a text, with the BOS that the file asks for.

        A text that begins with BOS gets no second one.
        """
        number = self.model.metadata.get("tokenizer.ggml.bos_token_id")
        bos = "" if number is None else self.model._model.token_get_text(int(number))
        adds_bos = self.model.metadata.get("tokenizer.ggml.add_bos_token") == "true"
        if bos and text.startswith(bos):
            adds_bos = False
        return list(self.model.tokenize(text.encode(), add_bos=adds_bos, special=special))

    def logits(self, ids: list[int]) -> np.ndarray:
        """Return the logits behind every token, fp32 ``[len(ids), V]``."""
        self.model.reset()
        self.model.eval(ids)
        return np.array(self.model.scores[: len(ids)], np.float32)

    def ends(self, token: int) -> bool:
        """Return whether generation ends at a token."""
        import llama_cpp

        return bool(llama_cpp.llama_vocab_is_eog(self.model._model.vocab, token))


@dataclass(frozen=True)
class Seen:
    """Token ids, embeddings and logits of llama.cpp for a text with an image in it.

    Attributes:
        texts: token ids before, between and behind the pieces that a family cuts an image into; one
            list more than pieces. -1 is a token that the family puts there and the vocabulary
            lacks.
        images: embeddings of each piece in place of those of tokens, fp32 ``[n, D]``.
        logits: of the token behind the text, fp32 ``[V]``; None if a token is lacking, or the
            context is too short.
    """

    texts: list[list[int]]
    images: list[np.ndarray]
    logits: np.ndarray | None


_PROGRAM = """
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
    """Let llama.cpp read a text with an image in it, in a process of its own.

    llama.cpp ends its process if something is wrong.

    Args:
        projector: GGUF file of the part that reads images.
        language: GGUF file of the language part.
        before: the text in front of the image.
        image: uint8 ``[height, width, 3]``.
        after: the text behind the image.
        tokens: size of the context.

    Raises:
        ValueError: it cannot read it; the message has its last log line.
    """
    with tempfile.TemporaryDirectory() as place:
        np.save(Path(place) / "image.npy", image)
        arguments = {
            "projector": str(projector),
            "language": str(language),
            "before": before,
            "after": after,
            "tokens": tokens,
            "place": place,
        }
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }
        command = [sys.executable, "-c", _PROGRAM, __file__, json.dumps(arguments)]
        ran = subprocess.run(
            command, env=environment, capture_output=True, text=True, errors="replace"
        )
        if ran.returncode:
            words = [
                line for line in ran.stderr.splitlines() if "Error: " in line or "GGML_" in line
            ]
            last = words[-1].strip() if words else f"it ended its process ({ran.returncode})"
            raise ValueError(f"{projector.name}: llama.cpp cannot read an image with it: {last}")
        seen = json.loads((Path(place) / "seen.json").read_text())
        images = [np.load(Path(place) / f"{n}.npy") for n in range(seen["images"])]
        logits = Path(place) / "logits.npy"
        return Seen(seen["texts"], images, np.load(logits) if logits.exists() else None)


def see_here(arguments: Mapping[str, Any]) -> None:
    """Do the work of ``see`` in this process, and leave the results in the folder ``place``."""
    place = Path(arguments["place"])
    client = LlamaCpp(Path(arguments["language"]), tokens=arguments["tokens"])
    reader = ImageReader(Path(arguments["projector"]), client)
    seen = reader.see(arguments["before"], np.load(place / "image.npy"), arguments["after"])
    for n, embeddings in enumerate(seen.images):
        np.save(place / f"{n}.npy", embeddings)
    if seen.logits is not None:
        np.save(place / "logits.npy", seen.logits)
    (place / "seen.json").write_text(json.dumps({"texts": seen.texts, "images": len(seen.images)}))
    os._exit(0)  # without the client's own clean-up


class ImageReader:
    """An mmproj file beside a language part, loaded by llama.cpp on the CPU.

    Raises:
        ValueError: llama.cpp refuses the file; the message has its last log lines.
    """

    def __init__(self, projector: Path, language: LlamaCpp):
        import llama_cpp
        from llama_cpp import mtmd_cpp

        self.language = language
        log = log_lines()
        mtmd_cpp.mtmd_log_set(_callbacks[0], None)
        mtmd_cpp.mtmd_helper_log_set(_callbacks[0], None)
        log.clear()
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
                f"{' '.join(''.join(log).splitlines()[-3:])}"
            )

    def see(self, before: str, image: np.ndarray, after: str) -> Seen:
        """Read a text with an image in it.

        Args:
            before: the text in front of the image.
            image: uint8 ``[height, width, 3]``.
            after: the text behind the image.
        """
        import llama_cpp
        from llama_cpp import mtmd_cpp

        marker = mtmd_cpp.mtmd_default_marker().decode()
        text = f"{before}{marker}{after}".encode()
        marked_text = mtmd_cpp.mtmd_input_text(
            text=text, text_len=len(text), add_special=True, parse_special=True
        )
        content = np.ascontiguousarray(image, np.uint8)
        pointer = content.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        bitmap = mtmd_cpp.mtmd_bitmap_init(image.shape[1], image.shape[0], pointer)
        chunks = mtmd_cpp.mtmd_input_chunks_init()
        try:
            bitmaps = (ctypes.c_void_p * 1)(bitmap)
            failed = mtmd_cpp.mtmd_tokenize(
                self.context, chunks, ctypes.byref(marked_text), bitmaps, 1
            )
            if failed:
                size = f"{image.shape[1]} x {image.shape[0]} pixels"
                raise ValueError(f"llama.cpp cannot read an image of {size}: error {failed}")
            texts: list[list[int]] = [[]]
            images = []
            for n in range(mtmd_cpp.mtmd_input_chunks_size(chunks)):
                chunk = mtmd_cpp.mtmd_input_chunks_get(chunks, n)
                kind = mtmd_cpp.mtmd_input_chunk_get_type(chunk)
                if kind == mtmd_cpp.MTMD_INPUT_CHUNK_TYPE_IMAGE:
                    failed = mtmd_cpp.mtmd_encode_chunk(self.context, chunk)
                    if failed:
                        raise ValueError(f"llama.cpp cannot encode an image: error {failed}")
                    count = mtmd_cpp.mtmd_input_chunk_get_n_tokens(chunk)
                    width = llama_cpp.llama_model_n_embd(self.language.model._model.model)
                    embeddings = mtmd_cpp.mtmd_get_output_embd(self.context)
                    images.append(np.ctypeslib.as_array(embeddings, (count, width)).copy())
                    texts.append([])
                else:
                    length = ctypes.c_size_t()
                    ids = mtmd_cpp.mtmd_input_chunk_get_tokens_text(chunk, ctypes.byref(length))
                    texts[-1] += [int(ids[i]) for i in range(length.value)]
            # Evaluating a token that the vocabulary lacks would end the process.
            is_whole = all(min(text, default=0) >= 0 for text in texts)
            return Seen(texts, images, self._logits(chunks, iter(images)) if is_whole else None)
        finally:
            mtmd_cpp.mtmd_input_chunks_free(chunks)
            mtmd_cpp.mtmd_bitmap_free(bitmap)

    def _logits(self, chunks: Any, images: Iterator[np.ndarray]) -> np.ndarray | None:
        """Return the logits of the token behind everything, fp32 ``[V]``.

        Args:
            chunks: of the text, as llama.cpp holds them.
            images: embeddings of the chunks that are images.
        """
        import llama_cpp
        from llama_cpp import mtmd_cpp

        model = self.language.model
        if mtmd_cpp.mtmd_helper_get_n_tokens(chunks) > model.n_ctx():
            return None
        model.reset()
        model._ctx.kv_cache_clear()
        context = model._ctx.ctx
        past = llama_cpp.llama_pos(0)
        count = mtmd_cpp.mtmd_input_chunks_size(chunks)
        for n in range(count):
            chunk = mtmd_cpp.mtmd_input_chunks_get(chunks, n)
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
                    n == count - 1,
                    ctypes.byref(past),
                )
            if failed:
                raise ValueError(f"llama.cpp cannot evaluate a text with an image: error {failed}")
        logits = llama_cpp.llama_get_logits_ith(context, -1)
        return np.ctypeslib.as_array(logits, (model.n_vocab(),)).copy()
