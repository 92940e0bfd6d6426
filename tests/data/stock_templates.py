"""The stock chat templates that trl carries: a tiny tokenizer for each, conversations of every
kind, and marked twins.

A twin is the same template with ``{% generation %}`` marks (``NAME_training.jinja``), from which
transformers makes a mask.
"""

import copy
import functools
import importlib.util
import random
import re
import string
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken

import tiny
from chronicals.data import TemplateError, Tokenizer
from chronicals.data.tokens.tokenizer_training import train_tokenizer

SPECIAL = re.compile(
    r"<\|[^<>|\s]{1,40}\|>|<\uff5c[^<>]{1,40}\uff5c>|<\|\w+>|<\w+\|>"
    r"|</?(?:start_of_turn|end_of_turn|end_of_utterance|image|s)>"
)
ADDED = re.compile(r"</?(?:think|tool_call|tool_response)>")

KINDS = ["single", "turns", "system", "tools", "thinking", "thinking turns"]
"""One question, several, with a system message, with a call and its answer, with thoughts, with
thoughts in every turn.
"""

TOOL = {
    "type": "function",
    "function": {
        "name": "measure",
        "description": "Measures a thing.",
        "parameters": {
            "type": "object",
            "properties": {"thing": {"type": "string", "description": "What to measure."}},
        },
    },
}


def folder():
    trl = importlib.util.find_spec("trl")
    return None if trl is None else Path(trl.submodule_search_locations[0]) / "chat_templates"


def names():
    """Of all stock templates, without the twins; none where trl is not installed."""
    files = [] if folder() is None else sorted(folder().glob("*.jinja"))
    return [path.stem for path in files if not path.stem.endswith("_training")]


def shipped(name):
    if folder() is None:
        pytest.skip("trl is not installed")
    path = folder() / f"{name}.jinja"
    if not path.exists():
        pytest.skip(f"this trl has no {path.name}")
    return path.read_text()


def twin(name):
    """The twin's text, or None."""
    path = folder() / f"{name}_training.jinja"
    return path.read_text() if path.exists() else None


@functools.cache
def base_tokenizer():
    return train_tokenizer(
        [*tiny.TEXTS, "b: a", "user: assistant: system\nmodel\n"] * 20, vocab_size=400
    )


def with_template(template, **named):
    """A tokenizer that has the template and its special tokens."""
    tokenizer = copy.deepcopy(base_tokenizer())
    for pattern, special in ((SPECIAL, True), (ADDED, False)):
        found = sorted(set(pattern.findall(template)))
        tokenizer.add_tokens(
            [AddedToken(text, special=special, normalized=False) for text in found], special
        )
    tokenizer.add_special_tokens({"bos_token": "<bos>", **named})
    tokenizer.chat_template = template
    return tokenizer


def saying():
    """A random text; templates strip its ends, so those are letters, and it is not short enough
    to be in others by chance.
    """
    middle = "".join(
        random.choices(
            string.ascii_letters + string.digits + "   \n\n.:é🙂", k=random.randrange(8, 40)
        )
    )
    return f"{random.choice(string.ascii_letters)}{middle}{random.choice(string.ascii_letters)}"


def user(content):
    return {"role": "user", "content": content}


def assistant(content, **more):
    return {"role": "assistant", "content": content, **more}


def called(**arguments):
    """An assistant's message that calls the tool."""
    function = {"name": "measure", "arguments": arguments}
    return assistant("", tool_calls=[{"type": "function", "id": "call00001", "function": function}])


def answered(content):
    return {"role": "tool", "name": "measure", "tool_call_id": "call00001", "content": content}


def record(kind):
    """A row that is a random conversation of this kind."""
    if kind == "tools":
        messages = [user(saying()), called(thing=saying()), answered(saying()), assistant(saying())]
        return {"messages": messages, "tools": [TOOL]}
    thoughts = [{"reasoning_content": saying()} if "thinking" in kind else {} for _ in range(4)]
    turns = random.randint(2, 4) if "turns" in kind else 1
    system = [{"role": "system", "content": saying()}] if kind == "system" else []
    return {
        "messages": [
            *system,
            *(
                m
                for i in range(turns)
                for m in (user(saying()), assistant(saying(), **thoughts[i]))
            ),
        ]
    }


def spans(mask):
    """Start and end of each run of trained tokens."""
    edges = np.flatnonzero(np.diff([0, *map(int, mask), 0]))
    return [(int(start), int(end)) for start, end in edges.reshape(-1, 2)]


