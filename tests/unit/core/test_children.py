"""Child processes that end with their parent, however it ends."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

from baton.core.process.children import bound_to_us

PARENT = """
import signal, subprocess, sys, time
from baton.core.process.children import bound_to_us
child = subprocess.Popen(bound_to_us(["sleep", "60"], signal.SIGKILL), pass_fds=[int(sys.argv[1])])
time.sleep({pause_s})
print("started", flush=True)
time.sleep(60)
"""


def test_a_child_ends_with_its_killed_parent() -> None:
    """At any moment, also before the child has executed its command."""
    for pause_s in (0.0, 0.005, 0.02, 0.3):
        ours, theirs = os.pipe()
        parent = subprocess.Popen(
            [sys.executable, "-c", PARENT.format(pause_s=pause_s), str(theirs)],
            pass_fds=[theirs],
            stdout=subprocess.PIPE,
        )
        os.close(theirs)
        assert parent.stdout is not None and parent.stdout.readline() == b"started\n"
        parent.kill()
        parent.communicate()
        ready, _, _ = select.select([ours], [], [], 5.0)  # end of file: no writer is left
        assert ready and os.read(ours, 1) == b""
        os.close(ours)


def test_the_command_runs_as_if_it_had_been_started_so() -> None:
    command = ["sh", "-c", "kill -PIPE $$; echo survived"]
    assert subprocess.run(bound_to_us(command, signal.SIGTERM)).returncode == -signal.SIGPIPE
    done = subprocess.run(
        bound_to_us(["sh", "-c", 'echo "$WORD" "$1" "$#"', "sh", "a b"], signal.SIGTERM),
        env=os.environ | {"WORD": "said"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "said a b 1\n"
