"""Load adapters, ours or PEFT's, into a model."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from chronicals.config.values import is_init
from chronicals.lora.apply import apply_lora
from chronicals.lora.config import LoRAConfig
from chronicals.lora.embeddings import (
    embedding_rows,
    modules_to_save,
    stored_embeddings,
    take_embeddings,
)
from chronicals.lora.layers import AdapterLayer, LoRALinear, adapters, in_file
from chronicals.lora.peft_format import (
    ADAPTER_PREFIX,
    CONFIG_FILE,
    SEQUENCE_CLASSIFICATION,
    WEIGHTS_FILE,
)
from chronicals.lora.starting_values import Start
from chronicals.lora.targets import targeted_paths, targets_of
from chronicals.lora.tokens import FILE_NAME, plan_tokens, trained_tokens
from chronicals.models import SCORE, embedding_table, score_of
from chronicals.models.checkpoint_checks import why_no_language_model
from chronicals.models.loading import DAMAGED
from chronicals.models.routed_experts import is_of_head

REQUIRED_FIELDS = ("r", "lora_alpha", "target_modules")
"""Fields without which an adapter cannot be read."""

UNSUPPORTED_FIELDS = (
    "layer_replication",
    "alora_invocation_tokens",
    "use_qalora",
    "use_bdlora",
    "velora_config",
    "monteclora_config",
    "arrow_config",
    "kasa_config",
    "megatron_config",
)
"""Fields of PEFT by which an adapter is more than LoRA or DoRA over its base."""


def load_adapter(model: Any, folder: str | Path) -> Any:
    """Attach the adapters in ``folder``, ours or PEFT's, to a model, and return the model.

    If the model has adapters, the stored values are loaded into those.

    If an embedding is stored with them, because tokens were added, it replaces the model's.

    Raises:
        ValueError: the folder has something else than LoRA or DoRA, or its tensors do not fit the
            model, which is unchanged then.
    """
    folder = Path(folder)
    described = describe_adapter(folder)
    if described.get("task_type") == SEQUENCE_CLASSIFICATION and score_of(model) is None:
        raise ValueError(why_no_language_model(folder))
    attached = dict(adapters(model))
    config = _config(model, described, attached)
    if attached:
        _check_attached(folder, config, model.chronicals_lora, attached)

    whole = modules_to_save(model, config.modules_to_save)
    with _readable(folder):
        tensors = load_file(folder / WEIGHTS_FILE)
    try:
        embeddings = stored_embeddings(model, tensors, ADAPTER_PREFIX)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None
    row_count = embedding_rows(model, embeddings)
    own_count = embedding_table(model).shape[0]
    if attached and row_count != own_count:
        raise ValueError(
            f"{folder}: its embedding has {row_count} rows, the model's {own_count}: add the "
            "tokens that were added before"
        )
    for path, module in whole.items():
        for name, _ in module.named_parameters():
            if (path, name) not in embeddings:
                raise ValueError(
                    f"{folder}: {path} is in modules_to_save, and its {name} is missing: save the "
                    "adapter again"
                )

    targets = [] if attached else targets_of(model, config, whole)
    shapes = {path: _shapes_of(layer) for path, layer in attached.items()}
    shapes |= {target.path: target.shapes(model, config, row_count) for target in targets}

    plan = _planned_tokens(
        model, folder, config, {*shapes, *whole}, row_count, fixed=bool(attached)
    )
    rows = _pop_rows(folder, tensors, plan, embedding_table(model).shape[1])
    stored = _pop_tensors(folder, tensors, shapes)
    for path, layer in attached.items():
        stored[path] = _since_start(folder, path, layer, stored[path])

    # Everything fits: the model is changed from here on.
    take_embeddings(model, embeddings, whole)
    if not attached:
        apply_lora(model, config.fitted([target.named for target in targets]))
    with torch.no_grad():
        for path, layer in adapters(model):
            for name, tensor in stored[path].items():
                getattr(layer, name.removesuffix(".weight")).copy_(tensor)
        for path, tokens_layer in trained_tokens(model):
            tokens_layer.values.copy_(rows[path])
    return model


def _check_attached(
    folder: Path, config: LoRAConfig, current: LoRAConfig, attached: Mapping[str, AdapterLayer]
) -> None:
    """Raise ValueError if the attached adapters are of another kind or scale than the stored.

    Args:
        folder: folder of the stored adapters.
        config: their configuration.
        current: configuration of the attached adapters.
        attached: the attached adapters by path.
    """
    for path, layer in attached.items():
        scale = config.at(layer.named_at(path)).scale
        if not math.isclose(layer.scale, scale, rel_tol=1e-12):
            raise ValueError(
                f"{folder}: {path} is scaled by {scale:g}, the model's adapter by {layer.scale:g}"
            )
    if current.use_dora != config.use_dora:
        difference = "is not DoRA, the model's adapters are"
        if config.use_dora:
            difference = "is DoRA, the model's adapters are not"
        raise ValueError(f"{folder}: {difference}; load the model without adapters")
    if set(current.modules_to_save or ()) != set(config.modules_to_save or ()):
        raise ValueError(
            f"{folder}: was trained with modules_to_save={config.modules_to_save}, the model has "
            f"{current.modules_to_save}"
        )


def _planned_tokens(
    model: Any,
    folder: Path,
    config: LoRAConfig,
    taken: Collection[str],
    rows: int,
    fixed: bool,
) -> Mapping[str, list[int]]:
    """Return the trained tokens of the stored adapter by path.

    Args:
        model: the model.
        folder: folder of the stored adapter.
        config: its configuration.
        taken: paths of layers that are trained in another way.
        rows: number of rows that the embedding will have.
        fixed: whether adapters are attached, whose trained tokens must be the same.
    """
    stored = config.trainable_token_indices
    if not fixed:
        return plan_tokens(model, stored, taken, rows)

    attached = {path: layer.token_ids.tolist() for path, layer in trained_tokens(model)}
    lists: list[list[int]] = []
    if isinstance(stored, Mapping):
        lists = [list(ids) for ids in stored.values()]
    elif stored is not None:
        lists = [list(stored)]
    if lists != list(attached.values()) and (
        not lists
        or len(attached) != 1
        or any(ids != lists[0] for ids in (*lists, *attached.values()))
    ):
        raise ValueError(
            f"{folder}: trainable_token_indices={stored}, the model's adapters have "
            f"{attached or None}"
        )
    return attached


def _pop_rows(
    folder: Path, tensors: dict[str, Tensor], plan: Mapping[str, Sequence[int]], width: int
) -> dict[str, Tensor]:
    """Remove the rows of trained tokens from ``tensors`` and return them by path."""
    shapes = {path: {FILE_NAME: torch.Size((len(ids), width))} for path, ids in plan.items()}
    popped = _pop_tensors(folder, tensors, shapes, last=False)
    rows = {path: by_name[FILE_NAME] for path, by_name in popped.items()}

    if len(rows) == 1:
        # PEFT may store the same rows again for a head that is the embedding.
        (only_rows,) = rows.values()
        for name in [name for name in tensors if name.endswith(FILE_NAME)]:
            if torch.equal(tensors[name], only_rows):
                del tensors[name]
    return rows


def _shapes_of(layer: AdapterLayer) -> dict[str, torch.Size]:
    """Return the shapes of the trained parameters of a layer by their names in a file.

    Starting values, if there are any, stand beside A and B there.
    """
    if not isinstance(layer, LoRALinear) or layer.lora_start_A is None:
        return {in_file(name): layer.get_parameter(name).shape for name in layer.trained}
    rank, inputs = layer.lora_A.shape
    outputs = len(layer.lora_B)
    return {
        "lora_A.weight": torch.Size((2 * rank, inputs)),
        "lora_B.weight": torch.Size((outputs, 2 * rank)),
    }


def _since_start(
    folder: Path, path: str, layer: AdapterLayer, stored: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Return A and B of a layer without the starting values, which are stored beside them.

    See ``starting_values``.

    Raises:
        ValueError: the stored adapter started at other values than the layer, from whose base
            another part was taken.
    """
    if (
        not isinstance(layer, LoRALinear)
        or layer.lora_start_A is None
        or layer.lora_start_B is None
    ):
        return stored
    values, (start_a, start_b) = _halves(stored["lora_A.weight"], stored["lora_B.weight"])
    layer_a = layer.lora_start_A
    layer_b = layer.lora_start_B
    same_a = torch.equal(start_a.to(layer_a), layer_a)
    if not same_a or not torch.equal(start_b.to(layer_b), layer_b):
        raise ValueError(
            f"{folder}: {path} started from other values than the model's adapter does; load the "
            "adapter over the original base instead, which has none: chronicals.lora.load_adapter, "
            "or --model with this folder"
        )
    return dict(zip(stored, values, strict=True))


