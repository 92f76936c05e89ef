"""The path of a call behind every front, and the bounds on its wait."""
