"""What every test runs under: small and repeatable by default, larger and random with HYPOTHESIS_PROFILE=ci."""

import os

from hypothesis import HealthCheck, settings

_steady = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}  # a busy machine is no failure
settings.register_profile("small", max_examples=25, derandomize=True, **_steady)
settings.register_profile("ci", max_examples=400, print_blob=True, **_steady)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "small"))
