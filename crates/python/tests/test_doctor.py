"""What the package says of the machine that it is on, with a UCX and without."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import kvferry


def run(script: str, **environment: str) -> str:
    command = [sys.executable, "-c", script]
    said = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=60)
    assert said.returncode == 0, said.stderr
    return said.stdout


def test_the_report_names_the_ucx_and_tries_every_route() -> None:
    report = kvferry.doctor()
    assert report.ucx_version is not None and report.ucx_path is not None
    assert report.ucx_path in str(report)
    assert set(report.routes) == {"direct", "landing", "staged", "runs"}


def test_without_a_ucx_the_report_says_what_to_install(tmp_path: Path) -> None:
    script = "import kvferry; report = kvferry.doctor(); print(report.ucx_version, report.findings)"
    said = run(script, KVFERRY_UCX_DIR=str(tmp_path))
    assert said.startswith("None") and "libucx0" in said


def test_without_a_ucx_an_engine_says_where_it_was_looked_for(tmp_path: Path) -> None:
    script = """
import kvferry
try:
    kvferry.Engine()
except kvferry.StartError as error:
    print(error.kind, error, type(error).__mro__[1] is kvferry.KvferryError)
"""
    said = run(script, KVFERRY_UCX_DIR=str(tmp_path))
    assert said.startswith("Load ") and str(tmp_path) in said and said.endswith("True\n")


def test_the_ucx_of_a_wheel_beside_the_package_is_taken(tmp_path: Path) -> None:
    library = tmp_path / "libucx" / "lib" / "libucp.so.0"
    library.parent.mkdir(parents=True)
    library.touch()
    script = "import os, kvferry; print(os.environ.get('KVFERRY_UCX_DIR'))"
    assert run(script, PYTHONPATH=str(tmp_path), KVFERRY_UCX_DIR="").strip() == str(library.parent)
    # But not in place of the one that was asked for.
    assert run(script, PYTHONPATH=str(tmp_path), KVFERRY_UCX_DIR="/elsewhere").strip() == "/elsewhere"
