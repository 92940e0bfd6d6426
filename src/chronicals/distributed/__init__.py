"""Processes that train together."""

from chronicals.distributed.launch import Launch, require_one_process, warn_of_other_processes
from chronicals.distributed.mesh import Mesh
from chronicals.distributed.rank_files import RankFiles
from chronicals.distributed.sharded_adamw import ShardedAdam8bit, ShardedAdamW
from chronicals.distributed.shards import Shards
from chronicals.distributed.watch import RankWatch

__all__ = [
    "Launch", "Mesh", "RankFiles", "RankWatch", "ShardedAdam8bit", "ShardedAdamW", "Shards", "require_one_process",
    "warn_of_other_processes",
]  # fmt: skip
