"""What an alarm does when its rule fires: a line in alarms.jsonl and on the screen, a webhook, or the run's end.

In the flow: train.py shows it each line of metrics.jsonl. Invariant: a webhook that fails is said in the log and never ends a run.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import httpx

from rlagent.alarm_rules import AlarmRule, fires
from rlagent.errors import AlarmError

_WEBHOOK_TIMEOUT_S: Final = 5.0


class Alarms:
    """Watches a run's metrics. `say` shows a line to a person."""

    def __init__(
        self,
        rules: Sequence[AlarmRule],
        log: Path,
        say: Callable[[str], None],
        earlier: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self._rules = rules
        self._log = log
        self._say = say
        longest = max((rule.window + rule.for_steps for rule in rules), default=0)
        self._keep = 2 * longest  # eval metrics come on some lines only
        self._records = list(earlier)

    async def show(self, record: Mapping[str, Any]) -> None:
        """A step's line. Raises AlarmError where a rule that fired has action = "stop"."""
        self._records = [*self._records, record][-self._keep :] if self._keep else []
        fired = [rule for rule in self._rules if fires(rule, self._records)]
        for rule in fired:
            text = f"alarm: {rule.metric} = {record[rule.metric]:.4g} at step {record['step']} ({rule.condition})"
            self._say(text)
            self._write(rule, record)
            if rule.url is not None:
                await self._call(rule.url, rule, record, text)
        stopping = [rule for rule in fired if rule.action == "stop"]
        if stopping:
            raise AlarmError(
                f"the alarm on {stopping[0].metric} ({stopping[0].condition}) ended the run after step {record['step']}: it is "
                f"{record[stopping[0].metric]:.4g}. Look at {self._log.name} and metrics.jsonl; --resume goes on from the last "
                "checkpoint"
            )

    def _write(self, rule: AlarmRule, record: Mapping[str, Any]) -> None:
        with self._log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(_body(rule, record)) + "\n")

    async def _call(self, url: str, rule: AlarmRule, record: Mapping[str, Any], text: str) -> None:
        try:
            async with httpx.AsyncClient(timeout=_WEBHOOK_TIMEOUT_S) as client:
                answer = await client.post(url, json={**_body(rule, record), "text": text})
                answer.raise_for_status()
        except httpx.HTTPError as error:
            self._say(f"alarm: the webhook {url} failed: {error!r}")


def _body(rule: AlarmRule, record: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "step": record["step"],
        "metric": rule.metric,
        "value": record[rule.metric],
        "condition": rule.condition,
        "action": rule.action,
    }
