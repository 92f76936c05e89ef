"""Running requests that go on elsewhere: which, where, and when a gateway looks."""
