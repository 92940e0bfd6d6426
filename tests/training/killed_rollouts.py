"""A run whose answers the model draws, which kills itself with SIGKILL at its k-th event.

As ``killed_run.py``, with further events: each step of a generation, each call of the rewards, and
each write of samples. A rollout has four updates, and a checkpoint is written after every update.
"""

from pathlib import Path

from killed_run import Events

VARIANTS = {
    "several updates": {
        "section": {"updates": 2, "iterations": 2, "importance": "token_truncate"},
        "max_steps": 7,
    },
    "lora, drawn again": {
        "section": {"updates": 2, "redraws": 1, "beta": 0.1},
        "use_lora": True,
        "lora_rank": 4,
        "max_steps": 5,
    },
    "rloo in bf16": {
        "objective": "rloo",
        "section": {"iterations": 2},
        "mixed_precision": "bf16",
        "learning_rate": 3e-4,
        "max_steps": 5,
    },
}


def run(
    folder: str, variant: str, resume: bool, kill_at: int | None, events_file: str | None
) -> None:
    import torch

    import rollouts
    from chronicals.generation.call import Call
    from chronicals.objectives.policy_gradient import PolicyGradient
    from chronicals.training.rollouts.samples import SamplesFile

    torch.set_num_threads(1)
    events = Events(folder, kill_at)
    PolicyGradient.__call__ = events.counted("micro-batch", PolicyGradient.__call__)
    Call.step = events.counted("token", Call.step)
    rollouts.Rewards.score = events.counted("rewards", rollouts.Rewards.score)
    SamplesFile.write = events.counted("samples", SamplesFile.write)
    events.count_files()
    rollouts.train(
        Path(folder), resume=resume, save_steps=1, save_total_limit=2, **VARIANTS[variant]
    )
    if events_file:
        Path(events_file).write_text("\n".join(events.kinds))
