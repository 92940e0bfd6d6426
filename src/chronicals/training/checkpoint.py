"""Checkpoints that are whole or not there: safetensors and JSON, never pickle.

A checkpoint is a folder ``step-00000100``: ``model/`` (Hugging Face weights, or a PEFT adapter, with the tokenizer), the
optimizer's states (``optimizer_files.py``), ``rng.safetensors``, ``state.json``, and ``manifest.json`` with the size and
SHA-256 of every other file. It is written aside, each file synced, the manifest last, then the folder gets its name. What has
a name but does not match its manifest was damaged later: it is named in the log and the one before it is used.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from chronicals.distributed import Ranks
from chronicals.lora import adapters, load_adapter, name_base_by_absolute_path, save_adapter
from chronicals.models import load_whole, save_processors, within_lora
from chronicals.optimizers import FusedAdamW
from chronicals.standard_json import to_json
from chronicals.training.errors import CheckpointError
from chronicals.training.optimizer_files import optimizer_files, read_optimizer, write_optimizer

logger = logging.getLogger(__name__)

CHECKPOINTS, MANIFEST, STATE, RNG, MODEL = "checkpoints", "manifest.json", "state.json", "rng.safetensors", "model"

READERS = 8
"""Files that are synced and hashed at a time."""

STEP = re.compile(r"step-\d{8,}")
"""Names of checkpoints; other folders beside them are somebody's own."""


def write_folder(target: Path, fill: Callable[[Path], None]) -> None:
    """Make ``target`` appear whole: ``fill`` writes into a folder aside, which is synced, described and renamed.

    The caller holds the lock of the run, so what lies aside under such a name was left by a process that died.

    Raises:
        CheckpointError: the disk is full or not writable; nothing of the new folder stays, nothing else is touched.
    """
    aside = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(target)
        aside.mkdir()
        fill(aside)
        files = sorted(path for path in aside.rglob("*") if path.is_file())
        with ThreadPoolExecutor(READERS) as readers:
            described = dict(zip((str(path.relative_to(aside)) for path in files), readers.map(_describe, files)))
        (aside / MANIFEST).write_text(json.dumps(described, indent=1))
        _sync(aside / MANIFEST)
        for folder in (aside, *(path for path in aside.rglob("*") if path.is_dir())):
            _sync(folder)
        replaced = aside.with_name(f".replaced-{aside.name[1:]}")
        if os.path.lexists(target):
            os.rename(target, replaced)
        try:
            os.rename(aside, target)
        except OSError:
            if os.path.lexists(replaced):
                os.rename(replaced, target)
            raise
        _sync(target.parent)
        _remove(replaced)
    except Exception as error:
        shutil.rmtree(aside, ignore_errors=True)
        if _is_full(error):
            raise CheckpointError(
                f"{target}: the disk is full ({shutil.disk_usage(target.parent).free / 2**20:.0f} MiB free); free some "
                "or lower save_total_limit; the checkpoints written before are intact"
            ) from error
        if isinstance(error, OSError) or "I/O error" in str(error):
            raise CheckpointError(f"{target}: cannot be written: {error}") from error
        raise


def check_folder(folder: Path) -> str | None:
    """What is wrong with a folder that ``write_folder`` made, None if it is whole."""
    try:
        described = json.loads((folder / MANIFEST).read_text())
        if not isinstance(described, dict):
            return f"{MANIFEST} is no description of files"
    except (OSError, ValueError) as error:
        return f"{MANIFEST} cannot be read ({error})"
    with ThreadPoolExecutor(READERS) as readers:
        damages = readers.map(partial(_damage, folder), described, described.values())
        return next((damage for damage in damages if damage is not None), None)


def _damage(folder: Path, name: str, expected: Any) -> str | None:
    """What is wrong with one of its files."""
    if not isinstance(expected, dict) or not {"size", "sha256"} <= expected.keys():
        return f"{MANIFEST} does not describe {name}"
    path = folder / name
    try:
        if not path.is_file():
            return f"{name} is missing"
        whole = path.stat().st_size == expected["size"] and _hash(path) == expected["sha256"]
    except OSError as error:
        return f"{name} cannot be read ({error})"
    return None if whole else f"{name} is damaged"


def check_checkpoint(folder: Path) -> str | None:
    """What is wrong with a checkpoint, None if it is whole."""
    damage = check_folder(folder)
    missing = [name for name in (STATE, RNG, MODEL) if not (folder / name).exists()]
    if not optimizer_files(folder):
        missing.append("optimizer.safetensors")
    return damage or (f"{missing[0]} is missing" if missing else None)


