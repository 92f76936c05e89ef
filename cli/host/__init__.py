"""Looking at this host before anything starts: GPUs, packages, certificates."""
