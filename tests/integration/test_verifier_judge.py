"""A judge through the router: recorded in the rollout's own session, sampled as the judge wishes, never trained on."""

from pathlib import Path

import openai
from router_harness import in_turn, router, said

from rlagent.envs.verifiers import Attempt, Check, Rubric, exact, judge
from rlagent.router.config import RouterConfig
from rlagent.types import Reward


async def test_a_judge_in_the_session_is_recorded_and_not_trained_on(tmp_path: Path) -> None:
    config = RouterConfig(untrained_models=("judge",))
    async with router(tmp_path, in_turn(said("It is 41"), said("Wrong.\nScore: 0.25")), config=config) as harness:
        session = await harness.admin.new_session()
        async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
            completion = await client.chat.completions.create(
                model="policy", messages=[{"role": "user", "content": "What is 6 * 7?"}]
            )
        answer = completion.choices[0].message.content or ""
        attempt = Attempt(task={"question": "6 * 7", "answer": "42"}, answer=answer, session=session)
        checks = [
            Check(name="right", verifier=exact()),
            Check(name="judge", verifier=judge(), weight=2.0, timeout_s=60),
        ]
        async with Rubric(checks) as rubric:
            reward = await rubric.reward(attempt)
        assert reward == Reward(components={"right": 0.0, "judge": 0.5})
        await harness.admin.finish(session.session_id, reward=reward)
        asked, judged = await harness.admin.calls(session.session_id)
        assert asked["call_id"] == completion.id
        assert (judged["model"], judged["sampling"]["temperature"]) == ("judge", 0.0)
        trained, read = await harness.admin.trajectories(session.session_id)
        assert sum(trained["loss_mask"]) == len(asked["choices"][0]["output_ids"])
        assert not any(read["loss_mask"])
