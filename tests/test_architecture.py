"""The house rules that a reader cannot see at a glance: what imports what, shelves, sizes, a test for each fault."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from cukit.backend import CONTRACT

ROOT = Path(__file__).parent.parent
PRODUCT = [ROOT / "cukit_cli.py", *sorted((ROOT / "cukit").rglob("*.py"))]
TESTS = sorted((ROOT / "tests").rglob("*.py"))

# Layer -> the layers it may import (besides itself). A layer is a package or module of cukit, or the command line.
# options and backend are the ground; the order is cukit_cli, commands, trainers and bench, engine, models, ops,
# autograd, backend.
BESIDE = {"optim", "datasets", "tokenizer", "runs", "rewards", "parallel", "user_code"}
BELOW_ENGINE = {"models", "ops", "autograd", "backend", "options", "hub"}
LAYERS = {
    "options": set(),
    "hub": set(),
    "backend.numpy": {"backend"},
    "backend.cuda": {"backend"},
    "backend": set(),
    "autograd": {"backend"},
    "ops": {"autograd", "backend"},
    "models": {"ops", "autograd", "backend", "options", "hub"},
    "optim": {"autograd", "backend", "models"},
    "tokenizer": set(),
    "datasets": {"tokenizer", "options", "hub"},
    "user_code": set(),
    "rewards": {"options", "user_code"},
    "parallel": {"backend", "options"},
    "runs": {"models", "backend", "cukit"},
    "engine": BELOW_ENGINE | {"tokenizer", "parallel"},
    "trainers": BELOW_ENGINE | BESIDE | {"engine"},
    "bench": BELOW_ENGINE | BESIDE | {"cukit", "engine", "trainers"},
    "commands": BELOW_ENGINE | BESIDE | {"cukit", "engine", "trainers", "bench"},
    "cukit": set(),
    "__main__": {"cukit_cli"},
    "cukit_cli": BELOW_ENGINE | BESIDE | {"cukit", "commands", "engine", "trainers", "bench"},
}
RUNTIME_LIBRARIES = {
    "numpy",
    "ml_dtypes",
    "safetensors",
    "tokenizers",
    "yaml",
    "jinja2",
    "markupsafe",
    "rich",
    "threadpoolctl",
    "psutil",
}
OPTIONAL_LIBRARIES = {
    "huggingface_hub",
    "pyarrow",
    "matplotlib",
    "math_verify",
    "mpi4py",
    "tensorboardX",
    "trackio",
    "wandb",
}
GPU_LIBRARIES = {"cupy", "cupyx", "cupy_backends"}  # for backend/cuda alone

# Header of kernels/ -> its level. A file includes files of lower levels only; a .cu stands above all headers.
HEADER_LEVELS = {
    f"{name}.cuh": level
    for level, names in enumerate(
        (
            "common",
            "mma kl logits philox e4m3 rope",
            "filters linear attention_rows tiles_mma",
            "tiles_wgmma attention_ffma",
            "attention_mma",
            "attention_mma_backward attention_mma_decode",
            "attention",
            "paged",
        )
    )
    for name in names.split()
}

# Where a noun's file stands: the CUDA source, its launcher, its NumPy twin, the differentiable function, the tests of
# the last two, the tests of the first two.
SHELVES = {
    "kernels": "kernels/{}.cu",
    "cuda": "cukit/backend/cuda/{}.py",
    "numpy": "cukit/backend/numpy/{}.py",
    "ops": "cukit/ops/{}.py",
    "tests": "tests/ops/test_{}.py",
    "gpu tests": "tests/gpu/test_{}.py",
}
# Noun -> the shelves with a file of that name. Each of them is there, and no other.
ALL = set(SHELVES)
NOUNS = {
    "activation": ALL,
    "adapter": ALL,
    "attention": ALL,
    "embedding": ALL,
    "linear": ALL,
    "loss": ALL,
    "norm": ALL,
    "policy_loss": ALL,
    "ppo_loss": ALL,
    "rope": ALL,
    "score": ALL,
    "optimizer": ALL - {"ops"},  # these six have no derivative
    "paged_attention": ALL - {"ops"},
    "quantized": ALL - {"ops"},
    "random": ALL - {"ops"},
    "returns": ALL - {"ops"},
    "sampling": ALL - {"ops"},
    "device": {"cuda", "numpy"},
    "graph": {"cuda", "numpy", "gpu tests"},
    "memory": {"cuda", "numpy", "gpu tests"},
}
# Files of a shelf that are no noun's: what several nouns use, and what the other shelves do not need.
HELPERS = {
    "kernels": {"attention_prefix", "linear_few", "paged_attention_few"},
    "cuda": set("checked compile constants cublas exact loader nccl pool repeated verdicts versions".split()),
    "numpy": {"attention_core", "threads"},
    "ops": {"elementwise", "tensor_parallel"},
}
# Functions of ops/ with options of their own, in place of their forward passes' arguments.
OTHER_ARGUMENTS = {"adapter", "policy_loss", "ppo_loss"}

LINES = {".py": 400, ".cu": 500, ".cuh": 500}
FUNCTION_LINES = 60
GENERATORS = {"make_golden.py"}  # run once, by hand, in an environment of their own, to write tests/golden

# The rows of the list of faults found by use, each with a test named after it.
ROWS = [f"{kind}{n}" for kind, count in (("e", 18), ("r", 8), ("t", 9), ("c", 15)) for n in range(1, count + 1)]


def name_of(path: Path) -> str:
    """cukit/ops/norm.py -> cukit.ops.norm"""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer_of(module: str) -> str | None:
    """The layer of a dotted name, None for a library."""
    if module in ("cukit", "cukit_cli"):
        return module
    if not module.startswith("cukit."):
        return None
    parts = module.split(".")[1:]
    return ".".join(parts[:2]) if parts[0] == "backend" and parts[1:2] in (["numpy"], ["cuda"]) else parts[0]


def imports_of(path: Path) -> list[tuple[int, str]]:
    """(line, absolute dotted name) of every import, in functions too; `from x import y` of cukit gives x.y."""
    module = name_of(path)
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            name = ".".join(filter(None, [base, node.module]))
            found += [
                (node.lineno, f"{name}.{alias.name}" if name.startswith("cukit") else name) for alias in node.names
            ]
    return found


@pytest.mark.parametrize("path", PRODUCT, ids=name_of)
def test_imports_go_down(path):
    layer = layer_of(name_of(path))
    assert layer in LAYERS, f"{path.relative_to(ROOT)}: add the layer {layer!r} to LAYERS"
    for line, module in imports_of(path):
        target = layer_of(module)
        if target is not None and module.startswith("cukit.") and target not in LAYERS:
            target = "cukit"  # `from cukit import LLM`: a public name
        where = f"{path.relative_to(ROOT)}:{line} imports {module}"
        if target is None:
            library = module.split(".")[0]
            allowed = library in sys.stdlib_module_names or library in RUNTIME_LIBRARIES | OPTIONAL_LIBRARIES
            on_the_gpu_shelf = layer == "backend.cuda" and library in GPU_LIBRARIES
            assert allowed or on_the_gpu_shelf, where
        else:
            assert target == layer or target in LAYERS[layer], f"{where}; {layer} may import {sorted(LAYERS[layer])}"


CONFIGS = [path for path in PRODUCT if path.name.endswith("config.py")]


@pytest.mark.parametrize("path", CONFIGS, ids=name_of)
def test_a_config_imports_options_and_other_configs_only(path):
    for line, module in imports_of(path):
        ours = module.startswith("cukit") and not re.match(r"cukit\.(options|\w+\.(\w+_)?config)\b", module)
        library = module.split(".")[0] not in sys.stdlib_module_names and not module.startswith("cukit")
        assert not ours and not library, f"{path.relative_to(ROOT)}:{line} imports {module}"


def test_there_are_configs():
    assert {name_of(path) for path in CONFIGS} >= {
        f"cukit.{layer}.config" for layer in ("models", "engine", "trainers")
    }


def test_no_imports_run_in_a_circle_between_layers():
    def reach(layer, seen):
        for below in LAYERS[layer]:
            if below not in seen:
                seen.add(below)
                reach(below, seen)
        return seen

    for layer in LAYERS:
        if layer != "cukit":  # the package itself: its public names are an export, not a layer
            below = reach(layer, set()) - {"cukit"}
            assert layer not in below, f"{layer} is below itself"


def test_no_circle_of_files():
    """Imports inside functions and for types count too."""
    files = {name_of(path) for path in PRODUCT}
    wanted = {}
    for path in PRODUCT:
        found = set()
        for _, module in imports_of(path):
            found.add(module if module in files else module.rpartition(".")[0])
        wanted[name_of(path)] = (found & files) - {name_of(path)}
    packages = {name_of(path) for path in PRODUCT if path.name == "__init__.py"}
    done = set()
    while ready := {name for name, needs in wanted.items() if name not in done and needs - packages <= done}:
        done |= ready
    assert done == set(wanted), f"a circle among {sorted(set(wanted) - done)}"


def test_only_the_loader_compiles_kernels():
    found = {path for path in PRODUCT if "RawModule" in path.read_text(encoding="utf-8")}
    assert found == {ROOT / "cukit/backend/cuda/loader.py"}


def test_tests_need_no_torch():
    for path in TESTS:
        # The script that made the truths, and those that compare with transformers by hand.
        if path.parent.name not in ("golden", "oracle"):
            libraries = {module.split(".")[0] for _, module in imports_of(path)}
            assert not libraries & {"torch", "transformers", "trl"}, path.relative_to(ROOT)


def test_cpu_use_imports_no_cupy():
    code = (
        "import sys, cukit, cukit_cli; from cukit import LLM, SamplingParams, GRPOTrainer, SFTTrainer;"
        "from cukit.backend import backend_for; backend_for('cpu');"
        "sys.exit(' '.join({'cupy', 'torch', 'transformers'} & set(sys.modules)) or 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


# ---- shelves ----


def definitions(path: Path) -> dict[str, str]:
    """Public name -> a function's arguments with defaults and without annotations; "" for a class or a value."""
    found = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            for argument in ast.walk(node.args):
                if isinstance(argument, ast.arg):
                    argument.annotation = None
            found[node.name] = ast.unparse(node.args)
        elif isinstance(node, ast.ClassDef):
            found[node.name] = ""
        elif isinstance(node, ast.Assign):
            found |= {target.id: "" for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.ImportFrom):  # `import x as x`: a name of this file too
            found |= {alias.name: "" for alias in node.names if alias.asname == alias.name}
    return {name: arguments for name, arguments in found.items() if not name.startswith("_")}


