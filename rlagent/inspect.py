"""`rlagent inspect`: a session's trajectories in the terminal, each token coloured by what the learner does with it.

In the flow it stands at the end: recorded_session.py reads the rows that a learner would be given.
Invariant: what is shown are the recorded ids, one piece of text each; nothing is tokenised.
"""

import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import groupby, takewhile
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from rlagent.errors import NotFoundError
from rlagent.recorded_session import Json, Recorded
from rlagent.router.tokenizer import Detokenizer

PROMPT: Final = "bright_black"
UNTRAINED: Final = "cyan"
# Sampled tokens that train, by probability: from certain to surprising.
TRAINED: Final = (
    (0.9, "black on #a6d96a"),
    (0.5, "black on #d9ef8b"),
    (0.1, "black on #fdae61"),
    (0.0, "white on #d7191c"),
)
IMAGE: Final = "black on #80b1d3"
_VISIBLE: Final = str.maketrans({"\n": "⏎\n", "\t": "⇥\t", "\r": "␍"})
_UNFINISHED: Final = "·"  # a token that ends within a character


def show(recorded: Recorded, console: Console, *, row: int | None = None, tokens: bool = False) -> None:
    """Print the session, its calls, and its rows (or one of them, 1 is the first); `tokens`: a line for each token."""
    if row is not None and not 1 <= row <= len(recorded.rows):
        raise NotFoundError(f"the session has rows 1 to {len(recorded.rows)}, and no row {row}")
    console.print(_facts(recorded), soft_wrap=True, highlight=False)
    console.print(_calls(recorded))
    for number, one in enumerate(recorded.rows, 1):
        if row in (None, number):
            console.print(_row_head(number, one, recorded), soft_wrap=True)
            console.print(_table(one, recorded) if tokens else _text(one, recorded, number), soft_wrap=not tokens)
    if not tokens:
        console.print(_legend(), soft_wrap=True)


def show_newest(sessions: Sequence[Json], console: Console) -> None:
    """Print a line for each session: what to name, and what became of it."""
    table = Table(box=None, pad_edge=False)
    for name in ("session", "opened", "state", "status", "task", "group", "reward"):
        table.add_column(name, justify="right" if name == "reward" else "left", no_wrap=name == "session")
    for session in sessions:
        reward = session["reward"]
        table.add_row(
            session["session_id"], time.strftime("%m-%d %H:%M:%S", time.localtime(session["created_at"])), session["state"],
            session["status"] or "", session["task_id"] or "", session["group_id"] or "",
            "" if reward is None else f"{reward['total']:g}",
        )  # fmt: skip
    console.print(table)


def _facts(recorded: Recorded) -> str:
    session, reward = recorded.session, recorded.session["reward"]
    facts = [f"session {session['session_id']}", session["state"], session["status"] or ""]
    facts += [f"{name} {session[name + '_id']}" for name in ("task", "group") if session[name + "_id"]]
    facts.append("not trained" if not session["train"] else "")
    if reward is not None:
        components = ", ".join(f"{name} {value:g}" for name, value in reward["components"].items())
        facts.append(f"reward {reward['total']:g} ({components})" if components else f"reward {reward['total']:g}")
    return " · ".join(fact for fact in facts if fact)


def _calls(recorded: Recorded) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("call", "origin", "model", "prompt", "sampled", "versions", "logprob", "end", "delivery"):
        table.add_column(name, justify="right" if name in ("prompt", "sampled", "logprob") else "left")
    names = {call["call_id"]: f"{call['index']}" for call in recorded.calls}
    for call in recorded.calls:
        parent = call["parent"]
        origin = (
            f"fresh ({call['reason']})"
            if parent is None
            else f"extends {_node(names, parent['call_id'], parent['choice'])}"
        )
        for number, choice in enumerate(call["choices"]):
            logprobs = choice["logprobs"]
            table.add_row(
                _node(names, call["call_id"], number if len(call["choices"]) > 1 else 0), origin, call["model"],
                str(len(call["prompt_ids"])), str(len(choice["output_ids"])),
                _span(span["version"] for span in choice["versions"]),
                f"{sum(logprobs) / len(logprobs):.3f}" if logprobs else "-",
                " ".join(part for part in (choice["finish_reason"], _noted(choice)) if part), call["delivery"],
            )  # fmt: skip
    return table


def _noted(choice: Json) -> str:
    notes = [
        "" if choice["trainable"] else "(not trainable)",
        "(malformed call)" if choice["parse_status"] == "malformed" else "",
    ]
    return " ".join(note for note in notes if note)


