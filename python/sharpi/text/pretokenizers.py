"""How byte-level BPE cuts text into words before merging: the pre-tokenizers that files name."""

from __future__ import annotations

from dataclasses import dataclass

from sharpi.files.metadata import Metadata, quoted

__all__ = ["PreTokenizer", "find_pretokenizer"]


@dataclass(frozen=True)
class PreTokenizer:
    """Patterns applied one after another; each isolates its matches and leaves the gaps.

    `whole_words`: a word that is itself a token is taken as it is, without merging.
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    add_bos: bool = False


_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LINES_AND_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _gpt4_like(digits: str, marks: str = "") -> str:
    """The pattern most models since 2023 share; they differ in digits and combining marks."""
    letters = rf"[\p{{L}}{marks}]+" if marks else r"\p{L}+"
    return (rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?{letters}|{digits}"
            rf"| ?[^\s\p{{L}}{marks}\p{{N}}]+[\r\n]*|{_LINES_AND_SPACES}")


def _case_aware(digits: str, contraction: str = "", but: str = "", line_ends: str = r"[\r\n/]*") -> str:
    """The o200k family: a word is capitals then small letters, or capitals alone. `but` leaves letters out of both."""
    lead = r"[^\r\n\p{L}\p{N}]?"
    upper, lower = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]", rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]"
    return (f"{lead}{upper}*{lower}+{contraction}|{lead}{upper}+{lower}*{contraction}|{digits}"
            rf"| ?[^\s\p{{L}}\p{{N}}]+{line_ends}|{_LINES_AND_SPACES}")


_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_LINES_AND_SPACES}",
)
_DEEPSEEK_LETTERS = (  # letters with case, but not all of them
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK_MARKS = "!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002"
_EAST_ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK = (r"[\r\n]", rf"\s?[{_DEEPSEEK_LETTERS}]+", rf"\s?[{_DEEPSEEK_MARKS}]+", r"\s+$", _EAST_ASIAN, r"\p{N}")
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, r"\p{N}")
_KIMI2 = r"\p{Han}+|" + _case_aware(r"\p{N}{1,3}", _CONTRACTION + "?", but=r"&&[^\p{Han}]", line_ends=r"[\r\n]*")

# The names are those of tokenizer.ggml.pre. Only what its publisher's own tokenizer
# file or llama.cpp's table spells out is listed: a near miss gives wrong ids in silence.
_O200K = _case_aware(r"\p{N}{1,3}", _CONTRACTION + "?")
_PRETOKENIZERS: dict[str, PreTokenizer] = {}
for _names, _pretokenizer in (
    ("gpt-2 phi-2 mpt olmo jais trillion exaone4", PreTokenizer((_GPT2,))),
    ("starcoder refact command-r smollm codeshell exaone minerva-7b",
     PreTokenizer((r"\p{N}", _GPT2))),
    ("llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral lfm2",
     PreTokenizer((_gpt4_like(r"\p{N}{1,3}"),), whole_words=True, add_bos=True)),
    ("dbrx smaug-bpe", PreTokenizer((_gpt4_like(r"\p{N}{1,3}"),))),
    ("glm4 chatglm-bpe", PreTokenizer((_gpt4_like(r"\p{N}{1,3}"),), whole_words=True)),
    ("qwen2 deepseek-r1-qwen stablelm2 megrez hunyuan", PreTokenizer((_gpt4_like(r"\p{N}"),))),
    ("qwen35", PreTokenizer((_gpt4_like(r"\p{N}", marks=r"\p{M}"),))),
    ("tekken", PreTokenizer((_case_aware(r"\p{N}"),), whole_words=True, add_bos=True)),
    ("gpt-4o minimax-m2", PreTokenizer((_O200K,))),
    ("llama4", PreTokenizer((_O200K,), add_bos=True)),
    ("kimi-k2", PreTokenizer((_KIMI2,), whole_words=True)),
    ("deepseek-v3 hunyuan-dense joyai-llm", PreTokenizer(_DEEPSEEK3)),
    ("deepseek-llm", PreTokenizer(_DEEPSEEK)),
    ("deepseek-coder", PreTokenizer(_DEEPSEEK_CODER)),
):
    _PRETOKENIZERS.update(dict.fromkeys(_names.split(), _pretokenizer))


def find_pretokenizer(metadata: Metadata) -> PreTokenizer:
    """The one that tokenizer.ggml.pre names. Raises ModelFileError if it is unknown."""
    name = metadata.get_str("tokenizer.ggml.pre", None)
    if name in _PRETOKENIZERS:
        return _PRETOKENIZERS[name]
    said = "names no pre-tokenizer" if name is None else f"names the unknown pre-tokenizer {quoted(name)}"
    raise metadata.error(f"tokenizer.ggml.pre {said}; known are {', '.join(sorted(_PRETOKENIZERS))}")
