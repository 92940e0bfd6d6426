"""Writes docs/templates.md: what becomes of every stock chat template that trl carries.

``python benchmarks/templates.py [--out docs/templates.md]``; some seconds on a CPU.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import random
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [
    str(ROOT / "tests"),
    str(ROOT / "tests" / "data"),
    str(ROOT / "benchmarks"),
]

from page_text import laid_out  # noqa: E402

from chronicals.data import TemplateError, Tokenizer  # noqa: E402
from chronicals.data.tokens.chat_templates import FAMILIES  # noqa: E402
from data.public_conversations import CONVERSATIONS  # noqa: E402
from data.stock_templates import (  # noqa: E402  the tests' own tables
    DIFFERENCES,
    KINDS,
    differences,
    names,
    record,
    refusal,
    shipped,
    twin,
    with_template,
)
from data.test_chat_templates import PUBLIC, with_family  # noqa: E402

INTRODUCTION = """\
# Chat templates

Written by `python benchmarks/templates.py` with trl {trl} and transformers {transformers}. Every stock template that trl
carries, used as it is, under a tiny tokenizer that has its special tokens; a random conversation of each kind.

The tokens that are trained are found without marks in the template, by rendering prefixes of the conversation: an answer begins
where the generation prompt ends, and ends with the stop token. A turn that calls tools may end with the token at which the
template hands over to the tool (`<|call|>`, `<|tool_response>`). So the model learns to continue exactly what it is asked to
continue in generation. A conversation for which this does not hold is refused with its row, its message and the reason.

Kinds: **single** (a question and its answer), **turns** (several), **system** (with a system message), **tools** (tools
offered, a call, what the tool answers, an answer), **thinking** (an answer with `reasoning_content`), **thinking turns**
(several of these).

```yaml
train_on_roles: [assistant]   # whose messages are trained; any of system, developer, user, assistant, tool
train_on_turns: all           # or last: the last of those messages alone
train_after_stop: false       # or true: what the template writes behind the stop token of an answer, too
```

A message's own `"train": true` or `"train": false` wins over both. `train_on_turns: last` takes the templates that render
earlier answers otherwise than the last (without their thoughts, say). A message that is not the assistant's is trained with
the special token that follows its content, and refused where none does.

`train_after_stop: true` trains the white space behind the stop token of an answer (in ChatML a newline), and all that the
template writes behind the last answer, as TRL and the marked twins below do (differences 1 and 2). It is never generated, so
nothing is lost without it; for losses that are to equal TRL's it is needed.

Some templates take contents only as lists of parts, and some the arguments of a call only as text; they get them in that form.
A template that writes the date (`strftime_now`) writes the day on which the tokens were made. Stored tokens are used again on
later days.
"""

TWINS = """\

## Beside the marked twins

For many templates trl has a twin with `{% generation %}` marks, from which transformers makes a mask. On the same
conversations the twin's mask equals ours, or differs as follows.

| the twin | ours does otherwise, because | templates |
|---|---|---|
"""


BY_NAME = """\

## By name

`chat_template: NAME` (`--chat-template NAME`) gives a tokenizer one of these templates. Names may be spelled otherwise
(`llama-3.1`, `phi_35`). Each is written anew and writes, character for character, what the public text beside it writes for the
conversations of `tests/data/public_conversations.py`: a question, several turns, a system message, tools with one call and
several, tools with arguments of every type, arguments as objects and as text, contents that are null or missing, thoughts;
answered, and up to where the answer begins. Where the public text refuses a conversation, so does ours.
`python benchmarks/public_templates.py` writes down what the public texts write, the test compares.

The tokenizer must have the special tokens that a template writes; those that it lacks are named in an error. `chatml` and
`zephyr` do with its `eos_token`. Last column: the kinds of conversation of which all answers are trained; others are refused
with the reason. Several turns of `gpt-oss` take `train_on_turns: last`: only the last answer ends with its stop token.

| name | stop token | the same as | at | trained |
|---|---|---|---|---|
"""

LEFT_OUT = """\

Not by name:

- `zephyr` is there, and is not compared: the public text that was found (chujiezheng/chat_templates) takes off blanks and
  refuses conversations with tools.
- `yi`, `glm4`, `internlm2`, `olmo2`, `hunyuan`, `baichuan2`, `mistral` v7 without tekken: none of the repositories above has a
  text of theirs.
- `falcon`, `solar`, `amberchat`, `chatqa`, `llava`, `glm4moe`, `metharme` (but for the last answer): nothing ends an answer in
  the public text, so a model would not learn to stop.
