"""Who may import whom. The table is the rule; packages that do not exist yet are held to it too."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]


class Rule(NamedTuple):
    """What a part of the repository may import beside the standard library and itself."""

    own: frozenset[str]
    third_party: frozenset[str]


def rule(own: str = "", third_party: str = "") -> Rule:
    return Rule(frozenset(own.split()), frozenset(third_party.split()))


RULES = {
    "kernels": rule("", "torch triton"),
    "errors": rule(),
    "files": rule("errors"),
    "lazy": rule(),
    "run_log": rule("errors"),
    # of lora the part that loads no torch
    "arguments": rule("rollout_arguments lora"),
    "rollout_arguments": rule(),
    "option_checks": rule("errors"),
    "published": rule("", "huggingface_hub"),
    "quant": rule("kernels", "torch"),
    "model": rule("published quant kernels", "torch transformers safetensors tqdm fla"),
    "lora": rule("model published quant kernels", "torch transformers safetensors tqdm peft"),
    "data": rule("arguments", "torch datasets transformers tiktoken"),
    "parallel": rule(
        "lora model published quant kernels", "torch transformers safetensors deepspeed numpy"
    ),
    "monitor": rule("", "torch numpy safetensors matplotlib"),
    # sizes of modules, and shards: the parts of these that load no torch
    "plan": rule("lora parallel published", "numpy"),
    "train": rule(
        "arguments data lora model monitor parallel plan published quant kernels",
        "torch transformers safetensors datasets deepspeed accelerate trl numpy yaml",
    ),
    "rl": rule(
        "arguments data lora model monitor parallel plan published quant train kernels",
        "torch transformers safetensors datasets deepspeed accelerate trl numpy httpx tqdm "
        "reasoning_gym",
    ),
    "serve": rule(
        "data lora model rl published quant",
        "torch numpy starlette uvicorn",
    ),
    "report": rule("monitor", "numpy matplotlib orjson yaml"),
    "doctor": rule("published quant model kernels", "torch packaging"),
    "recipes": rule("arguments data lora model monitor plan rl train errors", "trl"),
    # the two front doors import what a name or a command needs when it is asked for
    "": rule("data lora model monitor plan published quant rl train"),
    "commands": rule(
        "data doctor lora model parallel plan published quant report serve", "torch typer"
    ),
    "cli": rule("commands published", "typer"),
}
# Standard library only, so they are open to the other parts of k3tune.
LEAVES = {"errors", "files", "lazy", "option_checks", "run_log"}
CLOSED_TO_LEAVES = {"kernels", "recipes", *LEAVES}
AT_MODULE_LEVEL = {"__init__": rule(), "cli": rule("commands", "typer")}
WITHOUT_TORCH = [
    "k3tune",
    "k3tune.cli",
    "k3tune.errors",
    "k3tune.files",
    "k3tune.monitor.record",
    "k3tune.parallel.shards",
    "k3tune.plan.planning",
    "k3tune.plan.render",
    "k3tune.published.inspection",
]


class Import(NamedTuple):
    """One imported name: the module it comes from, and whether importing the file imports it."""

    file: Path
    line: int
    module: str
    eager: bool

    @property
    def place(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line} imports {self.module}"


def module_of(file: Path) -> str:
    """``k3tune/model/mla.py`` -> ``k3tune.model.mla``; the folder ``kernels`` is no package."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[1:] if parts[0] == "kernels" else parts)


