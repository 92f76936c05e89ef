"""What everything else is written in terms of: stdlib only, imports nothing of ours."""
