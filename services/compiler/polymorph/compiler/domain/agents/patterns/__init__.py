"""C++ templates of the pattern agent, kept as package data."""
