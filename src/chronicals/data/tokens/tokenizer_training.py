"""Training of a tokenizer from text, and real text that every machine has to train it on.

The text are the documentation strings of Python's standard library, as questions and answers.
"""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML."""

SKIPPED_PACKAGES = {
    "test",
    "tests",
    "idlelib",
    "site-packages",
    "lib2to3",
    "turtledemo",
    "__pycache__",
}

MAX_ANSWER_LETTERS = 300
"""An answer is the whole sentences up to here."""


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Any:
    """Return byte-level BPE over ``texts`` as a transformers tokenizer.

    It has special tokens and a chat template.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=special,
            initial_alphabet=alphabet,
            show_progress=False,
        ),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=special[1:],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def questions_and_answers(folder: Path | None = None) -> list[dict]:
    """Return chat rows, sorted by name: "What does json.dumps do?" and its documentation.

    Args:
        folder: the library's sources; those of the running Python by default. Files are parsed,
            never imported.
    """
    folder = folder or Path(sysconfig.get_path("stdlib"))
    rows = {}
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        if SKIPPED_PACKAGES & set(parts) or any(part.startswith("_") for part in parts):
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            continue
        for name, text in _documented(tree, ".".join(parts)):
            # The first sentences, unless they are too short or not ASCII.
            paragraph = " ".join(text.split("\n\n")[0].split())
            answer = ""
            for sentence in paragraph.replace(". ", ".\n").split("\n"):
                if len(answer) + len(sentence) + 1 > MAX_ANSWER_LETTERS:
                    break
                answer = f"{answer} {sentence}".strip()
            if len(answer) > 20 and answer.isascii():
                rows[name] = answer
    chats = []
    for name in sorted(rows):
        question = {"role": "user", "content": f"What does {name} do?"}
        chats.append({"messages": [question, {"role": "assistant", "content": rows[name]}]})
    return chats


def _documented(node: ast.AST, prefix: str) -> Iterator[tuple[str, str]]:
    """Yield names and documentation of public functions, classes and methods below ``node``."""
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, definitions) or child.name.startswith("_"):
            continue
        name = f"{prefix}.{child.name}"
        text = ast.get_docstring(child)
        if text:
            yield name, text
        if isinstance(child, ast.ClassDef):
            yield from _documented(child, name)
