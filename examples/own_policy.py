"""A cache policy of one's own, run beside `none` and compared with it.

    python examples/own_policy.py

A policy is a frozen dataclass whose fields are its settings. Its `plan` looks at a request and returns the next pass:
which rows are computed in which layers, and which positions are predicted. The K/V of all other rows come from the
cache. The engine does the rest, and ends a request whose plan reads what no pass has written.
"""

from dataclasses import dataclass

from remask import LLM
from remask.plan import Plan, View
from remask.policies import CachePolicy
from remask_lab.bench.bench import run_bench
from remask_lab.bench.contenders import contender
from remask_lab.bench.report import table
from remask_lab.bench.workload import usual_workload


@dataclass(frozen=True, slots=True)
class PromptOnce(CachePolicy):
    """The prompt's rows are computed every `interval` steps, the response's rows in every step."""

    interval: int = 4

    def plan(self, view: View) -> Plan:
        """One span of all layers. The prompt's last row is always in it, as in some models it predicts a token."""
        refresh = view.step % self.interval == 0
        spans = view.over(0 if refresh else view.prompt - 1, view.length)
        return Plan(spans, predict=view.candidates, refreshes=refresh)


def main() -> None:
    """Answer a question under both policies, then measure them on the model's own task."""
    llm = LLM("bundled-tariff", dtype="float32")
    workload = usual_workload(llm, requests=8, seed=0, sampling={})
    prompt, params = workload.tasks[0].request.prompt_token_ids, workload.tasks[0].request.params
    for cache in ("none", PromptOnce(), PromptOnce(interval=2)):
        (output,) = llm.generate([list(prompt)], params, cache=cache)
        print(f"{cache}: {output.text!r}, {output.usage.row_layers} row-layers")
    contenders = [contender(llm, cache, None, workload) for cache in ("none", PromptOnce())]
    record = run_bench(llm, workload, contenders, rounds=1, engine=llm.session.engine_config, progress=False)
    print(table(record))


if __name__ == "__main__":
    main()
