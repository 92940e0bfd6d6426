"""One peer in a process of its own: ``python -m peers.arm WORK_FOLDER NAME --steps N --out FILE``.

Nothing of torch is imported before the peer is known: Unsloth must come first in its process.
"""

from __future__ import annotations

import time

from chronicals.benchmark.arm import arm_parser, run_arm

PEER_ARMS = {
    "documents": {
        "transformers": "peers.plain:transformers",
        "transformers-recompute": "peers.plain:transformers_recompute",
        "torch-compile": "peers.plain:torch_compile",
        "liger": "peers.plain:liger",
        "unsloth": "peers.unsloth:unsloth",
        "unsloth-recompute": "peers.unsloth:unsloth_recompute",
        "unsloth-padded": "peers.unsloth:unsloth_padded",
        "unsloth-compiled": "peers.unsloth:unsloth_compiled",
        "trl": "peers.trl:trl",
        "trl-recompute": "peers.trl:trl_recompute",
    },
    "pairs": {
        "trl": "peers.preference:trl",
        "trl-recompute": "peers.preference:trl_recompute",
        "unsloth": "peers.unsloth_preference:unsloth",
        "unsloth-recompute": "peers.unsloth_preference:unsloth_recompute",
    },
    "distillation": {
        "transformers": "peers.distilled:transformers",
        "liger": "peers.distilled:liger",
    },
}
"""Module and function of each peer, by the kind of the work."""


def main(arguments: list[str] | None = None) -> None:
    began = time.perf_counter()
    chosen = arm_parser("peers.arm", [*PEER_ARMS["documents"]]).parse_args(arguments)
    if chosen.name.startswith("unsloth"):
        from peers.unsloth_import import import_unsloth

        import_unsloth(chosen.work, chosen.name)
    run_arm(chosen, PEER_ARMS, began)


if __name__ == "__main__":
    main()
