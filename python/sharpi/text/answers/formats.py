"""The formats of calls, and which of them a chat template has taught its model."""

from __future__ import annotations

from dataclasses import replace

from sharpi.text.answers.markers import Markers
from sharpi.text.answers.tool_format import Parameter, ToolFormat

__all__ = ["ANSWER_TOKENS", "FORMATS", "HERMES", "format_of"]

HERMES = ToolFormat(
    "hermes", "objects", triggers=("<tool_call>",), before_name='<tool_call>\n{"name": "',
    after_name='", "arguments": ', end="}\n</tool_call>", separator="\n", tokens=("<tool_call>", "</tool_call>"))
LLAMA = ToolFormat(
    "llama", "objects", triggers=("<|python_tag|>",), starts=("{",), before_name='{"name": "',
    after_name='", "parameters": ', end="}", several=False, tokens=("<|python_tag|>",))
MISTRAL_ARRAY = ToolFormat(
    "mistral-array", "mistral", triggers=("[TOOL_CALLS]",), opening="[TOOL_CALLS][", before_name='{"name": "',
    after_name='", "arguments": ', end="}", separator=", ", closing="]", id_length=9, tokens=("[TOOL_CALLS]",))
MISTRAL = ToolFormat(
    "mistral", "mistral", triggers=("[TOOL_CALLS]",), before_name="[TOOL_CALLS]", after_name="[ARGS]", end="",
    id_length=9, tokens=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"))
COMMAND = ToolFormat(
    "command", "objects", triggers=("<|START_ACTION|>",), opening="<|START_ACTION|>[\n    ",
    before_name='{"tool_name": "', after_name='", "parameters": ', end="}", separator=",\n    ",
    closing="\n]<|END_ACTION|>", names=("tool_name", "name"),
    tokens=("<|START_THINKING|>", "<|END_THINKING|>", "<|START_ACTION|>", "<|END_ACTION|>", "<|START_RESPONSE|>",
            "<|END_RESPONSE|>"))
DEEPSEEK = ToolFormat(
    "deepseek", "named", triggers=("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
    opening="<｜tool▁calls▁begin｜>", before_name="<｜tool▁call▁begin｜>", after_name="<｜tool▁sep｜>",
    end="<｜tool▁call▁end｜>", closing="<｜tool▁calls▁end｜>",
    tokens=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>",
            "<｜tool▁sep｜>"))
# V3 and R1 name the kind of tool first, and fence the arguments.
DEEPSEEK_FENCED = replace(
    DEEPSEEK, name="deepseek-fenced", before_name="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    after_name="\n```json\n", end="\n```<｜tool▁call▁end｜>", separator="\n")
KIMI = ToolFormat(
    "kimi", "named", triggers=("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
    opening="<|tool_calls_section_begin|>", before_name="<|tool_call_begin|>functions.",
    after_name=":{index}<|tool_call_argument_begin|>", end="<|tool_call_end|>", closing="<|tool_calls_section_end|>",
    tokens=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>", "<|tool_call_end|>"))
QWEN = ToolFormat(
    "qwen-xml", "tags", triggers=("<tool_call>", "<function="), notation="tags",
    before_name="<tool_call>\n<function=", after_name=">\n", end="</function>\n</tool_call>", separator="\n",
    parameter=Parameter("<parameter=", ">\n", "\n</parameter>\n"),
    tokens=("<tool_call>", "</tool_call>"))
GLM = ToolFormat(
    "glm", "tags", triggers=("<tool_call>",), notation="tags", before_name="<tool_call>", after_name="\n",
    end="</tool_call>", separator="\n",
    parameter=Parameter("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
    tokens=("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"))
GLM_COMPACT = replace(GLM, name="glm-compact", after_name="", separator="",
                      parameter=Parameter("<arg_key>", "</arg_key><arg_value>", "</arg_value>"))
MINIMAX = ToolFormat(
    "minimax", "tags", triggers=("<minimax:tool_call>",), notation="tags", opening="<minimax:tool_call>\n",
    before_name='<invoke name="', after_name='">\n', end="</invoke>\n", closing="</minimax:tool_call>",
    parameter=Parameter('<parameter name="', '">', "</parameter>\n"),
    tokens=("<minimax:tool_call>", "</minimax:tool_call>"))
DSML = ToolFormat(
    "dsml", "tags", triggers=("<｜DSML｜tool_calls>", "<｜DSML｜function_calls>"), notation="tags",
    opening="<｜DSML｜tool_calls>\n", before_name='<｜DSML｜invoke name="', after_name='">\n',
    end="</｜DSML｜invoke>\n", closing="</｜DSML｜tool_calls>",
    parameter=Parameter('<｜DSML｜parameter name="', '"', "</｜DSML｜parameter>\n",
                        kinds=(' string="true">', ' string="false">')),
    tokens=("｜DSML｜",))
GEMMA = ToolFormat(
    "gemma", "bare", triggers=("<|tool_call>call:",), notation="bare", before_name="<|tool_call>call:", after_name="",
    end="<tool_call|>", tokens=("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"))
PYTHON = ToolFormat(
    "python", "python", triggers=("<|tool_call_start|>",), notation="python", opening="<|tool_call_start|>[",
    before_name="", after_name="(", end=")", separator=", ", closing="]<|tool_call_end|>",
    tokens=("<|tool_call_start|>", "<|tool_call_end|>"))
# Its tokens are shown in vocabularies with messages only: others end an answer with <|end|>.
HARMONY = ToolFormat(
    "harmony", "harmony", triggers=("<|channel|>commentary to=functions.", " to=functions."),
    before_name="<|channel|>commentary to=functions.", after_name=" <|constrain|>json<|message|>", end="<|call|>",
    several=False)

# What a template's source must contain, the more telling first.
_SIGNS: tuple[tuple[tuple[str, ...], ToolFormat], ...] = (
    (("<|channel|>analysis<|message|>",), HARMONY),
    (("｜DSML｜",), DSML),
    (("<｜tool▁calls▁begin｜>", "```json"), DEEPSEEK_FENCED),
    (("<｜tool▁calls▁begin｜>",), DEEPSEEK),
    (("<|tool_calls_section_begin|>",), KIMI),
    (("<minimax:tool_call>",), MINIMAX),
    (("<|tool_call>call:",), GEMMA),
    (("[TOOL_CALLS]", "[ARGS]"), MISTRAL),
    (("[TOOL_CALLS]",), MISTRAL_ARRAY),
    (("<|START_ACTION|>",), COMMAND),
    (("</arg_key><arg_value>",), GLM_COMPACT),
    (("<tool_call>", "<arg_key>"), GLM),
    (("<function=", "<parameter="), QWEN),
    (("<tool_call>",), HERMES),
    (("<|tool_call_start|>",), PYTHON),
    (("List of tools: [",), PYTHON),  # whose template leaves the calls to the messages' content
    (('{"name": ', '"parameters": ', "<|start_header_id|>"), LLAMA),
)
FORMATS = tuple({known.name: known for _, known in _SIGNS}.values())

# Control tokens that belong to the text of an answer: they tell its parts apart.
ANSWER_TOKENS = ("<think>", "</think>", "[THINK]", "[/THINK]",
                 *dict.fromkeys(token for known in FORMATS for token in known.tokens))


def format_of(template: str) -> ToolFormat:
    """How a model with this chat template (its source) writes reasoning and calls."""
    found = next((known for signs, known in _SIGNS if all(sign in template for sign in signs)), None)
    if found is None:
        found = replace(HERMES, needs_instructions=True)
    return replace(found, thinking=Markers.of(template))
