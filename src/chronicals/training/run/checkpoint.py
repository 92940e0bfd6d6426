"""Checkpoints that are either complete or absent: safetensors and JSON, never pickle.

A checkpoint is a folder ``step-00000100`` that ``saving.write_folder`` wrote: ``model/`` (Hugging
Face weights, or a PEFT adapter, with the tokenizer), the states of the optimizer and of the random
number generators, ``state.json`` and ``manifest.json``. If one is damaged, the log names it and the
checkpoint before it is used.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import Parameter

from chronicals import saving
from chronicals.distributed import (
    VALUE,
    Mesh,
    RankFiles,
    ShardedAdamW,
    WeightShards,
    is_divided,
    local,
)
from chronicals.kernels.adamw import join_master, split_master
from chronicals.optimizers import FusedAdamW
from chronicals.saving import (
    CheckpointError,
    ModelParts,
    Piece,
    Staging,
    StoredStates,
    check_folder,
    optimizer_files,
    remove_folder,
    save_model,
    save_without_weights,
    trained,
    write_folder,
    write_optimizer,
    write_pieces,
)
from chronicals.saving import hash_file as _hash
from chronicals.standard_json import to_json

logger = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"
STATE_FILE = "state.json"
RNG = "rng.safetensors"
MODEL = "model"

STEP = re.compile(r"step-\d{8,}")
"""Pattern of the names of checkpoints; other folders beside them are the user's own."""


def check_checkpoint(folder: Path) -> str | None:
    """Return what is wrong with a checkpoint; None if it is whole."""
    damage = check_folder(folder, _hash)
    missing = [name for name in (STATE_FILE, RNG, MODEL) if not (folder / name).exists()]
    if not optimizer_files(folder):
        missing.append("optimizer.safetensors")
    return damage or (f"{missing[0]} is missing" if missing else None)


def checkpoints(output_dir: Path) -> list[Path]:
    """Return the folders of checkpoints, newest first, complete or not."""
    return sorted(
        (path for path in (output_dir / CHECKPOINTS).glob("step-*") if STEP.fullmatch(path.name)),
        reverse=True,
    )


def newest_valid(output_dir: Path) -> Path | None:
    """Return the newest complete checkpoint, or None; damaged ones are named in the log."""
    for folder in checkpoints(output_dir):
        damage = check_checkpoint(folder)
        if damage is None:
            return folder
        logger.error("%s: %s; the checkpoint before it is used", folder, damage)
    return None


@dataclass(frozen=True)
class CheckpointState:
    """The content of a checkpoint after one step.

    Attributes:
        weights: by the names of ``model.state_dict()``; none on ranks but the first.
        optimizer: by the names of ``optimizer_states``, whole, or this rank's pieces.
        random: of ``random_states``.
        facts: everything else, as JSON.
    """

    weights: Mapping[str, Any]
    optimizer: Mapping[str, Tensor | Piece]
    random: Mapping[str, Tensor]
    facts: Mapping[str, Any]

    def changing(self) -> dict[tuple[str, str], Tensor]:
        """Return the tensors that the next update changes, by place and name.

        Buffers are included, frozen weights are not.
        """
        return {
            **{
                ("weights", name): tensor
                for name, tensor in self.weights.items()
                if isinstance(tensor, Tensor)
                and (tensor.requires_grad or not isinstance(tensor, Parameter))
            },
            **{
                ("optimizer", name): state.tensor if isinstance(state, Piece) else state
                for name, state in self.optimizer.items()
            },
        }

    def staged(self, staging: Staging) -> CheckpointState:
        """Return the state with copies in host memory of all tensors that change.

        The copies are valid within ``staging.reading``.
        """
        copies = staging.copy(self.changing())
        weights = {
            name: copies.get(("weights", name), tensor) for name, tensor in self.weights.items()
        }
        optimizer = {
            name: replace(state, tensor=copies["optimizer", name])
            if isinstance(state, Piece)
            else copies["optimizer", name]
            for name, state in self.optimizer.items()
        }
        return replace(self, weights=weights, optimizer=optimizer)

    def write_optimizer(self, folder: Path, ranks: Mesh) -> None:
        """Write this rank's optimizer states: its pieces if they are sharded, else all states."""
        pieces: dict[str, Piece] = {}
        whole: dict[str, Tensor] = {}
        for name, state in self.optimizer.items():
            if isinstance(state, Piece):
                pieces[name] = state
            else:
                whole[name] = state
        if pieces or (ranks.count > 1 and not self.optimizer):
            write_pieces(pieces, folder, ranks.rank, ranks.count)
        else:
            write_optimizer(whole, folder)


