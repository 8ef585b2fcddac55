"""Files and functions stay small enough to read, and live where a reader expects them."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILE_LINES = {"kernels": 600, "tests": 400}
FUNCTION_LINES = {"kernels": 150}
PYTHON_FILES = sorted(
    file
    for folder in ("k3tune", "kernels", "recipes", "scripts", "tests")
    for file in (ROOT / folder).rglob("*.py")
)
DOCUMENTS = sorted(
    file
    for file in ROOT.rglob("*.md")
    if not any(part.startswith(".") for part in file.relative_to(ROOT).parts)
)


def place(file: Path) -> str:
    return str(file.relative_to(ROOT))


def top(file: Path) -> str:
    return file.relative_to(ROOT).parts[0]


def test_no_file_is_too_long():
    lengths = {file: len(file.read_text(encoding="utf-8").splitlines()) for file in PYTHON_FILES}
    assert not {
        place(file): lines
        for file, lines in lengths.items()
        if lines > FILE_LINES.get(top(file), 500)
    }


def test_no_function_is_too_long():
    too_long = {}
    for file in PYTHON_FILES:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > FUNCTION_LINES.get(top(file), 60):
                    too_long[f"{place(file)}:{node.lineno} {node.name}"] = lines
    assert not too_long


def test_packages_are_at_most_two_levels_deep():
    for package in (ROOT / "k3tune", ROOT / "kernels" / "k3tune_kernels"):
        for file in package.rglob("*.py"):
            assert len(file.relative_to(package).parts) <= 3, place(file)


def test_folders_that_are_no_packages_have_no_init():
    for folder in ("kernels", "recipes", "scripts", "tests"):
        assert not (ROOT / folder / "__init__.py").exists()


def test_no_file_has_a_name_that_hides_a_library_or_says_nothing():
    # a recipe's folder is the first place Python looks in when the recipe is launched
    hiding = {"accelerate", "datasets", "kernels", "peft", "tokenizers", "trl", "types"}
    for file in PYTHON_FILES:
        assert file.stem not in {"utils", "common", "helpers"}, place(file)
        assert top(file) != "recipes" or file.stem not in hiding, place(file)


@pytest.mark.parametrize("arguments", [["check"], ["format", "--check"]], ids=" ".join)
def test_ruff_finds_nothing(arguments):
    result = subprocess.run(
        [sys.executable, "-m", "ruff", *arguments, "."], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("document", DOCUMENTS, ids=place)
def test_links_of_a_document_lead_to_files_of_the_repository(document):
    text = document.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        if "://" not in target:
            linked = (document.parent / target).resolve()
            assert linked.is_relative_to(ROOT) and linked.exists(), f"{place(document)}: {target}"