def imports_of(file: Path) -> Iterator[Import]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    eager = set(map(id, eager_nodes(tree)))
    package = module_of(file).split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            # "from k3tune import model" imports k3tune.model
            names = [f"{origin}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            yield Import(file, node.lineno, name, id(node) in eager)


def eager_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Nodes that run when the file is imported: not in functions, nor for type checkers only."""
    for node in ast.iter_child_nodes(tree):
        deferred = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        typing_only = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        if not deferred and not typing_only:
            yield node
            yield from eager_nodes(node)


def owner_of(module: str) -> str | None:
    """The key of RULES a module of this repository falls under; None for other modules."""
    top, *rest = module.split(".")
    if top == "k3tune_kernels":
        return "kernels"
    if top in ("recipes", "scripts", "tests"):
        return top
    if top != "k3tune":
        return None
    return rest[0] if rest and (rest[0] in RULES or exists(rest[0])) else ""


def exists(part: str) -> bool:
    return (ROOT / "k3tune" / part).is_dir() or (ROOT / "k3tune" / f"{part}.py").is_file()


def violation(found: Import, allowed: Rule, owner: str) -> str | None:
    target = owner_of(found.module)
    if target is None:
        top = found.module.split(".")[0]
        fine = top in sys.stdlib_module_names or top in allowed.third_party
    else:
        # the package itself is loaded anyway, and holds the version
        open_to_all = target in LEAVES or found.module in ("k3tune", "k3tune.__version__")
        leaf = open_to_all and owner not in CLOSED_TO_LEAVES
        fine = target == owner or target in allowed.own or leaf
    return None if fine else f"{found.place}: not allowed in {owner or 'k3tune/__init__.py'}"


def library_files() -> list[Path]:
    folders = ("k3tune", "kernels/k3tune_kernels", "recipes")
    return sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py"))


def test_every_import_is_in_the_table():
    problems = []
    for file in library_files():
        owner = owner_of(module_of(file).removesuffix(".__init__"))
        assert owner in RULES, f"{file.relative_to(ROOT)} has no rule: add one for {owner!r}"
        problems += [violation(found, RULES[owner], owner) for found in imports_of(file)]
    assert not list(filter(None, problems)), "\n".join(filter(None, problems))


@pytest.mark.parametrize("part", AT_MODULE_LEVEL)
def test_front_doors_import_nothing_heavy_at_module_level(part):
    eager = [found for found in imports_of(ROOT / "k3tune" / f"{part}.py") if found.eager]
    problems = [violation(found, AT_MODULE_LEVEL[part], "module level") for found in eager]
    assert not list(filter(None, problems)), problems


@pytest.mark.parametrize(
    ("part", "line"),
    [
        ("kernels", "import k3tune.errors"),
        ("model", "from k3tune.lora import inject"),
        ("model", "from k3tune import parallel"),
        ("model", "import peft"),
        ("train", "import peft"),
        ("data", "from k3tune.model import K3Config"),
        ("plan", "import torch"),
        ("plan", "from k3tune.model import K3Config"),
        ("published", "from k3tune.model import K3Config"),
        ("train", "from k3tune.rl import rollout"),
        ("monitor", "from k3tune.train import sft"),
        ("rl", "import recipes.grpo"),
        ("quant", "from tests.closeness import assert_close"),
        ("lora", "import deepspeed"),
    ],
)
def test_the_table_forbids(part, line, tmp_path):
    [node] = ast.parse(line).body
    name = (
        node.names[0].name
        if isinstance(node, ast.Import)
        else f"{node.module}.{node.names[0].name}"
    )
    assert violation(Import(ROOT / "x.py", 1, name, True), RULES[part], part)


def in_fresh_interpreter(code: str, repository: Path) -> dict:
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=repository, capture_output=True, text=True, check=True
    )
    return json.loads(result.stdout)


LOADED = """
import json, os, sys
sys.path[:0] = [".", "kernels"]
before = dict(os.environ)
import {module}
heavy = ("torch", "triton", "deepspeed", "transformers", "peft", "trl", "numpy")
print(json.dumps({{
    "heavy": [name for name in heavy if name in sys.modules],
    "environment": sorted(set(before.items()) ^ set(os.environ.items())),
}}))
"""


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_import_loads_nothing_heavy_and_leaves_the_environment_alone(module, repository):
    loaded = in_fresh_interpreter(LOADED.format(module=module), repository)
    assert loaded == {"heavy": [], "environment": []}
