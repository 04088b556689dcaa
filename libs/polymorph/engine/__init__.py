"""What worker and evaluator both need to know about vLLM: how it is started, and the slots inside it."""
