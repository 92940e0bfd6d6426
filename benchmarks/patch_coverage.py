"""Writes docs/coverage.md: what ``patch_model`` replaces in every architecture of transformers' causal-LM mapping.

``python benchmarks/patch_coverage.py [--out docs/coverage.md]``; some minutes on a CPU.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from patching.architectures import ROLES, Line, architectures, cover  # noqa: E402  the tests' own table


def row(line: Line) -> str:
    marks = [{True: "yes", False: "no", None: "-"}[line.roles[role]] for role in ROLES]
    left = "; ".join(f"{part}: {reason}" for part, reason in line.left.items())
    generation = {True: "equal", False: "**differs**", None: "n/a"}[line.generation]
    return f"| {line.name} | {' | '.join(marks)} | {'equal' if line.equal else '**differs**'} | {generation} | {left} |"


def page(lines: list[Line]) -> str:
    built = [line for line in lines if not line.reason]
    whole, failed = sum(line.whole for line in built), sum(not line.equal for line in built)
    fused = [line.roles["experts"] for line in built if line.roles["experts"] is not None]
    untouched = sum(not any(line.roles.values()) for line in built)
    return "\n".join(
        [
            "# Coverage of `patch_model`",
            "",
            f"Written by `benchmarks/patch_coverage.py` with transformers {importlib.metadata.version('transformers')}. Every "
            "architecture of the causal-LM mapping that can be built from a tiny configuration on a CPU, with random weights: "
            "the loss and every gradient in fp32 and greedy generation, with and without the patch.",
            "",
            f"- {len(lines)} architectures, {len(built)} built",
            f"- {whole} with all parts replaced (norms, gated MLP or experts, rotary embedding, attention, loss)",
            f"- {len(fused)} with experts, {sum(fused)} of them replaced; `-` where there are none, or no other MLP",
            f"- {len(built) - whole - untouched} with some parts replaced, {untouched} unchanged",
            f"- {failed} changed by the patch",
            "",
            f"| architecture | {' | '.join(ROLES)} | loss and gradients | generation | not replaced, why |",
            f"|---|{'---|' * len(ROLES)}---|---|---|",
            *map(row, built),
            "",
            "## Not built from a tiny configuration",
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
        print(name, lines[-1].reason or ("equal" if lines[-1].equal else "DIFFERS"), flush=True)
    arguments.out.write_text(page(lines))


if __name__ == "__main__":
    main()
