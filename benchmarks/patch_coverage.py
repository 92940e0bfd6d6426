"""Writes docs/coverage.md: what is replaced in every architecture of transformers' causal-LM
mapping, and which take packs.

``python benchmarks/patch_coverage.py [--out docs/coverage.md]``; some minutes on a CPU.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks")]

from page_text import laid_out  # noqa: E402

from patching.architectures import ROLES, Line, architectures, cover, prove_packs  # noqa: E402  the tests' own table

WITHOUT_TWIN = (
    "No small copy (twin) of their default configuration can be built and run, so that nothing is "
    "proved of them. They train "
    "in padded rows, not in packs, with whole logits, not with a fused loss, and with their own "
    "attention; norms, MLPs and "
    "experts are replaced where each can be proved by itself. The first lines of a run's log say "
    "so."
)


def row(line: Line) -> str:
    marks = [{True: "yes", False: "no", None: "-"}[line.roles[role]] for role in ROLES]
    packed = line.packs is not None and line.packs.packed
    reasons = (
        dict(line.left)
        if packed or line.packs is None
        else {**line.left, "packs": line.packs.reason}
    )
    left = "; ".join(
        f"{part}: {' '.join(reason.split())}" for part, reason in reasons.items()
    ).replace("|", "\\|")
    generation = {True: "equal", False: "**differs**", None: "n/a"}[line.generation]
    marks.append("one by one" if packed and line.packs.one_by_one else "yes" if packed else "no")
    return (
        f"| {line.name} | {' | '.join(marks)} | {'equal' if line.equal else '**differs**'} | "
        f"{generation} | {left} |"
    )


def page(lines: list[Line]) -> str:
    built = [line for line in lines if not line.reason]
    whole = sum(line.whole for line in built)
    failed = sum(not line.equal for line in built)
    fused = [line.roles["experts"] for line in built if line.roles["experts"] is not None]
    untouched = sum(not any(line.roles.values()) for line in built)
    packed = sum(line.packs is not None and line.packs.packed for line in built)
    return "\n".join(
        [
            "# Coverage of `patch_model`",
            "",
            "Written by `benchmarks/patch_coverage.py` with transformers "
            f"{importlib.metadata.version('transformers')}. Every "
            "architecture of the causal-LM mapping that can be built from a tiny configuration on "
            "a CPU, with random weights: "
            "the loss and every gradient in fp32 and greedy generation, with and without the "
            "patch. Documents of those that "
            "take packs are trained end to end; the others are trained in padded rows, for the "
            "reason that stands last.",
            "",
            f"- {len(lines)} architectures, {len(built)} with a twin; {len(lines) - len(built)} "
            "[without](#without-a-twin)",
            f"- {packed} take packs; `one by one` where attention runs on one document after the "
            "other, as it chooses keys or "
            "makes them of several tokens by a part of its own, which bounds of documents do not "
            "reach",
            f"- {whole} with all parts replaced (norms, gated MLP or experts, rotary embedding, "
            "attention, loss)",
            f"- {len(fused)} with experts, {sum(fused)} of them replaced; `-` where there are "
            "none, or no other MLP",
            f"- {len(built) - whole - untouched} with some parts replaced, {untouched} unchanged",
            f"- {failed} changed by the patch",
            "",
            f"| architecture | {' | '.join(ROLES)} | packs | loss and gradients | generation | "
            "not replaced, why |",
            f"|---|{'---|' * len(ROLES)}---|---|---|---|",
            *map(row, built),
            "",
            "## Without a twin",
            "",
            WITHOUT_TWIN,
            "",
            *(f"- {line.name}: {line.reason}" for line in lines if line.reason),
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "coverage.md")
    arguments = parser.parse_args()
    lines = []
    for name in architectures():
        lines.append(cover(name))
        if not lines[-1].reason:
            lines[-1].packs = prove_packs(name)
        print(name, lines[-1].reason or ("equal" if lines[-1].equal else "DIFFERS"), flush=True)
    arguments.out.write_text(laid_out(page(lines)))


if __name__ == "__main__":
    main()
