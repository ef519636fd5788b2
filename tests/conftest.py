"""What every test shares: one thread of the forward pass, so that tests beside other work do not
stall in OpenMP's spinning, and no network for transformers."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
