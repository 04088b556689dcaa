"""Embedded mode: the whole loop on one machine under one supervisor, and the `polymorph` command."""
