"""How long it takes from the command to the first step, and from the last step to the end, saving
included.

    python benchmarks/startup.py OUTPUT.json [--shape qwen2.5-0.5b] [--mode lora] [--arms chronicals
    trl] [--rounds 3]

Random weights of the shape and 2000 short texts are written once; then the arms take turns:
`chronicals train`, and where they are installed a plain script around TRL's `SFTTrainer` and one
around Unsloth's model. Each run is a new process. In the first round of an arm nothing is cached
(its home folder and compilers' caches are new and empty), in the others what the first left is
there. Phases are the times between marks, which are set by wrapping functions in the process
itself. A table of the medians comes last; the file has every mark of every run and is written anew
after each.
"""

import argparse
import importlib
import importlib.abc
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

STEPS = 10
ROWS = 2000
BATCH = 4
WIDTH = 512
ARMS = {"chronicals": (), "trl": ("trl", "datasets"), "unsloth": ("unsloth",)}
"""What is compared, and the packages it needs."""

PHASES = ("imports", "model", "data", "patching", "first step", "other steps", "saving", "exit")
BARS = {"cold": 30.0, "warm": 12.0}
"""Seconds from the command to the first step, at most."""

SFT = {
    "max_steps": STEPS,
    "per_device_train_batch_size": BATCH,
    "gradient_accumulation_steps": 1,
    "max_length": WIDTH,
    "save_strategy": "no",
    "report_to": "none",
    "logging_steps": STEPS,
    "gradient_checkpointing": False,
    "disable_tqdm": True,
    "dataset_num_proc": 1,
}


class Marks:
    """Names and times, a line each in a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, name: str) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps([name, time.time()]) + "\n")


class AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function with a module as soon as somebody has imported it, without importing it
    earlier than they do.
    """

    def __init__(self, hooks: dict) -> None:
        self.hooks = hooks

    def find_spec(self, name, path=None, target=None):
        if name not in self.hooks:
            return None
        hook = self.hooks.pop(name)
        spec = find_spec(name)
        assert spec is not None and spec.loader is not None, name
        run = spec.loader.exec_module

        def execute(module):
            run(module)
            hook(module)

        spec.loader.exec_module = execute
        return spec


def marked(
    owner, name: str, mark: Marks, before: str | None = None, after: str | None = None
) -> None:
    """Wrap ``owner.name`` so that calls of it set marks."""
    inner = getattr(owner, name)

    def wrapped(*given, **named):
        if before:
            mark(before)
        result = inner(*given, **named)
        if after:
            mark(after)
        return result

    setattr(owner, name, wrapped)


def run_chronicals(mark: Marks, model: Path, rows: Path, output: Path, mode: str) -> None:
    """The command line as it is; marks lie between the trainer's own parts."""

    def in_preparation(module) -> None:
        marked(module, "open_stores", mark, after="data")

    def in_loading(module) -> None:
        marked(module.SavedModel, "model", mark, before="imports", after="model")

    def in_callbacks(module) -> None:
        marked(module.MetricsFile, "run_began", mark, before="patching")
        marked(module.MetricsFile, "step_done", mark, before="step")

    hooks = {
        "chronicals.training.preparation": in_preparation,
        "chronicals.saving.saved_model": in_loading,
        "chronicals.training.run.callbacks": in_callbacks,
    }
    sys.meta_path.insert(0, AfterImport(hooks))
    sys.argv = [
        "chronicals",
        "train",
        "--model",
        str(model),
        "--data",
        str(rows),
        "--output-dir",
        str(output),
        "--max-steps",
        str(STEPS),
        "--batch-size",
        str(BATCH),
        "--gradient-accumulation-steps",
        "1",
        "--max-seq-length",
        str(WIDTH),
        *(["--use-lora"] if mode == "lora" else ["--no-use-lora"]),
    ]
    from chronicals.cli import main

    main()


def run_trl(mark: Marks, model: Path, rows: Path, output: Path, mode: str) -> None:
    import torch
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    adapters = None
    if mode == "lora":
        from peft import LoraConfig

        adapters = LoraConfig(
            r=16, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"
        )
    mark("imports")
    on_card = torch.cuda.is_available()
    loaded = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.bfloat16, device_map={"": 0 if on_card else "cpu"}
    )
    tokenizer = AutoTokenizer.from_pretrained(model)
    mark("model")
    described = SFTConfig(output_dir=str(output), bf16=on_card, use_cpu=not on_card, **SFT)
    dataset = load_dataset("json", data_files=str(rows), split="train")
    trainer = SFTTrainer(
        model=loaded,
        processing_class=tokenizer,
        train_dataset=dataset,
        args=described,
        peft_config=adapters,
    )
    mark("data")
    train_with(mark, trainer, output)


