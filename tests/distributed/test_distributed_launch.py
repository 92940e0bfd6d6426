"""What the variables of torchrun, job operators, MPI and Slurm say, on processes that are one of
several and that are not.
"""

import pytest

from chronicals.config import ConfigurationError
from chronicals.distributed import Launch, require_one_process, warn_of_other_processes
from chronicals.distributed.launch import LAUNCHERS

MEETING = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
SEVERAL = {
    "torchrun": ({"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1"}, (3, 4, 1)),
    "a job operator, a process a machine": ({"WORLD_SIZE": "2", "RANK": "0"}, (0, 2, None)),
    "Open MPI": (
        {
            "OMPI_COMM_WORLD_SIZE": "2",
            "OMPI_COMM_WORLD_RANK": "1",
            "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        },
        (1, 2, 1),
    ),
    "MPICH": ({"PMI_SIZE": "2", "PMI_RANK": "1", "MPI_LOCALRANKID": "1"}, (1, 2, 1)),
    "srun": (
        {
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_NTASKS": "2",
            "SLURM_PROCID": "1",
            "SLURM_LOCALID": "0",
        },
        (1, 2, 0),
    ),
    "srun within a batch script": (
        {
            "ENVIRONMENT": "BATCH",
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_NTASKS": "8",
            "SLURM_PROCID": "0",
            "SLURM_LOCALID": "0",
        },
        (0, 2, 0),
    ),
    "tasks of an older Slurm": (
        {"SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
        (0, 2, 0),
    ),
    "srun with WORLD_SIZE set by hand": (
        {"WORLD_SIZE": "2", "SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "1"},
        (1, 2, 1),
    ),
}
ALONE = {
    "nothing": {},
    "one of one": {"WORLD_SIZE": "1", "RANK": "0", **MEETING},
    "one of one in a large job": {
        "WORLD_SIZE": "1",
        "RANK": "0",
        "SLURM_NTASKS": "8",
        "SLURM_PROCID": "0",
    },
    "a shell of salloc": {"SLURM_NTASKS": "2"},
    "an interactive step": {"SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
    "a shell of srun --pty": {"SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_JOB_NAME": "bash"},
    "a batch script": {"SLURM_NTASKS": "2", "SLURM_PROCID": "0", "ENVIRONMENT": "BATCH"},
    "mpirun -n 1": {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
    "a rank of nothing": {"RANK": "0"},
    "an empty variable": {"WORLD_SIZE": ""},
}


@pytest.mark.parametrize("how", SEVERAL)
def test_one_of_several(how):
    environment, (rank, count, local_rank) = SEVERAL[how]
    launch = Launch.found(environment)
    assert (launch.rank, launch.count, launch.local_rank) == (rank, count, local_rank)
    launch.require_meeting_point({**environment, **MEETING})
    with pytest.raises(ConfigurationError) as refused:
        launch.require_meeting_point({**environment, "MASTER_ADDR": "10.0.0.1"})
    name, _, value = launch.told_by.partition("=")
    assert environment[name] == value
    for part in (
        launch.told_by,
        "MASTER_PORT is not set",
        f"torchrun --nproc-per-node={count}",
        f"unset {name}",
    ):
        assert part in str(refused.value)


@pytest.mark.parametrize("how", ALONE)
def test_alone(how):
    assert Launch.found(ALONE[how]) is None


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 is set and RANK is not.*unset WORLD_SIZE"),
        ({"WORLD_SIZE": "two", "RANK": "0"}, "WORLD_SIZE='two': expected a number"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "RANK=2: WORLD_SIZE=2 says that ranks are 0 to 1"),
        ({"WORLD_SIZE": "2", "RANK": ""}, "RANK"),
        ({"RANK": "1"}, "RANK=1 is set and WORLD_SIZE is not.*torchrun"),
    ],
)
def test_half_a_launch_is_refused(environment, message):
    with pytest.raises(ConfigurationError, match=message):
        Launch.found(environment)


@pytest.fixture
def no_launcher(monkeypatch):
    for name in {name for names in LAUNCHERS for name in names}:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_what_runs_in_one_process_says_so(no_launcher, caplog):
    require_one_process("verify")
    warn_of_other_processes("evaluate")
    assert not caplog.text
    no_launcher.setenv("OMPI_COMM_WORLD_SIZE", "2")
    no_launcher.setenv("OMPI_COMM_WORLD_RANK", "0")
    with pytest.raises(
        ConfigurationError,
        match="OMPI_COMM_WORLD_SIZE=2: verify runs in one process, and 2 were started",
    ):
        require_one_process("verify")
    warn_of_other_processes("evaluate")
    assert "evaluate runs in one process" in caplog.text