def differences(name, row, **options):
    """How the twin's mask of a row differs from ours, a phrase each; TemplateError where ours
    refuses the row.
    """
    tokenizer = with_template(shipped(name))
    encoder = Tokenizer(tokenizer, **options)
    ids, trained = encoder.encode(row, "row 1")
    theirs = tokenizer.apply_chat_template(
        encoder.template.form(row["messages"], "row 1"),
        tools=row.get("tools"),
        chat_template=twin(name),
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    if list(theirs["input_ids"]) != ids:
        return {"renders otherwise"}
    ours = spans(trained)
    marked = spans(theirs["assistant_masks"])
    if len(ours) != len(marked):
        return {f"{len(marked)} spans, not {len(ours)}"}
    found = set()
    for (start, end), (first, last) in zip(ours, marked):
        found |= _beside("before", tokenizer, ids, first, start) | _beside(
            "after", tokenizer, ids, end, last
        )
    return found


def _beside(side, tokenizer, ids, start, end):
    if start == end:
        return set()
    text = tokenizer.decode(ids[min(start, end) : max(start, end)], skip_special_tokens=False)
    return {f"{'trains' if start < end else 'leaves out'} {text!r} {side}"}


def refusal(name, row):
    """Why a row is refused, or None."""
    try:
        Tokenizer(with_template(shipped(name))).encode(row, "row 1")
    except TemplateError as error:
        return str(error)
    return None


# --- what is expected
# ------------------------------------------------------------------------------------------------

ANSWERED = ("single", "turns", "system", "tools")
EVERY_TURN = ("turns", "thinking turns")
THOUGHTS = ("thinking", "thinking turns")

OTHERWISE_CONTINUED = "asks the model to continue is not how it renders"
NOT_RENDERED = "does not render '.*' in this assistant turn"

REFUSED = [
    (OTHERWISE_CONTINUED, KINDS, "deepseek_r1_distill deepseekv3"),
    (
        OTHERWISE_CONTINUED,
        (*ANSWERED, "thinking turns"),
        "nemotron_3_5_lightning nemotron_3_nano nemotron_3_super nemotron_3_ultra",
    ),
    (OTHERWISE_CONTINUED, EVERY_TURN, "qwen3_5_nothink qwen3_5_think qwen3_6"),
    (OTHERWISE_CONTINUED, ("thinking",), "qwen3_5_nothink"),
    ("writes no special token after an assistant's answer", KINDS, "glm4moe"),
    (r"'<\|return\|>' does not close this assistant turn", EVERY_TURN, "gptoss"),
    ("System role not supported", ("system",), "gemma"),
    ("roles must alternate", ("tools",), "cohere cohere2 gemma gemma3"),
    ("Only user and assistant roles", ("tools",), "llava_next"),
    (NOT_RENDERED, ("tools",), "idefics3 lfm2 llama3 phi3 phi3_5 qwen2_5_vl smolvlm"),
    (
        NOT_RENDERED,
        THOUGHTS,
        "cohere cohere2 gemma gemma3 gemma4 gemma4_v2 gemma4_v3 gemma4_v4 idefics3 lfm2 lfm2_v2 "
        "llama3 llama3_1 llama3_2 "
        "llava_next phi3 phi3_5 qwen2_5 qwen2_5_vl qwen3_instruct_2507 qwen3_vl smolvlm",
    ),
    (
        NOT_RENDERED,
        ("thinking turns",),
        "diffusion_gemma gemma4_v5 lfm2_2_5 lfm2_2_5_v2 lfm2_2_5_vl qwen3",
    ),
]
"""What is refused: the reason given, the kinds of conversation, the templates. Everything else
is taken.
"""

DIFFERENCES = [
    (
        r"trains '\n' after",
        "the newline after the stop token is never generated: generation has stopped",
        {
            "gemma": ("single", "turns"),
            "gemma3 idefics3 lfm2 qwen2_5_vl smolvlm": ("single", "turns", "system"),
            "lfm2_v2 qwen2_5 qwen3_instruct_2507 qwen3_vl": ANSWERED,
            "diffusion_gemma": (*ANSWERED, "thinking"),
            "nemotron_3_5_lightning nemotron_3_nano nemotron_3_super nemotron_3_ultra": (
                "thinking",
            ),
            "phi3 phi3_5": ("turns",),
            "qwen3": ("single", "system", "thinking"),
            "qwen3_5_nothink": ("single", "system", "tools"),
            "qwen3_5_think qwen3_6": ("single", "system", "tools", "thinking"),
            "qwen3_8": KINDS,
        },
    ),
    (
        r"trains '\n<|endoftext|>' after",
        "what follows the stop token at the end of a conversation is never generated",
        {"phi3 phi3_5": ("single", "turns", "system")},
    ),
    (
        "trains '<|END_OF_TURN_TOKEN|>' after",
        "the answer is closed by <|END_RESPONSE|>, at which generation stops; the second mark is "
        "never generated",
        {"cohere2": ("single", "turns", "system")},
    ),
    (
        "leaves out '<|tool_response>' after",
        "the twin leaves out the token that closes a call, so the model would not learn to hand "
        "over to the tool",
        {"diffusion_gemma": ("tools",)},
    ),
    (
        r"leaves out '<|turn>model\n' before",
        "after a tool's answer the generation prompt opens no turn, so the model has to",
        {"diffusion_gemma": ("tools",)},
    ),
    (
        "trains '<|start|>assistant' before",
        "the generation prompt writes it",
        {"gptoss": ("single", "system", "tools", "thinking"), "muse_glimmer": KINDS},
    ),
    (
        r"trains '<think>\n' before",
        "the generation prompt writes it",
        {
            "nemotron_3_5_lightning nemotron_3_nano nemotron_3_super nemotron_3_ultra": (
                "thinking",
            ),
            "qwen3_5_think qwen3_6": ("single", "system", "tools", "thinking"),
            "qwen3_8": KINDS,
        },
    ),
    (
        r"trains '<think>\n\n</think>\n\n' before",
        "the generation prompt writes it",
        {"qwen3_5_nothink": ("single", "system", "tools")},
    ),
    (r"trains '\n' before", "the generation prompt writes the newline", {"qwen2_5": ANSWERED}),
    (
        "renders otherwise",
        "the twin writes an empty thought into earlier answers, which the template of generation "
        "leaves out",
        {"qwen3": ("turns", "tools")},
    ),
]
"""How a twin's mask differs from ours: the difference, why ours is right, and where it occurs."""


def expected_refusal(name, kind):
    """The reason listed, or None."""
    found = [
        reason
        for reason, kinds, templates in REFUSED
        if kind in kinds and name in templates.split()
    ]
    assert len(found) < 2, (name, kind)
    return found[0] if found else None


def expected_differences(name, kind):
    """The differences listed, each with why ours is right."""
    return {
        difference: why
        for difference, why, where in DIFFERENCES
        if any(name in templates.split() and kind in kinds for templates, kinds in where.items())
    }