@torch.no_grad()
def save_checkpoint(
    output_dir: Path,
    step: int,
    model: Any,
    text_files: Mapping[str, bytes],
    state: CheckpointState,
    keep: int,
    best: int | None = None,
    ranks: Mesh | None = None,
    beside: Callable[[Path], AbstractContextManager[Any]] = nullcontext,
    write_divided: Callable[..., None] | None = None,
    ready: Callable[[], None] | None = None,
) -> Path:
    """Write the checkpoint of ``step``, and remove the older checkpoints that are not to be kept.

    ``keep`` checkpoints remain: the new one, that of step ``best`` (even if ``keep`` is 1), and the
    newest of the others. Checkpoints of later steps do not count: they must be damaged, or the run
    would have resumed from them.

    Args:
        output_dir: folder of the run.
        step: number of steps done.
        model: the model, for its files.
        text_files: result of ``saving.text_files``.
        state: content of the checkpoint on this rank.
        keep: number of checkpoints that remain.
        best: step whose checkpoint stays; None for none.
        ranks: all ranks of the run; None for a single process.
        beside: context, given the folder, in which it is written; it brings the files of other
            ranks.
        write_divided: writes the model from the files of all ranks, if no rank has all weights.
            Called with the folder and the description of the data.
        ready: passed on to ``write_folder``.
    """
    folder = output_dir / CHECKPOINTS / name_of(step)

    def fill(aside: Path) -> None:
        about = state.facts.get("about", {})
        with beside(aside):
            if write_divided is None:
                save_model(aside / MODEL, model, text_files, about, state.weights)
            state.write_optimizer(aside, ranks or Mesh())
            save_file(dict(state.random), aside / RNG)
            (aside / STATE_FILE).write_text(to_json(state.facts, indent=1))
        if write_divided is not None:
            write_divided(aside, about=about)

    write_folder(folder, fill, ready)
    earlier = [other for other in checkpoints(output_dir) if other.name < folder.name]
    kept = [other for other in earlier if best is not None and other.name == name_of(best)]
    others = [other for other in earlier if other not in kept]
    for old in others[max(keep - 1 - len(kept), 0) :]:
        remove_folder(old)
    return folder


def name_of(step: int) -> str:
    """Return the folder name of the checkpoint of a step."""
    return f"step-{step:08d}"


def load_state(folder: Path) -> dict[str, Any]:
    """Return the facts of a checkpoint: everything but tensors."""
    return json.loads((folder / STATE_FILE).read_text())


def load_checkpoint_weights(folder: Path, model: Any) -> None:
    """Load the weights, or adapters, of a checkpoint into the model.

    Raises:
        CheckpointError: the checkpoint belongs to another model.
    """
    with _belonging_to(folder):
        saving.load_saved_weights(folder / MODEL, model)


@torch.no_grad()
def load_optimizer(folder: Path, model: Any, optimizer: FusedAdamW) -> dict[str, dict[str, Tensor]]:
    """Load the optimizer states of a checkpoint, bit for bit.

    The model must already have the weights of the checkpoint.

    Returns:
        The loaded states, by weight and name.

    Raises:
        CheckpointError: the checkpoint belongs to another model.
    """
    with _belonging_to(folder):
        stored = StoredStates(folder)
        found = {}
        for name, parameter in trained(model):
            states = stored.of(name)
            # Divided weights are stored in fp32: the lower half complements the bf16 value to it.
            value = states.pop(VALUE, None)
            if value is not None:
                states["low"] = split_master(value)[1]
            optimizer.load_state(parameter, states)
            found[name] = states
        return found


@torch.no_grad()
def load_divided(
    folder: Path, model: Any, optimizer: ShardedAdamW, ranks: Mesh, states: bool = True
) -> None:
    """Load weights whose rows are divided among the ranks, and their states.

    All ranks must call it.

    Only rank 0 needs to see the checkpoint. One weight is whole at a time, except if the checkpoint
    was written by ranks that each held all weights.

    Args:
        folder: the checkpoint.
        model: model whose weights are set.
        optimizer: optimizer whose states are set.
        ranks: all ranks of the run.
        states: load optimizer states too.

    Raises:
        CheckpointError: the checkpoint belongs to another model.
    """
    whole: Mapping[str, Tensor] = {}

    def open_whole_weights() -> None:
        nonlocal whole
        whole = _whole_weights(folder, model)

    ranks.writer_does(open_whole_weights, CheckpointError)
    stored = StoredStates(folder) if ranks.writer else None
    shards = optimizer.shards
    assert isinstance(shards, WeightShards)
    device = local(next(model.parameters())).device
    for name, parameter in model.named_parameters():
        trains = parameter.requires_grad and states
        sent = optimizer.empty_states(parameter) if trains else {}
        value = torch.empty(parameter.shape, dtype=local(parameter).dtype, device=device)
        if stored is not None:
            given: dict[str, Tensor] = {}
            if trains:
                given = stored.of(name)
            elif not whole:
                given = {VALUE: stored.read(f"{name}:{VALUE}")}
            if VALUE in given:
                value.copy_(given[VALUE])
            elif "low" in given and whole[name].dtype == torch.bfloat16:
                value.copy_(join_master(whole[name], given["low"]))
            else:
                value.copy_(whole[name])
            for part, tensor in sent.items():
                tensor.copy_(given[part])
        ranks.same_weights([value, *sent.values()])
        shards.set_value(parameter, value)
        if trains:
            optimizer.load_state(parameter, sent)


