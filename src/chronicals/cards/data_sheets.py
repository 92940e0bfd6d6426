"""Figures of cards as their makers publish them, for plans of cards that nobody measured here.

FLOP/s are those of dense products that are summed in fp32, half of what data sheets give with
sparsity. Cards for games have twice as many that are summed in fp16, which training does not use.
"""

from __future__ import annotations

from dataclasses import dataclass

PCIE_3 = 16e9
PCIE_4 = 32e9
PCIE_5 = 64e9
"""Bytes a second in one direction over 16 lanes (PCI-SIG)."""


@dataclass(frozen=True)
class DataSheet:
    """Published figures of a card.

    Attributes:
        card: its name.
        memory: bytes.
        bandwidth: bytes a second of its memory.
        bf16: FLOP/s of dense products of 16-bit values.
        fp8: FLOP/s of dense products of FP8 values; 0 if it has none.
        fp32: FLOP/s in fp32, without tensor cores.
        host: bytes a second to the host, in one direction.
        origin: document that has these figures.
    """

    card: str
    memory: int
    bandwidth: float
    bf16: float
    fp8: float
    fp32: float
    host: float
    origin: str


GB = 10**9

DATA_SHEETS = (
    DataSheet(
        "H100",
        80 * GB,
        3.35e12,
        989e12,
        1979e12,
        67e12,
        PCIE_5,
        "NVIDIA H100 data sheet, SXM: https://www.nvidia.com/en-us/data-center/h100/",
    ),
    DataSheet(
        "H100 PCIe",
        80 * GB,
        2.0e12,
        756e12,
        1513e12,
        51e12,
        PCIE_5,
        "NVIDIA H100 PCIe product brief, PB-11133-001",
    ),
    DataSheet(
        "H200",
        141 * GB,
        4.8e12,
        989e12,
        1979e12,
        67e12,
        PCIE_5,
        "NVIDIA H200 data sheet: https://www.nvidia.com/en-us/data-center/h200/",
    ),
    DataSheet(
        "B200",
        180 * GB,
        8e12,
        2250e12,
        4500e12,
        75e12,
        PCIE_5,
        "NVIDIA DGX B200 data sheet, an eighth: https://www.nvidia.com/en-us/data-center/dgx-b200/",
    ),
    DataSheet(
        "A100 40GB",
        40 * GB,
        1.555e12,
        312e12,
        0,
        19.5e12,
        PCIE_4,
        "NVIDIA A100 data sheet: https://www.nvidia.com/en-us/data-center/a100/",
    ),
    DataSheet(
        "A100 80GB",
        80 * GB,
        2.039e12,
        312e12,
        0,
        19.5e12,
        PCIE_4,
        "NVIDIA A100 data sheet, SXM: https://www.nvidia.com/en-us/data-center/a100/",
    ),
    DataSheet(
        "A10G",
        24 * GB,
        600e9,
        70e12,
        0,
        35e12,
        PCIE_4,
        "NVIDIA A10G data sheet, as of AWS G5: https://aws.amazon.com/ec2/instance-types/g5/",
    ),
    DataSheet(
        "L4",
        24 * GB,
        300e9,
        121e12,
        242e12,
        30.3e12,
        PCIE_4,
        "NVIDIA L4 data sheet: https://www.nvidia.com/en-us/data-center/l4/",
    ),
    DataSheet(
        "L40S",
        48 * GB,
        864e9,
        362e12,
        733e12,
        91.6e12,
        PCIE_4,
        "NVIDIA L40S data sheet: https://www.nvidia.com/en-us/data-center/l40s/",
    ),
    DataSheet(
        "T4",
        16 * GB,
        320e9,
        65e12,
        0,
        8.1e12,
        PCIE_3,
        "NVIDIA T4 data sheet, fp16: https://www.nvidia.com/en-us/data-center/tesla-t4/",
    ),
    DataSheet(
        "RTX 3090",
        24 * GB,
        936e9,
        71e12,
        0,
        35.6e12,
        PCIE_4,
        "NVIDIA Ampere GA102 GPU architecture, version 2.1, appendix A",
    ),
    DataSheet(
        "RTX 4090",
        24 * GB,
        1.008e12,
        165.2e12,
        330.3e12,
        82.6e12,
        PCIE_4,
        "NVIDIA Ada GPU architecture, version 2.1, appendix A",
    ),
    DataSheet(
        "RTX 5090",
        32 * GB,
        1.792e12,
        209.5e12,
        419e12,
        104.8e12,
        PCIE_5,
        "NVIDIA RTX Blackwell GPU architecture, version 1.1, appendix A",
    ),
)
"""Data sheets by card; their words are matched by ``cards.rates.is_named``."""
