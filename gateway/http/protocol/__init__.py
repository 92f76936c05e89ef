"""The HTTP layer below the routes: connections, bodies, errors, event streams."""
