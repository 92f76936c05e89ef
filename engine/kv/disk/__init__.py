"""The KV tier on disk, behind host memory: slots in a file, the thread that copies, the tier."""
