"""The list of runs tells advice from what was acted on."""

from __future__ import annotations

from typing import Any

from tests.sidecar.test_app import run, sidecar


def test_a_flag_is_counted_as_advice_and_a_skip_is_not() -> None:
    async def test() -> None:
        async with sidecar() as at:

            async def listed() -> tuple[int, int]:
                row = (await at.tcp.get("/v1/runs")).json()["runs"][0]
                return row["open_incidents"], row["open_advice"]

            async def step(number: int, logit: float, **more: Any) -> None:
                columns = {"layer_attention_max_logit": [logit, 5.0]}
                seen = {"step": number, "loss": 3.0, "grad_norm": 1.0, "columns": columns} | more
                got = await at.tcp.post("/v1/runs/js/steps", json=seen)
                assert got.status_code == 200, got.text

            await at.tcp.put("/v1/runs/js", json={"layers": ["a", "b"]})
            await step(0, 5.0)
            await step(1, 80.0)
            await step(2, 5.0)  # what was done with a step is known with the next
            assert await listed() == (1, 1)
            await step(3, 5.0, grad_norm="nan")
            await step(4, 5.0)
            assert await listed() == (2, 1)

    run(test)
