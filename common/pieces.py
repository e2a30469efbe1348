"""Request bodies in memory, of which what many begin with is held once. Pure.

Files whose requests share long beginnings (a document, a long system prompt) take little more memory so than what tells
their requests apart, so that many more of them can be planned together.
"""

from __future__ import annotations

from xxhash import xxh3_64_intdigest

#: Bytes of a piece.
PIECE = 512
#: Bodies of less are held as they are.
LEAST = 2 * PIECE
#: Bytes of memory that go with a digest that is known, with a piece besides its own, and with a reference to one.
_KNOWN, _OBJECT, _REFERENCE = 112, 48, 8

#: A body, or the pieces of one.
Body = bytes | tuple[bytes, ...]


class Pieces:
    """What is known of the bodies, and of other texts, that are in memory together.

    What is seen once may never be seen again, so only its digest is kept, and itself from the second time on.
    """

    def __init__(self) -> None:
        self._known: dict[int, bytes | None] = {}

    def hold(self, body: bytes) -> tuple[Body, int]:
        """The body, or the same in pieces, and how many bytes of memory it takes that were not taken yet."""
        size = len(body)
        if size < LEAST:
            return body, size
        digest = xxh3_64_intdigest(body[:PIECE])
        if digest not in self._known:
            self._known[digest] = None
            return body, size + _KNOWN
        # Others begin like this, and may go on like this.
        end = size - size % PIECE
        pieces = []
        taken = size - end + _OBJECT + (end // PIECE + 1) * _REFERENCE
        for at in range(0, end, PIECE):
            piece, more = self._keep(body[at : at + PIECE])
            pieces.append(piece)
            taken += more
        pieces.append(body[end:])
        return tuple(pieces), taken

    def share(self, text: bytes) -> tuple[bytes, int]:
        """The text, if it is known an equal one, and how many bytes of memory it takes that were not taken yet."""
        digest = xxh3_64_intdigest(text)
        if digest in self._known:
            return self._keep(text, digest)
        self._known[digest] = None
        return text, len(text) + _KNOWN

    def _keep(self, piece: bytes, digest: int | None = None) -> tuple[bytes, int]:
        digest = xxh3_64_intdigest(piece) if digest is None else digest
        held = self._known.get(digest)
        if held == piece:
            return held, 0
        self._known[digest] = piece
        return piece, len(piece) + _KNOWN + _OBJECT

    def clear(self) -> None:
        """Others follow, which are not in memory together with those so far."""
        self._known.clear()


def whole(body: Body) -> bytes:
    """The body itself."""
    return body if isinstance(body, bytes) else b"".join(body)


def length(body: Body) -> int:
    """Its bytes."""
    return len(body) if isinstance(body, bytes) else sum(map(len, body))
