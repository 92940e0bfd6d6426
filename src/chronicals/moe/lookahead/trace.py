"""Router traces on disk: ``trace.json`` and ``trace-00000.npz``, ``trace-00001.npz`` … in a folder.

Fields of ``trace.json``:

    version        2
    model, model_type
    layers         indices of the decoder layers with routed experts
    num_experts, k, hidden_size
    config_sha256, model_sha256      digests of the configuration and the weights (``identity.py``)
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

import json
import logging
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

from chronicals.config import ChronicalsConfig
from chronicals.moe.lookahead.choosing import SAMPLE, Choice
from chronicals.moe.lookahead.identity import checksum, config_digest
from chronicals.moe.lookahead.recording import Recorded, record_data
from chronicals.moe.mixture_parts import mixture_layers
from chronicals.moe.routers import experts_per_token
from chronicals.standard_json import to_json

logger = logging.getLogger(__name__)

_VERSION = 2
INDEX = "trace.json"
ALWAYS = ("token_ids", "documents", "experts", "weights", "logits")
OPTIONAL = ("features", "hidden", "embeddings")


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
            config_digest(model.config),
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
        name = f"trace-{len(self.info.files):05d}.npz"
        np.savez(self.folder / name, **_arrays(recorded, self.info))  # type: ignore[arg-type]
        self.info.files.append(
            {"name": name, "tokens": len(recorded), "documents": len(recorded.documents) - 1}
        )
        self.info.tokens += len(recorded)

    def close(self) -> TraceInfo:
        """Write the index."""
        (self.folder / INDEX).write_text(to_json(asdict(self.info), indent=1))
        return self.info


def _arrays(recorded: Recorded, info: TraceInfo) -> dict[str, np.ndarray]:
    ids = np.uint8 if info.num_experts <= 256 else np.uint16
    kinds = {"token_ids": np.int32, "documents": np.int64, "experts": ids}
    names = ALWAYS + (OPTIONAL if info.features else ())
    given = {name: getattr(recorded, name) for name in names}
    if missing := [name for name, value in given.items() if value is None]:
        raise ValueError(
            f"the trace is to have {', '.join(missing)}, and they were not recorded; "
            "record(features=True)"
        )
    wide = {
        name: value.float() if value.is_floating_point() else value for name, value in given.items()
    }
    return {
        name: value.cpu().numpy().astype(kinds.get(name, np.float16))
        for name, value in wide.items()
    }


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
        source, config, features, tokens: as for ``record_data``.
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
        writer.info.choice = Choice.found(model, sample).to_dict()
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
        return _read(self.folder / file["name"], file["tokens"], self.info)

    def first(self, parts: Iterable[int], tokens: int) -> list[int]:
        """Return the first of ``parts`` that together hold ``tokens`` tokens, or all if they hold
        fewer.
        """
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
            weights: the checksum of the model, if known.

        Returns:
            The checksum of the model.

        Raises:
            ValueError: the trace is of another model, has no features, or has no known choice.
        """
        name = model.config._name_or_path or type(model).__name__
        theirs = self.info.model or self.info.model_type
        if config_digest(model.config) != self.info.config_sha256:
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
    """Return the index of a trace, and an iterator that reads one file at a time, in fp32 on the
    CPU.

    Raises:
        ValueError: there is no complete trace, or one of another version.
    """
    trace = Trace(folder)
    return trace.info, (_wide(trace.part(number)) for number in range(len(trace.info.files)))


def _wide(recorded: Recorded) -> Recorded:
    named = {
        name: value
        for name, value in vars(recorded).items()
        if value is not None and value.is_floating_point()
    }
    return replace(recorded, **{name: value.float() for name, value in named.items()})


def _read(path: Path, tokens: int, info: TraceInfo) -> Recorded:
    try:
        with np.load(path) as arrays:
            found = {
                name: _tensor(arrays[name]) for name in ALWAYS + (OPTIONAL if info.features else ())
            }
    except (OSError, KeyError, ValueError, BadZipFile) as error:
        raise ValueError(f"{path}: the trace is damaged ({error}); record it again") from None
    shape = (len(info.layers), tokens, info.k)
    if found["experts"].shape != shape:
        raise ValueError(
            f"{path}: experts of shape {tuple(found['experts'].shape)}, {INDEX} says {shape}; "
            "record it again"
        )
    return Recorded(**found)


def _tensor(array: np.ndarray) -> Tensor:
    """Convert to a tensor; integers become int64, which torch can index with."""
    return torch.from_numpy(array if array.dtype.kind == "f" else array.astype(np.int64))
