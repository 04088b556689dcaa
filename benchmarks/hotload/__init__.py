"""`make bench-hotload`: kernels changed under load, and what slots cost while nothing changes."""
