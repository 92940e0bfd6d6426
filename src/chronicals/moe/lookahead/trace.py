"""Router traces on disk: ``trace.json`` and ``trace-00000.npz``, ``trace-00001.npz`` … in a folder.

Fields of ``trace.json``:

    version        2
    model, model_type
    layers         indices of the decoder layers with routed experts
    num_experts, k, hidden_size
    config_sha256, model_sha256      digests by which the traced model is recognised
    choice         the rule that chooses experts from logits (``choosing.py``)
    features       true if the files hold features
    files          [{"name", "tokens", "documents"}]
    tokens         in all files together

``docs/traces.md`` documents the format for its readers. Each file holds little-endian NumPy arrays
by name, for T tokens in N documents:

    token_ids   int32   [T]
    documents   int64   [N + 1]     document bounds
    experts     uint8   [L, T, k]   uint16 with more than 256 experts
    weights     float16 [L, T, k]   factors of the outputs of the chosen experts
    logits      float16 [L, T, E]   router logits
    features    float16 [L, T, D]   optional: normed inputs of the layers before attention
    hidden      float16 [T, D]      with the features: last hidden states
    embeddings  float16 [T, D]      with the features: token embeddings
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self
from zipfile import BadZipFile

import numpy as np
import torch

from chronicals.config import ChronicalsConfig
from chronicals.moe.lookahead.choosing import SAMPLE, Choice
from chronicals.moe.lookahead.recording import Recorded, record_data
from chronicals.moe.routers import experts_per_token, mixture_layers
from chronicals.standard_json import to_json

logger = logging.getLogger(__name__)

_VERSION = 2
INDEX = "trace.json"
ALWAYS = ("token_ids", "documents", "experts", "weights", "logits")
OPTIONAL = ("features", "hidden", "embeddings")


OF_LOADING = {
    "transformers_version",
    "architectures",
    "dtype",
    "torch_dtype",
    "quantization_config",
    "use_cache",
    "output_router_logits",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "attn_implementation",
    "experts_implementation",
}
"""Configuration fields that say how a model is loaded, run or saved; the digest excludes them.

