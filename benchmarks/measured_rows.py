"""The rows of the benchmark as they stand in `results/`, read for the tables (`figures.py`) and the
plots (`plots.py`).

A row may have been measured several times: `results/row-NAME-CARD.json`,
`results/row-NAME-CARD-2.json` and so on, CARD being h100, h200 or another. Measurements at one
commit are a row with a range; those at another commit are another row.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path

from chronicals.benchmark.shapes import SHAPES

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
MEASURED_ROW = re.compile(r"row-(?P<row>.+)-(?P<card>[a-z]{1,2}\d{2,4})(?:-(?P<run>\d+))?\.json")
FIELD = re.compile(r"(\w+)=(\[[^\]]*\]|\S+)")
WITH_FRONTIER = ("0.5b full fixed", "0.5b lora fixed", "8b lora fixed")
"""Rows with a frontier of memory and speed."""

SPELT = {
    "lora": "LoRA",
    "qlora": "QLoRA",
    "dora": "DoRA",
    "fp8": "FP8",
    "8bit": "8-bit states",
    "dpo": "DPO",
    "orpo": "ORPO",
    "distill": "distilled",
}

MIXTURES = {"olmoe 1b 7b": "OLMoE-1B-7B", "30b a3b": "Qwen3-30B-A3B (8 of its 48 layers)"}
"""Models of rows whose names have several words."""

UNLIKE_PEERS = ("use_fp8", "max_grad_norm")
"""Fields of a variant of ours that no peer has: peers multiply in 16 bit and clip."""


@dataclass(frozen=True)
class Row:
    """A row of the tables.

    Attributes:
        title: its name with blanks, `0.5b full fixed`.
        result: the newest measurement, as its file has it.
        others: earlier ones at its commit, and those on other cards.
        arms: of the newest, those that have a speed, the fastest first.
    """

    title: str
    result: dict
    others: list[dict]
    arms: dict[str, dict]

    @property
    def name(self) -> str:
        """The title as a reader of the README has it: `0.5B full, fixed`."""
        model = next(
            (model for model in MIXTURES if self.title.startswith(model)), self.title.split()[0]
        )
        *mode, data = self.title.removeprefix(model).split()
        words = [MIXTURES.get(model, model.upper()), *(SPELT.get(word, word) for word in mode)]
        return f"{' '.join(words)}, {data}"

    @property
    def compared(self) -> dict[str, dict]:
        """The arms without variants of ours that ran in the scouting round alone."""
        return {name: arm for name, arm in self.arms.items() if not is_scouted(name, arm)}

    @property
    def scouted(self) -> bool:
        """Whether it has such variants, which make a frontier of memory and speed."""
        return any(is_scouted(name, arm) for name, arm in self.arms.items())

    @property
    def peers(self) -> list[str]:
        """Arms that are not ours, the fastest first."""
        return [name for name in self.arms if not name.startswith("ours")]

    @property
    def paired(self) -> bool:
        """Whether it is over pairs of answers."""
        return "pairs_a_step" in self.result.get("row", {})

    @property
    def taught(self) -> bool:
        """Whether it has a teacher."""
        return "teacher" in self.result.get("row", {})

    @property
    def in_4_bits(self) -> bool:
        """Whether its base is."""
        return bool(self.result.get("row", {}).get("fields", {}).get("quantization"))

    @property
    def routed(self) -> bool:
        """Whether its model is a mixture of experts."""
        shape = SHAPES.get(self.result.get("row", {}).get("model", ""))
        return shape is not None and "num_experts" in shape.sizes

    @property
    def commit(self) -> str:
        commit: str = self.result["commit"]
        return commit

    @property
    def card(self) -> str:
        return self.result["machine"]["card"].removeprefix("NVIDIA ")

    @property
    def place(self) -> str:
        """Card, torch and commit."""
        return f"{self.card}, torch {self.result['versions']['torch']}, `{self.result['commit']}`"

    def rates(self, name: str) -> list[float]:
        """Tokens per second of an arm in all measurements that it has a speed in."""
        arms = [result["arms"].get(name, {}) for result in (self.result, *self.others)]
        return [
            arm["tokens_per_second"]["median"] for arm in arms if arm.get("status") == "measured"
        ]

    def ratios(self, name: str) -> list[float]:
        """Ours over an arm in all measurements that compare them in the same rounds; of a row
        without such rounds, the ratio of what both were scouted with."""
        results = (self.result, *self.others)
        paired = [
            result["ratios"][name]["median"] for result in results if name in result["ratios"]
        ]
        if paired or any(result["ratios"] for result in results) or name.startswith("ours"):
            return paired
        scouted = [
            [result["arms"].get(arm, {}).get("tokens_per_second") for arm in ("ours", name)]
            for result in results
        ]
        return [ours["median"] / peer["median"] for ours, peer in scouted if ours and peer]

    def least(self, names: list[str]) -> str:
        """The arm of these with the lowest peak of memory."""
        return min(names, key=lambda name: self.arms[name]["peak_gib"])

    def variants(self, *, unlike_peers: bool) -> list[str]:
        """Arms of ours whose fields the peers have, too, or those that have fields of their own."""
        return [
            name
            for name in self.arms
            if name.startswith("ours") and bool(own_fields(name)) == unlike_peers
        ]


def rows() -> list[Row]:
    """All rows over documents in the results, those of the newest commit first."""
    return [row for row in all_rows() if not row.paired]


def preferences() -> list[Row]:
    """The same over pairs of answers."""
    return [row for row in all_rows() if row.paired]


def all_rows() -> list[Row]:
    """Those of the newest commit first; without a date, a file without a number is the newest."""
    found: dict[tuple[str, str], list[tuple[str, int, dict]]] = {}
    for path in sorted(RESULTS.glob("row-*.json")):
        parts = MEASURED_ROW.fullmatch(path.name)
        if parts is None:
            raise SystemExit(f"{path.name}: expected row-NAME-CARD.json or row-NAME-CARD-2.json")
        result = json.loads(path.read_text())
        key = parts["row"].replace("-", " "), result["commit"]
        found.setdefault(key, []).append((result.get("date", ""), -int(parts["run"] or 1), result))
    made = [
        row_of(title, [result for *_, result in sorted(measured, key=lambda one: one[:2])])
        for (title, _), measured in found.items()
    ]
    dates: dict[str, str] = {}
    for row in made:
        dates[row.commit] = max(dates.get(row.commit, ""), row.result.get("date", ""))
    return sorted(made, key=lambda row: (dates[row.commit], row.commit), reverse=True)


def row_of(title: str, results: list[dict]) -> Row:
    """Of its measurements, the newest last."""
    *others, newest = results
    arms = {name: arm for name, arm in newest["arms"].items() if arm["status"] == "measured"}
    arms = dict(sorted(arms.items(), key=lambda item: -item[1]["tokens_per_second"]["median"]))
    return Row(title, newest, others, arms)


def with_peers(*, apart: bool = False) -> list[Row]:
    """Those that compare ours with peers: dense ones in 16 bit at the newest commit of them;
    ``apart``, those over bases in 4 bits and those of mixtures, each at its own newest commit."""
    of_kind = [row for row in rows() if (row.in_4_bits or row.routed) == apart]
    found = [row for row in of_kind if row.peers and "ours" in row.arms and not row.taught]
    if apart:
        return list({row.title: row for row in reversed(found)}.values())
    return [row for row in found if row.commit == found[0].commit]


def with_frontier() -> list[Row]:
    """Those with variants of ours that need less memory."""
    return [row for row in with_peers() if row.title in WITH_FRONTIER and row.scouted]


def is_scouted(name: str, arm: dict) -> bool:
    """Whether it is a variant of ours that ran in the scouting round alone."""
    return name.startswith("ours ") and not arm["rounds"]


def fields(name: str) -> dict[str, str]:
    """The configuration fields in which an arm of ours differs from the row's: {'memory':
    'recompute_layers'}.
    """
    return {field: value.strip("[]").replace("'", "") for field, value in FIELD.findall(name)}


def own_fields(name: str) -> list[str]:
    """Those that no peer has."""
    return [f"{field}={value}" for field, value in fields(name).items() if field in UNLIKE_PEERS]
