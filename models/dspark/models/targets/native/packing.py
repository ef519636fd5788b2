"""A model's weights go into the library: packed in memory of this process, or mapped from a file
that all processes of the machine share."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch
from transformers import PreTrainedModel

from dspark.models.cache import Progress
from dspark.models.targets.native import decoder
from dspark.models.targets.native.library import Layer
from dspark.models.targets.native.weights import Shelf, shared_weights


@dataclass(frozen=True, slots=True)
class Packing:
    """library, handle: of a model that has been created and has no weights yet."""

    library: Any
    handle: ctypes.c_void_p
    model: PreTrainedModel
    windows: tuple[int, ...]

    def private(self) -> None:
        """Pack here. Raises `ModelError` for weights that are not finite."""
        self._set(matrices=True)

    def shared(self, shelf: Shelf, maker: str, progress: Progress) -> BinaryIO | None:
        """Map the file of these weights, which is made if it is not there: it is in use until what
        is returned is closed. None: they are packed here, since they cannot be kept there, and the
        embedding is the model's own. maker: all but the weights that a file depends on, a name
        that begins with the source and a hyphen."""

        def pack() -> Sequence[memoryview]:
            self.private()
            size = int(self.library.dn_weights_size(self.handle))
            start = int(self.library.dn_weights(self.handle))
            matrices = (ctypes.c_char * size).from_address(start)
            embedding = self.model.get_input_embeddings().weight.detach().contiguous()
            return memoryview(matrices).cast("B"), memoryview(embedding.numpy()).cast("B")

        name = f"{maker}-{self._contents()}"
        file = shared_weights(shelf, name, pack, self._checksum, progress)
        if file is not None:
            try:
                self._check(self.library.dn_map(self.handle, file.fileno()))
                self._set(matrices=False)
            except BaseException:
                file.close()
                raise
        return file

    def _set(self, *, matrices: bool) -> None:
        for index, tensors in enumerate(decoder.layer_tensors(self.model, matrices=matrices)):
            pointers = {name: _pointer(tensor) for name, tensor in tensors.items()}
            layer = Layer(**pointers, window=self.windows[index])
            self._check(self.library.dn_set_layer(self.handle, index, ctypes.byref(layer)))
        head: Any = self.model.get_output_embeddings()
        named = {
            "norm": self.model.base_model.norm.weight,
            "lm_head": head.weight if matrices else None,
            "lm_head.bias": head.bias,
        }
        ends = [decoder.finite(name, tensor) for name, tensor in named.items()]
        self._check(self.library.dn_set_head(self.handle, *map(_pointer, ends)))

    def _contents(self) -> str:
        """Of every number of the model, a tensor of two names counted at both."""
        digest, sums = hashlib.blake2b(digest_size=12), dict[int, int]()
        for name, tensor in self.model.state_dict().items():
            whole = tensor.detach().contiguous()
            at = whole.data_ptr()
            if at not in sums:
                sums[at] = self._checksum(at, whole.nbytes)
            digest.update(f"{name} {tuple(whole.shape)} {sums[at]}\n".encode())
        return digest.hexdigest()

    def _checksum(self, at: int, size: int) -> int:
        return int(self.library.dn_checksum(self.handle, at, size))

    def _check(self, failed: int) -> None:
        if failed:
            raise RuntimeError(f"native weights: {self.library.dn_error().decode()}")


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
