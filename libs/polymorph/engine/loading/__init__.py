"""From a signed revision to slots that serve it, whoever asks: a worker over the bus, or a folder of a plain vLLM."""