def run_unsloth(mark: Marks, model: Path, rows: Path, output: Path, mode: str) -> None:
    import unsloth  # noqa: F401, I001  # before all others
    import torch
    from datasets import load_dataset
    from trl import SFTConfig, SFTTrainer
    from unsloth import FastLanguageModel

    mark("imports")
    loaded, tokenizer = FastLanguageModel.from_pretrained(
        str(model),
        max_seq_length=WIDTH,
        dtype=torch.bfloat16,
        load_in_4bit=False,
        full_finetuning=mode == "full",
    )
    if mode == "lora":
        loaded = FastLanguageModel.get_peft_model(
            loaded, r=16, lora_alpha=16, use_gradient_checkpointing=False
        )
    mark("model")
    dataset = load_dataset("json", data_files=str(rows), split="train")
    described = SFTConfig(output_dir=str(output), bf16=True, **SFT)
    trainer = SFTTrainer(
        model=loaded, processing_class=tokenizer, train_dataset=dataset, args=described
    )
    mark("data")
    train_with(mark, trainer, output)


def train_with(mark: Marks, trainer, output: Path) -> None:
    """Train and save through a trainer of transformers."""
    import torch
    from transformers import TrainerCallback

    class Steps(TrainerCallback):
        def on_train_begin(self, *given, **named):
            mark("patching")

        def on_step_end(self, *given, **named):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            mark("step")

    trainer.add_callback(Steps())
    trainer.train()
    trainer.save_model(str(output / "model"))


def phases_of(marks: list[tuple[str, float]], began: float, ended: float) -> dict[str, float]:
    """Seconds of each phase: it ends at the last mark of its name; of the steps the first one is
    a phase of its own.
    """
    steps = [at for name, at in marks if name == "step"]
    ends = {name: at for name, at in marks if name in PHASES}
    ends |= {
        "first step": steps[0],
        "other steps": steps[-1],
        "saving": next(at for name, at in marks if name == "end"),
    }
    ends["exit"] = ended
    found = {}
    before = began
    for phase in sorted(ends, key=ends.__getitem__):
        found[phase] = ends[phase] - before
        before = ends[phase]
    return found | {
        "to first step": steps[0] - began,
        "after last step": ended - steps[-1],
        "all": ended - began,
    }


def run_arm(arm: str, cache: str, home: Path, work: Path, mode: str, timeout: float) -> dict:
    """One process of an arm; its phases, or its last words."""
    marks = work / "marks.jsonl"
    marks.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="chronicals-startup-") as output:
        command = [
            sys.executable,
            __file__,
            "--child",
            arm,
            "--work",
            str(work),
            "--mode",
            mode,
            "--run-in",
            output,
        ]
        began = time.time()
        try:
            done = subprocess.run(
                command,
                env=environment(home),
                cwd=output,
                text=True,
                timeout=timeout,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            code = done.returncode
            said = done.stdout
        except subprocess.TimeoutExpired as expired:
            code = 124
            said = str(expired.stdout)
        ended = time.time()
    lines = [json.loads(line) for line in marks.read_text().splitlines()] if marks.exists() else []
    found = {
        "arm": arm,
        "cache": cache,
        "began": began,
        "ended": ended,
        "marks": lines,
        "exit_code": code,
    }
    return found | (
        {"last_words": said[-2000:]} if code else {"seconds": phases_of(lines, began, ended)}
    )


def environment(home: Path) -> dict[str, str]:
    """The caller's, with every cache below ``home``."""
    caches = {
        "HOME": "",
        "XDG_CACHE_HOME": ".cache",
        "TRITON_CACHE_DIR": "triton",
        "TORCHINDUCTOR_CACHE_DIR": "inductor",
        "CUDA_CACHE_PATH": "cuda",
        "HF_HOME": "hf",
    }
    dropped = {"FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", "NUMBA_CACHE_DIR"}
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    return {
        **kept,
        **{name: str(home / place) for name, place in caches.items()},
        "HF_HUB_OFFLINE": "1",
    }


def prepare(work: Path, shape: str) -> None:
    """The model and the rows, in this process, which is then done with torch."""
    import torch

    from chronicals.benchmark.shapes import build_model

    build_model(shape, work / "base", "cuda" if torch.cuda.is_available() else "cpu")
    texts = (
        {"text": "one two three four five six seven eight " * (n % 50 + 1) + str(n)}
        for n in range(ROWS)
    )
    (work / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))


