"""Cache policies: pure functions from a host-side `View` to a `Plan`, one file a method."""

from remask.policies.base import CachePolicy
from remask.policies.bicache import BiCache
from remask.policies.block import BlockDual, BlockPrefix, UniformCache
from remask.policies.dense import Dense
from remask.policies.dkv import DkvDecode, DkvGreedy, DkvPd, DkvPrefill
from remask.policies.dllm import DllmCache
from remask.policies.elastic import ElasticCache
from remask.policies.exact import Exact
from remask.policies.registry import names_for, parse, policy_names, settings_of
from remask.policies.reuse import Reuse

__all__ = [
    "BiCache",
    "BlockDual",
    "BlockPrefix",
    "CachePolicy",
    "Dense",
    "DkvDecode",
    "DkvGreedy",
    "DkvPd",
    "DkvPrefill",
    "DllmCache",
    "ElasticCache",
    "Exact",
    "Reuse",
    "UniformCache",
    "names_for",
    "parse",
    "policy_names",
    "settings_of",
]
