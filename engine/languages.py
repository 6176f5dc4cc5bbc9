"""The languages of Whisper: code → English name, in the order of their tokens (openai/whisper tokenizer.py).

Which of them a model has is read from its checkpoint; this table only gives names to codes.
"""

from __future__ import annotations

_PAIRS = """
en:english zh:chinese de:german es:spanish ru:russian ko:korean fr:french ja:japanese pt:portuguese
tr:turkish pl:polish ca:catalan nl:dutch ar:arabic sv:swedish it:italian id:indonesian hi:hindi fi:finnish
vi:vietnamese he:hebrew uk:ukrainian el:greek ms:malay cs:czech ro:romanian da:danish hu:hungarian ta:tamil
no:norwegian th:thai ur:urdu hr:croatian bg:bulgarian lt:lithuanian la:latin mi:maori ml:malayalam cy:welsh
sk:slovak te:telugu fa:persian lv:latvian bn:bengali sr:serbian az:azerbaijani sl:slovenian kn:kannada
et:estonian mk:macedonian br:breton eu:basque is:icelandic hy:armenian ne:nepali mn:mongolian bs:bosnian
kk:kazakh sq:albanian sw:swahili gl:galician mr:marathi pa:punjabi si:sinhala km:khmer sn:shona yo:yoruba
so:somali af:afrikaans oc:occitan ka:georgian be:belarusian tg:tajik sd:sindhi gu:gujarati am:amharic
yi:yiddish lo:lao uz:uzbek fo:faroese ht:haitian-creole ps:pashto tk:turkmen nn:nynorsk mt:maltese
sa:sanskrit lb:luxembourgish my:myanmar bo:tibetan tl:tagalog mg:malagasy as:assamese tt:tatar haw:hawaiian
ln:lingala ha:hausa ba:bashkir jw:javanese su:sundanese yue:cantonese
"""

LANGUAGES = dict(pair.split(":") for pair in _PAIRS.split())
LANGUAGES["ht"] = "haitian creole"

_CODES = {name: code for code, name in LANGUAGES.items()}


def language_code(text: str) -> str | None:
    """The code that `text` means, or None where it means none.

    Accepts a code, a code with a region (`en-US`, `en_us`) or an English name, in any case.
    """
    word = text.strip().lower()
    base = word.replace("_", "-").partition("-")[0]
    if word in _CODES:
        return _CODES[word]
    return base if base in LANGUAGES else None
