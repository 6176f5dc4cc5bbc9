"""Record what openai/whisper's tokenizer makes of awkward texts, with the English-only vocabulary.

    python tests/golden/make_encodings.py > tests/golden/encodings.tiny.en.json

In an environment of its own (`pip install openai-whisper==20250625`); tests/engine/test_byte_pairs.py compares.
"""

from __future__ import annotations

import json

from whisper.tokenizer import get_tokenizer

TEXTS = (
    " Glossary: Zanzibar, Quetzalcoatl, Ouagadougou",
    "Hello world",
    "don't we'll I'VE they're",
    "  two  spaces   and\ttabs\n\nnewlines  ",
    "3.14159 and 1,000,000 x² ½ Ⅷ 一二三",
    "春风春风春风 北京のテスト 🎉 ņ",
    "naïve café — “quotes” …",
    "e\u0301 combining",
    "<|endoftext|> is text <|0.00|>",
    " ",
    "",
    "a",
    "\u00a0nbsp\u2003em",
    "supercalifragilisticexpialidocious",
    "안녕하세요 세계",
    "Привет, мир!",
    "हिन्दी भाषा",
    "👩‍👩‍👧‍👦 family",
)


def main() -> None:
    encoding = get_tokenizer(multilingual=False).encoding
    rows = (json.dumps([text, encoding.encode(text, disallowed_special=())], ensure_ascii=False) for text in TEXTS)
    print("[\n  " + ",\n  ".join(rows) + "\n]")


if __name__ == "__main__":
    main()