def table(runs: list[dict]) -> str:
    """Medians by arm and cache."""
    names = ["to first step", *PHASES[:5], "after last step", "saving", "exit", "all"]
    lines = ["".join(f"{word:>16}" for word in ["seconds, median of", *names])]
    for arm, cache in dict.fromkeys((run["arm"], run["cache"]) for run in runs):
        chosen = [run for run in runs if (run["arm"], run["cache"]) == (arm, cache)]
        good = [run["seconds"] for run in chosen if "seconds" in run]
        if not good:
            lines.append(
                f"{arm} {cache}: failed: {chosen[-1]['last_words'].strip().splitlines()[-1:]}"
            )
            continue
        cells = [
            f"{statistics.median(one[name] for one in good):.1f}" if name in good[0] else "-"
            for name in names
        ]
        lines.append("".join(f"{cell:>16}" for cell in [f"{arm} {cache} ({len(good)})", *cells]))
        if arm == "chronicals" and cells[0] != "-":
            lines[-1] += (
                f"  bar {BARS[cache]:.0f} s: "
                f"{'held' if float(cells[0]) <= BARS[cache] else 'missed'}"
            )
    return "\n".join(lines)


def machine() -> dict:
    from importlib.metadata import PackageNotFoundError, version

    import torch

    versions = {}
    for name in (
        "chronicals",
        "torch",
        "transformers",
        "triton",
        "flash-attn-4",
        "trl",
        "unsloth",
        "peft",
    ):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed"
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return {
        "card": card,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": versions,
    }


def measure(given: argparse.Namespace, work: Path) -> list[dict]:
    from chronicals.benchmark.record import current_commit

    ends = time.monotonic() + given.time_limit
    runs = list[dict]()
    subprocess.run(
        [
            sys.executable,
            __file__,
            "--child",
            "prepare",
            "--work",
            str(work),
            "--shape",
            given.shape,
        ],
        check=True,
    )
    described = {
        "shape": given.shape,
        "mode": given.mode,
        "steps": STEPS,
        "batch_size": BATCH,
        "max_seq_length": WIDTH,
        "bars": BARS,
        "commit": given.commit or current_commit(),
        **machine(),
    }
    arms = [arm for arm in given.arms if all(find_spec(package) for package in ARMS[arm])]
    for number in range(1 + given.rounds):
        for arm in arms:
            if time.monotonic() > ends:
                print(f"not begun, the time limit is reached: {arm}, round {number}", flush=True)
                continue
            home = work / f"home-{arm}"
            home.mkdir(exist_ok=True)
            runs.append(
                run_arm(arm, "warm" if number else "cold", home, work, given.mode, given.timeout)
            )
            seconds = runs[-1].get("seconds", {"to first step": float("nan")})
            print(
                f"{arm} {runs[-1]['cache']}: first step after {seconds['to first step']:.1f} s",
                flush=True,
            )
            given.output.write_text(json.dumps({**described, "runs": runs}, indent=1))
    return runs


def child(given: argparse.Namespace) -> None:
    if given.child == "prepare":
        prepare(given.work, given.shape)
        return
    mark = Marks(given.work / "marks.jsonl")
    arm = {"chronicals": run_chronicals, "trl": run_trl, "unsloth": run_unsloth}[given.child]
    try:
        arm(mark, given.work / "base", given.work / "rows.jsonl", given.run_in / "run", given.mode)
    finally:
        mark("end")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path, nargs="?")
    parser.add_argument(
        "--shape",
        default="qwen2.5-0.5b",
        help="a built-in shape of the benchmark; tiny to try the script",
    )
    parser.add_argument("--mode", choices=["full", "lora"], default="full")
    parser.add_argument(
        "--arms", nargs="+", choices=ARMS, default=list(ARMS), help="of those that are installed"
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="with what the first, cold one has left in the caches"
    )
    parser.add_argument(
        "--time-limit", type=float, default=480, help="seconds after which nothing new is begun"
    )
    parser.add_argument("--timeout", type=float, default=150, help="seconds that one run may take")
    parser.add_argument("--commit", help="to record")
    for hidden, kind in {"--child": str, "--work": Path, "--run-in": Path}.items():
        parser.add_argument(hidden, type=kind, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        child(given)
        return
    if given.output is None:
        parser.error("name the file to write")
    with tempfile.TemporaryDirectory(prefix="chronicals-startup-") as folder:
        runs = measure(given, Path(folder))
    print(table(runs))
    if not all("seconds" in run for run in runs if run["arm"] == "chronicals"):
        sys.exit(1)


if __name__ == "__main__":
    main()
