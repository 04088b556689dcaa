"""The bus: what services say to each other, keep for each other and remember together."""