def _halves(a: Tensor, b: Tensor) -> tuple[Start, Start]:
    """Return (A, B) and the starting values (A0, B0) from ``[A ; A0]`` and ``[B  -B0]``."""
    rank = len(a) // 2
    return (a[:rank], b[:, :rank]), (a[rank:], -b[:, rank:])


def stored_start(folder: Path) -> dict[str, Start]:
    """Return the starting values by path of adapters that started from the weights of their base.

    Raises:
        ValueError: the file of weights cannot be read.
    """
    tensors = {
        name.removesuffix(".weight"): tensor for name, tensor in adapter_tensors(folder).items()
    }
    starts: dict[str, Start] = {}
    for name, a in tensors.items():
        if name.endswith(".lora_A"):
            path = name.removesuffix(".lora_A")
            _, starts[path] = _halves(a, tensors[f"{path}.lora_B"])
    return starts


def describe_adapter(folder: Path) -> dict[str, Any]:
    """Return the fields of ``adapter_config.json`` of a LoRA or DoRA adapter.

    Raises:
        ValueError: the file cannot be read, lacks a field, or is of another kind of adapter.
    """
    try:
        described = json.loads((folder / CONFIG_FILE).read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{folder}: no readable {CONFIG_FILE}: {error}") from error

    if described.get("peft_type") != "LORA":
        raise ValueError(
            f"{folder}: peft_type={described.get('peft_type')!r}: only LORA adapters can be loaded"
        )
    for field in UNSUPPORTED_FIELDS:
        if described.get(field):
            raise ValueError(
                f"{folder}: {field}={described[field]!r} is not supported in this version; merge "
                "the adapter into its base with PEFT's merge_and_unload and load that model"
            )
    start = described.get("init_lora_weights", True)
    # Other kinds change the weights of the base.
    keeps_weights = start in (True, False, "gaussian", "orthogonal", "eva")
    if not keeps_weights and not (isinstance(start, str) and _is_from_weights(start)):
        raise ValueError(
            f"{folder}: init_lora_weights={start!r}: an adapter over changed base weights cannot "
            "be loaded"
        )
    if described.get("bias", "none") != "none" or described.get("lora_bias"):
        raise ValueError(
            f"{folder}: adapters with a trained bias are not supported in this version"
        )

    if described.get("target_modules") is None and described.get("target_parameters"):
        described["target_modules"] = []
    absent = [field for field in REQUIRED_FIELDS if described.get(field) is None]
    if absent:
        raise ValueError(
            f"{folder / CONFIG_FILE}: {', '.join(absent)} is missing; it was cut or changed, save "
            "the adapter again"
        )
    return described


def stored_config(model: Any, folder: str | Path) -> LoRAConfig:
    """Return the configuration of the adapters in ``folder`` for ``model``, which has none.

    Raises:
        ValueError: the folder has something else than LoRA or DoRA.
    """
    return _config(model, describe_adapter(Path(folder)), {})


def _config(model: Any, described: dict[str, Any], attached: Mapping[str, Any]) -> LoRAConfig:
    """Return the configuration of stored adapters for this model."""
    wanted = described["target_modules"]
    excluded = described.get("exclude_modules")
    layers = described.get("layers_to_transform")
    if (excluded or layers not in (None, [])) and not attached:
        layers = [layers] if isinstance(layers, int) else layers or None
        lists = described.get("layers_pattern") or r"[^.]*"
        wanted = targeted_paths(
            model, wanted, excluded, layers, [lists] if isinstance(lists, str) else lists
        )
    return described_config(described, wanted)


def described_config(described: Mapping[str, Any], target_modules: list[str] | str) -> LoRAConfig:
    """Return the LoRAConfig of the fields of ``describe_adapter``, for these targets."""
    start = described.get("init_lora_weights")
    moves_weights = isinstance(start, str) and _is_from_weights(start)
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
        init=str(start) if moves_weights else "default",
    )


