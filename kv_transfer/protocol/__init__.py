"""The hand-off as two state machines and their messages. Knows no transport."""
