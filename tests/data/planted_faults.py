"""A fault for every rule of the gate, planted among clean rows: for the tests, and for the table
in docs/gate.md.
"""

import copy
import json
import random

import tiny
from chronicals.data import Tokenizer
from chronicals.objectives import OBJECTIVES as OBJECTIVE_CLASSES

WIDTH = 64
CLEAN = tiny.chat_rows(12)
MASKED = {"input_ids": [1, 2, 3], "labels": [-100, -100, -100]}
USER = {"role": "user", "content": "what is the answer?"}
ASSISTANT = {"role": "assistant", "content": "forty two"}


def chat(*messages):
    return {"messages": list(messages)}


def without_end(tokenizer):
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] + ':' + m['content'] + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
    )


def with_other_prompt(tokenizer):
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant",
        "{% if add_generation_prompt %}{{ '<|im_start|>model",
    )


def with_bos(tokenizer):
    tokenizer.add_special_tokens({"bos_token": "<s>"})


def with_pad(tokenizer):
    tokenizer.add_special_tokens({"pad_token": "<pad>"})


def double_bos(tokenizer):
    return {"input_ids": [tokenizer.bos_token_id] * 2 + [5, 6, tokenizer.eos_token_id]}


def masked_stop(tokenizer):
    ids = [5, 6, 7, tokenizer.eos_token_id]
    return {"input_ids": ids, "labels": [-100, 6, 7, -100]}


def trained_padding(tokenizer):
    return {
        "input_ids": [5, 6, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.pad_token_id]
    }


PLANTED = {
    "unparsable_line": '{"messages": [',
    "missing_field": {"asked": "what?", "answer": "that"},
    "wrong_type": chat(USER, {"role": "assistant", "content": 42}),
    "unread_field": {"prompt": "what?", "completion": "that", "system": "be kind"},
    "pictures_or_sound": chat(
        {"role": "user", "content": [{"type": "image", "image": "cat.png"}]}, ASSISTANT
    ),
    "columns_recognised": {"question": "what?", "answer": "that"},
    "plain_completion": {"prompt": "what?", "completion": "that"},
    "repeated_prompt": {"prompt": "what is two?", "completion": "what is two? two"},
    "unusable_kind": {"prompt": "what?", "chosen": "this", "rejected": "that"},
    "empty_conversation": chat(),
    "unknown_role": chat(USER, {"role": "narrator", "content": "he said"}),
    "empty_answer": chat(USER, {"role": "assistant", "content": " \n"}),
    "no_assistant_turn": chat(USER),
    "consecutive_answers": chat(USER, ASSISTANT, {"role": "assistant", "content": "or so"}),
    "late_system_message": chat(USER, {"role": "system", "content": "be kind"}, ASSISTANT),
    "template_refuses": (lambda t: setattr(t, "chat_template", None), chat(USER, ASSISTANT)),
    "template_differs": (with_other_prompt, chat(USER, ASSISTANT)),
    "no_stop_token": (without_end, chat(USER, ASSISTANT)),
    "masked_stop": masked_stop,
    "cut_stop": chat(USER, {"role": "assistant", "content": "very " * WIDTH}),
    "masked_row": MASKED,
    "masked_by_cut": {"input_ids": [1] * (WIDTH + 1), "labels": [-100] * WIDTH + [1]},
    "double_bos": (with_bos, double_bos),
    "special_token_in_text": chat({"role": "user", "content": "say <|im_end|> to me"}, ASSISTANT),
    "trained_padding": (with_pad, trained_padding),
    "byte_garbage": chat({"role": "user", "content": "na\ufffdve"}, ASSISTANT),
    "cut_row": {"input_ids": list(range(1, WIDTH + 2)), "labels": [*range(1, WIDTH + 1), -100]},
    "split_row": {"text": "the answer to life " * WIDTH},
    "single_token": {"input_ids": [7]},
    "no_common_prompt": {"chosen": "forty two", "rejected": "everything"},
    "other_prompt": {
        "prompt": "what is 2?",
        "chosen": [USER, ASSISTANT],
        "rejected": [USER, {**ASSISTANT, "content": "two"}],
    },
    "identical_answers": {"prompt": [USER], "chosen": [ASSISTANT], "rejected": [ASSISTANT]},
    "tied_scores": {
        "prompt": [USER],
        "responses": ["forty two", "everything"],
        "scores": [0.5, 0.5],
    },
    "unusable_scores": {
        "prompt": [USER],
        "responses": ["forty two", "everything"],
        "scores": [0.5],
    },
    "unusable_label": {"prompt": [USER], "completion": [ASSISTANT], "label": "good"},
    "duplicate_row": copy.deepcopy(CLEAN[3]),
    "missing_field/dpo": {"prompt": [USER], "chosen": [ASSISTANT]},
    "missing_field/ipo": {
        "question": "what is two?",
        "query": "what is life?",
        "chosen": "two is",
        "rejected": "two are",
    },
    "columns_recognised/dpo": {
        "question": "what is 2?",
        "chosen": "the answer is two",
        "rejected": "the answer is life",
    },
    "columns_recognised/kto": {
        "instruction": "say it",
        "input": "what is 2?",
        "output": "two",
        "label": True,
    },
    "unusable_kind/dpo": chat(USER, ASSISTANT),
    "unusable_kind/kto": {"text": "the answer to life"},
    "empty_answer/dpo": {
        "prompt": [USER],
        "chosen": [ASSISTANT],
        "rejected": [{"role": "assistant", "content": " "}],
    },
    "empty_answer/kto": {"prompt": [USER], "completion": "\n", "label": True},
    "no_assistant_turn/dpo": {"prompt": [USER], "chosen": [ASSISTANT, USER], "rejected": "two"},
    "no_assistant_turn/kto": {**chat(USER), "label": True},
    "cut_stop/dpo": {"prompt": [USER], "chosen": [ASSISTANT], "rejected": "very " * WIDTH},
    "cut_stop/kto": {"prompt": [USER], "completion": "very " * WIDTH, "label": False},
    "masked_by_cut/dpo": {"prompt": "very " * WIDTH, "chosen": [ASSISTANT], "rejected": "forty"},
    "masked_by_cut/kto": {"prompt": "very " * WIDTH, "completion": [ASSISTANT], "label": True},
    "empty_prompt": {"prompt": " \n"},
    "answered_prompt": {"prompt": [USER, ASSISTANT]},
    "no_room": {"prompt": "very " * WIDTH},
    "unusable_label/kto/chat": chat(USER, ASSISTANT),
    "unusable_label/kto/missing": {"prompt": [USER], "completion": [ASSISTANT]},
}
"""Rule: the row that breaks it (a text is a raw line), or what is done to the tokenizer and the
row. Behind a slash stands the objective whose rows it is among, where other rows break the rule
than those of ``sft`` or of another one."""

