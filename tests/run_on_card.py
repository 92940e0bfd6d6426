"""``make test-gpu``: the tests with kernels compiled, by as many processes as the card has
memory for, and a verdict last.
"""

import os
import subprocess
import sys

import torch

GIB_A_PROCESS = 10
"""Card memory of one process: its context, its largest tensors, and what its allocator keeps."""


def processes(cores: int, free_bytes: int) -> int:
    """One a core, and fewer where the card's free memory holds fewer."""
    return max(1, min(cores, free_bytes // (GIB_A_PROCESS << 30)))


def main() -> int:
    """The exit status: pytest's, or 2 without a card."""
    if not torch.cuda.is_available():
        print(
            "test-gpu: failed: torch sees no CUDA device, so nothing was tested; 'make test' "
            "needs none"
        )
        return 2
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    free, total = torch.cuda.mem_get_info()
    count = processes(cores, free)
    beside = (
        f"{count} processes on {torch.cuda.get_device_name()}, {free / 2**30:.0f} of "
        f"{total / 2**30:.0f} GiB free"
    )
    print(f"test-gpu: {beside}", flush=True)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-n",
        str(count),
        "--dist",
        "worksteal",
        "-m",
        "not long",
        *sys.argv[1:],
    ]
    status = subprocess.run(command).returncode
    print(f"test-gpu: {'failed' if status else 'passed'}: {beside}")
    return status


if __name__ == "__main__":
    sys.exit(main())
