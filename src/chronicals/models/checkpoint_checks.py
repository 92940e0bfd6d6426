"""Checks before and after a checkpoint is loaded.

Before: its name is a local folder or a repository of the Hugging Face hub, and it is a language
model. transformers asks the hub for each file of a model, and retries if the hub is unreachable, so
a mistyped folder takes half a minute or more to fail. Here the hub is asked once a name.

After: the checkpoint has exactly the weights of the model's class. Weights that the class leaves
out by design are allowed.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from chronicals.model_shape import ModelShape

logger = logging.getLogger(__name__)

REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
"""``name`` or ``owner/name``, of letters, digits, ``-``, ``_`` and ``.``."""

_PATIENCE = 5.0
"""Timeout of the request in seconds.

A request takes far less, and a person waits about as long for an error.
"""

ANY_OF = ("config.json", "adapter_config.json", "tokenizer_config.json")
"""Files of which at least one is cached if the repository was loaded before."""


@functools.cache
def check_exists(name: str) -> None:
    """Raise ValueError if ``name`` is no local path and no repository in the cache or on the hub.

    An inconclusive answer, such as a server error, raises nothing: loading the model will report
    it.
    """
    if Path(name).expanduser().exists():
        return
    if not REPOSITORY.fullmatch(name):
        raise ValueError(
            "there is no such folder here, and no hub name has such a form (owner/name)"
        )
    from huggingface_hub import HfApi, constants, try_to_load_from_cache
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        RepositoryNotFoundError,
    )

    if constants.HF_HUB_OFFLINE or any(
        isinstance(try_to_load_from_cache(name, file), str) for file in ANY_OF
    ):
        return
    try:
        HfApi().model_info(name, timeout=_PATIENCE)
    except GatedRepoError:
        return
    except RepositoryNotFoundError:
        raise ValueError(
            "there is no such folder here, and no such model on the hub, or it is private and no "
            "token is set"
        ) from None
    except HFValidationError as error:
        raise ValueError(f"there is no such folder here, and as a hub name: {error}") from None
    except HfHubHTTPError:
        return
    except Exception as error:
        # The hub's client raises OSError or errors of its HTTP library, which depends on its
        # version: requests, httpx, httpx2.
        of_http = type(error).__module__.startswith(("httpx", "requests"))
        if not of_http and not isinstance(error, OSError):
            raise
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(
            "there is no such folder here, and the hub cannot be reached to look for the name "
            f"there ({reason})"
        ) from None


def is_reward_model(config: Any) -> bool:
    """Return True if the configuration is that of a sequence classifier with one label."""
    named = (getattr(config, "architectures", None) or [""])[0]
    return named.endswith("ForSequenceClassification") and config.num_labels == 1


def why_no_language_model(name: Any) -> str:
    """Return the error text for a reward model where a language model is needed."""
    return (
        f"{name}: is a reward model (a sequence classifier with one label), which scores answers "
        "and predicts no tokens; load "
        "it with transformers' AutoModelForSequenceClassification, or train it by "
        "objective='reward'; here give the language "
        "model that it was trained from"
    )


RECOMPUTED_BUFFERS = re.compile(
    r"(^|\.)(position_ids|inv_freq|masked_bias|attn\.bias|attention\.bias)$"
)
"""Names of buffers that some classes compute and some checkpoints store."""

NEXT_TOKENS = re.compile(r"(^|\.)(mtp|nextn)")
"""Names of layers for speculative decoding, which causal language models leave out."""

_FEW = 4
"""Maximum number of names in an error."""


def check_loaded_weights(model: Any, report: Mapping[str, Any]) -> None:
    """Check the loading report of ``from_pretrained``; log the weights that the class leaves out.

    Args:
        model: the model that was loaded.
        report: the second result of ``from_pretrained(…, output_loading_info=True)``.

    Raises:
        ValueError: weights are missing, have another shape, or would be dropped; the message names
            them.
    """
    missing = [name for name in report["missing_keys"] if not RECOMPUTED_BUFFERS.search(name)]
    unexpected = [name for name in report["unexpected_keys"] if not RECOMPUTED_BUFFERS.search(name)]
    dropped = [name for name in unexpected if not _is_left_by_design(model, name)]
    reasons = []
    if missing:
        reasons.append(f"{_told(missing)}: not in the checkpoint, and would be drawn at random")
    if report["mismatched_keys"]:
        shapes = [
            f"{name} ({list(there)} there, {list(here)} here)"
            for name, there, here in report["mismatched_keys"]
        ]
        reasons.append(f"{_told(shapes)}: of another shape than config.json says")
    if dropped:
        reasons.append(
            f"{_told(dropped)}: in the checkpoint, and {type(model).__name__} has no place for it"
        )
    if reasons:
        raise ValueError(
            f"{'; '.join(reasons)}. Its config.json or the names in it are of another model: "
            "download it again"
        )
    if unexpected:
        logger.warning(
            "%s leaves out what the checkpoint has beside it: %s",
            type(model).__name__,
            _told(unexpected),
        )


def _told(names: Collection[str]) -> str:
    few = sorted(names)[:_FEW]
    return ", ".join(few) + (f" and {len(names) - _FEW} others" if len(names) > _FEW else "")


def _is_left_by_design(model: Any, name: str) -> bool:
    """Return True if a weight belongs to a part other than the language model.

    Such parts are a classifier, a vision tower, or layers for speculative decoding.
    """
    text = model.config.get_text_config()
    layer = re.search(r"\.layers\.(\d+)\.", name)
    further = getattr(text, "num_nextn_predict_layers", None) or 0
    if NEXT_TOKENS.search(name) or (
        layer and 0 <= int(layer[1]) - ModelShape.of(model.config).layers < further
    ):
        return True
    if type(model).__name__ in (model.config.architectures or ()):
        return False
    # The class lacks the part if the closest module that it has is the model itself or its body.
    paths = dict(model.named_modules())
    path = name.rpartition(".")[0]
    while path not in paths:
        path = path.rpartition(".")[0]
    return paths[path] in (model, model.base_model, model.get_decoder())