ELSEWHERE = {
    "vocabulary_too_large",
    "id_out_of_range",
    "dropped_row",
    "held_out_in_training",
    "one_label",
    "no_other_prompt",
    "no_room_for_other",
}
"""Rules that need more than a row: tests of their own."""

OBJECTIVES = {
    "no_common_prompt": "dpo",
    "other_prompt": "dpo",
    "identical_answers": "dpo",
    "tied_scores": "dpo",
    "unusable_scores": "dpo",
    "unusable_label": "kto",
    "empty_prompt": "grpo",
    "answered_prompt": "grpo",
    "no_room": "grpo",
}
"""Of the rules that concern the rows of one objective; the others are broken under any."""

ALONG = {
    "cut_stop": {"cut_row"},
    "masked_by_cut": {"cut_row", "cut_stop"},
    "single_token": {"masked_row"},
    "columns_recognised": {"plain_completion"},
    "unread_field": {"plain_completion"},
    "repeated_prompt": {"plain_completion"},
    "masked_stop": set(),
    "trained_padding": set(),
    "columns_recognised/dpo": {"plain_completion"},
    "cut_stop/dpo": {"cut_row"},
    "cut_stop/kto": {"cut_row"},
    "masked_by_cut/dpo": {"cut_row"},
    "masked_by_cut/kto": {"cut_row"},
    "no_room": {"plain_completion"},
}
"""What else a planted row breaks, and must."""


def rule_of(name):
    """The rule that a planted row breaks."""
    return name.partition("/")[0]


def objective_of(name):
    """The objective among whose rows it is."""
    return name.split("/")[1] if "/" in name else OBJECTIVES.get(name, "sft")


def clean_rows(name):
    """Rows that the objective of a planted row takes."""
    answers = [[{"role": "assistant", "content": f"the answer is {n}"}] for n in range(13)]
    asked = [{"prompt": [{"role": "user", "content": f"what is {n}?"}]} for n in range(12)]
    kinds = OBJECTIVE_CLASSES[objective_of(name)].row_kinds
    if kinds == ("prompt",):
        return asked
    if kinds == ("preference",):
        return [
            {**row, "chosen": answers[n], "rejected": answers[n + 1]} for n, row in enumerate(asked)
        ]
    if kinds == ("unpaired preference",):
        return [
            {**row, "completion": answers[n], "label": n % 2 == 0} for n, row in enumerate(asked)
        ]
    return CLEAN


def encoder(name, tokenizer):
    """As the objective of a planted row has it."""
    return Tokenizer(tokenizer, kinds=OBJECTIVE_CLASSES[objective_of(name)].row_kinds)


def planted(name, tmp_path):
    """A file of clean rows with the fault at a random place: the file, a tokenizer, and the
    number of the row.
    """
    tokenizer = tiny.tokenizer()
    change, row = PLANTED[name] if isinstance(PLANTED[name], tuple) else (None, PLANTED[name])
    if change:
        change(tokenizer)
    row = row(tokenizer) if callable(row) else row
    clean = (
        [{"input_ids": [10 + n, 3, tokenizer.eos_token_id]} for n in range(9)]
        if change
        else clean_rows(name)
    )
    place = random.randint(4, len(clean))
    lines = [json.dumps(row) for row in clean]
    lines.insert(place, row if isinstance(row, str) else json.dumps(row))
    path = tmp_path / f"{name.replace('/', '-')}.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path, tokenizer, place + 1
