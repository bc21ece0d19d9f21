"""A number that the device computes for each predicted row, as data."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RowMeasure:
    """A number of the distribution that a row predicts: a remasking rule's confidence, or what a cache policy reads.

    Attributes:
        name: in documentation and errors.
        on_device: the function that computes it, as "module:name". It gets the log-probabilities of all tokens,
            float32 [rows, V], and their `Vocabulary`, and returns float [rows]. It may neither change its arguments nor
            wait for the device. On a model that runs in several processes the columns are those of one of them, and
            sums over tokens go through the methods of `Vocabulary`.
    """

    name: str
    on_device: str
