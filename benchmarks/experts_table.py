"""The tables of products of experts, from what ``grouped_products.py`` wrote."""

import json
import statistics

from measured_rows import RESULTS


def experts() -> list[str]:
    """Products of experts by shape: ours, torch's over rows sorted beforehand, and whole layers
    beside transformers'.
    """
    result = json.loads((RESULTS / "grouped-products-h100.json").read_text())
    lines = [
        "",
        "Products of experts in bf16, TFLOP/s: ours as they are trained with, rows gathered "
        "within the product, beside torch's "
        "grouped product over rows sorted beforehand, whose sorting is not counted. "
        f"{result['card'].removeprefix('NVIDIA ')}, `{result['commit']}`, cuBLAS "
        f"{result['cublas']:.0f} on 8192³:",
        "",
        "| shape (tokens, experts, of a token, widths) | product | ours | torch |",
        "|---|---|---|---|",
    ]
    for name, found in result["shapes"].items():
        shape = f"{name} ({', '.join(map(str, found['shape']))})"
        for product, row in found["products"].items():
            rates = {
                arm: row["flop"] / statistics.median(times) / 1e9
                for arm, times in row["milliseconds"].items()
            }
            lines.append(
                f"| {shape} | {product} | {rates['as trained']:.0f} | {rates['torch']:.0f} |"
            )
    lines += [
        "",
        "The whole layer, milliseconds:",
        "",
        "| shape | | ours | grouped_mm | loop over experts |",
        "|---|---|---|---|---|",
    ]
    words = {
        "forward": "forward",
        "both": "forward and backward",
        "frozen": "the same, weights frozen",
    }
    for name, found in result["shapes"].items():
        for part, said in words.items():
            times = [
                statistics.median(found["layer"][arm][part])
                for arm in ("ours", "grouped_mm", "loop")
            ]
            lines.append(f"| {name} | {said} | {' | '.join(f'{time:.1f}' for time in times)} |")
    return lines + in_fp8(result) + in_4_bits()


def in_fp8(result: dict) -> list[str]:
    """The same in FP8, where they were measured."""
    shapes = {name: found for name, found in result["shapes"].items() if "fp8" in found}
    if not shapes:
        return []
    lines = [
        "",
        "Products of experts in FP8, TFLOP/s, of operands quantised beforehand: ours, the same in "
        "bf16, and torch's scaled "
        "grouped product over rows sorted beforehand:",
        "",
        "| shape | product | ours | in bf16 | torch |",
        "|---|---|---|---|---|",
    ]
    for name, found in shapes.items():
        for product, row in found["fp8"].items():
            medians = {arm: statistics.median(times) for arm, times in row["milliseconds"].items()}
            rates = {arm: f"{row['flop'] / time / 1e9:.0f}" for arm, time in medians.items()}
            told = (rates.get(arm, "-") for arm in ("as trained", "bf16 as trained", "torch"))
            lines.append(f"| {name} | {product} | {' | '.join(told)} |")
    lines += ["", "The whole layer with its quantising, milliseconds:", ""]
    lines += ["| shape | | in FP8 | in bf16 |", "|---|---|---|---|"]
    words = {
        "forward": "forward, weights trained",
        "both": "forward and backward",
        "frozen": "the same, weights frozen",
    }
    for name, found in shapes.items():
        for part, said in words.items():
            times = (statistics.median(found["layer"][arm][part]) for arm in ("fp8", "ours"))
            lines.append(f"| {name} | {said} | {' | '.join(f'{time:.1f}' for time in times)} |")
    return lines


def in_4_bits() -> list[str]:
    """Training with experts in 4 bits beside 16, from what ``experts_in_4_bits.py`` wrote."""
    result = json.loads((RESULTS / "experts-in-4-bits-h100.json").read_text())
    lines = [
        "",
        f"LoRA over {result['layers']} layers of {result['shape']}, adapters on attention where "
        "it does not say experts, "
        "16,384 tokens a step (`benchmarks/experts_in_4_bits.py`, "
        f"{result['device'].removeprefix('NVIDIA ')}); stacks are "
        "dequantised whole, forward and backward:",
        "",
        "| experts | tokens/s | peak GiB | last loss |",
        "|---|---|---|---|",
    ]
    for name, found in result["trained"].items():
        lines.append(
            f"| {name} | {found['tokens/s']:,.0f} | {found['GiB']:.1f} | "
            f"{found['losses'][-1]:.3f} |"
        )
    return lines
