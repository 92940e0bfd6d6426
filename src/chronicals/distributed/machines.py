"""Number of ranks on each machine."""

from __future__ import annotations

import itertools
import logging
import os
import socket

from chronicals.distributed.mesh import Mesh

logger = logging.getLogger(__name__)


def on_each_machine(ranks: Mesh) -> int:
    """Return the number of ranks on each machine; all ranks must call it and get the same result.

    This is LOCAL_WORLD_SIZE if it is set and equal on all ranks (torchrun sets it; srun and mpirun
    do not), else it follows from the host names. If machines have different numbers of ranks, or
    the ranks of a machine are not consecutive, all ranks count as one machine.
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
