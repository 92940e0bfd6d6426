"""Checks of the inputs of a run: device, class of the model, vocabulary, data, and stop token.

A missing embedding row for a token is an error, or is added if asked for. A model with more tokens
than rows can be trained as long as no data has such a token, but no export format accepts it. Only
the padding token may lack a row, since its row is never read.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from chronicals.config import ChronicalsConfig, ConfigurationError
from chronicals.data import (
    RowSource,
    TokenStore,
    open_divided,
    open_held_out,
    open_store,
    stop_token_ids,
)
from chronicals.distributed import Mesh
from chronicals.generation import why_layers_not_exact, why_not_served
from chronicals.models import embedding_table, input_device
from chronicals.models.loading import RUNS_ON
from chronicals.objectives import OBJECTIVES
from chronicals.policies.facts import DIVIDE_WEIGHTS
from chronicals.saving import text_files
from chronicals.training.adapters import with_token_ids

logger = logging.getLogger(__name__)


def one_device(model: Any, ranks: Mesh, divided: bool = False) -> torch.device:
    """Return the single device of the model, and make it the current one.

    With several processes, the model is moved to the GPU of this process.

    Args:
        model: the model as the user gives it.
        ranks: all ranks of the run.
        divided: do not move the weights, which get there when they are divided among processes.

    Raises:
        ConfigurationError: the model is spread over several devices, or would have to be moved
            with layers that bitsandbytes keeps in 8 bits.
    """
    if divided:
        setattr(model, RUNS_ON, ranks.device)
        return ranks.device
    if ranks.device.type == "cuda" and (
        ranks.count > 1 or getattr(model, "hf_device_map", None) is None
    ):
        elsewhere = {p.device for p in model.parameters()} - {ranks.device}
        if elsewhere and getattr(model, "is_loaded_in_8bit", False):
            # bitsandbytes multiplies by a second reference to the codes, which stays behind.
            raise ConfigurationError(
                f"the model's layers in 8 bits lie on {', '.join(sorted(map(str, elsewhere)))}, "
                f"and bitsandbytes cannot move them to {ranks.device}; load the model there, with "
                f'device_map={{"": {ranks.device.index or 0}}}'
            )
        model.to(ranks.device)
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1 or torch.device("meta") in devices:
        raise ConfigurationError(
            f"the model is spread over {', '.join(sorted(map(str, devices)))}; load it on one "
            "device, for example with "
            'device_map={"": 0}'
        )
    device = input_device(model)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # Triton launches kernels on the current device
    return device


def check_class(model: Any) -> None:
    """Check that the model is a causal language model.

    Raises:
        ValueError: it is not.
    """
    name = type(model).__name__
    if hasattr(model, "_orig_mod"):
        raise ValueError(
            "torch.compile(model) is a shell around the model; give the model itself, which "
            "model.compile() compiles in place"
        )
    if model.config.is_encoder_decoder:
        raise ValueError(
            f"{name} has an encoder beside its decoder; only causal language models are trained "
            "here"
        )
    if model.get_output_embeddings() is None:
        scored = name.endswith("ForSequenceClassification")
        how = (
            "chronicals.models.load_scored, to train its score further"
            if scored
            else "AutoModelForCausalLM"
        )
        raise ValueError(f"{name} has no head that predicts tokens; load it with {how}")


def fit_precision(config: ChronicalsConfig, device: torch.device) -> ChronicalsConfig:
    """Return ``config`` with products in fp16 on a card without bf16, unless bf16 was asked for.

    Raises:
        ConfigurationError: bf16 was asked for, by its name or by weights without fp32 masters.
    """
    if (
        config.mixed_precision != "bf16"
        or device.type != "cuda"
        or torch.cuda.is_bf16_supported(including_emulation=False)
    ):
        return config
    if "mixed_precision" in config.explicit:
        raise ConfigurationError(
            "mixed_precision='bf16': this card has no bf16; use mixed_precision='fp16'"
        )
    if not config.master_weights:
        raise ConfigurationError("master_weights=False: this card has no bf16; leave it out")
    logger.info("mixed_precision: fp16, for this card has no bf16")
    return config.fitted(mixed_precision="fp16")


def check_tokenizer(model: Any, tokenizer: Any) -> None:
    """Check that the tokenizer is the same after it is saved to a temporary folder and read back.

    Raises:
        ConfigurationError: it is not, so users of the trained model would get another tokenizer.
    """
    try:
        text_files(model, tokenizer)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error


def open_stores(
    train: RowSource,
    held_out: RowSource | None,
    embedding_rows: int,
    tokenizer: Any,
    config: ChronicalsConfig,
    ranks: Mesh,
    reports: Path | None = None,
    answer_tokens: int = 0,
) -> tuple[TokenStore, TokenStore | None]:
    """Return tokenised training and held-out data that has passed the gate's checks.

    Args:
        train: training data.
        held_out: held-out data; None for none.
        embedding_rows: rows of the model's embedding.
        tokenizer: the model's tokenizer.
        config: configuration of the run.
        ranks: the first rank on each machine tokenises, while the others wait for its file.
        reports: folder for the gate's reports, ``train_dataset.json`` and ``eval_dataset.json``.
        answer_tokens: room behind a prompt for an answer that is drawn later.

    Raises:
        ConfigurationError: both held-out data and a share to hold out are set.
        DataError: training on the data would be wrong.
    """
    folder = reports if ranks.writer else None

    def options(name: str, source: RowSource) -> dict[str, Any]:
        return {
            "source": source,
            "tokenizer": tokenizer,
            "config": config,
            "builder": ranks.local_rank == 0,
            "name": str(source) if isinstance(source, (str, Path)) else name,
            "embedding_rows": embedding_rows,
            "report_file": folder and folder / f"{name}.json",
            "kinds": OBJECTIVES[config.objective].row_kinds,
            "answer_tokens": answer_tokens,
        }

    if held_out is not None and config.validation_split:
        raise ConfigurationError(
            f"validation_split={config.validation_split}: eval_dataset is given too, and only one "
            "can say what is held out; "
            "give one of them"
        )
    rest = None
    if config.validation_split:
        store, rest = open_divided(**options("train_dataset", train))
    else:
        store = open_store(**options("train_dataset", train))
    shared = store.tokens_shared
    if shared:
        whole = shared + int(store.lengths.sum())
        logger.info(
            "answers share their prompts: %s of %s tokens are not computed again",
            f"{shared:,}",
            f"{whole:,}",
        )
    if held_out is not None:
        return store, open_store(**options("eval_dataset", held_out), training=store)
    if rest is None:
        return store, None
    return store, open_held_out(rest, config, folder and folder / "eval_dataset.json")


def readable_again(source: RowSource) -> RowSource:
    """Return rows that can be read a second time: a generator becomes a list."""
    return list(source) if isinstance(source, Iterator) else source


def teach_generation_to_stop(model: Any, tokenizer: Any, chats: bool) -> None:
    """Make generation end at the stop token that is trained, also in the saved model.

    Contradictory generation settings are resolved now, since transformers would refuse to save them
    at the end of the run.

    Raises:
        ConfigurationError: they contradict each other otherwise than by a missing ``do_sample``.
    """
    generation = model.generation_config = model.generation_config or GenerationConfig()
    try:
        generation.validate(strict=True)
    except ValueError:
        # Files of some models have settings of sampling without do_sample.
        before = generation.do_sample
        generation.do_sample = True
        try:
            generation.validate(strict=True)
        except ValueError as error:
            generation.do_sample = before
            raise ConfigurationError(
                f"the model's generation_config could not be saved: {error}; mend it first"
            ) from error
        logger.warning("generation_config: it has settings of sampling, so do_sample is set")
    known = generation.eos_token_id
    known = [] if known is None else [known] if isinstance(known, int) else list(known)
    stops = known + [stop for stop in stop_token_ids(tokenizer, chats) if stop not in known]
    generation.eos_token_id = stops or None
    if (
        tokenizer.pad_token_id is not None
        and tokenizer.pad_token_id < embedding_table(model).shape[0]
    ):
        generation.pad_token_id = tokenizer.pad_token_id


def rows_needed(tokenizer: Any, rows: int, config: ChronicalsConfig) -> int:
    """Return the number of rows that an embedding of ``rows`` rows needs for a tokenizer.

    It is larger than ``rows`` only if ``config`` asks for more.

    Raises:
        ConfigurationError: tokens have no row, and none are to be added.
    """
    beyond = {token: number for token, number in tokenizer.get_vocab().items() if number >= rows}
    beyond.pop(tokenizer.pad_token, None)
    if not beyond:
        return rows
    token, last = max(beyond.items(), key=lambda item: item[1])
    if config.resize_embeddings:
        return max(last + 1, len(tokenizer))
    raise ConfigurationError(
        f"resize_embeddings=False: the tokenizer has {token!r} with id {last}, the embedding of "
        f"the model {rows} rows; what is "
        "trained so could not be exported. Set resize_embeddings=True to add rows for such tokens "
        "and train them, or take the "
        "model's own tokenizer"
    )


def fit_vocabulary(
    model: Any, tokenizer: Any, config: ChronicalsConfig, ranks: Mesh
) -> ChronicalsConfig:
    """Add the missing rows to the embedding and the head, if ``config`` asks for it.

    New rows are drawn around the mean of the existing ones, with their covariance (Hewitt, 2021),
    the same in every process.

    Returns:
        The configuration; with adapters it lists the new rows as trained tokens.

    Raises:
        ConfigurationError: tokens have no row, and none are to be added, or none can be.
    """
    rows = embedding_table(model).shape[0]
    needed = rows_needed(tokenizer, rows, config)
    if needed == rows:
        return config
    if config.sharding == DIVIDE_WEIGHTS and ranks.count > 1:
        raise ConfigurationError(
            "resize_embeddings=True: weights are divided among processes (sharding='weights') and "
            "get no rows there; call "
            "model.resize_token_embeddings(len(tokenizer)), save the model, and train that"
        )
    if hasattr(model, "chronicals_lora") or hasattr(model, "peft_config"):
        raise ConfigurationError(
            "resize_embeddings=True: the model has adapters already, which belong to an embedding "
            "of "
            f"{rows} rows; call model.resize_token_embeddings(len(tokenizer)) before they are "
            "attached"
        )
    config = with_token_ids(config, tokenizer)
    device = embedding_table(model).device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(config.seed)
        model.resize_token_embeddings(needed, mean_resizing=True)
    logger.info(
        "resize_embeddings: embedding and head have %d rows now, %d of them new, drawn around the "
        "mean of the others; %s",
        needed,
        needed - rows,
        "they are trained beside the adapters"
        if config.use_lora
        else "they are trained with the others",
    )
    return with_trained_rows(model, config, range(rows, needed)) if config.use_lora else config


def with_trained_rows(model: Any, config: ChronicalsConfig, new: range) -> ChronicalsConfig:
    """Return the configuration with new rows as trained tokens of embedding and head.

    Layers that are trained whole, or have an adapter, are left out.
    """
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    paths = {id(module): path for path, module in model.named_modules()}
    ends = [paths[id(embedding)]]
    if head is not None and head.weight is not embedding.weight:
        ends.append(paths[id(head)])
    asked = config.lora_trainable_tokens
    given = asked if isinstance(asked, dict) else {ends[0]: list(asked or [])}
    otherwise = list(config.lora_modules_to_save or [])
    # A regular expression usually matches linear layers, and not embeddings.
    if isinstance(config.lora_target_modules, list):
        otherwise += config.lora_target_modules
    tokens = dict(given) if asked else {}
    for path in ends:
        if any(f".{path}".endswith(f".{name}") for name in otherwise):
            continue
        name = next((name for name in given if f".{path}".endswith(f".{name}")), path)
        tokens[name] = [
            *given.get(name, []),
            *(number for number in new if number not in given.get(name, [])),
        ]
    return config.fitted(lora_trainable_tokens=tokens or None)


def check_exact_generation(config: ChronicalsConfig, model: Any, device: torch.device) -> None:
    """Check that a run with ``generation_exact`` can generate so.

    Raises:
        ConfigurationError: the class of the model or the precision does not allow it.
    """
    if not config.generation_exact:
        return
    reason = why_not_served(model, config.max_seq_length) or why_layers_not_exact(model)
    on_card = device.type == "cuda"
    if not reason and on_card == (config.mixed_precision == "fp32"):
        proved = "16 bits on a card (mixed_precision='bf16')" if on_card else "fp32 on the CPU"
        reason = f"mixed_precision={config.mixed_precision!r}, and only {proved} is proved"
    if reason:
        raise ConfigurationError(
            f"generation_exact=True: not possible for {type(model).__name__}: {reason}; leave it out"
        )
