"""Arrays of strings: PJRT has none, so a shard of one is its serialised form, as the client sends it."""

from __future__ import annotations

from typing import Any, final

import numpy as np

from regrow.wire.schema import ifrt_proto


@final
class Strings:
    """A shard of strings; has what is asked of a single-device array here."""

    __slots__ = ("serialized",)

    def __init__(self, serialized: bytes) -> None:
        self.serialized = serialized

    @classmethod
    def of(cls, value: np.ndarray[Any, Any]) -> Strings:
        """From an array of numpy's variable-width strings."""
        contents = ifrt_proto.StringArrayContents()
        contents.strings.extend(str(text).encode() for text in value.reshape(-1))
        return cls(contents.SerializeToString())

    def to_numpy(self, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        """The strings as numpy has them."""
        contents = ifrt_proto.StringArrayContents.FromString(self.serialized)
        texts = [text.decode("utf-8", "replace") for text in contents.strings]
        return np.array(texts, np.dtypes.StringDType()).reshape(shape)

    @property
    def nbytes(self) -> int:
        """How large it is on the way."""
        return len(self.serialized)

    def is_ready(self) -> bool:
        """It always is."""
        return True

    def block_until_ready(self) -> None:
        """It always is."""
