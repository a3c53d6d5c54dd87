"""Trained models as GGUF files, and back."""
from __future__ import annotations

import json
import pathlib

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, quants
from tokenizers import Tokenizer
from torch import Tensor

from .experts import ExpertModel
from .hybrid import HybridModel
from .layers import NORM_EPS
from .text import END_OF_TEXT

MODELS = {m.ARCHITECTURE: m for m in (ExpertModel, HybridModel)}
Model = ExpertModel | HybridModel
# Routers and decays decide much with few numbers, and convolutions are not products.
EXACT = ("gate_inp", "ssm_alpha", "ssm_beta", "ssm_conv1d")


def tensor_type(name: str, ndim: int) -> GGMLQuantizationType:
    """What a tensor is stored as: experts are most of the bytes and lose least."""
    if ndim == 1 or any(part in name for part in EXACT):
        return GGMLQuantizationType.F32
    return GGMLQuantizationType.Q5_0 if "_exps" in name else GGMLQuantizationType.Q8_0


def file_name(name: str) -> str:
    """A parameter's name in the file, which knows nothing of the parts of a layer."""
    name = name.replace(".mixer.", ".").replace(".ffn.", ".")
    return name if name.endswith((".weight", ".bias", "ssm_a")) else name + ".weight"


def add_tokenizer(writer: GGUFWriter, tokenizer: Tokenizer) -> None:
    """A byte-level BPE."""
    description = json.loads(tokenizer.to_str())["model"]
    ids = {i: t for t, i in description["vocab"].items()}
    end = tokenizer.token_to_id(END_OF_TEXT)
    writer.add_vocab_size(len(ids))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([ids[i] for i in range(len(ids))])
    writer.add_token_types([3 if i == end else 1 for i in range(len(ids))])
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in description["merges"]])
    writer.add_bos_token_id(end)
    writer.add_eos_token_id(end)
    writer.add_add_bos_token(False)


def stored_values(name: str, parameter: Tensor) -> np.ndarray:
    """A parameter's values in the file, where the rates of decay stand as they are used."""
    data = parameter.detach().float().cpu().numpy()
    return -np.exp(data) if name.endswith("ssm_a") else data


def write_gguf(path: pathlib.Path, model: Model, tokenizer: Tokenizer, exact: bool = False) -> None:
    """Quantize and write the model, in the place of what was there only when it is done. exact: all in float32."""
    unfinished = path.with_name(path.name + ".part")
    writer = GGUFWriter(str(unfinished), model.ARCHITECTURE)
    writer.add_name("Sharpi story")
    writer.add_description(model.DESCRIPTION)
    writer.add_license("MIT")
    model.add_sizes(writer)
    writer.add_layer_norm_rms_eps(NORM_EPS)
    add_tokenizer(writer, tokenizer)
    for name, parameter in model.named_parameters():
        name = file_name(name)
        kind = GGMLQuantizationType.F32 if exact else tensor_type(name, parameter.ndim)
        writer.add_tensor(name, quants.quantize(stored_values(name, parameter), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    unfinished.replace(path)


def read_gguf(path: pathlib.Path, device: str) -> Model:
    """Read such a file back, its weights dequantized to float32."""
    reader = GGUFReader(str(path))
    kind = MODELS[reader.fields["general.architecture"].contents()]
    model = kind(kind.stored(lambda key: int(reader.fields[f"{kind.ARCHITECTURE}.{key}"].contents())))
    stored = {t.name: quants.dequantize(t.data, t.tensor_type) for t in reader.tensors}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            data = torch.from_numpy(np.array(stored.pop(file_name(name)), np.float32)).view_as(parameter)
            parameter.copy_(torch.log(-data) if name.endswith("ssm_a") else data)
    assert not stored, f"unknown tensors: {sorted(stored)}"
    return model.to(device).eval()
