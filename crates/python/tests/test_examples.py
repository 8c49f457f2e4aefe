"""The examples, as processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[3] / "examples" / "python"


@pytest.mark.parametrize(("transports", "route"), [(None, "direct"), ("tcp", ""), ("posix,sysv,cma,tcp", "direct")])
def test_two_processes(transports: str | None, route: str) -> None:
    chosen = [] if transports is None else ["--transports", transports]
    command = [sys.executable, str(EXAMPLES / "two_processes.py"), "--requests", "5", *chosen]
    said = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert said.returncode == 0, said.stderr
    assert "5 requests arrived, every byte is right" in said.stdout
    assert f"by {route}" in said.stdout
