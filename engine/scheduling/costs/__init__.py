"""What steps take, measured."""
