"""The first hour of somebody who has just cloned the repository: the README's commands on a small
model, each with its exit code, its duration and the lines that a reader would judge by, and a
verdict last.

    python benchmarks/first_hour.py [--install] [--full-quickstart] [--folder FOLDER] [--only TEXT]

The commands run in a folder of their own, with a small random model and 400 short chats that are
made there; nothing is downloaded but what ``--install`` installs: a fresh clone of this checkout,
in an environment of its own, as the README says. Without it they run by this interpreter and this
checkout's source. Exit status 1 if a command did not do what it should.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
TIME_LIMIT = 900
LONGEST_LINE = 150

MADE = """
import json, torch
from transformers import LlamaConfig, LlamaForCausalLM
from chronicals.data.tokens.tokenizer_training import train_tokenizer
def chat(n):
    said = f"twice {n} is {2 * n}" if n % 2 else f"{n} is even, and half of it is {n // 2}"
    return {"messages": [{"role": "user", "content": f"what about {n}?"}, {"role": "assistant", "content": said}]}
for name, numbers in (("chats.jsonl", range(400)), ("held-out.jsonl", range(1000, 1040))):
    open(name, "w").write("".join(json.dumps(chat(n)) + "\\n" for n in numbers))
tokenizer = train_tokenizer((m["content"] for n in range(400) for m in chat(n)["messages"]), 400)
torch.manual_seed(0)
LlamaForCausalLM(LlamaConfig(
    hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    vocab_size=len(tokenizer), max_position_embeddings=512, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
)).save_pretrained("base")
tokenizer.save_pretrained("base")
open("recipe.yaml", "w").write("model: base\\ndata: chats.jsonl\\nlearning_rate: 3e-3\\nmax_seq_length: 128\\nnum_epochs: 1\\n")
open("wrong-name.yaml", "w").write("model: base\\ndata: chats.jsonl\\nlearning_rat: 3e-3\\n")
open("wrong-value.yaml", "w").write("model: base\\ndata: chats.jsonl\\nbatch_size: none\\n")
sharegpt, alpaca = [], []
for n in range(400):
    question, answer = (m["content"] for m in chat(n)["messages"])
    sharegpt.append({"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]})
    alpaca.append({"instruction": question, "input": "", "output": answer})
for name, rows in (("sharegpt.json", sharegpt), ("alpaca.json", alpaca)):
    with open(name, "w") as file:
        json.dump(rows, file)
"""

AXOLOTL = """\
base_model: base
datasets:
  - path: sharegpt.json
    type: chat_template
    field_messages: conversations
sequence_len: 128
micro_batch_size: 2
gradient_accumulation_steps: 2
num_epochs: 1
adapter: lora
lora_r: 8
lora_target_linear: true
learning_rate: 0.001
optimizer: adamw_torch_fused
sample_packing: true
val_set_size: 0.1
output_dir: from-axolotl
"""
AXOLOTL_FOLLOWED = """\
model: base
data: [{path: sharegpt.json, columns: {messages: conversations}}]
max_seq_length: 128
batch_size: 2
gradient_accumulation_steps: 2
num_epochs: 1
use_lora: true
lora_rank: 8
learning_rate: 0.001
use_sequence_packing: true
validation_split: 0.1
output_dir: from-axolotl
"""
LLAMA_FACTORY = """\
model_name_or_path: base
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
dataset: alpaca.json
template: default
cutoff_len: 128
per_device_train_batch_size: 2
gradient_accumulation_steps: 2
learning_rate: 1.0e-3
num_train_epochs: 1.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
output_dir: from-llama-factory
"""
LLAMA_FACTORY_FOLLOWED = """\
model: base
objective: sft
use_lora: true
lora_rank: 8
data: alpaca.json
max_seq_length: 128
batch_size: 2
gradient_accumulation_steps: 2
learning_rate: 1.0e-3
num_epochs: 1.0
lr_scheduler: cosine
warmup_ratio: 0.1
output_dir: from-llama-factory
"""

SHORT_QUICKSTART = """
from pathlib import Path
from chronicals.training import quickstart
rows = quickstart.questions_and_answers()[:600]
quickstart.questions_and_answers = lambda: rows
size = quickstart.Size(64, layers=2, vocab_size=600, epochs=2, batch_size=1, learning_rate=3e-3, mixed_precision="fp32")
done = quickstart.run_quickstart(Path("quickstart"), size=size)
print(f"held-out loss {done.before.loss:.2f} before, {done.after.loss:.2f} after")
assert done.after.loss < done.before.loss - 1
"""

RECIPES_OF_OTHERS = {
    "axolotl.yaml": AXOLOTL,
    "axolotl-followed.yaml": AXOLOTL_FOLLOWED,
    "llama-factory.yaml": LLAMA_FACTORY,
    "llama-factory-followed.yaml": LLAMA_FACTORY_FOLLOWED,
}

TRAINED = ["--max-seq-length", "128", "--learning-rate", "3e-3"]


@dataclass(frozen=True)
class Step:
    """A command and what a reader expects of it.

    Attributes:
        command: ``chronicals`` or ``python``, and arguments.
        shows: regular expressions, each of which a line of the output must match.
        code: exit code.
        last: a regular expression that the last line of the output must match.
        typed: what is typed.
        interrupt: Ctrl-C as soon as a line matches this.
        only_answers: standard output must hold so many lines and no other.
    """

    command: Sequence[str]
    shows: Sequence[str] = ()
    code: int = 0
    last: str = ""
    typed: str = ""
    interrupt: str = ""
    only_answers: int | None = None

    def __str__(self) -> str:
        words = [word if len(word) < LONGEST_LINE else "…" for word in self.command]
        return (
            shlex.join(words)
            + (f" <<< {self.typed!r}" if self.typed else "")
            + (" (Ctrl-C)" if self.interrupt else "")
        )


def steps(full_quickstart: bool) -> list[Step]:
    data = ["--data", "chats.jsonl"]
    base = ["--model", "base"]
    recipes = "".join(
        f"open({name!r}, 'w').write({text!r})\n" for name, text in RECIPES_OF_OTHERS.items()
    )
    return [
        Step(["python", "-c", MADE + recipes]),
        Step(
            ["python", "-c", "import chronicals; print(*dir(chronicals))"],
            ["ChronicalsTrainer .*patch_model"],
        ),
        Step(["chronicals", "--version"], [r"\d+\.\d+\.\d+"]),
        Step(["chronicals", "--help"], ["quickstart +Train", "doctor +What"]),
        Step(["chronicals", "doctor"], ["torch +│ 2", "transformers +│ 5"], last="^passed "),
        *(
            [
                Step(
                    ["chronicals", "quickstart"],
                    ["^│ loss", "^│ perplexity", "^documented"],
                    last="chronicals generate",
                )
            ]
            if full_quickstart
            else [Step(["python", "-c", SHORT_QUICKSTART], last="^held-out loss")]
        ),
        Step(
            ["chronicals", "data", "show", "chats.jsonl", *base, "--rows", "1"], ["what about", "⟦"]
        ),
        Step(
            ["chronicals", "train", *base, *data, "--check"],
            ["400 rows", "^training: .* steps"],
            last="can be trained on",
        ),
        Step(
            [
                "chronicals",
                "train",
                *base,
                *data,
                "--validation-split",
                "0.1",
                "--num-epochs",
                "2",
                *TRAINED,
            ],
            ["100.00%", r"step 1/", "held-out after step", "^trained .* steps, last loss"],
            last="next: chronicals generate",
        ),
        Step(
            ["chronicals", "train", "recipe.yaml", "--use-lora", "--output-dir", "adapter"],
            ["^trained .* steps"],
        ),
        Step(
            ["chronicals", "train", "recipe.yaml", "--output-dir", "part"],
            ["^stopped|^interrupted", "train --resume"],
            130,
            interrupt="step 5/",
        ),
        Step(
            ["chronicals", "train", "--resume", "--output-dir", "part"],
            ["^resumed from", "^trained .* steps"],
        ),
        Step(
            ["chronicals", "evaluate", "chronicals-output", "--data", "held-out.jsonl"],
            ["token accuracy", '^{"loss"'],
        ),
        Step(
            ["chronicals", "generate", "chronicals-output", "--prompt", "what about 7?"],
            only_answers=1,
        ),
        Step(
            [
                "chronicals",
                "generate",
                "adapter",
                "--prompt",
                "what about 7?",
                "--max-new-tokens",
                "8",
            ],
            only_answers=1,
        ),
        Step(
            [
                "chronicals",
                "generate",
                "chronicals-output",
                "--temperature",
                "0.7",
                "--top-p",
                "0.9",
                "--system",
                "Be brief.",
            ],
            ["/help lists the commands", "/reset +forget"],
            typed="what about 7?\n/help\nand 8?\n/reset\n/exit\n",
            only_answers=2,
        ),
        Step(
            [
                "chronicals",
                "export",
                "adapter",
                "--to",
                "merged-fp32,gguf-q8_0",
                "--output",
                "exported",
            ],
            ["chat template .*equal", "llama-server -m"],
            last="^next",
        ),
        Step(
            ["chronicals", "verify", *base, *data, *TRAINED, "--max-steps", "20"],
            ["^note|passed"],
            last="^passed 5 steps",
        ),
        Step(
            [
                "chronicals",
                "benchmark",
                "--model",
                "tiny",
                "--mixed-precision",
                "fp32",
                "--steps",
                "3",
                "--warm-up",
                "2",
                "--rounds",
                "1",
                "--time-limit",
                "300",
            ],
            ["^│ ours", "^reference step|^no reference step", "real tokens a step"],
        ),
        Step(["chronicals", "train", *base, *data, "--lr", "1e-3"], ["--learning-rate"], 2),
        Step(
            ["chronicals", "train", *base, *data, "--learning-rte", "1e-3"], ["--learning-rate"], 2
        ),
        Step(["chronicals", "trian"], ["Did you mean 'train'"], 2),
        Step(
            ["chronicals", "train", "wrong-name.yaml"],
            ["learning_rat.*did you mean 'learning_rate'"],
            1,
        ),
        Step(["chronicals", "train", "wrong-value.yaml"], ["batch_size.*none"], 1),
        Step(
            ["chronicals", "train", *base, "--data", "chat.jsonl", "--output-dir", "none"],
            ["chat.jsonl"],
            1,
        ),
        Step(
            ["chronicals", "generate", "chronicals-output", "--prompt", "hi", "--top-k", "5"],
            ["--top-k 5.*temperature"],
            1,
        ),
        *habits_of_others(),
    ]


def habits_of_others() -> list[Step]:
    """Recipes and rows of Axolotl and LLaMA-Factory: every field that is named otherwise here is
    answered at once, and the recipe that follows those answers trains.
    """
    axolotl = [
        "use model: base",
        r"use data: \[\{path: sharegpt.json, columns: \{messages: conversations\}\}\]",
        "use max_seq_length: 128",
        "use batch_size: 2",
        "adapter: no such field; use use_lora: true",
        "use lora_rank: 8",
        "lora_target_linear: .* adapts every linear layer",
        "optimizer: no such field; leave it out",
        "use use_sequence_packing: true",
        "use validation_split: 0.1",
    ]
    llama_factory = [
        "use model: base",
        "stage: no such field; use objective: sft",
        "do_train: no such field; leave it out",
        "finetuning_type: no such field; use use_lora: true",
        "lora_target: no such field; leave it out",
        "use data: alpaca.json",
        "template: no such field; leave it out",
        "use max_seq_length: 128",
        "use batch_size: 2",
        "use num_epochs: 1",
        "use lr_scheduler: cosine",
    ]
    return [
        Step(["chronicals", "preprocess", "axolotl.yaml"], ["use chronicals train --check"], 2),
        Step(["chronicals", "train", "axolotl.yaml"], axolotl, 1),
        Step(
            ["chronicals", "train", "axolotl-followed.yaml"],
            ["400 rows .400 chat.: 360 trained, 40 held out", "^trained .* steps"],
        ),
        Step(["chronicals", "train", "llama-factory.yaml"], llama_factory, 1),
        Step(
            ["chronicals", "train", "llama-factory-followed.yaml"],
            ["400 rows .400 instruction.", "^trained .* steps"],
        ),
        Step(["chronicals", "chat", "from-llama-factory"], ["use chronicals generate"], 2),
        Step(
            ["chronicals", "generate", "from-llama-factory", "--prompt", "what about 7?"],
            only_answers=1,
        ),
    ]


@dataclass(frozen=True)
class Outcome:
    """What a command did."""

    code: int
    seconds: float
    stdout: str
    stderr: str

    @property
    def lines(self) -> list[str]:
        return [
            line.rstrip()
            for line in (self.stderr + "\n" + self.stdout).splitlines()
            if line.strip()
        ]

    def judged(self, step: Step) -> list[str]:
        """The lines by which the step is judged: those that match, the last, and the answers."""
        said = self.stdout.splitlines()[: step.only_answers or 0]
        wanted = [*step.shows, *filter(None, [step.last])]
        shown = [
            next((line for line in self.lines if re.search(pattern, line)), None)
            for pattern in wanted
        ]
        return [line for line in dict.fromkeys([*shown, *said]) if line]

    def wrong(self, step: Step) -> list[str]:
        """What is not as it should be, in words; empty if all is."""
        found = [] if self.code == step.code else [f"exit code {self.code}, not {step.code}"]
        found += [
            f"no line matches {text!r}"
            for text in step.shows
            if not any(re.search(text, line) for line in self.lines)
        ]
        if step.last and not (self.lines and re.search(step.last, self.lines[-1])):
            found.append(f"the last line does not match {step.last!r}: {self.lines[-1:]}")
        answers = self.stdout.splitlines()
        if step.only_answers is not None and len(answers) != step.only_answers:
            found.append(f"{len(answers)} lines on standard output, not {step.only_answers}")
        if "Traceback" in self.stderr:
            found.append("a traceback")
        return found


def run(
    step: Step, folder: Path, programs: dict[str, list[str]], environment: dict[str, str]
) -> Outcome:
    """Run a command in ``folder``."""
    command = [*programs[step.command[0]], *step.command[1:]]
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=err,
            text=True,
        )
        try:
            if step.interrupt:
                while process.poll() is None and not re.search(step.interrupt, _read(err)):
                    time.sleep(0.05)
                process.send_signal(signal.SIGINT)
            process.communicate(step.typed, timeout=TIME_LIMIT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        return Outcome(process.returncode, time.monotonic() - began, _read(out), _read(err))


def _read(file) -> str:
    return os.pread(file.fileno(), 1 << 24, 0).decode(errors="replace")


def install(folder: Path) -> tuple[dict[str, list[str]], dict[str, str]]:
    """A fresh clone, installed as the README says; the programs, and the environment they run
    in.
    """
    pip = [
        "environment/bin/python",
        "-m",
        "pip",
        "install",
        "--quiet",
        "--constraint",
        "clone/constraints.txt",
    ]
    for command in (
        ["git", "clone", "--quiet", str(ROOT), "clone"],
        [sys.executable, "-m", "venv", "environment"],
        [*pip, "./clone[peft,export]"],
    ):
        began = time.monotonic()
        done = subprocess.run(command, cwd=folder)
        print(
            f"$ {shlex.join(command)}\n    exit {done.returncode}, {time.monotonic() - began:.1f} "
            "s",
            flush=True,
        )
        if done.returncode:
            raise SystemExit("first hour: failed: it could not be installed")
    programs = {
        name: [str(folder / "environment" / "bin" / name)] for name in ("chronicals", "python")
    }
    return programs, {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def in_place() -> tuple[dict[str, list[str]], dict[str, str]]:
    """This interpreter, with the source of this checkout."""
    path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = "import sys; sys.argv[0] = 'chronicals'; from chronicals.cli import main; main()"
    programs = {"chronicals": [sys.executable, "-c", command], "python": [sys.executable]}
    return programs, {**os.environ, "PYTHONPATH": path}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--install",
        action="store_true",
        help="install a fresh clone first, in an environment of its own",
    )
    parser.add_argument(
        "--full-quickstart", action="store_true", help="not the short one: minutes more on a CPU"
    )
    parser.add_argument(
        "--folder", type=Path, help="run here and keep everything (default: a temporary folder)"
    )
    parser.add_argument(
        "--only", default="", help="besides the first, only commands that contain this text"
    )
    given = parser.parse_args()
    began = time.monotonic()
    failed = []
    with tempfile.TemporaryDirectory(prefix="chronicals-first-hour-") as scratch:
        folder = (given.folder or Path(scratch)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        programs, environment = install(folder) if given.install else in_place()
        environment |= {"HF_HUB_OFFLINE": "1", "COLUMNS": "120", "HOME": str(folder)}
        chosen = [
            step
            for number, step in enumerate(steps(given.full_quickstart))
            if not number or given.only in str(step)
        ]
        for step in chosen:
            print(f"$ {step}", flush=True)
            done = run(step, folder, programs, environment)
            print(f"    exit {done.code}, {done.seconds:.1f} s")
            for line in done.judged(step):
                print(f"    | {line[:LONGEST_LINE]}")
            if wrong := done.wrong(step):
                failed.append(str(step))
                print(*(f"    WRONG: {words}" for words in wrong), sep="\n")
                print(*(f"    > {line[:LONGEST_LINE]}" for line in done.lines[-8:]), sep="\n")
    minutes = (time.monotonic() - began) / 60
    told = f"{len(chosen)} commands in {minutes:.1f} minutes"
    print(
        f"first hour: failed: {len(failed)} of {told}: {json.dumps(failed)}"
        if failed
        else f"first hour: passed: {told}"
    )
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
