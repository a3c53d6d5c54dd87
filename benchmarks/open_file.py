"""What opening a model file costs: Sharpi's reader against the `gguf` package's.

Writes a file with a vocabulary as large as the largest in use (tokens, scores, types and merges, 250,000 each by
default) and a table of 600 tensors, then opens it with each reader, every time in a process of its own:

    python benchmarks/open_file.py [--tokens 250000] [--runs 5]

Prints the median of each step in milliseconds. The file lies in the page cache, so this is the reader's own work.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

SHARPI = """
import json, sys, time
t0 = time.perf_counter()
from sharpi.files.gguf import GgufFile
t1 = time.perf_counter()
model = GgufFile.open(sys.argv[1])
t2 = time.perf_counter()
tokens = model.metadata.get_strings("tokenizer.ggml.tokens").decode()
t3 = time.perf_counter()
merges = model.metadata.get_strings("tokenizer.ggml.merges").decode()
t4 = time.perf_counter()
assert len(tokens) == len(merges) == int(sys.argv[2])
print(json.dumps({"import": t1 - t0, "open": t2 - t1, "tokens": t3 - t2, "merges": t4 - t3}))
"""

GGUF_PACKAGE = """
import json, sys, time
t0 = time.perf_counter()
from gguf import GGUFReader
t1 = time.perf_counter()
model = GGUFReader(sys.argv[1])
t2 = time.perf_counter()
tokens = model.get_field("tokenizer.ggml.tokens").contents()
t3 = time.perf_counter()
merges = model.get_field("tokenizer.ggml.merges").contents()
t4 = time.perf_counter()
assert len(tokens) == len(merges) == int(sys.argv[2])
print(json.dumps({"import": t1 - t0, "open": t2 - t1, "tokens": t3 - t2, "merges": t4 - t3}))
"""


def write_vocabulary(path: Path, count: int) -> None:
    """A file whose strings are about as long as a large multilingual vocabulary's: 6 and 8 bytes on average."""
    import gguf
    import numpy as np

    letters = random.Random(5)
    alphabet = "abcdefghijklmnopqrstuvwxyzĠäé日本語"
    words = ["".join(letters.choices(alphabet, k=letters.randint(1, 9))) for _ in range(count)]
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_token_list(words)
    writer.add_token_scores([float(-index) for index in range(count)])
    writer.add_token_types([1] * count)
    writer.add_token_merges([f"{word[:4]} {word[4:]}" for word in words])
    for index in range(600):
        writer.add_tensor(f"blk.{index // 12}.tensor_{index % 12}.weight", np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def measure(program: str, path: Path, count: int, runs: int) -> dict[str, float]:
    """Median seconds of each step over `runs` fresh processes."""
    results = [json.loads(subprocess.run([sys.executable, "-c", program, str(path), str(count)], check=True,
                                         capture_output=True, text=True).stdout) for _ in range(runs)]
    return {step: statistics.median(result[step] for result in results) for step in results[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=250_000)
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vocabulary.gguf"
        write_vocabulary(path, arguments.tokens)
        print(f"{arguments.tokens:,} tokens and merges, 600 tensors, {path.stat().st_size / 1e6:.1f} MB; milliseconds")
        print(f"{'':10}{'import':>10}{'open':>10}{'tokens':>10}{'merges':>10}")
        for name, program in (("sharpi", SHARPI), ("gguf", GGUF_PACKAGE)):
            times = measure(program, path, arguments.tokens, arguments.runs)
            print(f"{name:10}" + "".join(f"{1000 * times[step]:10.1f}"
                                         for step in ("import", "open", "tokens", "merges")))


if __name__ == "__main__":
    main()
