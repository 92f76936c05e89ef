"""What leaves host memory goes to disk: slots in a file, a thread that fills them, the tier."""