def shelf_file(shelf: str, noun: str) -> Path:
    return ROOT / SHELVES[shelf].format(noun)


@pytest.mark.parametrize("noun", NOUNS)
def test_a_noun_stands_on_its_shelves(noun):
    there = {shelf for shelf in SHELVES if shelf_file(shelf, noun).exists()}
    assert there == NOUNS[noun], f"{noun}: missing {NOUNS[noun] - there}, not in the table {there - NOUNS[noun]}"


@pytest.mark.parametrize("shelf", HELPERS)
def test_every_file_of_a_shelf_is_in_the_table(shelf):
    example = shelf_file(shelf, "*")
    files = {path.stem for path in example.parent.glob(example.name)} - {"__init__"}
    nouns = {noun for noun, shelves in NOUNS.items() if shelf in shelves}
    assert files == nouns | HELPERS[shelf]


def test_the_contract_names_every_noun():
    assert set(CONTRACT) == {noun for noun, shelves in NOUNS.items() if "numpy" in shelves}
    names = [name for group in CONTRACT.values() for name in group]
    assert all(CONTRACT.values()) and len(names) == len(set(names))


@pytest.mark.parametrize("noun", CONTRACT)
def test_the_two_backends_have_the_contracts_names_and_equal_signatures(noun):
    numpy, cuda = (definitions(shelf_file(shelf, noun)) for shelf in ("numpy", "cuda"))
    for shelf, found in (("numpy", numpy), ("cuda", cuda)):
        public = {name for name in found if not name.isupper() and name != "logger"}  # constants are the file's own
        assert public == set(CONTRACT[noun]), f"backend/{shelf}/{noun}.py"
    for name in CONTRACT[noun]:
        if name != "accumulator":  # one function for both
            assert numpy[name] == cuda[name], name


