"""What a cache on several tiers decides: who leaves a full tier, and what is worth loading.

Pure arithmetic, for the reference engine's tiers, for replaying traces, and for planning.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Tier = Literal["host", "disk"]


class Leaving(ABC):
    """The order in which a full tier's objects leave it."""

    @abstractmethod
    def __len__(self) -> int:
        """Objects that are in."""

    @abstractmethod
    def hit(self, key: Hashable) -> None:
        """Note that an object that is in was used."""

    @abstractmethod
    def miss(self, key: Hashable) -> None:
        """Note that an object that is not in was asked for, before room is made for it."""

    @abstractmethod
    def evict(self, incoming: Hashable) -> Hashable:
        """Choose the object that leaves for `incoming`, and forget that it is in."""

    @abstractmethod
    def admit(self, key: Hashable) -> None:
        """Note that an object came in."""

    @abstractmethod
    def forget(self, key: Hashable) -> None:
        """Note that an object is gone for another reason."""


class LeastRecent(Leaving):
    """LRU: who was not used for longest leaves."""

    def __init__(self) -> None:
        self._order: OrderedDict[Hashable, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._order)

    def hit(self, key: Hashable) -> None:
        """Make it the last to leave."""
        self._order.move_to_end(key)

    def miss(self, key: Hashable) -> None:
        """Nothing is remembered of those outside."""

    def evict(self, incoming: Hashable) -> Hashable:
        """The one used longest ago."""
        return self._order.popitem(last=False)[0]

    def admit(self, key: Hashable) -> None:
        """Make it the last to leave."""
        self._order[key] = None

    def forget(self, key: Hashable) -> None:
        """Take it out."""
        del self._order[key]


class Adaptive(Leaving):
    """ARC (Megiddo and Modha, FAST 2003): balances what was used once against what came back.

    It remembers as many objects that left as are in. The capacity is what is in when something
    has to leave, so that objects need not have one size.
    """

    def __init__(self) -> None:
        self._once: OrderedDict[Hashable, None] = OrderedDict()
        self._often: OrderedDict[Hashable, None] = OrderedDict()
        self._left_once: OrderedDict[Hashable, None] = OrderedDict()
        self._left_often: OrderedDict[Hashable, None] = OrderedDict()
        self._target_once = 0.0
        self._returned: Literal["", "once", "often"] = ""

    def __len__(self) -> int:
        return len(self._once) + len(self._often)

    def hit(self, key: Hashable) -> None:
        """It came back: it is among the frequent ones now."""
        self._once.pop(key, None)
        self._often[key] = None
        self._often.move_to_end(key)

    def miss(self, key: Hashable) -> None:
        """Give more room to the kind whose departed object is asked for."""
        once, often = len(self._left_once), len(self._left_often)
        self._returned = ""
        if key in self._left_once:
            self._returned = "once"
            self._target_once = min(len(self), self._target_once + max(often / once, 1))
        elif key in self._left_often:
            self._returned = "often"
            self._target_once = max(0.0, self._target_once - max(once / often, 1))

    def evict(self, incoming: Hashable) -> Hashable:
        """The oldest of the kind that has more than its share."""
        capacity = len(self)
        if not self._returned and len(self._once) + len(self._left_once) >= capacity:
            if len(self._once) >= capacity:
                return self._once.popitem(last=False)[0]
            self._left_once.popitem(last=False)
        elif not self._returned and capacity + len(self._left_once) + len(self._left_often) >= (
            2 * capacity
        ):
            self._left_often.popitem(last=False)
        return self._replace()

    def admit(self, key: Hashable) -> None:
        """Take it in as new, or as one that came back."""
        came_back = key in self._left_once or key in self._left_often
        self._left_once.pop(key, None)
        self._left_often.pop(key, None)
        (self._often if came_back else self._once)[key] = None

    def forget(self, key: Hashable) -> None:
        """Take it out."""
        for kind in (self._once, self._often):
            kind.pop(key, None)

    def _replace(self) -> Hashable:
        once = len(self._once)
        over = once > self._target_once or (self._returned == "often" and once == self._target_once)
        if once and (over or not self._often):
            key, _ = self._once.popitem(last=False)
            self._left_once[key] = None
        else:
            key, _ = self._often.popitem(last=False)
            self._left_often[key] = None
        return key


LEAVING: Mapping[str, type[Leaving]] = {"lru": LeastRecent, "arc": Adaptive}
"""The orders by name."""


def replay(requests: Iterable[Hashable], capacity: int, order: Leaving) -> float:
    """Return the share of requests that find their object in a tier of `capacity` objects."""
    inside: set[Hashable] = set()
    hits = total = 0
    for key in requests:
        total += 1
        if key in inside:
            hits += 1
            order.hit(key)
            continue
        if capacity < 1:
            continue
        order.miss(key)
        while len(inside) >= capacity:
            inside.remove(order.evict(key))
        order.admit(key)
        inside.add(key)
    return hits / total if total else 0.0


def matched_blocks(wanted: Sequence[Hashable], stored: Collection[Hashable]) -> int:
    """Return how many blocks of the start of `wanted` are stored: one that misses ends it."""
    return next((n for n, key in enumerate(wanted) if key not in stored), len(wanted))


@dataclass(frozen=True, slots=True)
class Speeds:
    """Bytes a second from each tier to the device, and seconds to compute one prompt token."""

    bytes_per_s: Mapping[Tier, float]
    prefill_s_per_token: float


@dataclass(frozen=True, slots=True)
class Plan:
    """How many of the found blocks to load, and when the prompt is ready."""

    blocks: int
    ready_s: float


def plan_loading(
    found: Sequence[Tier],
    *,
    prompt_tokens: int,
    block_tokens: int,
    block_bytes: int,
    speeds: Speeds,
) -> Plan:
    """Return the number of leading blocks to load that has the prompt ready first.

    `found` are the tiers of the blocks after what is on the device, `prompt_tokens` the tokens
    after it. A block that loads more slowly than it computes is loaded only if those behind it make
    up for it. Ties load less.
    """
    loading = 0.0
    best = Plan(0, prompt_tokens * speeds.prefill_s_per_token)
    for number, tier in enumerate(found, start=1):
        loading += block_bytes / speeds.bytes_per_s[tier]
        left = max(prompt_tokens - number * block_tokens, 0)
        ready = loading + left * speeds.prefill_s_per_token
        if ready < best.ready_s:
            best = Plan(number, ready)
    return best


def break_even_bytes_per_s(bytes_per_token: int, prefill_s_per_token: float) -> float:
    """Return the speed above which loading a token beats computing it."""
    return bytes_per_token / prefill_s_per_token


@dataclass(frozen=True, slots=True)
class Instance:
    """A server that could take a request: how long it is busy, and what it would do then."""

    name: str
    queue_s: float
    plan: Plan

    @property
    def first_token_s(self) -> float:
        """When the first token is expected."""
        return self.queue_s + self.plan.ready_s


def choose_instance(instances: Sequence[Instance], limit_s: float | None = None) -> Instance | None:
    """Return the instance that answers first, ties to the earlier one.

    None, if none would answer within `limit_s`: to refuse at once is kinder than to answer late.
    """
    first = min(instances, key=lambda instance: instance.first_token_s, default=None)
    if first is None or (limit_s is not None and first.first_token_s > limit_s):
        return None
    return first
