"""Where candidates are built and run: processes that reach nothing, and the parent's side of them."""
