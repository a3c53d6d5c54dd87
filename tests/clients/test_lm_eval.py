"""lm-eval's `local-completions`: its log-likelihoods are those of the model's own logits."""

from __future__ import annotations

import json

import pytest
from conftest import Served

lm_eval = pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.models.openai_completions import LocalCompletionsAPI  # noqa: E402

PAIRS = [
    ("The capital of France is", " Paris"),
    ("The capital of France is", " London, and it lies on the Thames"),
    ("One, two, three,", " four, five, six"),
    ("Water boils at a temperature of", " one hundred degrees. 水は百度で沸騰する。"),
]

# Sums of log-probabilities in double precision, and whether each token is the likeliest.
EXPECTED = """
import json, sys
import numpy as np
from sharpi import Model
found = []
with Model.load(sys.argv[1], device="cpu") as model:
    for context, rest in json.loads(sys.argv[2]):
        begin, ids = len(model.tokenize(context)), model.tokenize(context + rest)
        rows = model.logits(ids).astype(np.float64)[begin - 1:-1]
        rows -= rows.max(axis=1, keepdims=True)
        chosen = (rows - np.log(np.exp(rows).sum(axis=1, keepdims=True)))[np.arange(len(rows)), ids[begin:]]
        found.append((float(chosen.sum()), bool((rows.argmax(axis=1) == ids[begin:]).all())))
print(json.dumps(found))
"""


def test_loglikelihoods_are_the_models(served: Served) -> None:
    client = LocalCompletionsAPI(base_url=f"{served.url}/v1/completions", model=served.model, batch_size=2,
                                 num_concurrent=2, max_length=1024)
    assert client.tokenizer_backend == "remote"
    requests = [Instance("loglikelihood", {}, pair, index) for index, pair in enumerate(PAIRS)]
    found = client.loglikelihood(requests)
    expected = served.ask_sharpi(EXPECTED, json.dumps(PAIRS))
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    for (measured, _), (computed, _), (_, rest) in zip(found, expected, PAIRS, strict=True):
        assert measured == pytest.approx(computed, abs=1e-5 * len(rest)), rest


def test_generation_until_a_text(served: Served) -> None:
    client = LocalCompletionsAPI(base_url=f"{served.url}/v1/completions", model=served.model, max_length=1024)
    request = Instance("generate_until", {}, ("One, two, three, four,", {"until": ["\n"], "max_gen_toks": 8}), 0)
    (text,) = client.generate_until([request])
    assert "five" in text and "\n" not in text
