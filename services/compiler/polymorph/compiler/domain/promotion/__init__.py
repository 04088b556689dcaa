"""The promotion state machine: pure, from a desired state and a fact to the next desired state and its events."""
