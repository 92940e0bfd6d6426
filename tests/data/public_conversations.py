"""Fixed conversations on which a chat template of ours and a public text must write the same."""

import copy
import datetime
import json
import unittest.mock

from transformers.utils import chat_template_utils

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "measure",
            "description": "Measures a thing; it's quick & <cheap>.",
            "parameters": {
                "type": "object",
                "properties": {
                    "thing": {
                        "type": "string",
                        "description": 'What to "measure", \u00e9.g. \u6f22\u5b57.',
                    }
                },
                "required": ["thing"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "stop",
            "description": "Stops.",
            "parameters": {"type": "object", "properties": {}},
        },
    },
]

RICH = {
    "type": "function",
    "function": {
        "name": "order",
        "description": "Orders things.",
        "parameters": {
            "type": "object",
            "properties": {
                "names": {"type": "array", "items": {"type": "string"}, "nullable": True},
                "counts": {"type": "array", "items": {"type": "integer"}, "default": [1]},
                "boxes": {
                    "type": "array",
                    "items": {"type": "object", "properties": {"a": {"type": "number"}}},
                },
                "anything": {"type": "array"},
                "size": {
                    "type": "string",
                    "enum": ["small", "large"],
                    "default": "small",
                    "description": "The size.",
                },
                "note": {"type": "string", "nullable": True, "default": "none"},
                "either": {"type": ["string", "integer"]},
                "one": {
                    "oneOf": [
                        {"type": "string", "description": "A text."},
                        {"type": "number", "default": 2},
                    ]
                },
                "other": {"oneOf": [{"type": "object"}, {"type": "number"}]},
                "place": {
                    "type": "object",
                    "properties": {"street": {"type": "string"}, "number": {"type": "integer"}},
                    "required": ["street"],
                },
                "options": {"type": "object"},
                "fast": {"type": "boolean", "default": False},
                "unknown": {"description": "Of any type."},
            },
            "required": ["names", "size"],
        },
    },
}

SYSTEM = {"role": "system", "content": " Be brief.\nBe kind. "}
FIRST = {"role": "user", "content": ' How long is it,\n\n"it\'s" <it> & all?\n'}
SECOND = {"role": "user", "content": "And now? \U0001f642"}
ANSWER = {"role": "assistant", "content": "\nTwo metres.\n\n  Really. "}
LAST = {"role": "assistant", "content": "As before: \u00e9 'a' \"b\""}
THOUGHT = {"role": "assistant", "content": "Two.", "reasoning_content": "\nLet me think.\n"}


def _call(number, name, **arguments):
    function = {"name": name, "arguments": arguments}
    return {"type": "function", "id": f"call0000{number}", "function": function}


CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [_call(1, "measure", thing='a <"rope"> \u00e9', often=2)],
}
WITHOUT_CONTENT = {"role": "assistant", "tool_calls": CALL["tool_calls"]}
CALLS = {
    "role": "assistant",
    "content": "Wait.",
    "tool_calls": [_call(1, "measure", thing="rope"), _call(2, "stop")],
}
MEASURED = {
    "role": "tool",
    "name": "measure",
    "tool_call_id": "call00001",
    "content": '{"metres": 2}',
}
STOPPED = {"role": "tool", "name": "stop", "tool_call_id": "call00002", "content": "stopped"}


def _as_text(messages):
    """The same messages with the arguments of calls as JSON text."""
    changed = copy.deepcopy(messages)
    for message in changed:
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = json.dumps(
                call["function"]["arguments"], ensure_ascii=False
            )
    return changed


WITH_A_CALL = [FIRST, CALL, MEASURED, LAST]

CONVERSATIONS = {
    "single": ([FIRST, ANSWER], None),
    "turns": ([FIRST, ANSWER, SECOND, LAST], None),
    "system": ([SYSTEM, FIRST, ANSWER, SECOND, LAST], None),
    "tools": (WITH_A_CALL, TOOLS),
    "arguments as text": (_as_text(WITH_A_CALL), TOOLS),
    "system and tools": ([SYSTEM, *WITH_A_CALL, SECOND, LAST], TOOLS),
    "several calls": ([FIRST, CALLS, MEASURED, STOPPED, LAST], TOOLS),
    "content is null": ([FIRST, {**CALL, "content": None}, MEASURED, LAST], TOOLS),
    "content is missing": ([FIRST, WITHOUT_CONTENT, MEASURED, LAST], TOOLS),
    "rich tools": ([FIRST, LAST], [RICH]),
    "thought in the answer": (
        [FIRST, {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nTwo."}, SECOND, LAST],
        None,
    ),
    "thinking": ([FIRST, THOUGHT], None),
    "thinking turns": ([FIRST, THOUGHT, SECOND, THOUGHT], None),
}
"""By kind: messages, the last of which answers, and tools."""

SPECIAL = {"bos_token": "<bos>", "eos_token": "<eos>"}


class OneDay(datetime.datetime):
    """A clock that stands still, for texts that write the date."""

    @classmethod
    def now(cls, tz=None):
        return cls(2025, 1, 31)


def refused(written):
    """Whether a text refused the conversation; else ``written`` is what it wrote."""
    return not isinstance(written, str)


def rendered(text, kind):
    """A conversation as a text writes it, answered and up to where the last answer begins."""
    messages, tools = CONVERSATIONS[kind]
    asked = {"answered": (messages, False), "asked": (messages[:-1], True)}
    return {name: _written(text, part, tools, prompt) for name, (part, prompt) in asked.items()}


def _under_both_names(message):
    """A message with its thoughts under both names, as the newest transformers renders it."""
    if "reasoning_content" in message:
        message["thinking"] = message["reasoning_content"]
    return message


def _written(text, messages, tools, generation):
    try:
        with unittest.mock.patch.object(chat_template_utils, "datetime", OneDay):
            texts, _ = chat_template_utils.render_jinja_template(
                [[_under_both_names(message) for message in copy.deepcopy(messages)]],
                tools,
                chat_template=text,
                add_generation_prompt=generation,
                **SPECIAL,
            )
    except Exception as error:  # a text may raise whatever its author chose
        return {"refused": type(error).__name__}
    return texts[0]
