"""Processes that train together."""

from chronicals.distributed.launch import Launch, require_one_process, warn_of_other_processes
from chronicals.distributed.ranks import Ranks, card_of

__all__ = ["Launch", "Ranks", "card_of", "require_one_process", "warn_of_other_processes"]
