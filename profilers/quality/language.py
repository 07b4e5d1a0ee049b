"""Which language a text is in, from its script and its small words. No model, no network.

Letters decide between scripts; between languages in Latin script, the share of words that are
common small words of each. It is made for answers of a sentence or more in one of `LANGUAGES`, and
says nothing (`None`) rather than guess.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter

LANGUAGES = {
    "de": "German",
    "en": "English",
    "es": "Spanish",
    "fr": "French",
    "it": "Italian",
    "ja": "Japanese",
    "ko": "Korean",
    "nl": "Dutch",
    "pl": "Polish",
    "pt": "Portuguese",
    "ru": "Russian",
    "sv": "Swedish",
    "zh": "Chinese",
}

_SMALL_WORDS = {
    "de": """der die das und ist nicht ein eine einen einem einer eines zu von mit für auf den dem
        des im in es sich auch als an war wird wurde sind haben hat ich sie er wir ihr aus bei
        nach über wie oder aber wenn nur noch kann durch zum zur vom sehr dass diese dieser
        dieses werden man seine ihre unter vor bis mehr gibt liegt waren viele
        alle dann dazu da hier habe""",
    "en": """a the and of to is in that it was for on are with as at be this have from or had by not
        but what all were when we there can an your which their if will each about how up out
        them then she many some so these would other into has more her two like him see could
        no than been its who now my over did down only may after they he his you also where
        while because""",
    "es": """a el la los las de que y en un una es por con no para su se del al lo como más pero sus
        le ya o este sí porque esta entre cuando muy sin sobre también me hasta hay donde
        quien desde todo nos durante todos uno les ni contra otros ese eso ante ellos e esto
        mí antes algunos qué unos yo otro fue son está era tiene ha puede ser hace cada""",
    "fr": """a à le la les de des du un une et est en que qui dans pour pas ne sur avec il elle au
        aux ce cette ces se son sa ses par plus ou mais comme nous vous ils elles leur leurs je on
        été être était sont ont fait tout très bien aussi même sans sous entre où si y l d c
        qu n s j m
        pendant avant après beaucoup malgré encore toujours jamais rien""",
    "it": """a il lo la i gli le di che e un una uno è in per con non del della dei delle degli al
        alla ai nel nella nei sul sulla da dal dalla si come più ma anche sono ha questo
        questa questi suo sua loro era essere ci o se quando molto tra fra ogni tutti dove ho
        lui lei noi perché stato può hanno l d""",
    "nl": """de het een en van in is dat op te zijn met voor niet aan er om ook als dan maar bij
        nog uit door naar heeft had was werd worden wordt deze dit die hij zij ze wij we je ik
        hun haar over tot wel geen kan of veel meer zich onder tegen na al waar toen hebben
        werden tussen dan daarna eerst erbij hier""",
    "pl": """i w na z do nie się jest to że o jak po co za od ale przez dla czy przy tak już lub
        oraz tym są być może był była było jego jej ich ten ta te tego tej który która które
        nikt nic nigdy potem obok podczas dlaczego kiedy gdzie jeszcze najpierw bez pół
        także bardzo gdy bo pod nad ze we jako tylko każdy można ma mają jednak przed między""",
    "pt": """o a os as de que e do da em um para é com não uma se na por mais dos como mas foi ao
        ele das tem à seu sua ou ser quando muito há nos já está eu também só pelo pela até
        isso ela entre era depois sem mesmo aos ter seus quem nas me esse eles estão você num
        nem suas meu são no pode cada onde""",
    "sv": """och att det i en är som på för av med den till inte om ett han men var sig från vi så
        kan när nu hon under även eller där alla efter de du jag har hade vid ut upp mycket
        mot över sin sina sitt detta denna dessa blev blir finns många också ska skulle än vad
        hur mellan genom utan""",
}  # fmt: skip
_LATIN = {language: frozenset(words.split()) for language, words in _SMALL_WORDS.items()}
_OWNERS = Counter(word for words in _LATIN.values() for word in words)
_LETTERS = {
    "de": "äöüß",
    "es": "ñ¿¡áéíóú",
    "fr": "éèêàçùâîôûœë",
    "it": "èàùòì",
    "nl": "ë",
    "pl": "ąćęłńśźżó",
    "pt": "ãõçáâêéíóúà",
    "sv": "åäö",
}

_LETTER_OWNERS = Counter("".join(_LETTERS.values()))

LEAST_SHARE = 0.12
"""Share of a text's words that must be small words of its language. Running text has 0.3 to 0.5; a
list of names or a babble of word pieces has almost none."""

LEAD = 1.15
"""How far the best language must be ahead of the second for an answer."""


def detect(text: str) -> str | None:
    """The code of the language that most of the text is in; `None` when it cannot be told."""
    scripts = Counter(filter(None, map(_script, text)))
    if not scripts:
        return None
    # A kanji or a Chinese character says about as much as three letters of an alphabet.
    weights = {script: count * (3 if script == "han" else 1) for script, count in scripts.items()}
    main = max(weights, key=lambda script: weights[script])
    if main in ("han", "kana"):
        return "ja" if scripts["kana"] > 0.1 * scripts["han"] else "zh"
    if main == "hangul":
        return "ko"
    if main == "cyrillic":
        return None if re.search(r"[іїєґўћђљњ]", text.lower()) else "ru"
    return _latin(text.lower()) if main == "latin" else None


def _script(char: str) -> str | None:
    if not char.isalpha():
        return None
    if char.isascii():
        return "latin"
    name = unicodedata.name(char, "")
    for start, script in (
        ("LATIN", "latin"),
        ("CYRILLIC", "cyrillic"),
        ("CJK", "han"),
        ("HIRAGANA", "kana"),
        ("KATAKANA", "kana"),
        ("HANGUL", "hangul"),
    ):
        if name.startswith(start):
            return script
    return "other"


def _latin(text: str) -> str | None:
    words = re.findall(r"[^\W\d_]+", text)
    scores = {}
    for language, small in _LATIN.items():
        hits = [word for word in words if word in small]
        # A special letter counts like half a small word; what few languages share counts most.
        letters = _LETTERS.get(language, "")
        marks = sum(text.count(letter) / _LETTER_OWNERS[letter] for letter in letters) / 2
        if hits and len(hits) + marks >= LEAST_SHARE * len(words):
            scores[language] = sum(1 / _OWNERS[word] for word in hits) + marks
    ranked = sorted(scores, key=lambda language: -scores[language])
    if not ranked or (len(ranked) > 1 and scores[ranked[0]] < LEAD * scores[ranked[1]]):
        return None
    return ranked[0]
