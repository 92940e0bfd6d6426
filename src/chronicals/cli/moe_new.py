"""``chronicals moe new``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from chronicals.cli.options import values_of


def new(
    output: Annotated[Path, typer.Argument(help="Folder of the model")],
    tokenizer: Annotated[
        str, typer.Option(help="Folder or hub name of the model whose tokenizer it gets")
    ],
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Sizes, NAME=VALUE, as num_experts=32, with commas or repeated"),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of the weights: bf16, fp16 or fp32")] = "bf16",
    seed: Annotated[int, typer.Option(min=0, help="Of the random weights")] = 42,
) -> None:
    """Make a native mixture of experts with random weights, to be pretrained.

    `chronicals moe new DIR --tokenizer MODEL --set hidden_size=512 --set num_experts=32` writes a
    model of class `ChronicalsMoeForCausalLM`; docs/moe.md names the sizes. `chronicals train
    --model DIR --objective pretraining` trains it.
    """
    import torch
    from huggingface_hub.errors import StrictDataclassError

    from chronicals.config import ConfigurationError
    from chronicals.models import load_tokenizer
    from chronicals.models.loading import WEIGHT_DTYPES
    from chronicals.moe import ChronicalsMoeConfig, ChronicalsMoeForCausalLM

    if dtype not in WEIGHT_DTYPES:
        raise ConfigurationError(f"dtype={dtype!r}: choose {', '.join(WEIGHT_DTYPES)}")
    if output.exists() and any(output.iterdir()):
        raise ConfigurationError(
            f"output={str(output)!r}: holds something already; name another folder"
        )
    words = load_tokenizer(tokenizer)
    ids = {
        "bos_token_id": words.bos_token_id,
        "eos_token_id": words.eos_token_id,
        "pad_token_id": words.pad_token_id,
    }
    try:
        config = ChronicalsMoeConfig(
            **{"vocab_size": len(words), **ids, **_sizes(values_of("set", set_ or []))}
        )
    except (
        StrictDataclassError
    ) as error:  # of a field's type, or of sizes that do not fit each other
        raise ConfigurationError(f"set: {error.__cause__ or error}") from None
    torch.manual_seed(seed)
    model = ChronicalsMoeForCausalLM(config).to(WEIGHT_DTYPES[dtype])
    model.save_pretrained(output)
    words.save_pretrained(output)
    total = sum(parameter.numel() for parameter in model.parameters())
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    active = total - experts + experts * config.num_experts_per_tok // config.num_experts
    print(f"{output}: {total:,} parameters, {active:,} of them for a token")  # noqa: T201


def _sizes(given: list[str]) -> dict[str, Any]:
    """Return values by name from ``NAME=VALUE`` texts; values are read as YAML.

    Raises:
        ConfigurationError: a text is not NAME=VALUE, or the model has no such size.
    """
    import dataclasses
    import difflib

    import yaml

    from chronicals.config import ConfigurationError
    from chronicals.moe import ChronicalsMoeConfig

    known = {field.name for field in dataclasses.fields(ChronicalsMoeConfig)}
    found = {}
    for text in given:
        name, sign, value = text.partition("=")
        if not sign:
            raise ConfigurationError(f"set={text!r}: give NAME=VALUE, as num_experts=32")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise ConfigurationError(
                f"set={text!r}: there is no such size"
                + (f"; did you mean {near[0]!r}?" if near else "")
            )
        found[name] = yaml.safe_load(value)
    return found
