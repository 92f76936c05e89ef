"""How long `at once` may take in a test, on a machine that is busy with others.

Less than whatever would come next if a thing were not done at once: a heartbeat is missed after
1.2 s, a lease ends after 10 s, an engine that says nothing is ended after 30 s. How fast things are
is measured by the benchmarks, on an idle machine, and asserted by no test.
"""

from __future__ import annotations

AT_ONCE_S = 1.0  # before a heartbeat is missed
SOON_S = 5.0  # before a lease ends
