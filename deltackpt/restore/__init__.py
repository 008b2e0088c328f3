"""From patches to weights: a step is rebuilt tensor by tensor, proven, and written."""
