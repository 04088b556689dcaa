"""Hot loading in a plain `vllm serve`: a folder says what is desired, and the front of the server sees to it."""