def _whole_weights(folder: Path, model: Any) -> Mapping[str, Tensor]:
    """Return the weights in the model's own files; none if the checkpoint has them with its states.

    Ranks that held all weights wrote them into the model's files.

    Raises:
        CheckpointError: the checkpoint belongs to another model.
    """
    with _belonging_to(folder):
        names = set(StoredStates(folder).names)
        values = {name for name in names if name.endswith(f":{VALUE}")}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and f"{name}:exp_avg" not in names:
                raise ValueError(f"it has no states of {name}")
            if values and f"{name}:{VALUE}" not in values:
                raise ValueError(f"it has no weight {name}")
        return {} if values else saving.stored_weights(folder / MODEL, model)


@contextmanager
def _belonging_to(folder: Path) -> Iterator[None]:
    try:
        yield
    except (ValueError, KeyError, OSError, RuntimeError) as error:
        raise CheckpointError(f"{folder}: does not belong to this model: {error}") from error


def optimizer_states(model: Any, optimizer: FusedAdamW) -> dict[str, Tensor | Piece]:
    """Return the optimizer's states, named ``weight:state``.

    They are this rank's pieces if they are sharded.
    """
    found = {
        f"{name}:{part}": state
        for name, parameter in trained(model)
        for part, state in (
            optimizer.pieces(parameter)
            if isinstance(optimizer, ShardedAdamW)
            else optimizer.state_of(parameter)
        ).items()
    }
    if isinstance(optimizer, ShardedAdamW) and isinstance(optimizer.shards, WeightShards):
        found |= optimizer.shards.values(dict(model.named_parameters()))
    return found


def random_states(ranks: Mesh) -> dict[str, Tensor]:
    """Return the random states of all ranks, which must all call it.

    Names are ``cpu`` and ``cuda`` for the first rank, ``cpu.1`` and so on for the others.
    """
    own = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        own["cuda"] = torch.cuda.get_rng_state()
    found = {device: ranks.gather(state) for device, state in own.items()}
    return {
        _of_rank(device, rank): state
        for device, states in found.items()
        for rank, state in enumerate(states)
    }


def restore_random_states(tensors: dict[str, Tensor], rank: int, folder: Path) -> None:
    """Restore the random states of this rank.

    If the checkpoint has none, this is logged, and the current ones stay.
    """
    if _of_rank("cpu", rank) not in tensors:
        logger.warning(
            "%s: was written by fewer processes, that of rank %d draws its random numbers anew",
            folder,
            rank,
        )
        return
    torch.set_rng_state(tensors[_of_rank("cpu", rank)])
    if _of_rank("cuda", rank) in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors[_of_rank("cuda", rank)])


def _of_rank(device: str, rank: int) -> str:
    return f"{device}.{rank}" if rank else device


class DividedModel:
    """Writer of the model files of a run whose weights are divided among the ranks by rows.

    The ranks that see the checkpoint's folder make the files from it, each rank a share. All ranks
    must create the writer.

    Args:
        dtype: dtype of trained weights in the files.
    """

    def __init__(self, model: Any, dtype: torch.dtype):
        self._parts = ModelParts(model)
        self._dtype = dtype
        first = {id(p): name for name, p in model.named_parameters() if is_divided(p)}
        values = model.state_dict(keep_vars=True)
        self._stored = {name: first[id(p)] for name, p in values.items() if id(p) in first}
        self._here = {
            name: value.detach() for name, value in values.items() if name not in self._stored
        }

    def write(
        self,
        folder: Path,
        name: str,
        files: RankFiles,
        text_files: Mapping[str, bytes],
        about: Mapping[str, Any],
    ) -> None:
        """Write the model, on the first rank, together with the ranks that see the folder.

        Args:
            folder: the checkpoint's folder.
            name: the model's folder in it.
            files: files of all ranks.
            text_files: result of ``saving.text_files``.
            about: description of the run's data.

        Raises:
            CheckpointError: another rank could not write its share.
        """
        (folder / name).mkdir()
        save_without_weights(folder / name, self._parts.form, text_files, about)
        files.share(folder, lambda *turn: self.write_share(name, *turn))
        self._parts.name_files(folder / name)

    def write_share(self, name: str, folder: Path, turn: int, turns: int) -> None:
        """Write one of ``turns`` shares of the files of ``name``."""
        stored = StoredStates(folder)
        self._parts.write(
            folder / name,
            turn,
            turns,
            lambda names: {key: self._read(stored, key) for key in names},
        )

    def _read(self, stored: StoredStates, name: str) -> Tensor:
        if name in self._here:
            return self._here[name]
        value = stored.read(f"{self._stored[name]}:{VALUE}")
        return (
            split_master(value)[0]
            if value.dtype == torch.float32 and self._dtype == torch.bfloat16
            else value
        )