def checkpoints(output_dir: Path) -> list[Path]:
    """Folders of checkpoints, newest first, whole or not."""
    return sorted((path for path in (output_dir / CHECKPOINTS).glob("step-*") if STEP.fullmatch(path.name)), reverse=True)


def newest_valid(output_dir: Path) -> Path | None:
    """The newest checkpoint that is whole; damaged ones are named in the log."""
    for folder in checkpoints(output_dir):
        damage = check_checkpoint(folder)
        if damage is None:
            return folder
        logger.error("%s: %s; the checkpoint before it is used", folder, damage)
    return None


def save_checkpoint(
    output_dir: Path, step: int, model: Any, tokenizer: Any, optimizer: FusedAdamW, state: dict[str, Any],
    random_states: dict[str, Tensor], keep: int, best: int | None = None,
) -> Path:  # fmt: skip
    """Write the checkpoint of ``step``, and of those before it remove all but ``keep - 1``: that of step ``best`` stays, also
    where ``keep`` is 1, and beside it the newest.

    Those of later steps were damaged, or the run would not have come here again: they take no whole one's place.
    """
    folder = output_dir / CHECKPOINTS / name_of(step)

    def fill(aside: Path) -> None:
        save_model(aside / MODEL, model, tokenizer, state.get("about", {}))
        write_optimizer(_optimizer_tensors(model, optimizer), aside)
        save_file(random_states, aside / RNG)
        (aside / STATE).write_text(to_json(state, indent=1))

    write_folder(folder, fill)
    earlier = [other for other in checkpoints(output_dir) if other.name < folder.name]
    kept = [other for other in earlier if best is not None and other.name == name_of(best)]
    others = [other for other in earlier if other not in kept]
    for old in others[max(keep - 1 - len(kept), 0) :]:
        _remove(old)
    return folder


def name_of(step: int) -> str:
    """Of the checkpoint of a step."""
    return f"step-{step:08d}"


def save_model(folder: Path, model: Any, tokenizer: Any, about: dict[str, Any]) -> None:
    """The weights as Hugging Face or PEFT reads them, the tokenizer, and ``chronicals.json`` with what was trained."""
    folder.mkdir(parents=True, exist_ok=True)
    if next(adapters(model), None) is not None:
        save_adapter(model, folder)
    else:
        model.save_pretrained(folder)
        name_base_by_absolute_path(folder)
    save_processors(within_lora(model), folder)
    tokenizer.save_pretrained(folder)
    (folder / "chronicals.json").write_text(to_json(about, indent=1))


def load_state(folder: Path) -> dict[str, Any]:
    return json.loads((folder / STATE).read_text())


@torch.no_grad()
def load_weights(folder: Path, model: Any) -> None:
    """Put the weights, or adapters, of a checkpoint into the model.

    Raises:
        CheckpointError: the checkpoint belongs to another model.
    """
    with _belonging_to(folder):
        if next(adapters(model), None) is not None:
            load_adapter(model, folder / MODEL)
        elif hasattr(model, "get_base_model"):
            _load_peft(folder / MODEL, model)
        else:
            _load_whole_model(folder / MODEL, model)


@torch.no_grad()
def load_optimizer(folder: Path, model: Any, optimizer: FusedAdamW) -> None:
    """Put the optimizer states of a checkpoint back, bit for bit; the weights must already be its own.

    Raises:
        CheckpointError: the checkpoint belongs to another model.
    """
    with _belonging_to(folder):
        stored = read_optimizer(folder)
        for name, parameter in _trained(model):
            prefix = f"{name}:"
            state = {key[len(prefix) :]: value for key, value in stored.items() if key.startswith(prefix)}
            optimizer.load_state(parameter, state)


@contextmanager
def _belonging_to(folder: Path) -> Iterator[None]:
    try:
        yield
    except (ValueError, KeyError, OSError, RuntimeError) as error:
        raise CheckpointError(f"{folder}: does not belong to this model: {error}") from error


def _load_whole_model(folder: Path, model: Any) -> None:
    """Through ``from_pretrained``, which undoes whatever ``save_pretrained`` did to names and shapes."""
    if (folder / "adapter_config.json").exists():
        raise ValueError("it holds adapters, and the model has none; set use_lora as before")
    kinds = {parameter.dtype for parameter in model.parameters()}
    dtype = kinds.pop() if len(kinds) == 1 else torch.float32  # which holds what any of them holds
    stored = load_whole(type(model), folder, dtype=dtype, use_safetensors=True).state_dict()
    own = model.state_dict()
    if stored.keys() != own.keys():
        raise ValueError(
            f"{len(stored.keys() ^ own.keys())} tensors are not in both, the first is {min(stored.keys() ^ own.keys())}"
        )
    for name, tensor in own.items():
        if tensor.shape != stored[name].shape:
            raise ValueError(f"{name} is {list(stored[name].shape)} there and {list(tensor.shape)} here")
    for name, tensor in own.items():
        tensor.copy_(stored[name])


