"""Checks quickly that a name is a local folder or a repository of the Hugging Face hub.

transformers asks the hub for each file of a model, and retries if the hub is unreachable. A
mistyped folder then takes half a minute or more to fail. Here the hub is asked once a name, before
anything is loaded.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

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
    except OSError as error:
        raise ValueError(_unreachable(error)) from None
    except Exception as error:
        # The hub's client raises errors of its HTTP library, which depends on its version:
        # requests, httpx, httpx2.
        if not type(error).__module__.startswith(("httpx", "requests")):
            raise
        raise ValueError(_unreachable(error)) from None


def _unreachable(error: Exception) -> str:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return (
        "there is no such folder here, and the hub cannot be reached to look for the name "
        f"there ({reason})"
    )
