"""What the package says of the machine that it is on, with a UCX and without."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import kvferry


def test_the_report_names_the_ucx_and_tries_every_route() -> None:
    report = kvferry.doctor()
    assert report.ucx_version is not None and report.ucx_path is not None
    assert report.ucx_path in str(report)
    assert set(report.routes) == {"direct", "landing", "staged", "runs"}


def test_without_a_ucx_the_report_says_what_to_install(tmp_path: Path) -> None:
    script = "import kvferry; report = kvferry.doctor(); print(report.ucx_version, report.findings)"
    environment = {**os.environ, "KVFERRY_UCX_DIR": str(tmp_path)}
    said = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60)
    assert said.returncode == 0, said.stderr
    assert said.stdout.startswith("None") and "libucx0" in said.stdout
