"""Every planted fault has its place in the source, however that is written, and its tests exist."""

import ast
import re
import tomllib
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

import pytest

from planting import (
    DEFINITIONS,
    FUNCTIONS,
    NAMES,
    Module,
    Unfit,
    find,
    module_at,
    names_bound,
    path_of,
    plant,
)

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "chronicals"
LISTS = [tomllib.loads(path.read_text()) for path in sorted(ROOT.glob("tests/mutations/*.toml"))]
FAULTS = [fault for one in LISTS for fault in one["mutant"]]


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault["name"])
def test_a_planted_fault_fits_the_source(fault):
    find(module_at(path_of(fault, SOURCE)), fault)
    for test in fault["tests"]:
        file, *names = test.partition("[")[0].split("::")
        text = (ROOT / file).read_text()
        assert all(re.search(rf"^\s*(def|class) {name}\b", text, re.MULTILINE) for name in names), (
            test
        )


def places_before_and_after(change):
    """The places of all faults that fit, in the source and after ``change`` of its syntax trees.

    The source after a change is written from its trees. A place is the number of its first node.
    """
    faults_in = defaultdict(list)
    for fault in FAULTS:
        faults_in[path_of(fault, SOURCE)].append(fault)
    for path, faults in faults_in.items():
        before = module_at(path)
        after = Module(ast.unparse(change(ast.parse(path.read_text()))))
        numbers = {
            id(node): n
            for tree in (before.tree, after.tree)
            for n, node in enumerate(ast.walk(tree))
        }
        for fault in faults:
            with suppress(Unfit):
                yield tuple(numbers[id(find(module, fault).nodes[0])] for module in (before, after))


@pytest.mark.slow
def test_lines_quotes_and_comments_do_not_matter():
    places = list(places_before_and_after(lambda tree: tree))
    assert len(places) == len(FAULTS)
    assert all(before == after for before, after in places)


def with_other_locals(tree):
    """A syntax tree in which all locals of functions are called otherwise."""
    for function in outermost_functions(tree):
        inside = list(ast.walk(function))
        fixed = [node for node in inside if isinstance(node, (*DEFINITIONS, ast.alias))]
        declared = {
            name
            for node in inside
            if isinstance(node, (ast.Global, ast.Nonlocal))
            for name in node.names
        }
        changed = names_bound(inside) - names_bound(fixed) - declared
        for node in inside:
            field = NAMES.get(type(node))
            if field is not None and getattr(node, field) in changed:
                setattr(node, field, getattr(node, field) + "_of_another_name")
    return tree


def outermost_functions(node):
    if isinstance(node, FUNCTIONS):
        return [node]
    return [
        function for child in ast.iter_child_nodes(node) for function in outermost_functions(child)
    ]


@pytest.mark.slow
def test_names_of_locals_do_not_matter_where_one_place_alone_fits_others():
    """Refused is what fits several places then, or has a local that stands in ``new`` alone."""
    places = list(places_before_and_after(with_other_locals))
    assert len(places) > 0.9 * len(FAULTS)
    assert all(before == after for before, after in places)


MEAN = """
def mean(values, weights=None):
    if weights is None:
        total = sum(values)
    else:
        total = sum(v * w for v, w in zip(values, weights))
    return total / len(values)
"""

WEIGHTED = """
if weights is None:
    ...
else:
    total = sum(v * w for v, w in zip(values, weights))
"""

PLANTED = {
    "an expression": ("total/len(  values)", "total", "    return total"),
    "inside of another": (
        "v * w",
        "v",
        "        total = sum((v for v, w in zip(values, weights)))",
    ),
    "a statement": ("total = sum(values)", "pass", "        pass"),
    "any body": (WEIGHTED, "...", "    total = sum(values)"),
    "the head of any body": (WEIGHTED, "if values:\n    ...", "    if values:"),
    "other locals": ("x / len(given)", "x / len(given[1:])", "    return total / len(values[1:])"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_fault_is_planted_where_it_belongs(name):
    old, new, line = PLANTED[name]
    planted = plant(MEAN, {"in": "mean", "old": old, "new": new})
    before = ast.unparse(ast.parse(MEAN))
    assert set(planted.splitlines()) - set(before.splitlines()) == {line}


REFUSED = {
    "two places": ("total", "0", "it occurs 3 times in mean"),
    "another body": ("if weights is None: ...\nelse: total = 0", "...", "it occurs 0 times"),
    "one for two locals": ("x / len(x)", "x", "it occurs 0 times"),
    "locals that may be several": ("given", "[]", "it occurs 12 times"),
    "a name that is not known": ("len(values)", "count", "mean does not know count"),
    "a name that is gone": ("x / len(given)", "x / count", "mean does not know count"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_fault_without_a_place_of_its_own_is_refused(name):
    old, new, said = REFUSED[name]
    with pytest.raises(Unfit, match=said):
        plant(MEAN, {"in": "mean", "old": old, "new": new})


FAULT = {"file": "numbers.py", "in": "Numbers.mean", "old": "sum(self.all)", "new": "0"}
CLASS = "class Numbers:\n    def mean(self):\n        return sum(self.all)\n"


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({"numbers.py": CLASS}, "numbers.py"),
        ({"numbers.py": CLASS, "other.py": CLASS}, "numbers.py"),
        ({"numbers.py": "", "inside/other.py": CLASS}, "inside/other.py"),
        ({"one.py": CLASS, "inside/other.py": CLASS}, None),
        ({"numbers.py": CLASS.replace("mean", "median")}, None),
    ],
    ids=["where it is said to be", "not the other one", "moved", "either of two", "gone"],
)
def test_a_definition_is_found_where_it_has_been_moved(files, found, tmp_path):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    if found is None:
        with pytest.raises(
            Unfit, match=r"does not define Numbers\.mean, and [02] other modules do"
        ):
            path_of(FAULT, tmp_path)
    else:
        assert path_of(FAULT, tmp_path) == tmp_path / found
