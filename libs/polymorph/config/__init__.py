"""Configuration: polymorph.yaml, overridden by POLYMORPH_* variables, then by flags."""
