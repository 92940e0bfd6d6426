"""The house as drawn: who may import whom, read from the code; and the face stays light."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "chronicals"

FLOORS = [
    {"__main__"},
    {"cli"},
    {"ui", "tuning", "convert"},
    {"benchmark", "export", "verification", "planning"},
    {"training"},
    {"policies"},
    {"objectives", "generation", "distributed"},
    {"rewards"},
    {"patching", "saving"},
    {"lora", "moe"},
    {"models"},
    {"attention", "formats", "quantization", "optimizers", "memory"},
    {"kernels"},
]
LEAVES = [
    "data",
    "cards",
    "config",
    "batch",
    "step_work",
    "model_shape",
    "standard_json",
    "deferred_imports",
    "precompilation",
    "bound_process",
    "auto_classes",
    "versions",
    "log_once",
]
"""All may use these; each may use those after it."""


def imports(path: Path) -> set[str]:
    """Rooms of ours that a file imports, for types or at run time, at the top or in a function."""
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and node.module.startswith("chronicals.")
        ):
            rooms.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            rooms |= {
                name.name.split(".")[1]
                for name in node.names
                if name.name.startswith("chronicals.")
            }
    return rooms


def floor(room: str) -> int:
    return next(number for number, rooms in enumerate(FLOORS) if room in rooms)


def allowed(room: str, other: str) -> bool:
    if room == other:
        return True
    if other in LEAVES:
        return room not in LEAVES or LEAVES.index(other) > LEAVES.index(room)
    if room in LEAVES:
        return False
    if room == "kernels":
        return False
    return floor(other) > floor(room)


OLDER_NAMES = ["kernels/triton_kernels.py", "kernels/flash_attention_optimizer.py"]
"""Thin modules that lead older scripts to what is elsewhere now (docs/compatibility.md); nothing
of ours imports them.
"""

FILES = [
    path for path in SOURCE.rglob("*.py") if path.name != "__init__.py" or path.parent != SOURCE
]


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_run_down(path):
    if str(path.relative_to(SOURCE)) in OLDER_NAMES:
        pytest.skip("leads older scripts elsewhere")
    room = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    wrong = sorted(other for other in imports(path) if not allowed(room, other))
    assert not wrong, f"{room} imports {wrong}"


def files_imported(path: Path) -> set[str]:
    """Modules of ``chronicals.data`` that a file imports, also within functions."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            for name in node.names:
                module = f"{node.module}.{name.name}"
                is_file = (SOURCE.parent / f"{module.replace('.', '/')}.py").exists()
                modules.add(module if is_file else str(node.module))
    return {module for module in modules if module.startswith("chronicals.data.")}


DATA_IMPORTS = {
    ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts): files_imported(path)
    for path in (SOURCE / "data").rglob("*.py")
    if path.name != "__init__.py"
}
"""The files that each file of ``data/`` imports."""


@pytest.mark.parametrize("module", sorted(DATA_IMPORTS))
def test_rooms_of_data_import_lower_ones(module):
    from chronicals.data import FLOORS as rooms

    upward = [
        other
        for other in DATA_IMPORTS[module]
        if rooms.index(other.split(".")[2]) > rooms.index(module.split(".")[2])
    ]
    assert not upward, f"{module} imports {upward}"


def circle(imports: dict[str, set[str]]) -> list[str]:
    """Files that import each other in a circle; empty if there is none."""
    left = dict(imports)
    while left:
        lowest = [module for module, others in left.items() if not others & left.keys()]
        if not lowest:
            return sorted(left)
        for module in lowest:
            del left[module]
    return []


def test_files_of_data_form_no_circle():
    assert not circle(DATA_IMPORTS)
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["a", "b", "c"]


CLASS_NAME = re.compile(r"chronicals\.(\w+)(\.\w+)*\.[A-Z]\w*")
"""The full name of a class of ours; its first group is the room."""


