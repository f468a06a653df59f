"""Wire formats that agents speak, each parsed into the router's own model and written from it."""

from typing import Final

from rlagent.router.dialects import (
    chat,
    chat_answer,
    completions,
    completions_answer,
    messages,
    messages_answer,
    responses,
    responses_answer,
)
from rlagent.router.dialects.dialect import Dialect

CHAT: Final = Dialect(
    path="chat/completions",
    body=chat.Request,
    parse=chat.parse,
    answer=chat_answer.completion,
    stream=chat_answer.ChunkWriter,
    error=lambda error: error.body,
)
COMPLETIONS: Final = Dialect(
    path="completions",
    body=completions.Request,
    parse=completions.parse,
    answer=completions_answer.completion,
    stream=completions_answer.ChunkWriter,
    error=lambda error: error.body,
)
MESSAGES: Final = Dialect(
    path="messages",
    body=messages.Request,
    parse=messages.parse,
    answer=messages_answer.message,
    stream=messages_answer.EventWriter,
    error=messages_answer.error_body,
    request_id="request-id",
)
RESPONSES: Final = Dialect(
    path="responses",
    body=responses.Request,
    parse=responses.parse,
    answer=responses_answer.response,
    stream=responses_answer.EventWriter,
    error=lambda error: error.body,
)
DIALECTS: Final = (CHAT, COMPLETIONS, RESPONSES, MESSAGES)
