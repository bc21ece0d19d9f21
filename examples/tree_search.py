"""Tree search over continuations, on pages that are shared exactly.

    python examples/tree_search.py

Every node extends its parent's text, and siblings differ by their seed. The K/V of a block-causal model do not
depend on later tokens, so a node reads all whole pages of its ancestors from the store and computes its own blocks
only. The weights are random: the example shows what is shared, not good text.
"""

from dataclasses import dataclass

from remask import LLM, SamplingParams
from remask.engine.config import EngineConfig

DEPTH, WIDTH, KEPT = 3, 3, 2


@dataclass(frozen=True)
class Node:
    """A text so far, and how good it is."""

    tokens: tuple[int, ...]
    score: int


def score(tokens: tuple[int, ...]) -> int:
    """How many different tokens there are: put a verifier or a reward model here."""
    return len(set(tokens))


def main() -> None:
    """Expand the best nodes, level by level."""
    engine = EngineConfig(page_size=4, max_num_seqs=6)
    llm = LLM("sdar-tiny", load_format="dummy", cache="exact", dtype="float32", engine=engine)
    frontier = [Node(tuple(range(40, 64)), 0)]
    for level in range(DEPTH):
        prompts = [list(node.tokens) for node in frontier for _ in range(WIDTH)]
        params = [SamplingParams(max_tokens=8, temperature=1.0, seed=seed) for seed in range(len(prompts))]
        outputs = llm.generate(prompts, params)
        children = [(*prompt, *output.token_ids) for prompt, output in zip(prompts, outputs, strict=True)]
        frontier = sorted((Node(child, score(child)) for child in children), key=lambda node: -node.score)[:KEPT]
        found = sum(output.usage.cached_tokens for output in outputs)
        asked = sum(output.usage.prompt_tokens for output in outputs)
        print(f"level {level}: {len(prompts)} branches, {found} of {asked} prompt tokens read from shared pages")
    pages = llm.engine.memory_report()
    print(f"kept: {pages.used} pages (x layers), best score {frontier[0].score}")


if __name__ == "__main__":
    main()
