"""Where the time of whole generations goes, operation by operation (the thesis's table 6.2)."""

from remask.llm import LLM
from remask.policies import CachePolicy
from remask_lab.bench.workload import Workload
from remask_lab.ops.operations import profile_operations

# Ours, under the names that rows of tables ask for; all others are the rest.
NAMED = ("projections", "attention", "mlp", "head", "norms")
OPERATIONS = (*NAMED, "rest", "total")


def operation_times(llm: LLM, workload: Workload, policy: CachePolicy, rounds: int) -> dict[str, float]:
    """Milliseconds that answering `workload` takes by operation, and in "total", as `remask profile-ops` takes them.

    "overhead" is what the instruments add, as a share of the time.
    """
    work = [task.request.with_policy(policy) for task in workload.tasks]
    profile = profile_operations(llm, work, rounds=rounds)
    spent = {name: 1e3 * operation.seconds for name, operation in profile.operations.items()}
    times = {name: spent.pop(name) for name in NAMED}
    times["rest"] = sum(spent.values())
    return {**times, "total": sum(times.values()), "overhead": profile.overhead}
