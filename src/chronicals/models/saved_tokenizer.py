"""Saves tokenizers so that ``AutoTokenizer`` reads them back unchanged, and compares tokenizers.

``AutoTokenizer`` depends on the model beside a tokenizer: for some families (Qwen2, Phi-3 …) it
builds the family's own class from the vocabulary, whatever class ``tokenizer_config.json`` names. A
tokenizer of another kind then splits texts differently. ``auto_map`` makes it use the named class.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from operator import attrgetter, methodcaller
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

logger = logging.getLogger(__name__)

TEXTS = (
    "The quick brown fox jumps over 12345 lazy dogs.",
    "  two  blanks,\ttabs,\n\nlines  \n and 3.14159e-10",
    "def add(a, b):\n    return a + b  # it's we're I'LL",
    "Na\u00efve caf\u00e9, cafe\u0301; £3.50 — «déjà vu» 漢字 🙂👩‍💻",
    "<|im_start|>user\nhello<|im_end|>\n<s>[INST] hi [/INST]</s> <think>",
    "",
)
"""Texts on which tokenizers are compared.

They have blanks, digits, code, composed and decomposed letters, emoji, and chat markers.
"""

_CONVERSATION = [
    {"role": "user", "content": "What is  2 + 2?"},
    {"role": "assistant", "content": "It is 4. 🙂"},
    {"role": "user", "content": "And 3 + 3?"},
]

GENERIC = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Names of the class that uses ``tokenizer.json`` as it is, in transformers 4 and 5."""

MODULE = "tokenization_as_stored"
CLASS = "TokenizerAsStored"
"""Module and class that are written beside a tokenizer.

transformers imports them if it may run code that comes with a model.
"""

SOURCE = f'''"""The tokenizer of tokenizer.json as it is stored, whatever class the model beside it usually has."""

from transformers import PreTrainedTokenizerFast


class {CLASS}(PreTrainedTokenizerFast):
    """As its base."""
'''

OF_REMOTE_CODE = "transformers_modules"
"""Package in which transformers puts code that came with a model.

Running such code needs the consent of the user who loads the model.
"""


def save_tokenizer(tokenizer: Any, folder: Path, config: Any) -> None:
    """Write a tokenizer so that ``AutoTokenizer`` reads the same one beside a model.

    Args:
        tokenizer: a tokenizer of transformers.
        folder: folder that the files are written to.
        config: configuration of the model, which may be saved elsewhere.

    Raises:
        ValueError: it would be read as another tokenizer; the message names a text and a remedy.
    """
    tokenizer.save_pretrained(folder)
    if type(tokenizer).__module__.startswith(OF_REMOTE_CODE):
        return
    found = _difference_when_read(tokenizer, folder, config)
    if found is None:
        return
    if hasattr(tokenizer, "backend_tokenizer"):
        # AutoTokenizer shall use tokenizer.json unchanged, with remote code allowed or not.
        file = folder / "tokenizer_config.json"
        declared = json.loads(file.read_text())
        declared |= {
            "tokenizer_class": GENERIC[0],
            "auto_map": {"AutoTokenizer": [None, f"{MODULE}.{CLASS}"]},
        }
        file.write_text(json.dumps(declared, indent=2, ensure_ascii=False) + "\n")
        (folder / f"{MODULE}.py").write_text(SOURCE)
        if _difference_when_read(tokenizer, folder, config) is None:
            logger.info(
                "tokenizer: beside a %s AutoTokenizer would make another one of it (%s); %s tells "
                "it to read tokenizer.json as "
                "it is",
                config.model_type,
                found,
                "auto_map in tokenizer_config.json",
            )
            return
    raise ValueError(
        f"tokenizer: {type(tokenizer).__name__} beside a {config.model_type} model is saved as a "
        "tokenizer that AutoTokenizer "
        f"reads otherwise: {found}; give "
        "PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer) with its "
        "special tokens and chat template, or the model's own tokenizer"
    )


