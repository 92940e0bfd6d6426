"""Document attention by backend on a card: TFLOP/s forward and backward, bf16, causal, random data.

    python benchmarks/attention.py OUTPUT.json [--rounds 30] [--commit HASH] [--backends
    flash-attn-4,flash]

Shapes are those of Qwen2.5-0.5B (14 query, 2 key heads, width 64) and Llama-3.1-8B (32, 8, 128):
documents of one length, and ragged ones. Each backend is first compared with the definition in fp64
(first and last document, first and last group of heads); one that is wrong or fails is not timed,
is named in the table, and makes the exit code 1. Times are of the device: a sleeping kernel hides
the host, L2 is overwritten before each sample, and backends take turns. FLOPs are those of the
causal half, 4 · H · D · Σs²/2 forward and 2.5 times that backward.
"""

import argparse
import importlib.metadata
import json
import platform
import statistics
import sys
import traceback
from pathlib import Path

import torch
import triton

from chronicals.attention import BACKENDS, attention_reference, choose_backend, document_attention
from chronicals.attention.support import Needs

HEADS = {"0.5B 14/2x64": (14, 2, 64), "8B 32/8x128": (32, 8, 128)}
LENGTHS = {
    "8x2048": [2048] * 8,
    "32x512": [512] * 32,
    "2x8192": [8192] * 2,
    "ragged": [
        2048,
        1733,
        1500,
        1311,
        1204,
        1100,
        1013,
        950,
        850,
        777,
        700,
        640,
        555,
        500,
        431,
        400,
        333,
        200,
        107,
        31,
        1,
    ],
}
ALLOWED = 2**-6
"""Relative Frobenius error against fp64; products of bf16 are at about a quarter of it."""
WARM_UP = 3
SLEEP_CYCLES = 3_000_000
L2_BYTES = 2**28
PACKAGES = ("flash-attn-4", "nvidia-cutlass-dsl", "quack-kernels")


class Case:
    """Inputs of one shape, and what is needed to time and to judge a backend on them."""

    def __init__(self, heads: int, groups: int, width: int, lengths: list[int]) -> None:
        tokens = sum(lengths)
        shapes = [
            (tokens, heads, width),
            (tokens, groups, width),
            (tokens, groups, width),
            (tokens, heads, width),
        ]
        *qkv, self.upstream = (
            torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes
        )
        self.leaves = [x.requires_grad_() for x in qkv]
        self.bounds = torch.tensor([0, *lengths]).cumsum(0)
        self.cu = self.bounds.to("cuda", torch.int32)
        self.longest = max(lengths)
        self.width = width
        self.flops = 2 * heads * width * sum(length**2 for length in lengths)

    def forward(self, backend: str) -> torch.Tensor:
        return document_attention(*self.leaves, self.cu, self.longest, backend=backend)

    def backward(self, out: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(out, self.leaves, self.upstream, retain_graph=True)

    def errors(self, backend: str) -> list[float]:
        """Of the output and the gradients of q, k and v, in the parts that are compared."""
        out = self.forward(backend)
        found = [out.detach(), *self.backward(out)]
        pieces: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[], [], [], []]
        groups = self.leaves[1].shape[1]
        shared = self.leaves[0].shape[1] // groups
        for document in (0, len(self.bounds) - 2):
            span = slice(int(self.bounds[document]), int(self.bounds[document + 1]))
            for group in (0, groups - 1):
                of_q = slice(group * shared, (group + 1) * shared)
                of_k = slice(group, group + 1)
                expected = self.exact(span, of_q, of_k)
                parts = (
                    found[0][span, of_q],
                    found[1][span, of_q],
                    found[2][span, of_k],
                    found[3][span, of_k],
                )
                for piece, part, right in zip(pieces, parts, expected, strict=True):
                    piece.append((part.double().flatten(), right.flatten()))
        return [relative(piece) for piece in pieces]

    def exact(self, span: slice, of_q: slice, of_k: slice) -> list[torch.Tensor]:
        q, k, v = (
            x.detach()[span, part].double().transpose(0, 1).requires_grad_()
            for x, part in zip(self.leaves, (of_q, of_k, of_k), strict=True)
        )
        seen = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool, device="cuda").tril()
        out = attention_reference(q, k, v, seen, self.width**-0.5, None, None)
        gradients = torch.autograd.grad(
            out, (q, k, v), self.upstream[span, of_q].double().transpose(0, 1)
        )
        return [x.detach().transpose(0, 1) for x in (out, *gradients)]