SHAPED_BY = ("peft_type", "r", "lora_alpha", "use_rslora", "use_dora")
"""Fields of PEFT's configuration without whose values an adapter's matrices mean something else."""


def _load_peft(folder: Path, model: Any) -> None:
    """What PEFT's wrapping of a model saved: its adapters, those that are not ``default`` in folders by their names."""
    from peft import PeftConfig, set_peft_model_state_dict

    own = {name: tensor.clone() for name, tensor in _trained(model)}
    try:
        for adapter, config in model.peft_config.items():
            place = folder if adapter == "default" else folder / adapter
            before = PeftConfig.from_pretrained(str(place))
            for field in SHAPED_BY:
                if getattr(before, field, None) != getattr(config, field, None):
                    values = getattr(before, field, None), getattr(config, field, None)
                    raise ValueError(f"adapter {adapter!r} has {field}={values[0]!r} there and {values[1]!r} here")
            found = set_peft_model_state_dict(model, load_file(place / "adapter_model.safetensors"), adapter_name=adapter)
            if found.unexpected_keys:
                raise ValueError(f"the model has no {found.unexpected_keys[0]}")
    except Exception:
        for name, tensor in _trained(model):
            tensor.copy_(own[name])
        raise


def _trained(model: Any) -> Iterator[tuple[str, Tensor]]:
    return ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)


def _optimizer_tensors(model: Any, optimizer: FusedAdamW) -> dict[str, Tensor]:
    return {
        f"{name}:{part}": tensor
        for name, parameter in _trained(model)
        for part, tensor in optimizer.state_of(parameter).items()
    }


def random_states(ranks: Ranks) -> dict[str, Tensor]:
    """Those of all ranks, which must all ask: ``cpu`` and ``cuda`` are the first one's, ``cpu.1`` and so on the others'."""
    own = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        own["cuda"] = torch.cuda.get_rng_state()
    found = {device: ranks.gather(state) for device, state in own.items()}
    return {_of_rank(device, rank): state for device, states in found.items() for rank, state in enumerate(states)}


def load_random_states(folder: Path) -> dict[str, Tensor]:
    """Those of all ranks that wrote the checkpoint."""
    return load_file(folder / RNG)


def restore_random_states(tensors: dict[str, Tensor], rank: int, folder: Path) -> None:
    """Those of this rank; without any it goes on with what it has, which the log says."""
    if _of_rank("cpu", rank) not in tensors:
        logger.warning("%s: was written by fewer processes, that of rank %d draws its random numbers anew", folder, rank)
        return
    torch.set_rng_state(tensors[_of_rank("cpu", rank)])
    if _of_rank("cuda", rank) in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors[_of_rank("cuda", rank)])


def _of_rank(device: str, rank: int) -> str:
    return f"{device}.{rank}" if rank else device


def _describe(path: Path) -> dict[str, Any]:
    _sync(path)
    return {"size": path.stat().st_size, "sha256": _hash(path)}


def _hash(path: Path) -> str:
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _is_full(error: BaseException) -> bool:
    """Or its quota is; safetensors reports that as an error of its own, with the system's words in it."""
    numbers = errno.ENOSPC, errno.EDQUOT
    return getattr(error, "errno", None) in numbers or any(f"os error {number})" in str(error) for number in numbers)


def _remove(path: Path) -> None:
    """A folder, or a link to one, whose target stays; what cannot be removed is named in the log and stays."""
    try:
        if path.is_symlink() or path.is_file():
            path.unlink()
        elif path.exists():
            shutil.rmtree(path)
    except OSError as error:
        logger.warning("%s: could not be removed (%s)", path, error)


def _remove_leftovers(target: Path) -> None:
    """What processes that were killed left aside of this folder, and of those called alike but for their number. A folder
    that was to be replaced, and was not, has its name back."""
    kin = re.sub(r"\d+", r"\\d+", re.escape(target.name))
    for folder in sorted(target.parent.glob(".*")):
        found = re.fullmatch(rf"\.(replaced-)?({kin})\.\d+", folder.name)
        if found and found[1] and not os.path.lexists(folder.with_name(found[2])):
            os.rename(folder, folder.with_name(found[2]))
        elif found:
            _remove(folder)
