"""The native backend: dense decoders on a CPU, in float32 or int8, rows bit-equal in any batch."""

from dspark.models.targets.native.backend import NativeBackend, NativeOptions
from dspark.models.targets.native.library import NativeUnavailable
from dspark.models.targets.native.opening import open_native
from dspark.models.targets.native.weights import Shelf

__all__ = ["NativeBackend", "NativeOptions", "NativeUnavailable", "Shelf", "open_native"]
