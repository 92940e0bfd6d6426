"""One of several processes that divide an embedding: the program of ``test_embedding_shards.py``.

``python embedding_ranks.py FOLDER SEED``: every rank writes what it looked up, and what it should
have found, to ``RANK.pt``.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

from chronicals.distributed import EmbeddingInShards, Mesh, looking_up_as_many

ROWS = 37
WIDTH = 24
KINDS = {
    "fp32": lambda: nn.Embedding(ROWS, WIDTH),
    "bf16": lambda: nn.Embedding(ROWS, WIDTH, dtype=torch.bfloat16),
    "padding": lambda: nn.Embedding(ROWS, WIDTH, padding_idx=3),
    "scaled": lambda: Gemma3TextScaledWordEmbedding(
        ROWS, WIDTH, 3, embed_scale=WIDTH**0.5
    ).bfloat16(),
    "strided": lambda: nn.Embedding(ROWS, WIDTH, _weight=torch.randn(WIDTH, ROWS).t()),
}
EVEN = ((5,), (1, 7), (3, 4), (2, 3, 2))
UNEVEN = ((4, 1), (6, 0, 1, 2), (1, 5, 3, 3))
"""Shapes of ids on all ranks; of the others numbers of ids, one for each rank."""


def main() -> None:
    folder = Path(sys.argv[1])
    seed = int(sys.argv[2])
    torch.set_num_threads(1)
    ranks = Mesh.current()
    drawing = torch.Generator().manual_seed(seed + ranks.rank)
    found = {}
    for kind, make in KINDS.items():
        torch.manual_seed(seed)
        whole = make()
        model = nn.Sequential(EmbeddingInShards(whole, ranks.rank, ranks.count, ranks.device))

        def look_up(
            *shape: int, whole: nn.Module = whole, model: nn.Module = model
        ) -> list[torch.Tensor]:
            ids = torch.randint(0, ROWS, shape, generator=drawing)
            return [model(ids), whole(ids).detach()]

        with looking_up_as_many(model):
            found |= {f"{kind}, {shape}": look_up(*shape) for shape in EVEN}
        found |= {
            f"{kind}, one of {sizes}": look_up(sizes[ranks.rank % len(sizes)]) for sizes in UNEVEN
        }
        found[f"{kind}, in rows that differ"] = look_up(2, 3 + ranks.rank)
    torch.save(found, folder / f"{ranks.rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
