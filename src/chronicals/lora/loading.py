"""Reading adapters, ours or PEFT's, into a model."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from chronicals.config.lora_init import is_init
from chronicals.lora.adapter_layer import AdapterLayer, in_file
from chronicals.lora.apply import apply_lora
from chronicals.lora.config import LoRAConfig
from chronicals.lora.embeddings import (
    Weights,
    modules_to_save,
    rows_of,
    stored_embeddings,
    take_embeddings,
)
from chronicals.lora.layers import LoRALinear, adapters
from chronicals.lora.peft_format import CONFIG_FILE, PREFIX, SEQUENCE_CLASSIFICATION, WEIGHTS_FILE
from chronicals.lora.starting_values import Start
from chronicals.lora.targets import targeted_paths, targets_of
from chronicals.lora.tokens import FILE_NAME, plan_tokens, trained_tokens
from chronicals.models import SCORE, embedding_table, score_of
from chronicals.models.loading import DAMAGED
from chronicals.models.lookahead_heads import is_of_head
from chronicals.models.reward_model import why_no_language_model

NEEDED = ("r", "lora_alpha", "target_modules")
"""Fields without which an adapter cannot be read."""


def load_adapter(model: Any, folder: str | Path) -> Any:
    """Attach the adapters in ``folder``, ours or PEFT's, to a model that has none; or refill those
    it has.

    Where an embedding is stored with them, because tokens were added, the model's becomes that one.

    Raises:
        ValueError: the folder holds something else than LoRA or DoRA, or its tensors do not fit the
            model, which is as it was.
    """
    folder = Path(folder)
    described = describe_adapter(folder)
    if described.get("task_type") == SEQUENCE_CLASSIFICATION and score_of(model) is None:
        raise ValueError(why_no_language_model(folder))
    attached = dict(adapters(model))
    config = _config(model, described, attached)
    for path, layer in attached.items():
        if not math.isclose(
            layer.scale, scale := config.at(layer.named_at(path)).scale, rel_tol=1e-12
        ):
            raise ValueError(
                f"{folder}: {path} is scaled by {scale:g}, the model's adapter by {layer.scale:g}"
            )
    if attached and model.chronicals_lora.use_dora != config.use_dora:
        which = (
            "is DoRA, the model's adapters are not"
            if config.use_dora
            else "is not DoRA, the model's adapters are"
        )
        raise ValueError(f"{folder}: {which}; load the model without adapters")
    if attached and set(model.chronicals_lora.modules_to_save or ()) != set(
        config.modules_to_save or ()
    ):
        here = model.chronicals_lora.modules_to_save
        raise ValueError(
            f"{folder}: was trained with modules_to_save={config.modules_to_save}, the model has "
            f"{here}"
        )
    whole = modules_to_save(model, config.modules_to_save)
    tensors = _tensors(folder)
    embeddings = _embeddings(model, folder, tensors, fixed=bool(attached))
    own = ((path, name) for path, module in whole.items() for name, _ in module.named_parameters())
    if absent := [
        f"{path} is in modules_to_save, and its {name}"
        for path, name in own
        if (path, name) not in embeddings
    ]:
        raise ValueError(f"{folder}: {absent[0]} is missing: save the adapter again")
    targets = [] if attached else targets_of(model, config, whole)
    shapes = {path: _shapes_of(layer) for path, layer in attached.items()}
    shapes |= {
        target.path: target.shapes(model, config, rows_of(model, embeddings)) for target in targets
    }
    tokens = {path: layer.token_ids.tolist() for path, layer in trained_tokens(model)}
    plan = _tokens(
        model,
        folder,
        config,
        {*shapes, *whole},
        rows_of(model, embeddings),
        tokens if attached else None,
    )
    wide = embedding_table(model).shape[1]
    rows = _taken(
        folder,
        tensors,
        {path: {FILE_NAME: torch.Size((len(ids), wide))} for path, ids in plan.items()},
        last=False,
    )
    for path in plan:  # of a head that is the embedding PEFT may store the same rows again
        same = [
            name
            for name in tensors
            if name.endswith(FILE_NAME) and torch.equal(tensors[name], rows[path][FILE_NAME])
        ]
        for name in same if len(plan) == 1 else ():
            del tensors[name]
    stored = _taken(folder, tensors, shapes)
    stored |= {
        path: _since_start(folder, path, layer, stored[path]) for path, layer in attached.items()
    }
    take_embeddings(model, embeddings, whole)
    if not attached:
        apply_lora(model, config.fitted([target.named for target in targets]))
    with torch.no_grad():
        for path, layer in adapters(model):
            for name, tensor in stored[path].items():
                getattr(layer, name.removesuffix(".weight")).copy_(tensor)
        for path, tokens_layer in trained_tokens(model):
            tokens_layer.values.copy_(rows[path][FILE_NAME])
    return model


def _tokens(
    model: Any,
    folder: Path,
    config: LoRAConfig,
    taken: Collection[str],
    rows: int,
    there: Mapping[str, list[int]] | None,
) -> Mapping[str, list[int]]:
    """The trained tokens of the adapter, which must be those that are ``there`` if adapters are
    attached.
    """
    if there is None:
        return plan_tokens(model, config.trainable_token_indices, taken, rows)
    asked = config.trainable_token_indices
    lists = [
        list(ids)
        for ids in (
            asked.values() if isinstance(asked, Mapping) else [] if asked is None else [asked]
        )
    ]
    if lists != list(there.values()) and (
        len(there) != 1 or any(ids != lists[0] for ids in (*lists, *there.values()))
    ):
        raise ValueError(
            f"{folder}: trainable_token_indices={asked}, the model's adapters have "
            f"{dict(there) or None}"
        )
    return there


def _shapes_of(layer: AdapterLayer) -> dict[str, torch.Size]:
    """Of what is trained of a layer, by the names in a file: with the starting values beside A
    and B where it has some.
    """
    if not isinstance(layer, LoRALinear) or layer.lora_start_A is None:
        return {in_file(name): layer.get_parameter(name).shape for name in layer.trained}
    (rank, wide) = layer.lora_A.shape
    narrow = len(layer.lora_B)
    return {
        "lora_A.weight": torch.Size((2 * rank, wide)),
        "lora_B.weight": torch.Size((narrow, 2 * rank)),
    }


def _since_start(
    folder: Path, path: str, layer: AdapterLayer, stored: dict[str, Tensor]
) -> dict[str, Tensor]:
    """A and B of a layer from those over its original weight; see ``starting_values``.

    Raises:
        ValueError: they started elsewhere than the layer, whose base is without another part of its
            weight.
    """
    if (
        not isinstance(layer, LoRALinear)
        or layer.lora_start_A is None
        or layer.lora_start_B is None
    ):
        return stored
    now, start = _halves(stored["lora_A.weight"], stored["lora_B.weight"])
    own = layer.lora_start_A, layer.lora_start_B
    if not all(torch.equal(value.to(kept), kept) for value, kept in zip(start, own, strict=True)):
        raise ValueError(
            f"{folder}: {path} started from other values than the model's adapter does; load the "
            "adapter over the original "
            "base instead, which has none: chronicals.lora.load_adapter, or --model with this "
            "folder"
        )
    return dict(zip(stored, now, strict=True))


def _halves(a: Tensor, b: Tensor) -> tuple[Start, Start]:
    """What an adapter is now and where it started, of ``[A ; A0]`` and ``[B  -B0]``."""
    rank = len(a) // 2
    return (a[:rank], b[:, :rank]), (a[rank:], -b[:, rank:])


def stored_start(folder: Path) -> dict[str, Start]:
    """Where the adapters in ``folder`` started, by path; of those that started from the weights of
    their base.

    Raises:
        ValueError: the file of weights cannot be read.
    """
    tensors = {
        name.removesuffix(".weight"): tensor for name, tensor in adapter_tensors(folder).items()
    }
    paths = [name.removesuffix(".lora_A") for name in tensors if name.endswith(".lora_A")]
    return {
        path: _halves(tensors[f"{path}.lora_A"], tensors[f"{path}.lora_B"])[1] for path in paths
    }


def describe_adapter(folder: Path) -> dict[str, Any]:
    """What ``adapter_config.json`` says of a LoRA or DoRA adapter.

    Raises:
        ValueError: it cannot be read, lacks a field, or is something else.
    """
    try:
        described = json.loads((folder / CONFIG_FILE).read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{folder}: no readable {CONFIG_FILE}: {error}") from error
    _refuse_what_is_not_known(folder, described)
    if described.get("target_modules") is None and described.get("target_parameters"):
        described["target_modules"] = []
    absent = [field for field in NEEDED if described.get(field) is None]
    if absent:
        raise ValueError(
            f"{folder / CONFIG_FILE}: {', '.join(absent)} is missing; it was cut or changed, save "
            "the adapter again"
        )
    return described


def _config(model: Any, described: dict[str, Any], attached: Mapping[str, Any]) -> LoRAConfig:
    wanted = described["target_modules"]
    excluded = described.get("exclude_modules")
    layers = described.get("layers_to_transform")
    if (excluded or layers not in (None, [])) and not attached:
        layers = [layers] if isinstance(layers, int) else layers or None
        lists = described.get("layers_pattern") or r"[^.]*"
        wanted = targeted_paths(
            model, wanted, excluded, layers, [lists] if isinstance(lists, str) else lists
        )
    return shape_of(described, wanted)


def shape_of(described: Mapping[str, Any], target_modules: list[str] | str) -> LoRAConfig:
    """The LoRAConfig of what ``describe_adapter`` returns, for these targets."""
    return LoRAConfig(
        rank=described["r"],
        alpha=described["lora_alpha"],
        dropout=described.get("lora_dropout", 0.0),
        target_modules=target_modules,
        use_rslora=described.get("use_rslora", False),
        rank_pattern=described.get("rank_pattern") or {},
        alpha_pattern=described.get("alpha_pattern") or {},
        modules_to_save=described.get("modules_to_save") or None,
        trainable_token_indices=described.get("trainable_token_indices") or None,
        target_parameters=described.get("target_parameters") or None,
        use_dora=described.get("use_dora", False),
        init=start
        if isinstance(start := described.get("init_lora_weights"), str) and _is_from_weights(start)
        else "default",
    )


def adapter_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors in an adapter's folder, by their names in the model.

    Raises:
        ValueError: the file of weights cannot be read.
    """
    return {name.removeprefix(PREFIX): tensor for name, tensor in _tensors(folder).items()}


