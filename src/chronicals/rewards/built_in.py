"""Rewards that come with the package, by the name that ``rewards`` has for them.

Each is made of the text in the brackets behind its name, and of the columns that it reads.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

ScoreFunction = Callable[..., list[float | None]]

BuiltReward = tuple[ScoreFunction, tuple[str, ...]]
"""A reward, and the columns that it needs."""

ANSWER = "answer"
"""Column of the right answer, unless another is named."""


def text_of(text_or_messages: Any) -> str:
    """Return a text: itself, or the contents of messages behind one another."""
    if isinstance(text_or_messages, str):
        return text_or_messages
    return "\n".join(message.get("content") or "" for message in text_or_messages)


def exact(argument: str | None) -> BuiltReward:
    """Return the reward 1 for an answer that is the right one but for white space around it.

    None where a row has no right answer.
    """
    column = argument or ANSWER

    def reward(completions: Sequence[Any], **columns: Any) -> list[float | None]:
        pairs = zip(completions, columns[column])
        return [
            None if right is None else float(text_of(given).strip() == str(right).strip())
            for given, right in pairs
        ]

    return reward, (column,)


def regex(argument: str | None) -> BuiltReward:
    """Return the reward 1 for an answer in which a pattern is found; ``.`` is any letter."""
    if not argument:
        raise ValueError("has no pattern; give one in brackets, as regex(<answer>.*</answer>)")
    try:
        pattern = re.compile(argument, re.DOTALL)
    except re.error as error:
        raise ValueError(f"{argument!r} is no regular expression: {error}") from None

    def reward(completions: Sequence[Any], **columns: Any) -> list[float | None]:
        return [float(pattern.search(text_of(given)) is not None) for given in completions]

    return reward, ()


def length(argument: str | None) -> BuiltReward:
    """Return the penalty of long answers of DAPO, by tokens.

    Yu et al., 2025 (arXiv 2503.14476), equation 13, with L the tokens of an answer:

        0                      where L ≤ most − soft
        (most − soft − L)/soft    up to most
        −1                     above

    ``length(most)`` or ``length(most, soft)``; soft is a fifth of most by default, as there (4,096
    of 20,480).
    """
    wrong = ValueError(
        f"length({argument or ''}): takes the most tokens of an answer, and over how many of them "
        "the penalty rises, as length(512, 128)"
    )
    try:
        most, *rest = [int(part) for part in (argument or "").split(",")]
        soft = rest[0] if rest else max(most // 5, 1)
    except ValueError:
        raise wrong from None
    if len(rest) > 1 or not 0 < soft <= most:
        raise wrong

    def reward(completion_ids: Sequence[Sequence[int]], **columns: Any) -> list[float | None]:
        over = [len(ids) - (most - soft) for ids in completion_ids]
        return [max(min(-tokens / soft, 0.0), -1.0) for tokens in over]

    return reward, ()


PLAIN_SIGNS = str.maketrans("\u2212\u00d7\u00b7\u00f7", "-**/")
"""The typographic minus, times, dot and division, and Python's signs."""

NUMBER = re.compile(r"-?\d+(?:,\d{3}(?!\d))*(?:\.\d+)?(?:/\d+)?")
"""A number in an answer: an integer, with commas between thousands or not, a decimal or a fraction."""

THOUSANDS = re.compile(r"\d+(?:,\d{3}(?!\d))+")
"""A number with commas between thousands."""

EXPRESSION = re.compile(r"[-(\s]*\d[\d\s.+\-*/()]*")
"""What may be an expression in a question; it must have an operator."""

OPERATORS: dict[type, Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def arithmetic(argument: str | None) -> BuiltReward:
    """Return the reward 1 for an answer whose last number is the value of the question.

    The question is the last expression of + − × / in the prompt, such as ``12 + 7 * 3``; None where
    the prompt has none. Values are exact. With a column in brackets the right number is its.
    """

    def by_question(
        prompts: Sequence[Any], completions: Sequence[Any], **columns: Any
    ) -> list[float | None]:
        pairs = zip(prompts, completions)
        return [equal(value_of(text_of(asked)), given) for asked, given in pairs]

    def by_column(completions: Sequence[Any], **columns: Any) -> list[float | None]:
        pairs = zip(columns[str(argument)], completions)
        return [equal(last_number(str(right)), given) for right, given in pairs]

    def equal(right: Fraction | None, completion: Any) -> float | None:
        return None if right is None else float(last_number(text_of(completion)) == right)

    return (by_column, (argument,)) if argument else (by_question, ())


def last_number(text: str) -> Fraction | None:
    """Return the last number of a text, exactly; None if it has none."""
    found = NUMBER.findall(text.translate(PLAIN_SIGNS))
    if not found:
        return None
    try:
        return Fraction(found[-1].replace(",", ""))
    except (ValueError, ZeroDivisionError):
        return None


def value_of(text: str) -> Fraction | None:
    """Return the value of the last expression of a text, exactly; None if it has none."""
    plain = THOUSANDS.sub(lambda number: number[0].replace(",", ""), text.translate(PLAIN_SIGNS))
    for found in reversed(EXPRESSION.findall(plain)):
        try:
            tree = ast.parse(_complete(found), mode="eval").body
            if isinstance(tree, ast.BinOp):
                return _evaluated(tree)
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
            continue
    return None


def _complete(text: str) -> str:
    """Return a text without signs and brackets at its ends that belong to the words around it."""
    text = text.strip().rstrip("+-*/( ")
    while text.count(")") > text.count("(") and text.endswith(")"):
        text = text[:-1].rstrip("+-*/( ")
    while text.count("(") > text.count(")") and text.startswith("("):
        text = text[1:].lstrip()
    if text.count("(") > text.count(")"):
        text = text[: text.rindex("(")].rstrip("+-*/( ")
    return text


def _evaluated(node: ast.expr) -> Fraction:
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        left = _evaluated(node.left)
        return OPERATORS[type(node.op)](left, _evaluated(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluated(node.operand)
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return Fraction(str(node.value))
    raise ValueError(f"{ast.unparse(node)} is no arithmetic")


def math(argument: str | None) -> BuiltReward:
    """Return the reward 1 for an answer that math-verify finds equal to the right one.

    None where the right answer is nothing that it can read.

    Raises:
        ValueError: math-verify is not installed.
    """
    column = argument or ANSWER
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise ValueError(
            "needs math-verify, which is not installed; pip install 'chronicals[math]'"
        ) from error

    def reward(completions: Sequence[Any], **columns: Any) -> list[float | None]:
        values = list[float | None]()
        for given, right in zip(completions, columns[column]):
            gold = parse(str(right))
            values.append(float(verify(gold, parse(text_of(given)))) if gold else None)
        return values

    return reward, (column,)


BUILT_IN: dict[str, Callable[[str | None], BuiltReward]] = {
    made.__name__: made for made in (arithmetic, exact, regex, length, math)
}
"""The rewards by name."""