@pytest.mark.parametrize("noun", [noun for noun, shelves in NOUNS.items() if "ops" in shelves])
def test_a_function_of_ops_has_its_forward_passs_arguments(noun):
    functions, passes = definitions(shelf_file("ops", noun)), definitions(shelf_file("numpy", noun))
    forwards = [name for name in CONTRACT[noun] if name.endswith("_forward")]
    assert forwards
    for forward in forwards:
        name = forward.removesuffix("_forward")
        assert name in functions, f"ops/{noun}.py has no {name}"
        if noun not in OTHER_ARGUMENTS:
            wanted, got = (re.sub(r"=[^,]*", "", text) for text in (passes[forward], functions[name]))
            assert got == wanted, name


@pytest.mark.parametrize("noun", [noun for noun, shelves in NOUNS.items() if "kernels" in shelves])
def test_a_launcher_loads_its_own_source(noun):
    path = shelf_file("cuda", noun)
    calls = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
    first = [call.args[0].value for call in calls if call.args and isinstance(call.args[0], ast.Constant)]
    assert noun in first, f"{path.relative_to(ROOT)} launches nothing of kernels/{noun}.cu"


# ---- CUDA headers ----


def includes_of(path: Path) -> list[str]:
    return re.findall(r'^\s*#\s*include\s*"(\S+)"', path.read_text(encoding="utf-8"), re.M)


