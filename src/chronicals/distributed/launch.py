"""Detection of a launch with several processes, from the variables that launchers set."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from chronicals.config import ConfigurationError

logger = logging.getLogger(__name__)

LAUNCHERS = (
    ("WORLD_SIZE", "RANK", "LOCAL_RANK"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_RANK"),
    ("PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID"),
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID"),
    ("SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID"),
)
"""Names of the variables for world size, rank and local rank.

In order: torchrun and job operators, Open MPI, MVAPICH2, MPICH and Intel MPI, Slurm.
"""

MEETING_POINT = ("MASTER_ADDR", "MASTER_PORT")
"""Variables with the address at which the processes find each other."""


@dataclass(frozen=True)
class Launch:
    """This process's place among those that were launched, as the environment gives it.

    Attributes:
        rank, count: rank of this process and the world size.
        local_rank: rank on this machine; None if no variable gives it.
        told_by: the variable that gave the world size, as ``NAME=value``.
    """

    rank: int
    count: int
    local_rank: int | None
    told_by: str

    @classmethod
    def found(cls, environment: Mapping[str, str] = os.environ) -> Launch | None:
        """Read the launch from the environment; None if this is the only process.

        Raises:
            ConfigurationError: a variable is not a number, or the world size is known but not the
                rank.
        """
        for size_name, rank_name, local_name in LAUNCHERS:
            if not environment.get(size_name):
                continue
            count = _number(size_name, environment)
            # A batch script and an interactive shell (``salloc``) have SLURM_NTASKS of the job too,
            # but are single processes; only ``srun`` starts one process of several.
            interactive = environment.get("SLURM_JOB_NAME") in ("interactive", "bash")
            batch_script = environment.get("ENVIRONMENT") == "BATCH"
            in_slurm_step = "SLURM_PROCID" in environment and not interactive and not batch_script
            if size_name == "SLURM_NTASKS" and not in_slurm_step:
                continue
            if count > 1:
                rank, local_rank = _place(rank_name, local_name, size_name, count, environment)
                return cls(rank, count, local_rank, f"{size_name}={count}")
            if size_name in ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS"):
                return None
        if (
            not environment.get("WORLD_SIZE")
            and environment.get("RANK")
            and _number("RANK", environment) > 0
        ):
            raise ConfigurationError(
                f"RANK={environment['RANK']} is set and WORLD_SIZE is not: the number of "
                f"processes is unknown; {remedy('RANK')}"
            )
        return None

    def require_meeting_point(self, environment: Mapping[str, str] = os.environ) -> None:
        """Check that the processes can find each other.

        Raises:
            ConfigurationError: a variable of ``MEETING_POINT`` is not set.
        """
        missing = [name for name in MEETING_POINT if not environment.get(name)]
        if missing:
            raise ConfigurationError(
                f"{self.told_by}: {self.count} processes were started to train together, but "
                f"{' and '.join(missing)} "
                f"{'is' if len(missing) == 1 else 'are'} not set, so they cannot find each other; "
                "each would train alone. "
                f"{remedy(self.told_by.partition('=')[0], self.count)}"
            )


def become_launcher(count: int, arguments: Sequence[str]) -> None:
    """Replace this process by torchrun with ``count`` processes of ``chronicals ARGUMENTS``.

    All of them run on this machine. For ``count`` 1 it does nothing and returns. If OMP_NUM_THREADS
    is not set, the processes divide the CPU cores among themselves.

    Raises:
        ConfigurationError: this process is already one of several, or the machine has fewer GPUs.
    """
    launch = Launch.found()
    if launch is not None:
        raise ConfigurationError(
            f"nproc={count}: {launch.told_by} says that {launch.count} processes were started "
            "already; leave nproc out, or "
            f"unset {launch.told_by.partition('=')[0]}"
        )
    if count == 1:
        return
    import torch

    cards = torch.cuda.device_count()
    if 0 < cards < count:
        raise ConfigurationError(
            f"nproc={count}: this machine has {cards} card{'s' * (cards > 1)}; give at most as many"
        )
    # The processes divide the CPU cores among themselves.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    launcher = [
        sys.executable,
        "-m",
        "chronicals.distributed.torchrun",
        "--standalone",
        f"--nproc-per-node={count}",
    ]
    sys.stdout.flush()  # execv would drop what is buffered
    os.execv(sys.executable, [*launcher, "-m", "chronicals.cli", *arguments])


def require_one_process(command: str) -> None:
    """Check that ``command``, which runs in one process only, was not launched as several.

    Raises:
        ConfigurationError: this process is one of several.
    """
    launch = Launch.found()
    if launch is not None:
        raise ConfigurationError(
            f"{launch.told_by}: {command} runs in one process, and {launch.count} were started; "
            "start it without torchrun, "
            f"srun or mpirun, or unset {launch.told_by.partition('=')[0]}"
        )


def warn_of_other_processes(command: str) -> None:
    """Warn if ``command``, which needs one process, was launched as several: each does all work."""
    try:
        launch = Launch.found()
    except ConfigurationError:
        return
    if launch is not None:
        logger.warning(
            "%s: %s runs in one process; where several were started, each of them does all the "
            "work",
            launch.told_by,
            command,
        )


def remedy(variable: str, count: int | None = None) -> str:
    """Return the advice of error messages: how to launch several processes, or only one."""
    return (
        f"Start them with `torchrun --nproc-per-node={count or 'N'} -m chronicals.cli train ...` "
        "(or a script of yours), or "
        "set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT for each; for one process "
        f"alone, unset {variable}"
    )


def _place(
    rank_name: str, local_name: str, size_name: str, count: int, environment: Mapping[str, str]
) -> tuple[int, int | None]:
    """Return the rank and the local rank, which is None if unknown.

    Read from the launcher's own variables. If they are missing, from those of another launcher that
    gives the same world size.

    Raises:
        ConfigurationError: there is no rank, or it is not below the world size.
    """
    alike = [
        (rank, local)
        for size, rank, local in LAUNCHERS
        if size == size_name or (environment.get(size) == str(count) and rank in environment)
    ]
    rank_from = next((rank for rank, _ in alike if rank in environment), None)
    if rank_from is None:
        raise ConfigurationError(
            f"{size_name}={count} is set and {rank_name} is not: which of the {count} processes "
            "this one is, is unknown; "
            f"{remedy(size_name, count)}"
        )
    rank = _number(rank_from, environment)
    if not 0 <= rank < count:
        raise ConfigurationError(
            f"{rank_from}={rank}: {size_name}={count} says that ranks are 0 to {count - 1}"
        )
    local_from = next((local for _, local in alike if local in environment), None)
    return rank, None if local_from is None else _number(local_from, environment)


def _number(name: str, environment: Mapping[str, str]) -> int:
    text = environment[name]
    try:
        return int(text)
    except ValueError:
        raise ConfigurationError(
            f"{name}={text!r}: expected a number, as a launcher sets it; {remedy(name)}"
        ) from None
