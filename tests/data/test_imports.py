"""Importing the package, or the parts of it that need no tokenizer, loads nothing heavy."""

import json
import subprocess
import sys

import pytest

LOADED = """
import json, sys
sys.path[:0] = [".", "kernels"]
import k3tune.data{module}
heavy = ("torch", "datasets", "transformers", "tiktoken")
print(json.dumps([name for name in heavy if name in sys.modules]))
"""


@pytest.mark.parametrize("module", ["", ".chat", ".messages", ".packing", ".sources"])
def test_import_is_cheap(repository, module):
    result = subprocess.run(
        [sys.executable, "-c", LOADED.format(module=module)],
        cwd=repository,
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(result.stdout) == []
