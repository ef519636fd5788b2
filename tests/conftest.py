"""What every test shares: one thread of the forward pass, so that tests beside other work do not
stall in OpenMP's spinning. Set before torch is imported, and inherited by processes that start."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
