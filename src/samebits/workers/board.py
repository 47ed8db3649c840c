"""What the launchers of all nodes tell each other: texts under keys of a store, signed by a secret that they share."""

from __future__ import annotations

import hashlib
import hmac
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import Store  # type: ignore[attr-defined]

_DIGITS = 32  # of a signature, HMAC with SHA-256


class Board:
    """A store in which nothing stands but what was signed: of a stranger's text it says that it is not there.

    Whoever reaches the store may still remove what stands there, or overwrite it.
    """

    def __init__(self, store: Store, secret: str) -> None:
        self._store, self._secret = store, secret.encode()

    def within(self, launch: str) -> Board:
        """A board for what was signed in one launch: what stood in another, of the same secret, is a stranger's."""
        return Board(self._store, f"{self._secret.hex()}\n{launch}")

    def set(self, key: str, text: str) -> None:
        """Write a text, in the place of what stands there."""
        self._store.set(key, self._signed(key, text))

    def get(self, key: str) -> str | None:
        """The text that stands there."""
        return self._read(key, self._store.get(key)) if self.has(key) else None

    def has(self, key: str) -> bool:
        """Whether anything stands there, be it a stranger's."""
        return bool(self._store.check([key]))

    def get_all(self, keys: Sequence[str]) -> list[str | None]:
        """The texts under keys each of which was set, in one go."""
        return [self._read(key, value) for key, value in zip(keys, self._store.multi_get(list(keys)), strict=True)]

    def claim(self, key: str, text: str) -> bool:
        """Write a text unless there is another; whether it stands there now."""
        stands = self._store.compare_set(key, "", self._signed(key, text))
        if (known := self._read(key, stands)) is None:
            self.set(key, text)
        return known in (None, text)

    def number(self, key: str) -> int:
        """How often this was asked of the key; a stranger may have asked too."""
        return self._store.add(key, 1)

    def _signed(self, key: str, text: str) -> str:
        mac = hmac.new(self._secret, f"{key}\n{text}".encode(), hashlib.sha256)
        return mac.hexdigest()[:_DIGITS] + text

    def _read(self, key: str, value: bytes) -> str | None:
        text = value.decode(errors="replace")[_DIGITS:]
        return text if hmac.compare_digest(self._signed(key, text).encode(), value) else None
