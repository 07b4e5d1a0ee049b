"""Servers that answer the questions of a quality suite by a function, in the place of real ones."""

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace

from contracts.landscape import ONLY_BLOCK_SIZE

from kvtune.engines.simulated.engine import SimulatedEngine
from kvtune.profilers.quality.limits import Limit
from kvtune.profilers.quality.suite import Answer, Item, QualityMetric, Size, Suite
from kvtune.types import EffectiveConfig, Harm

RIGHT = QualityMetric("right", "share", "higher", "difference", 0.05)
SCREEN_ITEMS, STANDARD_ITEMS, FULL_ITEMS = 20, 150, 200
"""Too few to prove that 5 points are not lost, and enough."""

ITEMS = {Size.SCREEN: SCREEN_ITEMS, Size.STANDARD: STANDARD_ITEMS, Size.FULL: FULL_ITEMS}

ONE_POINT = Limit("words", RIGHT, 0.01)
"""More than the standard items can prove."""


ONLY_KV_DTYPE = {**ONLY_BLOCK_SIZE, "block-size": 128}
"""Leaves the stock defaults and two 8-bit formats."""


class Words(Suite):
    """Items that are right when the answer repeats the prompt; never more than a size has."""

    name, says = "words", "nothing is repeated any more"
    metrics = (RIGHT,)

    def items(self, plan):
        numbers = range(ITEMS[plan.size])
        return tuple(Item(f"{self.name}-{n}", "one", prompt=f"word {n}") for n in numbers)

    def figures(self, item, ours, theirs):
        return {"right": tuple(float(a.texts[0] == item.prompt) for a in (ours, theirs))}


class More(Words):
    """The same once more, as another suite."""

    name = "more"


class Server:
    """Runs until `died` says otherwise; `own_server`: it was started for questions alone."""

    def __init__(self, arguments, own_server):
        self.arguments = arguments
        self.own_server = own_server
        self.died = None
        self.effective = EffectiveConfig()
        self.warnings = ()
        self.start_s = 0.1
        self.endpoint = self

    def failure(self):
        return self.died

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass


@dataclass
class Question:
    """One call of an asker."""

    arguments: dict
    keys: list
    seed: int
    concurrency: int
    own_server: bool


@dataclass
class Questioned:
    """Servers that can be asked. `say(arguments, item)` is an answer.

    `asked` holds every call of an asker, `launched` the arguments of servers that were started for
    questions alone. `meanwhile(server)` is called in the middle of each call.
    """

    say: callable = lambda arguments, item: item.prompt
    meanwhile: callable = lambda server: None
    asked: list = field(default_factory=list)
    launched: list = field(default_factory=list)

    def serve(self, arguments, own_server=False):
        """A server with these arguments."""
        return Server(dict(arguments), own_server)

    def asker(self, endpoint, *, request_timeout_s, should_stop, on_progress, seeds):
        """What stands in for `ServerAsker`."""

        async def ask(items, *, seed, concurrency):
            keys = [item.key for item in items]
            self.asked.append(
                Question(endpoint.arguments, keys, seed, concurrency, endpoint.own_server)
            )
            self.meanwhile(endpoint)
            await asyncio.sleep(0)
            if should_stop() is not None:
                return [Answer(error="stopped")] * len(items)
            said = [self.say(endpoint.arguments, item) for item in items]
            return [Answer((text,), (1,), ("stop",)) for text in said]

        return SimpleNamespace(ask=ask)

    @property
    def engine(self):
        """Starts servers for questions alone."""
        questioned = self

        class Starts(SimulatedEngine):
            def launch(self, spec, **options):
                questioned.launched.append(dict(spec.arguments))
                return questioned.serve(spec.arguments, own_server=True)

        return Starts()

    @property
    def items_by_settings(self):
        """How many items were asked of stock settings and of others."""
        stock = sum(len(one.keys) for one in self.asked if not is_harmful(one.arguments))
        return stock, sum(len(one.keys) for one in self.asked) - stock


def is_harmful(arguments):
    """Whether settings may change answers."""
    return "kv-cache-dtype" in arguments


def harmful(tuning):
    """The trials of a search that may change answers, without the rounds that confirmed them."""
    found = [e.trial for e in tuning.ledger.entries if e.trial.stack.harm is not Harm.LOSSLESS]
    return [trial.number for trial in found if trial.parent is None]