def adapter_tensors(folder: Path) -> dict[str, Tensor]:
    """Return the tensors in an adapter's folder by their names in the model.

    Raises:
        ValueError: the file of weights cannot be read.
    """
    with _readable(folder):
        tensors = load_file(folder / WEIGHTS_FILE)
    return {name.removeprefix(ADAPTER_PREFIX): tensor for name, tensor in tensors.items()}


@contextmanager
def _readable(folder: Path) -> Iterator[None]:
    """Raise errors of a block that reads the file of weights as ValueError that names the file."""
    try:
        yield
    except SafetensorError as error:
        raise ValueError(f"{folder / WEIGHTS_FILE}: cannot be read ({error}): {DAMAGED}") from error
    except OSError as error:
        raise ValueError(f"{folder}: no readable {WEIGHTS_FILE}: {error}") from error


def stored_rows(folder: Path) -> int | None:
    """Return the number of rows of the embedding that is stored with an adapter, or None."""
    with _readable(folder), safe_open(folder / WEIGHTS_FILE, framework="pt") as file:
        others = (".lora_", FILE_NAME, f"{ADAPTER_PREFIX}{SCORE}.")
        rows = []
        for name in list(file.keys()):
            if not is_of_head(name) and not any(other in name for other in others):
                rows.append(file.get_slice(name).get_shape()[0])
        return max(rows, default=None)