It also excludes fields that begin with ``_``.
"""


def configuration_digest(config: Any) -> str:
    """Return the hexadecimal sha256 of the fields of a transformers configuration."""
    return hashlib.sha256(to_json(_sorted(config.to_dict())).encode()).hexdigest()


def _sorted(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {str(name): _sorted(part) for name, part in value.items() if name not in OF_LOADING}
        return {name: kept[name] for name in sorted(kept) if not name.startswith("_")}
    return [_sorted(part) for part in value] if isinstance(value, list | tuple) else value


def checksum(model: Any) -> str:
    """Return the hexadecimal sha256 of all parameters and buffers with their names."""
    found = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        found.update(name.encode())
        found.update(
            tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        )
    return found.hexdigest()


@dataclass
class TraceInfo:
    """Contents of ``trace.json``."""

    model: str
    model_type: str
    layers: list[int]
    num_experts: int
    k: int
    hidden_size: int
    features: bool
    config_sha256: str
    model_sha256: str
    choice: dict[str, Any] | None = None
    files: list[dict[str, Any]] = field(default_factory=list)
    tokens: int = 0
    version: int = _VERSION

    @classmethod
    def of(cls, model: Any, k: int, features: bool, name: str = "") -> Self:
        """Describe ``model`` for a new trace.

        Args:
            model: a mixture-of-experts model.
            k: experts per token.
            features: the files are to hold features.
            name: folder or name of the model; by default that in its configuration.
        """
        layers = mixture_layers(model)
        config = model.config.get_text_config()
        numbers = [layer.number for layer in layers]
        width = model.get_input_embeddings().weight.shape[1]
        return cls(
            name or model.config._name_or_path,
            config.model_type,
            numbers,
            layers[0].num_experts,
            k,
            width,
            features,
            configuration_digest(model.config),
            checksum(model),
        )


class TraceWriter:
    """Writer of a trace, with one file for each ``Recorded``.

    ``close`` writes the index last, so a folder without an index is not a complete trace.

    Args:
        folder: created if missing; must not hold a trace.

    Raises:
        ValueError: it holds one.
    """

    def __init__(self, folder: Path, info: TraceInfo):
        self.folder = folder
        self.info = info
        if (folder / INDEX).exists():
            raise ValueError(f"{folder}: holds a trace already; name another folder")
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, recorded: Recorded) -> None:
        """Write one file of the trace.

        Raises:
            ValueError: the trace is to have features, and they were not recorded.
        """
        ids = np.uint8 if self.info.num_experts <= 256 else np.uint16
        kinds = {"token_ids": np.int32, "documents": np.int64, "experts": ids}
        names = ALWAYS + (OPTIONAL if self.info.features else ())
        given = {name: getattr(recorded, name) for name in names}
        missing = [name for name, value in given.items() if value is None]
        if missing:
            raise ValueError(
                f"the trace is to have {', '.join(missing)}, and they were not recorded; "
                "record(features=True)"
            )
        arrays = {}
        for name, value in given.items():
            wide = value.float() if value.is_floating_point() else value
            arrays[name] = wide.cpu().numpy().astype(kinds.get(name, np.float16))
        file = f"trace-{len(self.info.files):05d}.npz"
        np.savez(self.folder / file, **arrays)  # type: ignore[arg-type]
        self.info.files.append(
            {"name": file, "tokens": len(recorded), "documents": len(recorded.documents) - 1}
        )
        self.info.tokens += len(recorded)

    def close(self) -> TraceInfo:
        """Write the index."""
        (self.folder / INDEX).write_text(to_json(asdict(self.info), indent=1))
        return self.info


def record_trace(
    model: Any,
    tokenizer: Any,
    source: Any,
    config: ChronicalsConfig,
    folder: Path,
    features: bool = False,
    tokens: int | None = None,
    name: str = "",
) -> TraceInfo:
    """Run a mixture over data and write what its routers do as a trace.

    If no known rule reproduces the chosen experts, the trace has no ``choice`` and a warning is
    logged.

    Args:
        model: a mixture-of-experts model.
        tokenizer: the model's tokenizer.
        source: data, as ``train`` takes it.
        config: pack width, batch size and data settings.
        folder: folder of the trace.
        features: record what heads predict from, too.
        tokens: stop after this many tokens; None for all.
        name: name of the model, as for ``TraceInfo.of``.

    Raises:
        DataError: the data cannot be read.
        ValueError: the model is not a known mixture, there is no token, or the folder already holds
            a trace.
    """
    writer = TraceWriter(folder, TraceInfo.of(model, experts_per_token(model), features, name))
    sample = list[Recorded]()
    for recorded in record_data(model, tokenizer, source, config, features, tokens):
        if sum(map(len, sample)) < SAMPLE:
            sample.append(replace(recorded, features=None, hidden=None, embeddings=None))
        writer.add(recorded)
    if not sample:
        raise ValueError("there is no token to trace; give more data")
    try:
        writer.info.choice = asdict(Choice.found(model, sample))
    except ValueError as error:
        logger.warning("%s from this trace: %s", folder, error)
    return writer.close()


class Trace:
    """A trace on disk that is read one part (file) at a time.

    Raises:
        ValueError: there is no complete trace, or one of another version.
    """

    def __init__(self, folder: Path):
        try:
            said = json.loads((folder / INDEX).read_text())
        except (OSError, json.JSONDecodeError) as error:
            raise ValueError(
                f"{folder}: no trace is there ({INDEX}: {error}); make one with chronicals moe "
                "trace"
            ) from None
        if said.get("version") != _VERSION:
            raise ValueError(
                f"{folder / INDEX}: version {said.get('version')}, known is {_VERSION}; record it "
                "again"
            )
        self.folder = folder
        self.info = TraceInfo(**said)

    def part(self, number: int) -> Recorded:
        """Read part ``number`` into host memory; floats stay in 16 bits.

        Raises:
            ValueError: the file is damaged or does not match the index.
        """
        file = self.info.files[number]
        path = self.folder / file["name"]
        found = {}
        try:
            with np.load(path) as arrays:
                for name in ALWAYS + (OPTIONAL if self.info.features else ()):
                    array = arrays[name]
                    # torch can index with int64 alone.
                    array = array if array.dtype.kind == "f" else array.astype(np.int64)
                    found[name] = torch.from_numpy(array)
        except (OSError, KeyError, ValueError, BadZipFile) as error:
            raise ValueError(f"{path}: the trace is damaged ({error}); record it again") from None
        shape = (len(self.info.layers), file["tokens"], self.info.k)
        if found["experts"].shape != shape:
            raise ValueError(
                f"{path}: experts of shape {tuple(found['experts'].shape)}, {INDEX} says {shape}; "
                "record it again"
            )
        return Recorded(**found)

    def first(self, parts: Iterable[int], tokens: int) -> list[int]:
        """Return the first of ``parts`` that hold ``tokens`` tokens, or all if they hold fewer."""
        found = []
        seen = 0
        for number in parts:
            if seen >= tokens:
                break
            found.append(number)
            seen += self.info.files[number]["tokens"]
        return found

    def check(self, model: Any, weights: str | None = None) -> str:
        """Check that heads of ``model`` can be trained from this trace.

        Args:
            model: the model that heads are to be trained for.
            weights: the checksum of the model, if known.

        Returns:
            The checksum of the model.

        Raises:
            ValueError: the trace is of another model, has no features, or has no known choice.
        """
        name = model.config._name_or_path or type(model).__name__
        theirs = self.info.model or self.info.model_type
        if configuration_digest(model.config) != self.info.config_sha256:
            raise ValueError(
                f"{self.folder}: is a trace of {theirs} ({self.info.model_type}), whose "
                f"configuration is not that of {name} "
                f"({model.config.get_text_config().model_type}); name the model that was traced, "
                "or trace this one"
            )
        weights = weights or checksum(model)
        if weights != self.info.model_sha256:
            raise ValueError(
                f"{self.folder}: is a trace of {theirs} with weights "
                f"{self.info.model_sha256[:8]}, and {name} has "
                f"{weights[:8]}; give the adapter, the quantization and the dtype that were "
                "traced, or trace this model"
            )
        if not self.info.features:
            raise ValueError(
                f"{self.folder}: the trace has no features, from which heads predict; record it "
                "with --features"
            )
        if self.info.choice is None:
            raise ValueError(
                f"{self.folder}: the trace does not say how experts are chosen, for no rule known "
                "here gives them"
            )
        return weights


def read_trace(folder: Path) -> tuple[TraceInfo, Iterator[Recorded]]:
    """Return the index of a trace and an iterator over its files, in fp32 on the CPU.

    One file is read at a time.

    Raises:
        ValueError: there is no complete trace, or one of another version.
    """
    trace = Trace(folder)

    def parts() -> Iterator[Recorded]:
        for number in range(len(trace.info.files)):
            recorded = trace.part(number)
            wide = {
                name: value.float()
                for name, value in vars(recorded).items()
                if value is not None and value.is_floating_point()
            }
            yield replace(recorded, **wide)

    return trace.info, parts()