def _tensors(folder: Path) -> dict[str, Tensor]:
    with _readable(folder):
        return load_file(folder / WEIGHTS_FILE)


@contextmanager
def _readable(folder: Path) -> Iterator[None]:
    """Within, the file of weights is read; what goes wrong is a ValueError that names it."""
    try:
        yield
    except SafetensorError as error:
        raise ValueError(f"{folder / WEIGHTS_FILE}: cannot be read ({error}): {DAMAGED}") from error
    except OSError as error:
        raise ValueError(f"{folder}: no readable {WEIGHTS_FILE}: {error}") from error


def stored_rows(folder: Path) -> int | None:
    """Rows of the embedding that is stored with an adapter; None where there is none."""
    with _readable(folder), safe_open(folder / WEIGHTS_FILE, framework="pt") as file:
        others = (".lora_", FILE_NAME, f"{PREFIX}{SCORE}.")
        names = [
            name
            for name in list(file.keys())
            if not is_of_head(name) and not any(other in name for other in others)
        ]
        return max((file.get_slice(name).get_shape()[0] for name in names), default=None)


def _embeddings(model: Any, folder: Path, tensors: dict[str, Tensor], fixed: bool) -> Weights:
    """Taken out of ``tensors``; ``fixed``: the model's embedding must have as many rows."""
    try:
        found = stored_embeddings(model, tensors, PREFIX)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None
    there = rows_of(model, found)
    here = embedding_table(model).shape[0]
    if fixed and there != here:
        raise ValueError(
            f"{folder}: its embedding has {there} rows, the model's {here}: add the tokens that "
            "were added before"
        )
    return found