def _pop_tensors(
    folder: Path,
    tensors: dict[str, Tensor],
    shapes: Mapping[str, Mapping[str, torch.Size]],
    last: bool = True,
) -> dict[str, dict[str, Tensor]]:
    """Remove the tensors of each layer from ``tensors`` and return them by path and name.

    Args:
        folder: folder of the stored adapter.
        tensors: tensors by name.
        shapes: shapes of the tensors, all of which must be present, by path and name.
        last: whether no other tensors may be left.
    """
    popped: dict[str, dict[str, Tensor]] = {path: {} for path in shapes}
    for path, expected in shapes.items():
        for name, shape in expected.items():
            stored = tensors.pop(f"{ADAPTER_PREFIX}{path}.{name}", None)
            if stored is None or stored.shape != shape:
                parameter = name.removesuffix(".weight")
                raise ValueError(
                    f"{folder}: {path}.{parameter} is missing or not {tuple(shape)}: of another "
                    "model?"
                )
            popped[path][name] = stored
    if tensors and last:
        raise ValueError(
            f"{folder}: holds {len(tensors)} tensors that fit nothing, the first is "
            f"{next(iter(tensors))}"
        )
    return popped


def _is_from_weights(start: str) -> bool:
    """Return whether an ``init_lora_weights`` is one of ours that take a part of the weights."""
    return is_init(start) and start.startswith(("pissa", "olora"))