def relative(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Frobenius error of the first of each pair, of all pairs together."""
    found, expected = (torch.cat(column) for column in zip(*pairs, strict=True))
    return float((found - expected).norm() / expected.norm())


def milliseconds(work, scratch: torch.Tensor):
    """Device time of ``work()``, and its result."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    scratch.zero_()
    torch.cuda._sleep(SLEEP_CYCLES)
    start.record()
    result = work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end), result


def measure(case: Case, backends: list[str], rounds: int) -> dict:
    results: dict[str, dict] = {}
    for name in backends:
        try:
            errors = case.errors(name)
            results[name] = {"errors": errors, "forward_ms": [], "backward_ms": []}
            if not all(error <= ALLOWED for error in errors):
                results[name]["failure"] = "wrong: " + ", ".join(f"{error:.1e}" for error in errors)
        except Exception as error:  # recorded, shown, and the exit code is 1
            results[name] = {"failure": repr(error)[:300], "traceback": traceback.format_exc()}
    scratch = torch.empty(L2_BYTES, dtype=torch.uint8, device="cuda")
    sound = [name for name in backends if "failure" not in results[name]]
    for number in range(WARM_UP + rounds):
        for name in sound:
            forward, out = milliseconds(lambda name=name: case.forward(name), scratch)
            backward, _ = milliseconds(lambda out=out: case.backward(out), scratch)
            if number >= WARM_UP:
                results[name]["forward_ms"].append(forward)
                results[name]["backward_ms"].append(backward)
    for name in sound:
        forward, backward = (
            statistics.median(results[name][which]) for which in ("forward_ms", "backward_ms")
        )
        results[name]["tflops"] = {
            "forward": case.flops / forward / 1e9,
            "backward": 2.5 * case.flops / backward / 1e9,
        }
    return results


def versions() -> dict:
    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def able(width: int, asked: str | None) -> list[str]:
    needs = Needs("cuda", torch.cuda.get_device_capability(), torch.bfloat16, width)
    names = asked.split(",") if asked else BACKENDS
    return [name for name in names if BACKENDS[name].lacks(needs) is None]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--backends")
    given = parser.parse_args()
    torch.manual_seed(0)
    results: dict = {
        "card": torch.cuda.get_device_name(0),
        "versions": versions(),
        "commit": given.commit,
        "rounds": given.rounds,
        "heads": HEADS,
        "lengths": LENGTHS,
        "cases": {},
    }
    for model, (heads, groups, width) in HEADS.items():
        for shape, lengths in LENGTHS.items():
            found = measure(
                Case(heads, groups, width, lengths), able(width, given.backends), given.rounds
            )
            chosen = choose_backend(torch.device("cuda"), torch.bfloat16, width)
            results["cases"][f"{model} {shape}"] = {"chosen": chosen, "backends": found}
            given.output.write_text(json.dumps(results, indent=1))
            torch.cuda.empty_cache()
    sys.exit(print_table(results))


def print_table(results: dict) -> int:
    """The exit code: 1 where something failed."""
    failures = []
    print(f"{results['card']}: TFLOP/s forward / backward; * is what is chosen")
    print(f"{'':22}", *(f"{name:>15}" for name in BACKENDS))
    for case, row in results["cases"].items():
        cells = []
        for name in BACKENDS:
            found = row["backends"].get(name, {})
            failures += [f"{case} {name}: {found['failure']}"] if "failure" in found else []
            rates = "failed" if found else "-"
            if "tflops" in found:
                rates = "{forward:.0f} / {backward:.0f}".format(**found["tflops"])
            cells.append(f"{rates + ('*' if name == row['chosen'] else ' '):>15}")
        print(f"{case:22}", *cells)
    print(*failures, sep="\n", end="\n" if failures else "")
    return 1 if failures else 0


if __name__ == "__main__":
    main()