def _node(names: Mapping[str, str], call_id: str, choice: int) -> str:
    return f"#{names.get(call_id, call_id)}" + (f".{choice}" if choice else "")


def _span(versions: Iterator[int]) -> str:
    found = sorted(set(versions))
    return "-" if not found else f"v{found[0]}" if len(found) == 1 else f"v{found[0]}-v{found[-1]}"


def _row_head(number: int, row: Json, recorded: Recorded) -> Text:
    sampled = [version for version in row["versions"] if version >= 0]
    names = {call["call_id"]: str(call["index"]) for call in recorded.calls}
    path = " > ".join(_node(names, call_id, 0) for call_id in row["call_ids"])
    return Text.assemble(
        "\n",
        (f"row {number} of {len(recorded.rows)}", "bold"),
        f"  {path}  {len(row['token_ids'])} tokens, {sum(row['loss_mask'])} trained, {_span(iter(sampled))}"
        + (", truncated" if row["truncated"] else ""),
    )


def _pieces(row: Json, recorded: Recorded) -> list[str]:
    """Each token's own text; a character of several tokens stands at its last one, an image at its placeholder."""
    detokenizer = Detokenizer(recorded.tokenizer)
    pieces = [detokenizer.feed([token]) or _UNFINISHED for token in row["token_ids"]]
    for at, image in _images(row, recorded).items():
        pieces[at] = f"[image {image['digest'][:8]}, {image['num_tokens']} tokens]"
    return pieces


def _images(row: Json, recorded: Recorded) -> dict[int, Json]:
    """The images of a row, by where they stand."""
    calls = (call for call in recorded.calls if call["call_id"] in row["call_ids"])
    return {image["position"]: image for call in calls for image in call["images"]}


def _style(row: Json, at: int, images: Collection[int]) -> str:
    if at in images:
        return IMAGE
    if row["loss_mask"][at]:
        probability = math.exp(row["logprobs"][at])
        return next(style for least, style in TRAINED if probability >= least)
    return UNTRAINED if row["versions"][at] >= 0 else PROMPT


def _shared(row: Json, recorded: Recorded, number: int) -> tuple[int, int]:
    """The longest beginning that an earlier row shows, in tokens, and that row's number; (0, 0) if none."""
    ids = row["token_ids"]
    lengths = [
        sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ids, earlier["token_ids"], strict=False)))
        for earlier in recorded.rows[: number - 1]
    ]
    longest = max(lengths, default=0)
    return (longest, lengths.index(longest) + 1) if longest else (0, 0)


def _text(row: Json, recorded: Recorded, number: int) -> RenderableType:
    shared, with_row = _shared(row, recorded, number)
    pieces, images = _pieces(row, recorded), _images(row, recorded)
    parts: list[Text] = [Text(f"... {shared} tokens as in row {with_row}", style="italic")] if shared else []
    text = Text()
    for at in range(shared, len(pieces)):
        text.append(pieces[at].translate(_VISIBLE), style=_style(row, at, images))
    return Group(*parts, text)


def _table(row: Json, recorded: Recorded) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("at", "turn", "id", "token", "mask", "logprob", "p", "version", "temperature"):
        table.add_column(name, justify="left" if name == "token" else "right")
    pieces, images = _pieces(row, recorded), _images(row, recorded)
    for turn, members in groupby(range(len(pieces)), key=lambda at: row["turn"][at]):
        for at in members:
            sampled = row["versions"][at] >= 0
            logprob = row["logprobs"][at]
            table.add_row(
                str(at), str(turn), str(row["token_ids"][at]),
                Text(pieces[at].replace("\n", "⏎").replace("\t", "⇥"), style=_style(row, at, images)), str(row["loss_mask"][at]),
                f"{logprob:.4f}" if sampled else "", f"{math.exp(logprob):.3f}" if sampled else "",
                str(row["versions"][at]) if sampled else "", f"{row['temperature'][at]:g}" if sampled else "",
            )  # fmt: skip
        table.add_section()
    return table


def _legend() -> Text:
    names = ("p at least 0.9", "0.5", "0.1", "less")
    trained = [part for (_, style), name in zip(TRAINED, names, strict=True) for part in ((f" {name} ", style), " ")]
    return Text.assemble(
        "\ntrained: ", *trained, " sampled, not trained here: ", ("text", UNTRAINED), "  prompt: ", ("text", PROMPT)
    )