- `deepseek-r1`, and `deepseek-v3` as trl has it: the model is asked to continue with a thought that is left out of the answer.
- There is a public text, but none of ours yet: `gemma4`, `phi4`, `qwen3.5`, `qwen3.6`, `jamba`,
  `command-a`, `cohere2`, `lfm2.5`, `nemotron-3`, `pixtral`, `llama3.2-vision`, `llava-next`, `idefics3`, `smolvlm`. A
  tokenizer that comes with one of these uses its own, as the first table says.
"""


def trained_kinds(name: str) -> list[str]:
    """The conversations of the tests whose answers are all trained under a template by name."""
    tokenizer = with_family(name)
    kinds = []
    for kind, (messages, tools) in CONVERSATIONS.items():
        try:
            Tokenizer(tokenizer).encode({"messages": messages, "tools": tools}, "row 1")
        except TemplateError:
            continue
        kinds.append(kind)
    return kinds


def by_name() -> str:
    """A line for each template by name: where the public text is that it equals, and what it
    trains.
    """
    lines = []
    for name, origin in sorted(PUBLIC.items()):
        stop = "<|im_end|>" if name == "chatml" else FAMILIES[name].stop
        repository = origin["repository"].removeprefix("https://github.com/")
        source = f"[{repository}]({origin['repository']}) `{origin['path']}`"
        version = origin.get("package") or f"`{origin['commit']}`"
        kinds = ["single", "turns", "system"] if name == "chatml" else trained_kinds(name)
        escaped = stop.replace("|", "\\|")
        lines.append(f"| `{name}` | `{escaped}` | {source} | {version} | {', '.join(kinds)} |")
    return "\n".join(lines) + "\n"


def short(reason: str) -> str:
    """A refusal without the row, and what this conversation happened to say."""
    reason = re.sub(r"^row 1: ", "", reason)
    reason = re.sub(r"^message \d+: |^the chat template (refuses the conversation: )?", "", reason)
    reason = reason.split("; ")[0].split(", so ")[0]
    return (
        re.sub(r"does not render '.*' in", "does not render a part of", reason)
        .replace("|", "\\|")
        .strip()
    )


def line(name: str) -> str:
    cells = []
    reasons = {}
    found = set()
    for kind in KINDS:
        row = record(kind)
        reason = refusal(name, row)
        cells.append("no" if reason else "yes")
        if reason:
            reasons.setdefault(short(reason), []).append(kind)
        elif twin(name):
            found |= differences(name, row)
    try:
        tokenizer = with_template(shipped(name))
        stop = f"`{tokenizer.convert_ids_to_tokens(Tokenizer(tokenizer).template.stop)}`".replace(
            "|", "\\|"
        )
    except TemplateError:
        stop = "none"
    numbers = [
        str(number)
        for number, (difference, _, _) in enumerate(DIFFERENCES, 1)
        if difference in found
    ]
    beside = (
        "no twin"
        if not twin(name)
        else ", ".join(numbers) or ("refused" if "yes" not in cells else "equal")
    )
    why = "; ".join(
        f"{', '.join(kinds) if len(kinds) < len(KINDS) else 'all'}: {reason}"
        for reason, kinds in reasons.items()
    )
    return f"| {name} | {' | '.join(cells)} | {stop} | {beside} | {why} |"


def page() -> str:
    random.seed(0)
    versions = {name: importlib.metadata.version(name) for name in ("trl", "transformers")}
    head = f"| template | {' | '.join(KINDS)} | stop token | beside the twin | refused, why |"
    rows = [line(name) for name in names()]
    table = "\n".join([head, "|---" * (len(KINDS) + 4) + "|", *rows])
    listed = []
    for number, (difference, why, where) in enumerate(DIFFERENCES, 1):
        phrase, because = (text.replace("|", "\\|") for text in (difference, why))
        listed.append(f"| {number}: {phrase} | {because} | {', '.join(' '.join(where).split())} |")
    taken = sum("| yes |" in row for row in rows)
    count = f"\n{len(rows)} templates, {taken} of them taken for some kind of conversation.\n\n"
    stock = (
        INTRODUCTION.format(**versions) + count + table + "\n" + TWINS + "\n".join(listed) + "\n"
    )
    return laid_out(stock + BY_NAME + by_name() + LEFT_OUT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "templates.md")
    parser.parse_args().out.write_text(page())


if __name__ == "__main__":
    main()
