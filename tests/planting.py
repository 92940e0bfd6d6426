"""Finds where a fault belongs by what stands there, however it is written, and plants it.

A fault has two texts of Python. ``old`` is an expression, or statements of one body, and occurs
once; ``new`` stands there instead, ``pass`` for nothing. Syntax trees are compared: lines, quotes,
brackets and comments do not matter.

``in`` names the definition that holds ``old``, as ``Class.method``: a function with its decorators
and defaults, a class, or a name that a module or a class assigns. Without ``in`` the whole module
is searched.

``...`` at the end of one body in ``old`` is whatever follows there, and stands for it in ``new``:
``if ready: ...`` is the head of an ``if``.

Locals may have other names than in ``old``, each its own, where one place alone fits them; ``new``
then gets their names. A name of ``new`` that its place does not know is refused.
"""

from __future__ import annotations

import ast
import builtins
import copy
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DEFINITIONS = (*FUNCTIONS, ast.ClassDef)
ASSIGNMENTS = (ast.Assign, ast.AnnAssign, ast.AugAssign)

NAMES = {ast.Name: "id", ast.arg: "arg", ast.ExceptHandler: "name"}
"""Nodes that have the name of a local, and the field in which they have it."""

NOT_COMPARED = {"ctx", "kind", "type_comment"}
"""Fields that say nothing which the rest of a tree does not say."""


class Unfit(Exception):
    """A fault has no place in the source, or more than one."""


@dataclass
class Definition:
    """What a name defines, and the outermost function that holds it, or itself."""

    node: ast.AST
    scope: ast.AST

    @cached_property
    def locals(self) -> set[str]:
        return names_bound(ast.walk(self.scope))


class Module:
    """The syntax tree of a module, and its definitions by their dotted names.

    Several have the same name where one is a getter and one a setter, for example.
    """

    def __init__(self, text: str) -> None:
        self.tree = ast.parse(text)
        self._definitions: dict[str, list[Definition]] = defaultdict(list)
        self._enter(self.tree, "", None)

    def _enter(self, node: ast.AST, prefix: str, function: ast.AST | None) -> None:
        """Notes all definitions inside of a node, which is inside of ``function``."""
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                continue
            outermost = function
            if function is None and isinstance(child, FUNCTIONS):
                outermost = child
            for name in names_defined(child, in_function=function is not None):
                definition = Definition(child, outermost or child)
                self._definitions[prefix + name].append(definition)
            inside = f"{prefix}{child.name}." if isinstance(child, DEFINITIONS) else prefix
            self._enter(child, inside, outermost)

    def defining(self, name: str) -> list[Definition]:
        """The definitions of a dotted name; of the empty one, the module."""
        if not name:
            return [Definition(self.tree, self.tree)]
        return self._definitions.get(name, [])

    @cached_property
    def globals(self) -> set[str]:
        """The names that are known in all of the module."""
        bound = names_bound(outside_of_definitions(self.tree))
        return bound | set(dir(builtins)) | {"__file__"}


def names_defined(node: ast.AST, in_function: bool) -> list[str]:
    """The names by which faults find a node: those it defines, or assigns outside of functions."""
    if isinstance(node, DEFINITIONS):
        return [node.name]
    if in_function or not isinstance(node, ASSIGNMENTS):
        return []
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    parts = [part for target in targets for part in ast.walk(target)]
    return [part.id for part in parts if isinstance(part, ast.Name)]


def names_bound(nodes: Iterable[ast.AST]) -> set[str]:
    """The names that nodes define, import, take as arguments or assign."""
    found: set[str | None] = set()
    for node in nodes:
        if isinstance(node, (*DEFINITIONS, ast.ExceptHandler, ast.MatchAs, ast.MatchStar)):
            found.add(node.name)
        elif isinstance(node, ast.alias):
            found.add(node.asname or node.name.partition(".")[0])
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return {name for name in found if name is not None}


def names_read(nodes: Iterable[ast.AST]) -> set[str]:
    names = [node for node in nodes if isinstance(node, ast.Name)]
    return {name.id for name in names if isinstance(name.ctx, ast.Load)}


