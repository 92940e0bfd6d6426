"""Processes that train together."""

from chronicals.distributed.ranks import Ranks

__all__ = ["Ranks"]
