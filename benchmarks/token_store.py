"""Building token stores: rates beside the bare tokenizer and ``datasets.map``, and the memory of a
million rows.

    python benchmarks/token_store.py OUTPUT.json [--rows 1000000] [--compared 100000] [--commit
    HASH]

Rows are pieces of the Python sources that are on this machine, of lognormal length. Each arm runs
in its own process, in turn, three times; anonymous memory, that of its children included (PSS), is
sampled every 0.5 s. The bare tokenizer's rate is ``encode_batch`` over texts (or over conversations
already rendered) that are in memory, its results thrown away; ``datasets`` reads the same file as
ours, with ``load_dataset``, and maps over all cores.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import platform
import random
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from importlib.metadata import version
from pathlib import Path

from chronicals.config import ChronicalsConfig
from chronicals.data import Tokenizer, open_store
from chronicals.data.tokens.tokenizer_training import train_tokenizer

CHUNK = 4096
WIDTH = 2048
ROUNDS = 3


def write_rows(path: Path, chats: Path, count: int) -> None:
    """The same texts as rows of text and as conversations of two turns."""
    random.seed(0)
    lines = []
    for source in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        lines += source.read_text(encoding="utf-8", errors="ignore").splitlines()
    with path.open("w") as texts, chats.open("w") as conversations:
        for _ in range(count):
            size = max(int(random.lognormvariate(2.0, 0.8)), 2)
            start = random.randrange(len(lines) - size)
            asked, said = (
                "\n".join(lines[a:b]).strip() or "pass"
                for a, b in ((start, start + size // 2), (start + size // 2, start + size))
            )
            texts.write(json.dumps({"text": f"{asked}\n{said}"}) + "\n")
            messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
            conversations.write(json.dumps({"messages": messages}) + "\n")


def load(path: Path, count: int) -> list[dict]:
    with path.open() as lines:
        return [json.loads(line) for _, line in zip(range(count), lines)]


def first_rows(folder: Path, data: Path, count: int) -> Path:
    head = folder / f"head-{count}-{data.name}"
    if not head.exists():
        with data.open() as lines, head.open("w") as out:
            out.writelines(line for _, line in zip(range(count), lines))
    return head


def ours(folder: Path, data: Path, tokenizer, count: int) -> dict:
    head = first_rows(folder, data, count)
    config = ChronicalsConfig(max_seq_length=WIDTH, cache_dir=folder / f"stores-{os.getpid()}")
    begun = time.perf_counter()
    store = open_store(head, tokenizer, config)
    built = time.perf_counter() - begun
    begun = time.perf_counter()
    open_store(head, tokenizer, config)
    return {
        "seconds": built,
        "reopened_seconds": time.perf_counter() - begun,
        "tokens": int(store.lengths.sum()),
    }


def rendered(folder: Path, data: Path, tokenizer, count: int) -> list[str]:
    kept = folder / f"rendered-{count}-{data.stem}.json"
    if not kept.exists():
        rows = load(data, count)
        template = "messages" in rows[0]
        texts = [
            tokenizer.apply_chat_template(row["messages"], tokenize=False)
            if template
            else row["text"]
            for row in rows
        ]
        kept.write_text(json.dumps(texts))
    return json.loads(kept.read_text())


def bare(folder: Path, data: Path, tokenizer, count: int) -> dict:
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    texts = rendered(folder, data, tokenizer, count)
    begun = time.perf_counter()
    tokens = 0
    for start in range(0, count, CHUNK):
        tokens += sum(
            map(len, tokenizer.backend_tokenizer.encode_batch(texts[start : start + CHUNK]))
        )
    return {"seconds": time.perf_counter() - begun, "tokens": tokens}


def datasets_map(folder: Path, data: Path, tokenizer, count: int) -> dict:
    import datasets

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    head = first_rows(folder, data, count)

    def encode(batch: dict) -> dict:
        if "messages" in batch:
            return tokenizer.apply_chat_template(batch["messages"], return_dict=True)
        return {"input_ids": tokenizer(batch["text"], add_special_tokens=False)["input_ids"]}

    begun = time.perf_counter()
    rows = datasets.load_dataset(
        "json",
        data_files=str(head),
        split="train",
        cache_dir=str(folder / f"datasets-{os.getpid()}"),
    )
    done = rows.map(encode, batched=True, num_proc=os.cpu_count(), remove_columns=rows.column_names)
    return {"seconds": time.perf_counter() - begun, "tokens": sum(map(len, done["input_ids"]))}


ARMS = {"ours": ours, "encode_batch": bare, "datasets.map": datasets_map}


def run_arm(arm: str, folder: Path, data: Path, count: int) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    Tokenizer(tokenizer).fingerprint()
    peak = [0]
    ended = threading.Event()

    def sample() -> None:
        while not ended.wait(0.5):
            peak[0] = max(peak[0], anonymous("self") + sum(map(anonymous, descendants("self"))))

    threading.Thread(target=sample, daemon=True).start()
    result = ARMS[arm](folder, data, tokenizer, count)
    ended.set()
    result |= {
        "rows": count,
        "rows_per_second": count / result["seconds"],
        "peak_anonymous_mib": peak[0] / 1024,
    }
    print(json.dumps(result))


def anonymous(process: str) -> int:
    """KiB of a process that may have ended; what it shares with others by its part of it."""
    try:
        return int(
            Path(f"/proc/{process}/smaps_rollup").read_text().split("Pss_Anon:")[1].split()[0]
        )
    except (OSError, IndexError):
        return 0


def descendants(process: str) -> set[str]:
    """Processes that this one and those have started."""
    found = set[str]()
    with contextlib.suppress(OSError):  # it, or a thread of it, has ended meanwhile
        for task in Path(f"/proc/{process}/task").iterdir():
            with contextlib.suppress(OSError):
                found.update((task / "children").read_text().split())
    return found.union(*map(descendants, found))


def measured(arm: str, folder: Path, data: Path, count: int) -> dict:
    command = [
        sys.executable,
        __file__,
        "-",
        "--arm",
        arm,
        "--folder",
        str(folder),
        "--data",
        str(data),
        "--rows",
        str(count),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{arm}: {done.stderr[-2000:]}")
    sample = json.loads(done.stdout.splitlines()[-1])
    print(f"{arm:14}{count:10,} {data.stem:15}{sample['seconds']:6.1f} s", flush=True)
    return sample


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--compared", type=int, default=100_000)
    parser.add_argument("--commit", default="")
    parser.add_argument("--arm", choices=ARMS)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--data", type=Path)
    options = parser.parse_args()
    if options.arm:
        run_arm(options.arm, options.folder, options.data, options.rows)
    else:
        compare(options)


def compare(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        texts = folder / "texts.jsonl"
        chats = folder / "chats.jsonl"
        write_rows(texts, chats, options.rows)
        train_tokenizer((row["text"] for row in load(texts, 20_000)), 32_000).save_pretrained(
            folder / "tokenizer"
        )
        samples: dict[str, dict[str, list[dict]]] = {}
        for _ in range(ROUNDS):
            for kind, data in (("texts", texts), ("conversations", chats)):
                for arm in ARMS:
                    samples.setdefault(kind, {}).setdefault(arm, []).append(
                        measured(arm, folder, data, options.compared)
                    )
        whole = {
            "texts": measured("ours", folder, texts, options.rows),
            "conversations": measured("ours", folder, chats, options.rows),
        }
    rates = {
        kind: {
            arm: statistics.median(run["rows_per_second"] for run in runs)
            for arm, runs in arms.items()
        }
        for kind, arms in samples.items()
    }
    result = {
        "machine": {
            "cores": len(os.sched_getaffinity(0)),
            "processor": platform.processor() or platform.machine(),
        },
        "versions": {
            name: version(name) for name in ("tokenizers", "transformers", "datasets", "pyarrow")
        },
        "commit": options.commit,
        "rates": rates,
        "samples": samples,
        "whole": whole,
    }
    options.output.write_text(json.dumps(result, indent=1))
    print(f"{'':16}{'rows/s':>10}{'of encode_batch':>17}{'of datasets.map':>17}")
    for kind, arms in rates.items():
        mine = arms["ours"]
        print(
            f"{kind:16}{mine:10,.0f}{mine / arms['encode_batch']:17.2f}{mine / arms['datasets.map']:17.2f}"
        )
    for kind, run in whole.items():
        again = f"reopened in {run['reopened_seconds']:.2f} s"
        print(
            f"{run['rows']:,} {kind}: {run['seconds']:.0f} s, {run['peak_anonymous_mib']:.0f} "
            f"MiB, {again}"
        )


if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    main()