def outside_of_definitions(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes inside of a node but what functions and classes hold; these come themselves."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, DEFINITIONS):
            yield from outside_of_definitions(child)


@dataclass
class Match:
    """Compares ``old`` with nodes of the source, and keeps what ``old`` leaves open."""

    locals: set[str]
    """Names that may stand for others of ``old``."""
    known: set[str]
    """Names for which no other may stand."""
    names: dict[str, str] = field(default_factory=dict)
    """Those of ``old``, and what stands for them."""
    rest: list[ast.stmt] | None = None
    """What ``...`` is."""

    def fits(self, old: object, found: object) -> bool:
        """Whether two nodes, lists of them, or values of their fields say the same."""
        if type(old) is not type(found):
            return False
        if isinstance(old, list):
            return self._fits_all(old, found)
        if isinstance(old, ast.AST):
            return all(self._fits_field(old, found, name) for name in old._fields)
        return old == found

    def _fits_all(self, old: list, found: list) -> bool:
        if old and is_open(old[-1]):
            if self.rest is not None or len(found) < len(old):
                return False
            old = old[:-1]
            self.rest = found[len(old) :]
            found = found[: len(old)]
        return len(old) == len(found) and all(map(self.fits, old, found))

    def _fits_field(self, old: ast.AST, found: ast.AST, name: str) -> bool:
        if name in NOT_COMPARED:
            return True
        ours = getattr(old, name, None)
        theirs = getattr(found, name, None)
        if NAMES.get(type(old)) == name and ours and theirs:
            return self._fits_name(ours, theirs)
        return self.fits(ours, theirs)

    def _fits_name(self, old: str, found: str) -> bool:
        """Whether a name is the same or stands for another, everywhere and for no second one."""
        if old != found and (old in self.known or found not in self.locals):
            return False
        self.names.setdefault(old, found)
        return self.names[old] == found and list(self.names.values()).count(found) == 1

    def filled(self, new: list[ast.stmt]) -> ast.Module:
        """``new`` with the names of the source, and what ``...`` is there."""
        tree = ast.Module(copy.deepcopy(new), [])
        for node in ast.walk(tree):
            name = NAMES.get(type(node))
            if name is not None:
                given = getattr(node, name)
                setattr(node, name, self.names.get(given, given))
        if self.rest is not None:
            open_ = [node for node in ast.walk(tree) if is_open(node)]
            Replacement(open_, self.rest).visit(tree)
        return tree


def is_open(node: object) -> bool:
    """Whether a node is the statement ``...``."""
    value = node.value if isinstance(node, ast.Expr) else None
    return isinstance(value, ast.Constant) and value.value is ...


def is_expression(statements: list[ast.stmt]) -> bool:
    return len(statements) == 1 and isinstance(statements[0], ast.Expr)


class Replacement(ast.NodeTransformer):
    """Puts ``new`` where the first of some nodes is, and takes out the others."""

    def __init__(self, nodes: list, new: ast.expr | list[ast.stmt]) -> None:
        self.nodes = nodes
        self.new = new

    def visit(self, node: ast.AST):
        if not any(node is one for one in self.nodes):
            return self.generic_visit(node)
        return self.new if node is self.nodes[0] else None


def find(module: Module, fault: dict) -> Replacement:
    """The place of a fault in a module, with what stands there instead.

    Raises:
        Unfit: it has none, or several, or ``new`` has a name that is not known there.
    """
    name = fault.get("in", "")
    old = ast.parse(fault["old"]).body
    new = ast.parse(fault["new"]).body
    of_expression = is_expression(old) and is_expression(new)
    if of_expression:
        old = [old[0].value]
    found = matches(module, name, old, renamed=False) or matches(module, name, old, renamed=True)
    if len(found) != 1:
        raise Unfit(f"it occurs {len(found)} times in {name or 'the module'}, not once")
    ((nodes, match),) = found
    filled = match.filled(new)
    unknown = names_read(ast.walk(filled)) - match.known - names_bound(ast.walk(filled))
    if unknown:
        raise Unfit(f"{name or 'the module'} does not know {', '.join(sorted(unknown))}")
    return Replacement(nodes, filled.body[0].value if of_expression else filled.body)


def matches(module: Module, name: str, old: list, renamed: bool) -> list[tuple[list, Match]]:
    """The nodes that ``old`` fits, with the match.

    If ``renamed``, locals may stand for names that are not known.
    """
    found = []
    for definition in module.defining(name):
        known = definition.locals | module.globals
        for nodes in candidates(definition.node, old):
            match = Match(definition.locals if renamed else set(), known)
            if all(map(match.fits, old, nodes)):
                found.append((nodes, match))
    return found


def candidates(definition: ast.AST, old: list) -> Iterator[list]:
    """What ``old`` is compared with: each expression, or all as many statements in a row."""
    if isinstance(old[0], ast.expr):
        yield from ([node] for node in ast.walk(definition) if isinstance(node, ast.expr))
        return
    bodies = [[definition]]
    for node in ast.walk(definition):
        bodies += [value for _, value in ast.iter_fields(node) if isinstance(value, list)]
    for body in bodies:
        for start in range(len(body) - len(old) + 1):
            yield body[start : start + len(old)]


def plant(text: str, fault: dict) -> str:
    """The text of a module, written anew from its syntax tree, with a fault in it."""
    module = Module(text)
    return ast.unparse(find(module, fault).visit(module.tree))


@cache
def module_at(path: Path) -> Module:
    return Module(path.read_text())


PEERS = "benchmarks/peers/"


def path_of(fault: dict, folder: Path) -> Path:
    """The module below ``folder`` (``src/chronicals`` of a checkout) in which a fault belongs.

    It is the fault's ``file``, or the only one that defines what it is ``in``. A file that begins
    with ``benchmarks/peers/`` is one of the checkout's package of peers.

    Raises:
        Unfit: no module defines it, or several do.
    """
    path = folder / fault["file"]
    if fault["file"].startswith(PEERS):
        path = folder.parent.parent / fault["file"]
        folder = folder.parent.parent / PEERS
    name = fault.get("in", "")
    if path.exists() and module_at(path).defining(name):
        return path
    if not name:
        raise Unfit(f"there is no {fault['file']}")
    found = [other for other in sorted(folder.rglob("*.py")) if module_at(other).defining(name)]
    if len(found) != 1:
        raise Unfit(f"{fault['file']} does not define {name}, and {len(found)} other modules do")
    return found[0]
