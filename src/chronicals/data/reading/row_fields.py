"""Names of the fields that rows may have, and the kind of row that a set of them tells.

Sources rename columns to these names; ``chronicals.data.kinds`` reads the fields.
"""

from __future__ import annotations

CONVERSATION_FIELDS = ("messages", "conversations")
"""Fields that hold a list of messages."""

PROMPT_COMPLETION_PAIRS = (
    ("prompt", "response"),
    ("question", "answer"),
    ("query", "response"),
    ("input", "output"),
)
"""Other names of ``prompt`` and ``completion``."""

KIND_FIELDS: list[tuple[str, frozenset[str]]] = [
    ("chat", frozenset({"messages"})),
    ("chat", frozenset({"conversations"})),
    ("unpaired preference", frozenset({"prompt", "completion", "label"})),
    ("completion", frozenset({"prompt", "completion"})),
    ("unpaired preference", frozenset({"prompt", "response", "label"})),
    ("completion", frozenset({"prompt", "response"})),
    ("instruction", frozenset({"instruction", "output"})),
    ("instruction", frozenset({"instruction", "response"})),
    ("preference", frozenset({"chosen", "rejected"})),
    ("preference", frozenset({"prompt", "responses", "scores"})),
    ("tokens", frozenset({"input_ids"})),
    ("text", frozenset({"text"})),
    ("prompt", frozenset({"prompt"})),
    *(("completion", frozenset(pair)) for pair in PROMPT_COMPLETION_PAIRS[1:]),
]
"""The kinds of row and the fields that identify them, in the order in which they are tried."""

REQUESTED_KIND_FIELDS = [
    *KIND_FIELDS,
    ("preference", frozenset({"responses", "scores"})),
    *(
        ("unpaired preference", frozenset({answer, "label"}))
        for answer in ("completion", "response", "output", "answer", *CONVERSATION_FIELDS)
    ),
]
"""The same for kinds that an objective asks for; others ignore a chat's ``label``."""

ALL_KIND_FIELDS = frozenset().union(*(fields for _, fields in REQUESTED_KIND_FIELDS))
"""Every field that may identify a kind."""

IDENTIFYING_FIELDS = frozenset().union(*(fields for _, fields in KIND_FIELDS)) - frozenset().union(
    *PROMPT_COMPLETION_PAIRS[1:]
) | {"output", "response"}
"""Every field that identifies a kind before other names of prompt and completion are tried."""

TOKEN_FIELDS = ("input_ids", "labels", "attention_mask")
"""Fields of a row of tokens."""

MEDIA_FIELDS = ("image", "images", "video", "videos", "audio", "audios")
"""Fields of pictures and sound, which are refused."""

TEMPLATE_FIELDS = ("system", "tools", "history")
"""Fields that only the chat template has a place for."""

READ_FIELDS = (
    IDENTIFYING_FIELDS
    | frozenset().union(*PROMPT_COMPLETION_PAIRS)
    | {*TEMPLATE_FIELDS, *TOKEN_FIELDS}
)
"""Every field that is read."""
