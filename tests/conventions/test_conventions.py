"""Rules of the tree: imports point downward, files stay small, the native stub tells the truth."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from moechat import _native

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "moechat"
# Each layer may import only layers after it, and itself.
LAYERS = [
    ["__main__"],
    ["cli"],
    ["eval"],
    ["terminal", "batch", "bench"],
    ["engine", "quantize"],
    ["prefill", "decode"],
    ["kv", "weights", "gpu_weights", "sample"],
    ["models", "text", "registry"],
    ["folders", "json_file", "gguf_magic"],
    ["messages", "events"],
    ["errors", "lost_signals", "sizes", "terminal_size", "whole_file"],
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
MAX_LINES = {".py": 400, ".cpp": 400, ".h": 400, ".inl": 600}


def imported_parts(path):
    """Parts of moechat that a file imports, also inside functions; not those for type checking."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            node.body = []
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "moechat" and len(parts) > 1 and parts[1] in LEVEL:
                yield parts[1]


def python_files():
    return [path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE or path.stem in LEVEL]


@pytest.mark.parametrize("path", python_files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_downward(path):
    own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    for part in imported_parts(path):
        assert part == own or LEVEL[part] > LEVEL[own], f"{own} imports {part}"


def test_every_part_has_a_level():
    parts = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    parts |= {path.stem for path in PACKAGE.glob("*.py")} - {"__init__"}
    assert parts == set(LEVEL)


def test_files_stay_small_and_none_is_empty():
    for path in [*PACKAGE.rglob("*.py"), *(ROOT / "cpp").rglob("*.*")]:
        if path.suffix in MAX_LINES:
            lines = path.read_text().count("\n")
            assert 0 < lines <= MAX_LINES[path.suffix], f"{path} has {lines} lines"


def test_prefill_and_decode_do_not_know_each_other():
    for own, other in (("prefill", "decode"), ("decode", "prefill")):
        for path in (PACKAGE / own).glob("*.py"):
            assert other not in set(imported_parts(path)), path


def test_native_code_never_prints_exits_or_reads_the_environment():
    forbidden = re.compile(
        r"\b(printf|std::cout|std::cerr|puts|abort|exit|getenv|terminate)\s*\(|assert\("
    )
    for path in (ROOT / "cpp").rglob("*.*"):
        if path.suffix in (".cpp", ".h", ".inl"):
            for number, line in enumerate(path.read_text().splitlines(), 1):
                code = line.split("//")[0].replace("static_assert(", "")
                assert not forbidden.search(code), f"{path}:{number}: {line}"


def test_the_stub_names_what_the_module_has():
    stub = ast.parse((PACKAGE / "_native.pyi").read_text())
    declared = {
        node.name: node for node in stub.body if isinstance(node, ast.ClassDef | ast.FunctionDef)
    }
    actual = {name for name in dir(_native) if not name.startswith("_")}
    assert actual == set(declared)
    for name, node in declared.items():
        if isinstance(node, ast.ClassDef) and name != "NativeError":
            methods = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
            real = {item for item in vars(getattr(_native, name)) if not item.startswith("_")}
            assert real == methods - {"__init__"}, name


def test_importing_moechat_imports_neither_torch_nor_numpy():
    code = "import sys, moechat; print([m for m in ('torch', 'numpy', 'rich') if m in sys.modules])"
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert output.stdout.strip() == "[]"


def test_opening_a_model_without_a_gpu_imports_no_torch():
    """Nor does a prompt. "auto" looks for a driver's file first."""
    code = (
        "import sys\n"
        "from moechat.engine import device_names\n"
        "device_names.has_gpu_file = lambda: False\n"
        "from moechat import Engine, SamplingParams\n"
        "for device in ('cpu', 'auto'):\n"
        "    with Engine.open('mini', device=device) as engine:\n"
        "        list(engine.session().generate([0, 3, 4], SamplingParams(max_tokens=2)))\n"
        "print('torch' in sys.modules)\n"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert output.stdout.strip() == "False"


def test_torch_is_imported_by_what_runs_on_it_alone():
    """At the top of a module: the parts that compute with torch, and nothing that others import."""
    for path in PACKAGE.rglob("*.py"):
        own = path.relative_to(PACKAGE).parts
        names = {
            alias.name
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Import)
            for alias in node.names
        }
        if "torch" in names:
            assert "gpu" in own or own[0] == "gpu_weights" or own[-1].startswith("torch_"), path
