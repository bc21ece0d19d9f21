"""A table that tests draw, keep and read, and the rule of the authors' code."""

from remask_lab.similarity.rule import DepthRule
from remask_lab.similarity.table import Growth, SimilarityTable

AUTHORS = DepthRule("leading", "mean-curve", "paper")  # the reading of the authors' code
TABLE = SimilarityTable(
    model="llada-tiny",
    layers=2,
    tau=0.97,
    definition="flat",
    samples=16,
    source="a test",
    rule=DepthRule(boundary="paper"),
    entries={5: 1, 40: 2},
    limits={5: (1.0, 0.9), 40: (1.0, 0.98)},
    curves={5: (1.0, 0.9), 40: (1.0, 0.98)},
    request_depths={5: 1.25, 40: 2.0},
    growth=(Growth(16, 0.5),),
)
