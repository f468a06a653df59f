"""A message's content as its parts are read: text without separators, and images within it."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlagent.router.images import Image, read_base64, read_url


@dataclass(slots=True)
class Content:
    """Text and images in their order."""

    texts: list[str] = field(default_factory=list)
    images: list[Image] = field(default_factory=list)
    _length: int = 0

    def say(self, text: str) -> None:
        """The next text."""
        self.texts.append(text)
        self._length += len(text)

    def show_url(self, found: object, where: str) -> None:
        """The next image, by its data: URI. ApiError for other URLs."""
        self.images.append(read_url(found, self._length, where))

    def show_base64(self, found: object, where: str) -> None:
        """The next image, by its bytes."""
        self.images.append(read_base64(found, self._length, where))

    @property
    def text(self) -> str:
        """The text alone."""
        return "".join(self.texts)

    def __bool__(self) -> bool:
        return bool(self.texts or self.images)
