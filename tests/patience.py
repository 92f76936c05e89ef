"""The longest time that `at once` may take in a test, on a busy machine.

Shorter than the event that would follow without an immediate reaction: a heartbeat is missed after
1.2 s, a lease ends after 10 s, a silent engine is ended after 30 s. Speed is measured by the
benchmarks, on an idle machine, and asserted by no test.
"""

from __future__ import annotations

AT_ONCE_S = 1.0  # before a heartbeat is missed
SOON_S = 5.0  # before a lease ends
