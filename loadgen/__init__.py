"""A load generator for servers of tokens, and the figures of what it measured."""
