"""A quick answer to whether a name that is no folder here is a repository of the Hugging Face hub.

transformers asks the hub for each file of a model, and again and again where it cannot be reached:
half a minute and more for a mistyped folder. Here it is asked once for a name, before anything is
loaded.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
"""``name`` or ``owner/name``, letters, digits, ``-``, ``_`` and ``.``."""

PATIENCE = 5.0
"""Seconds in which the hub must answer: far longer than a request takes, and about as long as a
person waits for an error.
"""

ANY_OF = ("config.json", "adapter_config.json", "tokenizer_config.json")
"""Files of which one is in the cache where a repository was loaded before."""


@functools.cache
def check_exists(name: str) -> None:
    """Raise ValueError where ``name`` is neither a path here, nor a repository in the cache or on
    the hub.

    An answer that leaves it open, such as a server's error, raises nothing: whoever loads the model
    says what happened.
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
        HfApi().model_info(name, timeout=PATIENCE)
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
        # The hub's client raises errors of its HTTP library, which is another one in other
        # versions: requests, httpx, httpx2.
        if not type(error).__module__.startswith(("httpx", "requests")):
            raise
        raise ValueError(_unreachable(error)) from None


def _unreachable(error: Exception) -> str:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return (
        "there is no such folder here, and the hub cannot be reached to look for the name "
        f"there ({reason})"
    )
