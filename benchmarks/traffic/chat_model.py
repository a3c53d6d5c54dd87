"""The bundled model with a chat template, which `sharpi serve` needs for chats and tools."""

from __future__ import annotations

from pathlib import Path

import gguf

from sharpi.model import BUNDLED_MODEL

__all__ = ["write_chat_model"]

_TEMPLATE = ("{% if tools is defined and tools %}<tools>{{ tools | tojson }}\n{% endif %}"
             "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n"
             "{% for c in m.tool_calls %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>\n{% endfor %}"
             "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}")


def write_chat_model(path: Path, context: int = 1024) -> None:
    """Writes the bundled model's tensors and metadata to `path`, with a template that knows hermes' tool calls.

    context: the longest that the file allows, in tokens. The model was taught 1,024; beyond, it writes what it can.
    """
    reader = gguf.GGUFReader(BUNDLED_MODEL)
    writer = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        kind, *parts = field.types
        value = context if name.endswith(".context_length") else field.contents()
        writer.add_key_value(name, value, kind, parts[-1] if parts else None)
    writer.add_chat_template(_TEMPLATE)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
