"""Helpers of these tests are plain modules beside them; they need what the report needs."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

pytest.importorskip("matplotlib", reason="needs the extra `report`")
pytest.importorskip("orjson", reason="needs the extra `report`")
