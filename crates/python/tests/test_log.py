"""The library's log in ``logging``, and its metrics."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import kvferry

BEGIN = """
import logging, os, sys, threading, time
sys.path.insert(0, sys.argv[1])
import kvferry
from pairs import PATIENCE, pair
"""


def run(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: a log that has been asked for is asked for until the end."""
    command = [sys.executable, "-c", BEGIN + script, os.path.dirname(__file__)]
    said = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=120)
    assert said.returncode == 0, said.stderr
    return said


def test_what_the_library_says_is_in_pythons_log() -> None:
    said = run("""
heard = []
class Keep(logging.Handler):
    def emit(self, record):
        heard.append((record.name, record.levelname, record.getMessage(), record.created, threading.current_thread().name))
logging.getLogger("kvferry").addHandler(Keep())
logging.getLogger("kvferry").setLevel(logging.DEBUG)
began = time.time()
kvferry.forward_log("debug")
source, destination = pair()
receive = destination.engine.receive(destination.link, 17, [[3, 0]], 64)
source.engine.send(source.link, 17, [[9, 2, 5, 11]], 64)
receive.wait(PATIENCE)
end = time.monotonic() + PATIENCE
while not any("in receive" in message for _, _, message, _, _ in heard) and time.monotonic() < end:
    time.sleep(0.01)
starts = [entry for entry in heard if entry[2].startswith("an engine starts")]
assert len(starts) == 2 and starts[0][:2] == ("kvferry.engine", "INFO"), heard
assert all(began - 1 <= created <= time.time() + 1 for _, _, _, created, _ in heard)
assert {thread for *_, thread in heard} == {"kvferry-log"}
request, = [message for _, _, message, _, _ in heard if "in receive" in message][:1]
assert "request=17" in request and "attempt=0" in request, request
# Less from now on.
kvferry.forward_log(logging.CRITICAL + 1)
third = kvferry.Engine(instance="quiet")
kvferry.forward_log("INFO")
fourth = kvferry.Engine(instance="loud")
end = time.monotonic() + PATIENCE
while not any("loud" in message for _, _, message, _, _ in heard) and time.monotonic() < end:
    time.sleep(0.01)
assert any("loud" in message for _, _, message, _, _ in heard) and not any("quiet" in message for _, _, message, _, _ in heard)
print("heard")
""")
    assert said.stdout == "heard\n"


def test_what_is_said_at_the_end_is_written_and_a_handler_that_fails_holds_up_nothing() -> None:
    said = run("""
logging.basicConfig(level=logging.INFO, format="%(name)s %(levelname)s %(message)s")
failed = threading.Event()
class Fails(logging.Filter):
    def filter(self, record):
        failed.set()
        raise RuntimeError("a filter of the program's")
logging.getLogger("kvferry.engine").addFilter(Fails())
kvferry.forward_log()
engine = kvferry.Engine()
assert failed.wait(PATIENCE)
logging.getLogger("kvferry.engine").filters.clear()
second = kvferry.Engine()
print("ends")
""")
    assert said.stdout == "ends\n"
    assert "a filter of the program's" in said.stderr and "kvferry.engine INFO an engine starts" in said.stderr


def test_a_log_that_nobody_takes_is_lost_and_counted() -> None:
    """The thread that takes is held up by a handler; the engines go on."""
    said = run("""
gate, lost = threading.Event(), []
class Slow(logging.Handler):
    def emit(self, record):
        gate.wait(PATIENCE)
        if "are lost" in record.getMessage():
            lost.append(record.args[0])
logging.getLogger("kvferry").addHandler(Slow())
logging.getLogger("kvferry").setLevel(1)
kvferry.forward_log(5)
source, destination = pair()
end = time.monotonic() + 3 * PATIENCE
for request in range(3000):
    receive = destination.engine.receive(destination.link, request, [[3, 0]], 64)
    source.engine.send(source.link, request, [[9, 2, 5, 11]], 64)
    receive.wait(PATIENCE)
    assert time.monotonic() < end
gate.set()
while not lost and time.monotonic() < end:
    time.sleep(0.01)
assert lost and lost[0] > 0
print("lost")
""")
    assert said.stdout == "lost\n"


def test_a_forked_process_logs_nothing_until_it_asks() -> None:
    said = run("""
heard = []
class Keep(logging.Handler):
    def emit(self, record):
        heard.append(record.getMessage())
logging.getLogger("kvferry").addHandler(Keep())
logging.getLogger("kvferry").setLevel(logging.INFO)
kvferry.forward_log()
child = os.fork()
if child == 0:
    status = 1
    try:
        # The parent has had none, so there may be one here.
        kvferry.Engine(instance="unheard").close()
        kvferry.forward_log()
        engine = kvferry.Engine(instance="of the child")
        end = time.monotonic() + PATIENCE
        while not heard and time.monotonic() < end:
            time.sleep(0.01)
        engine.close()
        status = 0 if ["of the child" in message for message in heard if "starts" in message] == [True] else 2
    finally:
        os._exit(status)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
print("of the child")
""")
    assert said.stdout == "of the child\n"


@pytest.mark.parametrize("level", ["loud", -1, True, 2.5])
def test_levels_that_there_are_not(level: object) -> None:
    with pytest.raises(ValueError, match="level"):
        kvferry.forward_log(level)  # type: ignore[arg-type]


def test_metrics_are_prometheus_text() -> None:
    said = run("""
try:
    kvferry.metrics()
    print("recorded")
except RuntimeError as error:
    assert "record_metrics" in str(error)
kvferry.record_metrics()
kvferry.record_metrics()
source, destination = pair()
for request in range(5):
    receive = destination.engine.receive(destination.link, request, [[3, 0]], 64)
    source.engine.send(source.link, request, [[9, 2, 5, 11]], 64)
    moved = receive.wait(PATIENCE)[0].nbytes
late = destination.engine.receive(destination.link, 5, [[3, 0]], 64)
late.cancel()
assert late.wait_quiet(PATIENCE)
time.sleep(1.5)  # over a turn of the thread that sorts what was measured
text = kvferry.metrics()
lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if line and line[0] != "#")
def of(name, *labels):
    return [float(value) for key, value in lines.items() if key.split("{")[0] == name and all(label in key for label in labels)]
assert of("kvferry_requests_total", 'side="destination"', 'outcome="succeeded"') == [5], text
assert of("kvferry_requests_total", 'side="destination"', 'outcome="cancelled"') == [1], text
assert of("kvferry_received_bytes_total") == [5 * moved] and sum(of("kvferry_sent_bytes_total", 'route="direct"')) == 5 * moved
assert of("kvferry_request_seconds_count", 'side="destination"') == [5] and of("kvferry_request_seconds_bucket", 'le="+Inf"')
assert "# TYPE kvferry_requests_in_flight gauge" in text and "# HELP kvferry_requests_total" in text
print("counted")
""")
    assert said.stdout == "counted\n"
