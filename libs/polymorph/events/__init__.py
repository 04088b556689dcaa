"""The contract between services: what happened, under which subject, in which envelope."""