def classes_named(path: Path) -> set[str]:
    """Rooms of the classes that a file knows by the text of their names, without an import."""
    texts = (
        node.value
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    names = (CLASS_NAME.fullmatch(text) for text in texts)
    return {name[1] for name in names if name is not None}


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_no_class_of_a_room_above_is_known_by_its_name(path):
    room = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    wrong = sorted(other for other in classes_named(path) if not allowed(room, other))
    assert not wrong, f"{room} names classes of {wrong}: let them register instead"


def test_the_test_finds_a_class_known_by_its_name(tmp_path):
    file = tmp_path / "linear.py"
    file.write_text('READERS = {"chronicals.lora.layers.LoRALinear": None}')
    assert classes_named(file) == {"lora"} and not allowed("models", "lora")


def test_kernels_know_nothing_else_of_ours():
    for path in (SOURCE / "kernels").glob("*.py"):
        assert imports(path) <= {"kernels"} or f"kernels/{path.name}" in OLDER_NAMES, path


@pytest.mark.parametrize("name", OLDER_NAMES)
def test_nothing_of_ours_takes_the_road_of_older_scripts(name):
    module = name.removesuffix(".py").replace("/", ".")
    assert not [path for path in FILES if f"chronicals.{module}" in path.read_text()]


def test_the_test_finds_a_wrong_import():
    assert not allowed("kernels", "models")
    assert not allowed("data", "training")
    assert not allowed("objectives", "generation")
    assert allowed("training", "kernels")


@pytest.mark.slow
def test_the_face_is_light_and_complete():
    program = (
        "import sys, chronicals; assert 'torch' not in sys.modules and 'transformers' not in "
        "sys.modules; "
        "import chronicals as c; [getattr(c, name) for name in c.__all__]; print(*c.__all__)"
    )
    out = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    assert {"ChronicalsConfig", "ChronicalsTrainer", "apply_lora"} <= set(out.split())


@pytest.mark.slow
def test_dir_shows_the_public_names_and_imports_nothing():
    program = (
        "import time; began = time.process_time(); import chronicals, sys; names = "
        "dir(chronicals); "
        "assert time.process_time() - began < 0.5; assert not {'torch', 'transformers', 'numpy'} "
        "& set(sys.modules); "
        "from chronicals import *; assert set(chronicals.__all__) <= set(dir()); "
        "print(*(name for name in names if not name.startswith('_')))"
    )
    out = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    import chronicals

    assert out.split() == chronicals.__all__ and "__version__" in dir(chronicals)


def test_unknown_name_says_what_there_is():
    import chronicals

    with pytest.raises(AttributeError, match="ChronicalsTrainer"):
        _ = chronicals.Trainer


def test_no_pickle_no_remote_code():
    """Nothing of ours reads or writes pickle, and remote code is never switched on by default."""
    for path in FILES:
        text = path.read_text()
        assert "pickle" not in text.replace("never pickle", ""), path
        assert "torch.load" not in text and "torch.save" not in text, path
        assert "trust_remote_code=True" not in text, path


ROOT = SOURCE.parent.parent
SHARED = {
    "flash_attention_optimizer",
    "triton_kernels",
    "__init__",
    "cuda_graphs",
    "divergence_rows",
    "expert_stacks",
    "grouped_launch",
    "host_memory",
    "launch",
    "linear_head",
    "logit_rows",
    "low_rank_term",
    "products",
    "streamed_experts",
    "tensor_lists",
    "weight_tile",
}
"""Files of the kernels' room that hold no kernel with a name of its own."""


@pytest.mark.parametrize(
    "name", sorted({path.stem for path in (SOURCE / "kernels").glob("*.py")} - SHARED)
)
def test_the_same_name_stands_in_four_places(name):
    """A kernel's file, its tests, its row in the benchmark, its row in the documentation."""
    assert (ROOT / "tests" / "kernels" / f"test_{name}.py").exists(), (
        f"kernels/{name}.py has no tests/kernels/test_{name}.py; see CONTRIBUTING.md, or SHARED here"
    )
    assert f"`{name}.py`" in (ROOT / "docs" / "kernels.md").read_text(), (
        f"docs/kernels.md has no row with `{name}.py`"
    )
    assert name in (ROOT / "benchmarks" / "kernel_rates.py").read_text(), (
        f"benchmarks/kernel_rates.py does not measure {name}"
    )


def test_every_public_kernel_is_documented():
    from chronicals import kernels

    page = (ROOT / "docs" / "kernels.md").read_text()
    assert [name for name in kernels.__all__ if f"`{name}`" not in page] == []


WITHOUT_ENTRY = {
    "tests/kernels/compile_for_card.py": {
        "fp8_linear",
        "fused_cross_entropy",
    },
    "src/chronicals/verification/self_test.py": {
        "fp8_grouped_product",
        "fp8_quantize",
        "fp8_quantize_experts",
        "fused_cross_entropy",
        "fused_experts",
        "grouped_product",
        "grouped_weight_gradient",
    },
}
"""By file, public kernels that it does not name."""


@pytest.mark.parametrize("file", WITHOUT_ENTRY)
def test_every_public_kernel_has_its_entries(file):
    from chronicals import kernels

    text = (ROOT / file).read_text()
    missing = {name for name in kernels.__all__ if not re.search(rf"\b{name}\b", text)}
    assert missing == WITHOUT_ENTRY[file], f"{file}: no entry, or one too many here"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_what_is_saved_is_read_once(path):
    """A checkpoint of torch gives it once."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            reads = [
                part
                for part in ast.walk(node)
                if isinstance(part, ast.Attribute) and part.attr == "saved_tensors"
            ]
            assert len(reads) <= 1, f"{node.name}, line {node.lineno}"


@pytest.mark.slow
def test_nobody_asks_which_format_a_weight_has():
    """Outside of ``quantization/`` a weight is asked what it does, not what it is."""
    from chronicals import quantization

    formats = {name for name in quantization.__all__ if name[0].isupper()}
    asked = []
    for path in FILES:
        if "quantization" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in (
                "isinstance",
                "issubclass",
            ):
                names = {part.id for part in ast.walk(node.args[1]) if isinstance(part, ast.Name)}
                if names & formats:
                    asked.append(f"{path}:{node.lineno} {ast.unparse(node)}")
    assert asked == []
