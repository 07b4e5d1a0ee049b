from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtune.profilers.quality.language import LANGUAGES, detect
from kvtune.profilers.quality.texts import filler

# One plain sentence or two in each language, of everyday content.
SAMPLES = {
    "de": "Der Hund liegt vor der Tür und wartet auf seinen Freund, der heute nicht kommt.",
    "en": "The dog lies in front of the door and waits for its friend, who is not coming today.",
    "es": "El perro está delante de la puerta y espera a su amigo, que no viene hoy.",
    "fr": "Le chien est devant la porte et il attend son ami, qui ne vient pas aujourd'hui.",
    "it": "Il cane è davanti alla porta e aspetta il suo amico, che oggi non viene.",
    "ja": "犬はドアの前にいて、今日は来ない友達を待っています。",
    "ko": "개는 문 앞에 누워서 오늘 오지 않는 친구를 기다립니다.",
    "nl": "De hond ligt voor de deur en wacht op zijn vriend, die vandaag niet komt.",
    "pl": "Pies leży przed drzwiami i czeka na swojego przyjaciela, który dziś nie przyjdzie.",
    "pt": "O cão está em frente da porta e espera pelo seu amigo, que não vem hoje.",
    "ru": "Собака лежит перед дверью и ждёт своего друга, который сегодня не придёт.",
    "sv": "Hunden ligger framför dörren och väntar på sin vän, som inte kommer i dag.",
    "zh": "狗躺在门前，等着今天不来的朋友。",
}


@pytest.mark.parametrize("language", sorted(LANGUAGES))
def test_a_plain_sentence_is_told_in_each_language(language):
    assert detect(SAMPLES[language]) == language


@pytest.mark.parametrize("language", ["de", "en", "es", "fr", "it", "nl", "pl", "pt", "ru", "sv"])
def test_capital_letters_do_not_matter(language):
    assert detect(SAMPLES[language].upper()) == language


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1234 5678 !!!",
        "Emil Frida Gustav Hanna Igor Jana Klaus Lotte",
        "grumf tolpik wanzer brulo fintasch mopel drangu",
        "Ο σκύλος κάθεται μπροστά στην πόρτα.",
    ],
)
def test_what_is_in_no_known_language_is_not_guessed(text):
    assert detect(text) is None


def test_the_larger_part_of_a_mixed_text_decides():
    assert detect(SAMPLES["de"] * 4 + " " + SAMPLES["en"]) == "de"
    assert detect(SAMPLES["en"] + " 狗") == "en"


@pytest.mark.parametrize("language", ["de", "en", "es", "fr", "nl", "pl", "zh"])
@given(seed=st.integers(0, 10_000))
@settings(max_examples=40)
def test_generated_texts_are_told_and_never_taken_for_another_language(language, seed):
    lines = filler(Random(seed), 300, language)
    assert detect(" ".join(lines[:3])) == language
    assert detect(lines[3]) in (language, None)


def test_names_and_numbers_do_not_hide_the_language():
    assert detect("Rosa Kelbrook bought 17 lamps and 3 boats from Emil in Torham.") == "en"
