"""Training with several processes: launch, collectives, sharding, and detection of lost ranks."""

from chronicals.distributed.embedding_shards import (
    EmbeddingInShards,
    looking_up_as_many,
    shard_embedding,
    why_embedding_stays_whole,
)
from chronicals.distributed.frozen_shards import (
    Gathers,
    LinearInShards,
    RowsRead,
    Unit,
    can_be_cut,
    frozen_linears,
    gathers_of,
    put_whole,
    shard_frozen,
)
from chronicals.distributed.fsdp_extensions import forget_broken_step
from chronicals.distributed.launch import Launch, require_one_process, warn_of_other_processes
from chronicals.distributed.mesh import HostExchange, Mesh, on_each_machine
from chronicals.distributed.presence import WAITING
from chronicals.distributed.rank_agreement import (
    fingerprint_here,
    fingerprint_over,
    prove_alike,
    shared_settings,
)
from chronicals.distributed.rank_files import RankFiles
from chronicals.distributed.sharded_adamw import ShardedAdam8bit, ShardedAdamW
from chronicals.distributed.shards import Shards
from chronicals.distributed.watch import RankWatch
from chronicals.distributed.weight_shards import (
    VALUE,
    WeightShards,
    copies_of,
    divide_again,
    divided_among,
    is_divided,
    local,
    shard_weights,
    stay_gathered,
    weight_mesh,
    whole_parts,
)
from chronicals.distributed.work_of_one_rank import WorkEnded, refusing_collectives

__all__ = [
    "VALUE",
    "WAITING",
    "EmbeddingInShards",
    "Gathers",
    "HostExchange",
    "Launch",
    "LinearInShards",
    "Mesh",
    "RankFiles",
    "RankWatch",
    "RowsRead",
    "ShardedAdam8bit",
    "ShardedAdamW",
    "Shards",
    "Unit",
    "WeightShards",
    "WorkEnded",
    "can_be_cut",
    "copies_of",
    "divide_again",
    "divided_among",
    "fingerprint_here",
    "fingerprint_over",
    "forget_broken_step",
    "frozen_linears",
    "gathers_of",
    "is_divided",
    "local",
    "looking_up_as_many",
    "on_each_machine",
    "prove_alike",
    "put_whole",
    "refusing_collectives",
    "require_one_process",
    "shard_embedding",
    "shard_frozen",
    "shard_weights",
    "shared_settings",
    "stay_gathered",
    "warn_of_other_processes",
    "weight_mesh",
    "whole_parts",
    "why_embedding_stays_whole",
]


def __dir__() -> list[str]:
    return sorted(__all__)
