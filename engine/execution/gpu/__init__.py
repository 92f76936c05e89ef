"""What steps are on a GPU alone."""