def _taken(
    folder: Path,
    tensors: dict[str, Tensor],
    shapes: Mapping[str, Mapping[str, torch.Size]],
    last: bool = True,
) -> dict[str, dict[str, Tensor]]:
    """The tensors of each layer by name, all of ``shapes`` and, where these are the ``last``, no
    others.
    """
    found: dict[str, dict[str, Tensor]] = {path: {} for path in shapes}
    for path, expected in shapes.items():
        for name, shape in expected.items():
            stored = tensors.pop(f"{PREFIX}{path}.{name}", None)
            if stored is None or stored.shape != shape:
                own = name.removesuffix(".weight")
                raise ValueError(
                    f"{folder}: {path}.{own} is missing or not {tuple(shape)}: of another model?"
                )
            found[path][name] = stored
    if tensors and last:
        raise ValueError(
            f"{folder}: holds {len(tensors)} tensors that fit nothing, the first is "
            f"{next(iter(tensors))}"
        )
    return found


def _refuse_what_is_not_known(folder: Path, described: dict[str, Any]) -> None:
    if described.get("peft_type") != "LORA":
        raise ValueError(
            f"{folder}: peft_type={described.get('peft_type')!r}: only LORA adapters can be loaded"
        )
    for field in (
        "layer_replication",
        "alora_invocation_tokens",
        "use_qalora",
        "use_bdlora",
        "velora_config",
        "monteclora_config",
        "arrow_config",
        "kasa_config",
        "megatron_config",
    ):
        if described.get(field):
            remedy = (
                "merge the adapter into its base with PEFT's merge_and_unload and load that model"
            )
            raise ValueError(
                f"{folder}: {field}={described[field]!r} is not supported in this version; {remedy}"
            )
    start = described.get("init_lora_weights", True)
    harmless = start in (
        True,
        False,
        "gaussian",
        "orthogonal",
        "eva",
    )  # others change the weights of the base
    if not harmless and not (isinstance(start, str) and _is_from_weights(start)):
        raise ValueError(
            f"{folder}: init_lora_weights={start!r}: an adapter over changed base weights cannot "
            "be loaded"
        )
    if described.get("bias", "none") != "none" or described.get("lora_bias"):
        raise ValueError(
            f"{folder}: adapters with a trained bias are not supported in this version"
        )


def _is_from_weights(start: str) -> bool:
    """Whether it is one of ours that take a part of the base's weights."""
    return is_init(start) and start.startswith(("pissa", "olora"))
