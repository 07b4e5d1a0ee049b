"""Tools that a model may call, and requests for them; all made up for this purpose."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Values = Mapping[str, Any]

CITIES = (
    "Lisbon", "Oslo", "Turin", "Ghent", "Krakow", "Lyon", "Porto", "Bergen", "Graz", "Malmo",
    "Seville", "Leeds", "Cork", "Basel", "Bonn", "Nantes", "Riga", "Split", "Zadar", "Utrecht",
)  # fmt: skip
PEOPLE = (
    "Anna", "Bruno", "Clara", "David", "Elena", "Felix", "Greta", "Henry", "Irene", "Jonas",
    "Karin", "Lukas", "Maria", "Nils", "Olga", "Paul", "Ruth", "Simon", "Tina", "Viktor",
)  # fmt: skip
ROOMS = ("kitchen", "bedroom", "office", "hall", "garage", "cellar")
FOODS = ("apples", "eggs", "onions", "candles", "lemons", "pears", "carrots", "plates", "rolls")
LANGUAGES = ("French", "Spanish", "Polish", "Dutch", "Italian", "Greek")
CURRENCIES = ("EUR", "USD", "GBP", "CHF", "NOK", "PLN")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
WORDS = ("hello", "thanks", "goodbye", "sorry", "please", "congratulations", "welcome")


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool: `parameters` are JSON schemas by name, all of them required.

    `draw` makes up the values of a call, and `request` asks for it, with the values in braces.
    """

    name: str
    description: str
    parameters: Mapping[str, Mapping[str, Any]]
    draw: Callable[[random.Random], Values]
    request: str

    def schema(self) -> dict[str, Any]:
        """The JSON schema of the arguments."""
        return {
            "type": "object",
            "properties": {name: dict(rule) for name, rule in self.parameters.items()},
            "required": list(self.parameters),
            "additionalProperties": False,
        }


_TEXT = {"type": "string"}
_WHOLE = {"type": "integer", "minimum": 1}
_ROOM = {"type": "string", "enum": list(ROOMS)}
_DAY = {"type": "string", "enum": list(DAYS)}
_MONEY = {"type": "string", "enum": list(CURRENCIES)}


def _clock(rng: random.Random) -> str:
    return f"{rng.randint(6, 22):02d}:{rng.choice((0, 10, 15, 20, 30, 45)):02d}"


TOOLS = (
    Tool(
        "get_weather",
        "Get the weather of a city on a day.",
        {"city": _TEXT, "day": _DAY},
        lambda rng: {"city": rng.choice(CITIES), "day": rng.choice(DAYS)},
        "What will the weather be in {city} on {day}?",
    ),
    Tool(
        "set_alarm",
        "Set an alarm.",
        {"time": _TEXT},
        lambda rng: {"time": _clock(rng)},
        "Wake me up at {time}.",
    ),
    Tool(
        "send_message",
        "Send a short message to a person.",
        {"person": _TEXT, "message": _TEXT},
        lambda rng: {"person": rng.choice(PEOPLE), "message": rng.choice(WORDS)},
        'Send the message "{message}" to {person}.',
    ),
    Tool(
        "convert_money",
        "Convert an amount of money to another currency.",
        {"amount": _WHOLE, "from_currency": _MONEY, "to_currency": _MONEY},
        lambda rng: {
            "amount": rng.randint(20, 990),
            **dict(zip(("from_currency", "to_currency"), rng.sample(CURRENCIES, 2), strict=True)),
        },
        "How much is {amount} {from_currency} in {to_currency}?",
    ),
    Tool(
        "book_table",
        "Book a table in a restaurant.",
        {"people": _WHOLE, "day": _DAY, "time": _TEXT},
        lambda rng: {
            "people": rng.randint(2, 12),
            "day": rng.choice(DAYS),
            "time": _clock(rng),
        },
        "Book a table for {people} people on {day} at {time}.",
    ),
    Tool(
        "switch_light",
        "Switch the light of a room on or off.",
        {"room": _ROOM, "on": {"type": "boolean"}},
        lambda rng: {"room": rng.choice(ROOMS), "on": True},
        "Switch on the light in the {room}.",
    ),
    Tool(
        "set_temperature",
        "Set the temperature of a room in degrees Celsius.",
        {"room": _ROOM, "degrees": _WHOLE},
        lambda rng: {"room": rng.choice(ROOMS), "degrees": rng.randint(15, 26)},
        "Set the {room} to {degrees} degrees.",
    ),
    Tool(
        "find_train",
        "Find a train from one city to another.",
        {"start": _TEXT, "destination": _TEXT, "day": _DAY},
        lambda rng: {
            **dict(zip(("start", "destination"), rng.sample(CITIES, 2), strict=True)),
            "day": rng.choice(DAYS),
        },
        "Find a train from {start} to {destination} on {day}.",
    ),
    Tool(
        "translate",
        "Translate a word into another language.",
        {"word": _TEXT, "language": {"type": "string", "enum": list(LANGUAGES)}},
        lambda rng: {"word": rng.choice(WORDS), "language": rng.choice(LANGUAGES)},
        'Translate "{word}" into {language}.',
    ),
    Tool(
        "add_to_list",
        "Add something to the shopping list.",
        {"thing": _TEXT, "quantity": _WHOLE},
        lambda rng: {"thing": rng.choice(FOODS), "quantity": rng.randint(2, 40)},
        "Put {quantity} {thing} on the shopping list.",
    ),
    Tool(
        "start_timer",
        "Start a timer.",
        {"minutes": _WHOLE},
        lambda rng: {"minutes": rng.randint(2, 90)},
        "Start a timer of {minutes} minutes.",
    ),
    Tool(
        "call_person",
        "Call a person on the telephone.",
        {"person": _TEXT},
        lambda rng: {"person": rng.choice(PEOPLE)},
        "Call {person}, please.",
    ),
    Tool(
        "plan_meeting",
        "Put a meeting with a person into the calendar.",
        {"person": _TEXT, "day": _DAY, "minutes": _WHOLE},
        lambda rng: {
            "person": rng.choice(PEOPLE),
            "day": rng.choice(DAYS),
            "minutes": rng.choice((15, 20, 30, 45, 60, 90)),
        },
        "Plan a meeting with {person} on {day} for {minutes} minutes.",
    ),
    Tool(
        "find_hotel",
        "Find a hotel in a city.",
        {"city": _TEXT, "nights": _WHOLE, "most_price": _WHOLE},
        lambda rng: {
            "city": rng.choice(CITIES),
            "nights": rng.randint(2, 9),
            "most_price": rng.randint(6, 30) * 10,
        },
        "Find a hotel in {city} for {nights} nights that costs at most {most_price} a night.",
    ),
)
"""Each named differently enough that a request fits one of them only."""
