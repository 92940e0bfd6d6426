"""Packing plan: sequences per second and fill on lognormal lengths (median 400, σ 0.8, 1 to 2048), on the CPU.

python benchmarks/packing.py OUTPUT.json
"""

import json
import platform
import statistics
import sys
import time
from pathlib import Path

import numba
import numpy as np

from chronicals.data import plan_packs

SEQUENCES, SAMPLES, WIDTH = 1_000_000, 7, 2048


def main() -> None:
    random = np.random.default_rng(0)
    plan_packs([1, 2], WIDTH)  # compiles
    samples, fills = [], []
    for _ in range(SAMPLES):
        lengths = np.exp(random.normal(np.log(400), 0.8, SEQUENCES)).clip(1, WIDTH).astype(np.int64)
        start = time.perf_counter()
        plan = plan_packs(lengths, WIDTH)
        samples.append(SEQUENCES / (time.perf_counter() - start))
        fills.append(plan.fill)
    result = {
        "machine": platform.processor() or platform.machine(),
        "versions": {"python": platform.python_version(), "numpy": np.__version__, "numba": numba.__version__},
        "sequences": SEQUENCES, "max_seq_length": WIDTH,
        "sequences_per_second": {"median": statistics.median(samples), "samples": samples},
        "fill": {"lowest": min(fills), "samples": fills},
    }  # fmt: skip
    Path(sys.argv[1]).write_text(json.dumps(result, indent=1))
    print(f"{result['sequences_per_second']['median'] / 1e6:.1f} million sequences/s, fill {min(fills):.4f}")


if __name__ == "__main__":
    main()
