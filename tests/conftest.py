"""What every test shares. One thread of the forward pass, so that tests beside other work do not
stall in OpenMP's spinning: set before torch is imported, and inherited by processes that start. And
no clock in hypothesis, since how long an example takes says how busy the machine is."""

import os

from hypothesis import HealthCheck, settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

settings.register_profile(
    "dspark", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("dspark")
