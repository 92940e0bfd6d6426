"""Makes what follows from raw data anew in the result files of rows, by the code of this checkout.

    python benchmarks/recompute_shares.py [FILE ...]

All `results/row-*.json`, or those named. Anew are the kinds of kernels in profiles, the reference
step (`floor`) from its parts by themselves and the profile of our own step, every arm's share of
it, whether it ran in FP8, and MFU, which such an arm has not. Speeds, losses, kernels and `commit`
stay as they were measured; `recomputed_at` is the commit of the code that did this. A row that
would have no reference step now ends it with an error, for it is to be measured again.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from chronicals.benchmark.floor import STEP_PARTS, ReferenceStep
from chronicals.benchmark.measurement import category_of
from chronicals.benchmark.record import current_commit, write_row

RESULTS = Path(__file__).parent / "results"
CUT = 160
"""Characters of a kernel's name that a profile keeps; what a name says that was cut is what was
read before.
"""


def recomputed(result: dict[str, Any]) -> dict[str, Any]:
    """The same row with all that is derived made anew.

    Raises:
        SystemExit: an arm in 16 bit is faster than the reference step.
    """
    arms = {
        name: recomputed_arm(name, arm, result["row"]["fields"])
        for name, arm in result["arms"].items()
    }
    if not result["floor"]:
        return {**result, "arms": arms}
    step = reference_step(result["floor"], arms.get("ours", {}))
    for name, arm in arms.items():
        if "tokens_per_second" not in arm:
            continue
        share = arm["tokens_per_second"]["median"] / step.tokens_per_second
        if share > 1 and not arm["fp8"] and not name.startswith("ours "):
            raise SystemExit(
                f"{name} ran at {share:.1%} of the reference step: measure the row again"
            )
        arm["share_of_floor"] = None if arm["fp8"] or share > 1 else share
    by_itself = {part: by_itself_of(result["floor"])[part] for part in STEP_PARTS}
    return {**result, "floor": {**asdict(step), "by_itself": by_itself}, "arms": arms}


def by_itself_of(floor: dict[str, Any]) -> dict[str, float]:
    """Seconds of the parts by themselves; older files have no others."""
    return floor.get("by_itself", floor)


def reference_step(floor: dict[str, Any], ours: dict[str, Any]) -> ReferenceStep:
    measured = ReferenceStep(
        **{part: by_itself_of(floor)[part] for part in STEP_PARTS}, tokens=floor["tokens"]
    )
    profile = (ours.get("profile") or {}).get("milliseconds_a_step")
    if not profile or ours["fp8"] or "tokens_per_second" not in ours:
        return measured
    seconds = {kind: time / 1000 for kind, time in profile.items()}
    return measured.best_seen(seconds, floor["tokens"] / ours["tokens_per_second"]["median"])


def recomputed_arm(name: str, arm: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    """With kernels of its profile by their present kinds; no MFU where it ran in FP8."""
    if "settings" not in arm:
        return arm
    of_ours = name == "ours" or name.startswith("ours ")
    fp8 = arm.get(
        "fp8", of_ours and ("use_fp8=True" in arm["settings"] or bool(fields.get("use_fp8")))
    )
    arm = {**arm, "fp8": fp8}
    if fp8 and "mfu" in arm:
        arm["mfu"] = None
    return {**arm, "profile": recomputed_profile(arm["profile"])} if arm.get("profile") else arm


def recomputed_profile(profile: dict[str, Any]) -> dict[str, Any]:
    """The longest kernels, which alone are kept by name, move to their present kinds."""
    times = dict(profile["milliseconds_a_step"])
    kernels = []
    for kernel in profile["kernels"]:
        kind = category_of(kernel["name"]) if len(kernel["name"]) < CUT else kernel["kind"]
        if kind != kernel["kind"]:
            times[kernel["kind"]] -= kernel["milliseconds_a_step"]
            times[kind] += kernel["milliseconds_a_step"]
        kernels.append({**kernel, "kind": kind})
    share = {kind: time / sum(times.values()) for kind, time in times.items()}
    return {**profile, "milliseconds_a_step": times, "share": share, "kernels": kernels}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", type=Path)
    for path in parser.parse_args().files or sorted(RESULTS.glob("row-*.json")):
        result = recomputed(json.loads(path.read_text()))
        write_row({**result, "recomputed_at": current_commit()}, path)
        print(path)


if __name__ == "__main__":
    main()
