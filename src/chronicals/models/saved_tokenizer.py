"""Tokenizers in files, read back as whoever loads the model reads them, and compared.

``AutoTokenizer`` goes by the model beside a tokenizer: for some families (Qwen2, Phi-3 …) it builds
the family's own class of the vocabulary, whatever class ``tokenizer_config.json`` names, and a
tokenizer of another kind splits texts otherwise then. ``auto_map`` makes it look at that name
first.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator
from functools import partial
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
"""Texts by which tokenizers are compared: blanks, digits, code, composed and decomposed letters,
emoji, marks of chats.
"""

CONVERSATION = [
    {"role": "user", "content": "What is  2 + 2?"},
    {"role": "assistant", "content": "It is 4. 🙂"},
    {"role": "user", "content": "And 3 + 3?"},
]

GENERIC = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Names of the class that takes ``tokenizer.json`` as it is, in transformers 4 and 5."""

MODULE = "tokenization_as_stored"
CLASS = "TokenizerAsStored"
"""A file beside the tokenizer and its class, which transformers imports where it may run code of
a model.
"""

SOURCE = f'''"""The tokenizer of tokenizer.json as it is stored, whatever class the model beside it usually has."""

from transformers import PreTrainedTokenizerFast


class {CLASS}(PreTrainedTokenizerFast):
    """As its base."""
'''

OF_REMOTE_CODE = "transformers_modules"
"""Where transformers puts code that came with a model; what runs it must be asked for by whoever
loads it.
"""


def save_tokenizer(tokenizer: Any, folder: Path, config: Any) -> None:
    """Write a tokenizer so that ``AutoTokenizer`` reads this one beside a model.

    Args:
        config: of the model, which may be saved elsewhere.

    Raises:
        ValueError: it would be read as another tokenizer; the message says by which text, and what
            to do.
    """
    tokenizer.save_pretrained(folder)
    if type(tokenizer).__module__.startswith(OF_REMOTE_CODE):
        return
    found = _difference_when_read(tokenizer, folder, config)
    if found is None:
        return
    if hasattr(tokenizer, "backend_tokenizer"):
        _name_the_stored_one(folder)
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
    """The tokenizer of ``tokenizer.json`` where its settings name the generic class and
    ``AutoTokenizer`` made another of it.

    Args:
        found: what ``AutoTokenizer`` loaded.
        name: from where.
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


def _name_the_stored_one(folder: Path) -> None:
    """Have ``AutoTokenizer`` take the tokenizer as its file has it, with or without leave to run
    a model's code.
    """
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text())
    config |= {
        "tokenizer_class": GENERIC[0],
        "auto_map": {"AutoTokenizer": [None, f"{MODULE}.{CLASS}"]},
    }
    file.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
    (folder / f"{MODULE}.py").write_text(SOURCE)


def _difference_when_read(tokenizer: Any, folder: Path, config: Any) -> str | None:
    """In words, how the tokenizer in a folder is another beside a model; None where it is the
    same.
    """
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
    """What two tokenizers do otherwise, in words; None where all that is compared is equal."""
    for what, compute in _compared(one):
        expected = _outcome(compute, one)
        found = _outcome(compute, other)
        if expected != found:
            return f"{what}: {_shortened(expected)}, read back {_shortened(found)}"
    return None


def _compared(tokenizer: Any) -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """What is compared, and what computes it of a tokenizer."""
    yield "special tokens", _special_ids
    yield "ids of special tokens", lambda own: sorted(own.all_special_ids)
    yield "number of tokens", len
    marks = " ".join(tokenizer.all_special_tokens)
    for text in (*TEXTS, f"a{marks} b"):
        yield f"ids of {text[:20]!r}", partial(_ids, text)
        ids = _outcome(partial(_bare_ids, text), tokenizer)
        if isinstance(ids, list):
            yield f"what {text[:20]!r} is decoded to", partial(_decoded, ids)
            if getattr(tokenizer, "is_fast", False):
                yield f"places of {text[:20]!r}", partial(_places, text)
    yield "chat template", lambda own: own.chat_template
    if tokenizer.chat_template is not None:
        yield "a rendered chat", partial(_rendered, False)
        yield "a rendered prompt", partial(_rendered, True)


def _special_ids(tokenizer: Any) -> dict[str, int | None]:
    return {name: getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "unk", "pad")}


def _ids(text: str, tokenizer: Any) -> Any:
    return tokenizer(text)["input_ids"]


def _bare_ids(text: str, tokenizer: Any) -> Any:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _places(text: str, tokenizer: Any) -> Any:
    return tokenizer(text, return_offsets_mapping=True)["offset_mapping"]


def _decoded(ids: list[int], tokenizer: Any) -> list[str]:
    return [tokenizer.decode(ids, skip_special_tokens=skipped) for skipped in (False, True)]


def _rendered(prompt: bool, tokenizer: Any) -> Any:
    return tokenizer.apply_chat_template(CONVERSATION, tokenize=False, add_generation_prompt=prompt)


def _outcome(compute: Callable[[Any], Any], tokenizer: Any) -> Any:
    """A result, or the kind of error, which is compared like one: a template may refuse a chat,
    a vocabulary a text.
    """
    try:
        return compute(tokenizer)
    except Exception as error:
        return type(error).__name__


def _shortened(value: Any) -> str:
    if isinstance(value, list):
        return f"{len(value)} in {str(value)[:40]}"
    return str(value)[:60]
