"""vLLM: a weight-transfer backend, a worker extension and a load format, all named `deltackpt`."""