def test_every_header_has_a_level():
    assert {path.name for path in (ROOT / "kernels").glob("*.cuh")} == set(HEADER_LEVELS)


@pytest.mark.parametrize("path", sorted((ROOT / "kernels").glob("*.cu*")), ids=lambda path: path.name)
def test_headers_include_downward(path):
    level = HEADER_LEVELS.get(path.name, max(HEADER_LEVELS.values()) + 1)
    includes = includes_of(path)
    assert path.name == "common.cuh" or includes, "every file is above common.cuh"
    for name in includes:
        assert HEADER_LEVELS[name] < level, f"{path.name} (level {level}) includes {name} ({HEADER_LEVELS[name]})"


# ---- sizes ----


def sized_files():
    folders = ("cukit", "tests", "docs", "kernels")
    found = [ROOT / "cukit_cli.py", *(path for folder in folders for path in sorted((ROOT / folder).rglob("*")))]
    return [path for path in found if path.suffix in LINES and path.name not in GENERATORS]


@pytest.mark.parametrize("path", sized_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_sizes(path):
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= LINES[path.suffix]
    if path.suffix == ".py":
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = node.end_lineno - node.lineno + 1
                assert lines <= FUNCTION_LINES, f"{node.name} has {lines} lines"
    else:
        assert max(map(len, text.splitlines())) <= 120, "kernels are written in 120 columns"


# ---- faults found by use ----


@pytest.fixture(scope="module")
def test_names():
    pattern = re.compile(r"^\s*(?:async )?def (test_\w+)", re.M)
    return [name for path in TESTS for name in pattern.findall(path.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("row", ROWS)
def test_every_fault_has_a_test_named_after_it(row, test_names):
    assert any(name.startswith(f"test_{row}_") for name in test_names), f"no test is named test_{row}_…"


def test_every_package_is_in_the_wheel():
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {name_of(path.parent / "__init__.py") for path in PRODUCT if path.name != "cukit_cli.py"}
    assert folders | {"cukit.data_files", "cukit.kernels"} == set(setup["packages"])
