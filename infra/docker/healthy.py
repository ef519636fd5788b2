"""Exit 0 if the URL in HEALTH_URL answers 200 within 3 s; the image names its own Ray node.

A container's health check: only the standard library, so that one look costs about 50 ms.
"""

import os
import sys
import urllib.request

try:
    with urllib.request.urlopen(os.environ["HEALTH_URL"], timeout=3) as answer:
        answer.read()
except OSError as error:  # refused, timed out, or any status that is an error
    sys.exit(f"not healthy: {error}")
