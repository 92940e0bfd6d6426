"""Which processes are on one machine."""

from __future__ import annotations

import itertools
import logging
import os
import socket

from chronicals.distributed.mesh import Mesh

logger = logging.getLogger(__name__)


def on_each_machine(ranks: Mesh) -> int:
    """How many neighbours are on each machine, the same on all ranks, which must all ask; all of
    them where machines have different numbers of them, or ranks that are not next to each other.

    It is what torchrun says, if it says one number to all, else what the machines' names say: srun
    and mpirun say nothing.
    """
    told = ranks.gather_values([os.environ.get("LOCAL_WORLD_SIZE"), socket.gethostname()])
    (size, _), names = told[0], [name for _, name in told]
    if size is not None and all(other == size for other, _ in told):
        return int(size)
    sizes = [len(list(neighbours)) for _, neighbours in itertools.groupby(names)]
    if len(set(sizes)) == 1 and len(sizes) == len(set(names)):
        return sizes[0]
    if ranks.writer:
        logger.info(
            "%d machines have %s processes in turn: all are taken for neighbours",
            len(set(names)),
            sizes,
        )
    return ranks.count
