"""Wire formats that agents speak, each parsed into the router's own model and written from it."""

from typing import Final

from rlagent.router.dialects.chat import parse
from rlagent.router.dialects.chat_answer import ChunkWriter, completion
from rlagent.router.dialects.dialect import Dialect

CHAT: Final = Dialect(
    path="chat/completions", parse=parse, answer=completion, stream=ChunkWriter, error=lambda error: error.body
)
DIALECTS: Final = (CHAT,)
