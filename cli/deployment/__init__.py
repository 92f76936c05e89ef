"""A whole deployment on one host as child processes."""
