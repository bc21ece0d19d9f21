"""Cache policies: pure functions from a `View` of a request to a `Plan` of its next pass. Each method has a file."""

from remask.policies.base import ALWAYS, Around, CachePolicy, RequestFacts, Schedule, Traits
from remask.policies.bicache import BiCache, DepthLookup
from remask.policies.block import BlockDual, BlockPrefix
from remask.policies.dense import Dense, Reuse
from remask.policies.dkv import DkvDecode, DkvGreedy, DkvPd, DkvPrefill
from remask.policies.dllm import DllmCache
from remask.policies.exact import Exact
from remask.policies.registry import name_of, names_for, parse, policy_names, settings_of
from remask.policies.uniform_cache import UniformCache

__all__ = [
    "ALWAYS",
    "Around",
    "BiCache",
    "BlockDual",
    "BlockPrefix",
    "CachePolicy",
    "Dense",
    "DepthLookup",
    "DkvDecode",
    "DkvGreedy",
    "DkvPd",
    "DkvPrefill",
    "DllmCache",
    "Exact",
    "RequestFacts",
    "Reuse",
    "Schedule",
    "Traits",
    "UniformCache",
    "name_of",
    "names_for",
    "parse",
    "policy_names",
    "settings_of",
]
