"""The words everything else is written in: stdlib only, imports nothing of ours."""
