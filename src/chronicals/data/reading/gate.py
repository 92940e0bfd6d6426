"""The gate before step 0: faults of the data, the rows that have them, and those that stop a run.

Every rule has a name, a remedy, and the largest share of the rows that may break it before that is
an error: 0 if a single row would make training wrong, 1 if it may be meant, None if nothing is
wrong. ``ChronicalsConfig.gate`` sets other shares by name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from chronicals.config import ConfigurationError
from chronicals.data.reading.ledger import Ledger

EXAMPLES = 5
"""Row numbers and places that are kept of each finding."""


class DataError(ValueError):
    """The data would make training wrong or impossible; the message names the place and the remedy.

    Attributes:
        rule: name of the gate's rule, if a row (not the file) is at fault.
    """

    rule = "wrong_type"

    def __init__(self, message: str, rule: str | None = None):
        super().__init__(message)
        self.rule = rule or self.rule


class GateRule(NamedTuple):
    """A rule of the gate.

    Attributes:
        what: the finding, in words.
        remedy: what to do about it.
        share: largest share of the rows that may break it; None for all, without a warning.
    """

    what: str
    remedy: str
    share: float | None


RULES = {
    "unparsable_line": GateRule("lines that do not parse", "mend or delete them", 0),
    "missing_field": GateRule(
        "rows without a field they need",
        "fill it in, or name the columns with 'columns' (in memory: rename them)",
        0,
    ),
    "wrong_type": GateRule("rows with a field of the wrong type", "mend them", 0),
    "unread_field": GateRule(
        "plain completions with a system message, tools or a history, which are left out",
        "set completions_as_chat=True to render them through the chat template, which has a place "
        "for them",
        1,
    ),
    "pictures_or_sound": GateRule(
        "rows with pictures, video or sound, of which only text could be trained",
        "leave them out (allowed, they are), or remove the column or the parts where the text "
        "says it all",
        0,
    ),
    "columns_recognised": GateRule(
        "rows whose columns were taken for prompt and completion by their names",
        "nothing, if that is meant; else name them: columns={'prompt': 'THEIR_PROMPT', "
        "'completion': 'THEIR_ANSWER'}",
        None,
    ),
    "plain_completion": GateRule(
        "prompts and completions without the chat template that this tokenizer has, unlike what a "
        "chat with the model sends",
        "set completions_as_chat=True to render them as a user's and an assistant's message, "
        "unless plain text is meant, or "
        "texts hold turns of their own ('Human:', 'Assistant:'), which belong in messages",
        1,
    ),
    "repeated_prompt": GateRule(
        "answers that begin with the whole prompt, which is trained once more there",
        "leave it out of the answers, unless that is meant",
        1,
    ),
    "unusable_kind": GateRule(
        "rows this objective cannot train on", "choose their objective, or map their columns", 0
    ),
    "empty_conversation": GateRule("conversations without a message", "delete them", 0),
    "unknown_role": GateRule(
        "messages of an unknown role", "use system, developer, user, assistant or tool", 0
    ),
    "empty_answer": GateRule(
        "empty answers, which teach to say nothing", "delete them or fill them in", 0
    ),
    "no_assistant_turn": GateRule(
        "conversations without an assistant's turn",
        "let them end with the assistant, or delete them; where all is trained, use "
        "objective='pretraining'",
        0.5,
    ),
    "consecutive_answers": GateRule(
        "two assistant's turns in a row", "join them, unless this is meant", 1
    ),
    "late_system_message": GateRule(
        "system messages in the middle of a conversation", "put them first", 1
    ),
    "template_refuses": GateRule(
        "conversations the chat template refuses", "mend them, or use another template", 0
    ),
    "template_differs": GateRule(
        "conversations rendered otherwise in training than in generation", "use another template", 0
    ),
    "no_stop_token": GateRule(
        "answers the chat template does not close with a stop token", "use a template that does", 0
    ),
    "masked_stop": GateRule(
        "answers whose stop token is not trained", "train the token that ends the answer", 0
    ),
    "cut_stop": GateRule(
        "answers that lost their stop token to the cut",
        "raise max_seq_length, or set overlong='drop'",
        0.5,
    ),
    "masked_row": GateRule("rows with no token to train on", "look at their labels and roles", 0.5),
    "masked_by_cut": GateRule(
        "rows with an answer of which the cut leaves no token to train on",
        "raise max_seq_length",
        0.5,
    ),
    "double_bos": GateRule(
        "rows that begin with two BOS tokens", "let one of the two writers of BOS be silent", 0
    ),
    "special_token_in_text": GateRule(
        "texts that hold a special token", "remove it, unless this is meant", 1
    ),
    "trained_padding": GateRule(
        "rows that train the padding token", "mask it, or choose another pad_token", 0
    ),
    "vocabulary_too_large": GateRule(
        "tokens of the tokenizer that the embedding lacks", "set resize_embeddings=True", 1
    ),
    "id_out_of_range": GateRule(
        "token ids outside the model's embedding", "use the model's own tokenizer", 0
    ),
    "byte_garbage": GateRule(
        "texts with U+FFFD, left by a wrong decoding", "read the source in its own encoding", 0.1
    ),
    "cut_row": GateRule(
        "rows cut at max_seq_length",
        "raise max_seq_length, or set overlong='drop', or 'split' where a row is one document",
        1,
    ),
    "split_row": GateRule(
        "rows split at max_seq_length", "nothing, if documents may be split", None
    ),
    "dropped_row": GateRule(
        "rows longer than max_seq_length, left out", "raise max_seq_length", 0.5
    ),
    "single_token": GateRule("rows of a single token", "look at what the column holds", 0.5),
    "no_common_prompt": GateRule(
        "pairs without a prompt, whose answers do not begin alike",
        "give them a prompt, or name its column with 'columns'",
        0.5,
    ),
    "other_prompt": GateRule(
        "answers that begin with a question other than that of their row's prompt",
        "leave the prompt out where the conversations hold it all, or let the answers begin "
        "behind it",
        0.5,
    ),
    "identical_answers": GateRule(
        "pairs of two equal answers, which teach nothing",
        "remove them, or name the right columns",
        0.1,
    ),
    "tied_scores": GateRule(
        "ranked answers that have one score", "score them apart, or remove them", 0.5
    ),
    "unusable_scores": GateRule(
        "ranked answers without one finite number as the score of each, or fewer than two",
        "mend or delete them",
        0,
    ),
    "unusable_label": GateRule(
        "judged answers without a label, or with one that is neither true nor false",
        "write true for good answers and false for bad ones, or name the column with 'columns'",
        0,
    ),
    "no_other_prompt": GateRule(
        "judged answers near which all have the same prompt, so that none is an answer to another "
        "one",
        "shuffle the rows, or add answers to other prompts",
        0.5,
    ),
    "no_room_for_other": GateRule(
        "judged answers that leave no room for one to another prompt, so that the divergence is "
        "estimated without them",
        "raise max_seq_length",
        1,
    ),
    "one_label": GateRule(
        "answers that are all good, or all bad",
        "add answers of the other label, unless this is meant: unlearning, say",
        1,
    ),
    "empty_prompt": GateRule("prompts without a text", "delete them or fill them in", 0),
    "answered_prompt": GateRule(
        "prompts that end with an assistant's answer, behind which nothing is to be said",
        "leave the answer out of the prompt; a column of its own goes to the rewards",
        0,
    ),
    "no_room": GateRule(
        "prompts that leave no room for an answer of max_new_tokens in max_seq_length",
        "raise max_seq_length, or lower max_new_tokens",
        0.1,
    ),
    "duplicate_row": GateRule(
        "documents that are in the data more than once", "remove them, unless this is meant", 1
    ),
    "held_out_in_training": GateRule(
        "held-out documents that are trained on as well", "remove them from one of the two", 0.5
    ),
}


ANSWER_REMEDIES = {"cut_row": "raise max_seq_length, or set overlong='drop'"}
"""Other remedies for rows that are whole answers, which cannot be split."""


@dataclass
class Finding:
    """The rows that break a rule.

    Attributes:
        count: how many there are.
        rows: numbers of the first, from 1 in reading order.
        example: words about the first.
        places: where these rows were read.
    """

    count: int = 0
    rows: list[int] = field(default_factory=list)
    example: str = ""
    places: list[str] = field(default_factory=list)


@dataclass
class DataReport:
    """Counts of a tokenised data set.

    Attributes:
        rows: records read.
        documents: documents stored (a long text becomes several).
        tokens: tokens stored.
        targets: tokens that are predicted and trained on.
        kinds: rows by kind, including those that are left out.
        findings: by the name of the rule.
        answers: True if the rows are whole answers, compared or judged.
        forms: rows by the kind of their first document, in whose form they are trained: a pair may
            be of chats.
        left_out: rows that gave no document, by kind and then by the rule that says why.
        prompts: documents that are prompts, which answers share.
        mismatched: documents that are answers to other prompts, beside judged ones.
    """

    rows: int = 0
    documents: int = 0
    tokens: int = 0
    targets: int = 0
    kinds: dict[str, int] = field(default_factory=dict)
    findings: dict[str, Finding] = field(default_factory=dict)
    answers: bool = False
    forms: dict[str, int] = field(default_factory=dict)
    left_out: dict[str, dict[str, int]] = field(default_factory=dict)
    prompts: int = 0
    mismatched: int = 0

    def note(self, rule: str, row: int | None = None, example: str = "", count: int = 1) -> None:
        """Count ``row`` (from 0; None is the data as a whole) under ``rule``."""
        finding = self.findings.setdefault(rule, Finding())
        finding.count += count
        finding.example = finding.example or example
        if row is not None and len(finding.rows) < EXAMPLES:
            finding.rows.append(row + 1)

    def count(self, rule: str) -> int:
        """Return the number of rows counted under ``rule``."""
        return self.findings[rule].count if rule in self.findings else 0

    def add(self, other: DataReport) -> None:
        """Add the counts of further rows."""
        self.rows += other.rows
        self.documents += other.documents
        self.tokens += other.tokens
        self.targets += other.targets
        self.answers |= other.answers
        self.prompts += other.prompts
        self.mismatched += other.mismatched
        _add_counts(self.kinds, other.kinds)
        _add_counts(self.forms, other.forms)
        for kind, causes in other.left_out.items():
            _add_counts(self.left_out.setdefault(kind, {}), causes)
        for rule, finding in other.findings.items():
            self.note(rule, example=finding.example, count=finding.count)
            own = self.findings[rule]
            room = EXAMPLES - len(own.rows)
            own.places += finding.places[:room]
            own.rows += finding.rows[:room]

    def level(self, rule: str, shares: Mapping[str, float]) -> Literal["error", "warning", "info"]:
        """Return the level of a finding; an error stops the run.

        Args:
            rule: name of a rule that was broken.
            shares: largest shares of the rows that replace those of ``RULES``.
        """
        share = shares.get(rule, RULES[rule].share)
        if share is None:
            return "info"
        return "error" if share < 1 and self.count(rule) / max(self.rows, 1) > share else "warning"

    def entries(self, shares: Mapping[str, float] | None = None) -> list[dict[str, Any]]:
        """Return the findings as rows of a table, errors first.

        Each has rule, level, count, share, rows, places, what, remedy and example.
        """
        entries = []
        for rule, finding in self.findings.items():
            remedy = RULES[rule].remedy
            if self.answers:
                remedy = ANSWER_REMEDIES.get(rule, remedy)
            entries.append(
                {
                    "rule": rule,
                    "level": self.level(rule, shares or {}),
                    "count": finding.count,
                    "share": finding.count / max(self.rows, 1),
                    "rows": finding.rows,
                    "places": finding.places,
                    "what": RULES[rule].what,
                    "remedy": remedy,
                    "example": finding.example,
                }
            )
        order = list(RULES)
        levels = ("error", "warning", "info")
        return sorted(
            entries, key=lambda entry: (levels.index(entry["level"]), order.index(entry["rule"]))
        )

    @property
    def ledger(self) -> Ledger:
        """Ledger of the rows if none is held out."""
        trained = {}
        for kind, count in self.kinds.items():
            left = count - sum(self.left_out.get(kind, {}).values())
            if left:
                trained[kind] = left
        return Ledger(self.kinds, trained, left_out=self.left_out)

    def summary(self, ledger: Ledger | None = None) -> str:
        """Return one line: rows by kind, then documents, tokens and the share that is trained.

        Args:
            ledger: of the data, if some of them are held out.
        """
        ledger = ledger or self.ledger
        share = self.targets / max(self.tokens, 1)
        what = "scored" if ledger.is_scored else "trained"
        if self.are_prompts:
            return f"{ledger.words()}, {self.documents_in_words()}, {self.tokens:,} tokens"
        return (
            f"{ledger.words()}, {self.documents_in_words()}, {self.tokens:,} tokens, "
            f"{self.targets:,} of them {what} "
            f"({share:.0%})"
        )

    @property
    def are_prompts(self) -> bool:
        """True if the documents are prompts, which the model answers in the run."""
        return bool(self.documents) and not self.targets and "prompt" in self.kinds

    def documents_in_words(self) -> str:
        """Return the number of documents; of compared and judged answers, by what they are."""
        if self.are_prompts:
            return f"{self.documents:,} prompts"
        if not self.answers:
            return f"{self.documents:,} documents"
        counts = {
            "answers": self.documents - self.prompts - self.mismatched,
            "answers to other prompts": self.mismatched,
            "shared prompts": self.prompts,
        }
        return ", ".join(
            f"{count:,} {name}" for name, count in counts.items() if count or name == "answers"
        )

    def table(
        self, shares: Mapping[str, float] | None = None, ledger: Ledger | None = None
    ) -> list[tuple[str, str]]:
        """Return level and text of each line: the summary, then a finding a row, in columns."""
        entries = self.entries(shares)
        cells = [
            (
                entry["level"],
                entry["rule"],
                f"{entry['count']:,}",
                _listed_rows(entry),
                f"{entry['what']}: {entry['remedy']}",
            )
            for entry in entries
        ]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = [("info", self.summary(ledger))]
        for row in cells:
            padded = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
            lines.append((row[0], "  ".join(padded).rstrip()))
        return lines

    def errors(self, shares: Mapping[str, float] | None = None) -> list[dict[str, Any]]:
        """Return the findings that stop a run, as ``entries`` gives them."""
        return [entry for entry in self.entries(shares) if entry["level"] == "error"]

    @classmethod
    def from_dict(cls, fields: dict) -> DataReport:
        """Return the report that ``dataclasses.asdict`` made a dict of."""
        findings = {rule: Finding(**finding) for rule, finding in fields["findings"].items()}
        return cls(**{**fields, "findings": findings})

    def check(self, name: str, shares: Mapping[str, float] | None = None) -> None:
        """Raise an error with all findings that would make training wrong.

        Args:
            name: what the message calls the data.
            shares: other largest shares, by the name of the rule.

        Raises:
            DataError: no row, nothing to train on, or more rows break a rule than may.
        """
        if not self.rows:
            raise DataError(f"{name}: holds no rows; give a file with at least one")
        wrong = self.errors(shares)
        lines = ""
        is_usable = self.targets or self.are_prompts
        for entry in wrong if is_usable else self.entries(shares):
            rows = f" ({_listed_rows(entry)})" if entry["rows"] else ""
            example = f"; for one, {entry['example']}" if entry["example"] else ""
            lines += (
                f"\n  {entry['rule']}: {entry['count']:,} {entry['what']}{rows}: "
                f"{entry['remedy']}{example}"
            )
        if not is_usable:
            raise DataError(f"{name}: nothing to train on in any of {self.rows:,} rows:{lines}")
        if wrong:
            allowed = {
                entry["rule"]: min(1.0, math.ceil(1000 * entry["share"]) / 1000) for entry in wrong
            }
            raise DataError(
                f"{name}: breaks {len(wrong)} of the gate's rules in {self.rows:,} rows:{lines}\n"
                "To train without these rows or in spite of this, allow it: "
                f"gate={allowed}"
            )


def _add_counts(counts: dict[str, int], more: Mapping[str, int]) -> None:
    for name, count in more.items():
        counts[name] = counts.get(name, 0) + count


def _listed_rows(entry: Mapping[str, Any]) -> str:
    """Return the first rows of a finding by number, or by place if several files were read."""
    more = " …" if entry["count"] > len(entry["rows"]) else ""
    places = entry.get("places") or []
    if len(places) == len(entry["rows"]):
        for place, row in zip(places, entry["rows"]):
            number = re.search(r"(\d+)$", place)
            # Other files were read before that of this row, so its number there is lower.
            if number and int(number[1]) < row:
                return f"{', '.join(places)}{more}"
    return f"rows {', '.join(map(str, entry['rows']))}{more}" if entry["rows"] else ""


def check_shares(shares: Mapping[str, float]) -> None:
    """Check the configuration's ``gate``.

    Raises:
        ConfigurationError: it names no rule, or sets no share.
    """
    for rule, share in shares.items():
        if rule not in RULES:
            raise ConfigurationError(
                f"gate: no rule is named {rule!r}; there are {', '.join(RULES)}"
            )
        if not 0 <= share <= 1:
            raise ConfigurationError(f"gate: {rule}={share}: must be a share of the rows, 0 to 1")
