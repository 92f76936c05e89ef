"""Waits of microseconds end on time, also in threads that are started later."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import ctypes
import threading
from baton.core.process.children import end_waits_on_time

def slack_ns():
    return ctypes.CDLL(None).prctl(30, 0, 0, 0, 0)  # PR_GET_TIMERSLACK

before = slack_ns()
end_waits_on_time()
found = [slack_ns()]
thread = threading.Thread(target=lambda: found.append(slack_ns()))
thread.start()
thread.join()
print(before, *found)
"""


def test_this_thread_and_its_own() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    before, *found = ran.stdout.split()
    assert before != "1"
    assert found == ["1", "1"]