def as_declared(found: Any, name: str | Path, trust_remote_code: bool) -> Any:
    """Return the tokenizer that ``tokenizer_config.json`` declares.

    If it names the generic class and ``AutoTokenizer`` built another tokenizer, that of
    ``tokenizer.json`` is loaded. Otherwise ``found`` is returned.

    Args:
        found: the tokenizer that ``AutoTokenizer`` loaded.
        name: folder or hub name that it was loaded from.
        trust_remote_code: run code that comes with the tokenizer.
    """
    from transformers import PreTrainedTokenizerFast
    from transformers.models.auto.tokenization_auto import get_tokenizer_config

    if type(found).__name__ in (*GENERIC, CLASS) or not hasattr(found, "backend_tokenizer"):
        return found
    if (
        get_tokenizer_config(name, trust_remote_code=trust_remote_code).get("tokenizer_class")
        not in GENERIC
    ):
        return found
    stored = PreTrainedTokenizerFast.from_pretrained(name)
    difference = first_difference(stored, found)
    if difference is None:
        return found
    logger.warning(
        "%s: AutoTokenizer reads its tokenizer as %s, which is another than tokenizer.json holds "
        "(%s); that of tokenizer.json "
        "is taken, as tokenizer_config.json says",
        name,
        type(found).__name__,
        difference,
    )
    return stored


def _difference_when_read(tokenizer: Any, folder: Path, config: Any) -> str | None:
    """Describe how a saved tokenizer is read differently beside a model; None if it is not."""
    from transformers import AutoTokenizer

    with TemporaryDirectory() as made:
        place = Path(made) / "model"
        shutil.copytree(
            folder, place, ignore=shutil.ignore_patterns("*.safetensors", "config.json")
        )
        kind = {
            "model_type": config.model_type,
            "tokenizer_class": getattr(config, "tokenizer_class", None),
        }
        (place / "config.json").write_text(json.dumps(kind))
        try:
            read = AutoTokenizer.from_pretrained(place)
        except Exception as error:
            return f"it cannot be read: {error}"
    return first_difference(tokenizer, read)


def first_difference(one: Any, other: Any) -> str | None:
    """Describe the first difference between two tokenizers in the compared properties, or None."""
    for what, compute in _compared(one):
        expected = _outcome(compute, one)
        found = _outcome(compute, other)
        if expected == found:
            continue
        short = []
        for value in (expected, found):
            is_list = isinstance(value, list)
            short.append(f"{len(value)} in {str(value)[:40]}" if is_list else str(value)[:60])
        return f"{what}: {short[0]}, read back {short[1]}"
    return None


def _compared(tokenizer: Any) -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """Yield names of the compared properties, each with a function that computes it."""
    kinds = ("bos_token_id", "eos_token_id", "unk_token_id", "pad_token_id")
    yield "special tokens (bos, eos, unk, pad)", attrgetter(*kinds)
    yield "ids of special tokens", lambda own: sorted(own.all_special_ids)
    yield "number of tokens", len
    marks = " ".join(tokenizer.all_special_tokens)
    for text in (*TEXTS, f"a{marks} b"):
        yield f"ids of {text[:20]!r}", partial(_encoded, text, "input_ids", {})
        bare = {"add_special_tokens": False}
        ids = _outcome(partial(_encoded, text, "input_ids", bare), tokenizer)
        if isinstance(ids, list):
            for skipped in (False, True):
                decoded = methodcaller("decode", ids, skip_special_tokens=skipped)
                yield f"what {text[:20]!r} is decoded to", decoded
            if getattr(tokenizer, "is_fast", False):
                asked = {"return_offsets_mapping": True}
                places = partial(_encoded, text, "offset_mapping", asked)
                yield f"places of {text[:20]!r}", places
    yield "chat template", attrgetter("chat_template")
    if tokenizer.chat_template is None:
        return
    for what, prompt in (("chat", False), ("prompt", True)):
        options = {"tokenize": False, "add_generation_prompt": prompt}
        rendered = methodcaller("apply_chat_template", _CONVERSATION, **options)
        yield f"a rendered {what}", rendered


def _encoded(text: str, entry: str, options: dict[str, bool], tokenizer: Any) -> Any:
    return tokenizer(text, **options)[entry]


def _outcome(compute: Callable[[Any], Any], tokenizer: Any) -> Any:
    """Return a result, or the class of the error; errors are compared, too.

    A template may refuse a chat, and a vocabulary a text.
    """
    try:
        return compute(tokenizer)
    except Exception as error:
        return type(error).__name__
