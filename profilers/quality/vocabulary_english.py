"""The English vocabulary of generated texts."""

from __future__ import annotations

from kvtune.profilers.quality.vocabulary import Vocabulary

_ADJECTIVES = (
    "old", "broken", "heavy", "small", "painted", "borrowed", "forgotten", "wooden", "striped",
    "dusty", "folded", "polished", "rusty", "woven", "cracked", "spare", "expensive", "crooked",
)  # fmt: skip
_NOUNS = (
    "lantern", "ladder", "kettle", "umbrella", "bicycle", "mirror", "basket", "telescope",
    "violin", "blanket", "chair", "map", "barrel", "compass", "curtain", "drum", "hammer",
    "suitcase", "teapot", "wheel", "saddle", "fishing rod", "photograph", "coat", "bench",
    "typewriter", "vase", "rope", "sack of flour", "jar of honey", "loaf of bread", "tent",
)  # fmt: skip

ENGLISH = Vocabulary(
    language="en",
    typical_characters=4.7,
    least_characters=3.0,
    names=(
        "Tessa", "Bram", "Odile", "Karel", "Juno", "Lars", "Wanda", "Greta", "Anton", "Maud",
        "Felix", "Ines", "Piet", "Rosa", "Simon", "Thea", "Viktor", "Yara", "Emil", "Clara",
        "Hugo", "Lotte", "Milan", "Nora", "Oscar", "Paula", "Ruben", "Stella", "Tobias", "Ursula",
        "Willem", "Zoe", "Agnes", "Boris", "Dora", "Edgar", "Fanny", "Gustav", "Hilda", "Jakob",
    ),
    times=(
        "on Monday", "on Tuesday evening", "on Wednesday", "late on Thursday", "on Friday",
        "on Saturday morning", "on Sunday", "after lunch", "before sunrise", "in early spring",
        "at the end of summer", "during the storm", "a week later", "the next day",
        "shortly before noon", "around midnight", "in the middle of winter", "after the concert",
        "while the bells rang", "some days later", "when the rain stopped", "at dusk",
        "during the holidays", "on the first warm day",
    ),
    verbs=(
        "found", "repaired", "carried", "painted", "sold", "bought", "cleaned", "hid", "borrowed",
        "lost", "measured", "wrapped", "admired", "dropped", "returned", "described", "collected",
        "dragged", "photographed", "decorated", "inspected", "moved", "needed", "forgot",
    ),
    things=tuple(f"the {adjective} {noun}" for adjective in _ADJECTIVES for noun in _NOUNS),
    places=(
        "at the mill", "near the chapel", "in the harbour", "behind the orchard", "in the barn",
        "by the well", "under the bridge", "at the market", "next to the kiln", "in the library",
        "on the hill", "at the station", "in the bakery", "along the canal", "in the courtyard",
        "outside the theatre", "near the lighthouse", "in the workshop", "at the crossroads",
        "beside the river", "in the attic", "at the ferry landing", "behind the school",
        "in the greenhouse", "on the upper floor", "at the edge of the forest",
        "in front of the town hall", "in the cellar",
    ),
    tails=(
        "because the road was closed", "and nobody asked why", "although it was getting dark",
        "and the neighbours were pleased", "without telling anyone", "as the weather was mild",
        "since there was nothing else to do", "and then went home", "to everyone's surprise",
        "although the price was high", "and wrote a long letter about it", "in spite of the wind",
        "because an aunt had asked for it", "and the dog slept through it all",
        "while the children played outside", "just as the market closed", "with great care",
        "before the guests arrived", "and told the story for years", "for no good reason",
        "because the old one was worn out", "until the lamps were lit", "and laughed about it",
        "as the custom in the valley demands",
    ),
    shapes=(
        "{time}, {name} {verb} {thing} {place}.",
        "{name} {verb} {thing} {place} {tail}.",
        "{time}, {name} and {other} {verb} {thing} {tail}.",
        "{place}, {name} {verb} {thing}, {tail}.",
        "{name} told {other} about {thing} {place}.",
        "it was {time} that {name} {verb} {thing}.",
        "{other} was {place} when {name} {verb} {thing}.",
        "{time}, a stranger asked {name} for {thing} {tail}.",
        "nobody remembers why {name} {verb} {thing} {place}.",
        "{thing} stayed {place}, and {name} stopped looking for it.",
        "{name} promised {other} to bring {thing} back {time}.",
        "{time}, {thing} stood {place} {tail}.",
        "according to {other}, {name} {verb} {thing} {tail}.",
        "there was music {place}, so {name} and {other} met there {time}.",
        "{name} waited for {other} {place} {tail}.",
        "people say that {thing} once belonged to {name}.",
        "{other} wanted to know whether {name} {verb} {thing} {time}.",
        "first {name} {verb} {thing}, and then {other} came {place}.",
        "as usual, {name} arrived {place} {time}, {tail}.",
        "{name} did not like {thing}, but {other} {verb} it {tail}.",
    ),
    owners=tuple(
        f"the {colour} {place}"
        for colour in (
            "blue", "green", "red", "yellow", "purple", "orange", "white", "black", "golden",
            "silver", "pink", "brown",
        )
        for place in (
            "safe", "locker", "vault", "gate", "cabinet", "elevator", "garage", "laboratory",
            "warehouse", "archive",
        )
    ),
    code_fact="The secret code of {owner} is {code}.",
    code_question="What is the secret code of {owner}?",
    code_answer="The secret code of {owner} is",
)  # fmt: skip
