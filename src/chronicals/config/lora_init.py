"""Names of the initialisations of adapters."""

from __future__ import annotations

import re

INITS = (
    "takes default, gaussian, pissa, pissa_niter_N (N iterations, such as pissa_niter_16), "
    "olora or loftq"
)


def is_init(name: str) -> bool:
    return (
        re.fullmatch(r"default|gaussian|olora|loftq|pissa(_niter_[1-9][0-9]*)?", name) is not None
    )
