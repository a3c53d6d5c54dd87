"""A conversation whose every turn repeats all before it: what each turn finds in the cache, and how soon it answers.

    python benchmarks/traffic/conversation.py [-m MODEL] [--turns 20] [--tokens 60000] [--answer 16] [--json FILE]

--tokens: of the whole conversation at its end; without it, nine tenths of the model's context. Each turn's prompt is
the conversation so far, with the model's own answers, and a new question of random tokens. Three servings are timed:

kept     one scheduler serves all turns, one after the other
cold     each turn by a scheduler that has seen nothing
restart  each turn by a new scheduler with the cache directory that the ones before it have left

Beside them stands the time of the rest alone: the first token after what earlier turns left, in another conversation
of the same lengths, where one prompt brought the cache to that depth and a second one adds exactly the rest. The last
table serves conversations that want 60, 130 and 300 % of the cache's pages at once, and compares the time beyond that
of a cache with room for all with what was computed again. Of the conversation that is kept, too, it says how much was
computed again: the last page of a prompt, and answers, whose rows may not be a prompt's. Every serving must give the
same answers.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sharpi import Model, Scheduler
from sharpi.benchmark import again_share

PAGE = 64  # tokens of a page of the KV cache
DEMANDS = (0.6, 1.3, 3.0)


@dataclass(frozen=True)
class Turn:
    """One turn's prompt, what the cache had of it, seconds to the first token, and the answer."""

    prompt: int
    reused: int
    seconds: float
    answer: tuple[int, ...]


@dataclass(frozen=True)
class Demand:
    """Requests that want this part of the cache's pages: seconds until all are answered, and beside that with room for
    all. again_seconds: of it, computing what had been computed before."""

    part: float
    requests: int
    seconds: float
    beside_seconds: float
    again_seconds: float
    pauses: int
    spilled_pages: int
    restored_pages: int


def answered(scheduler: Scheduler, prompt: Sequence[int], tokens: int) -> Turn:
    """Serves one request alone."""
    started, first, ids = time.perf_counter(), 0.0, []
    with scheduler.submit(prompt, max_tokens=tokens, temperature=0.0, ignore_end=True) as answer:
        for token in answer:
            first = first or time.perf_counter() - started
            ids.append(token.id)
        return Turn(len(prompt), answer.reused_tokens, first, tuple(ids))


class Replay:
    """A conversation with a model."""

    def __init__(self, model: Model, turns: int, tokens: int, answer: int) -> None:
        self._model, self._answer = model, answer
        self.counts: dict[str, Any] = {}  # what the scheduler of the last kept() says
        question = tokens // turns - answer
        if question < 1:
            raise SystemExit(f"{turns} turns with answers of {answer} tokens do not fit into {tokens} tokens")
        self.questions = [self._random(question, turn) for turn in range(turns)]

    def _random(self, count: int, seed: int) -> list[int]:
        draw = random.Random(seed)
        return [draw.randrange(self._model.spec.vocab_size) for _ in range(count)]

    def kept(self) -> list[Turn]:
        """One scheduler serves all turns."""
        text: list[int] = []
        turns = []
        with self._model.scheduler() as scheduler:
            for question in self.questions:
                turns.append(answered(scheduler, text + question, self._answer))
                text += [*question, *turns[-1].answer]
            self.counts = scheduler.counts()
        return turns

    def anew(self, prompts: Sequence[Sequence[int]], cache_dir: str | None) -> list[Turn]:
        """A new scheduler serves each turn."""
        turns = []
        for prompt in prompts:
            with self._model.scheduler(spill_bytes=0, states_bytes=0, cache_dir=cache_dir) as scheduler:
                turns.append(answered(scheduler, prompt, self._answer))
        return turns

    def prompts(self, turns: Sequence[Turn]) -> list[list[int]]:
        """Of the turns that kept() gave."""
        text: list[int] = []
        prompts = []
        for question, turn in zip(self.questions, turns, strict=True):
            prompts.append(text + question)
            text = [*prompts[-1], *turn.answer]
        return prompts

    def rest_alone(self, turn: Turn, number: int) -> float:
        """Seconds to the first token of a prompt of the turn's length, of which the cache has as much."""
        text = self._random(turn.prompt, 1000 + number)
        with self._model.scheduler() as scheduler:
            if turn.reused:
                answered(scheduler, text[:turn.reused + 1], 1)
            return answered(scheduler, text, 1).seconds


def demands(path: str | None, options: dict[str, Any], tokens: int, answer: int) -> list[Demand]:
    """Requests of `tokens` tokens each, all at once, in a cache of four times as many."""
    room, found = -(-4 * tokens // PAGE) * PAGE, []
    for part in DEMANDS:
        requests = max(1, round(part * room / tokens))
        results = []
        for cache_tokens in (room, max(room, -(-tokens // PAGE) * PAGE * (requests + 1))):
            with Model.load(path, cache_tokens=cache_tokens, sequences=requests + 2, **options) as model, \
                    model.scheduler(queue=requests) as scheduler:
                started = time.perf_counter()
                draws = [random.Random(number) for number in range(requests)]
                answers = [scheduler.submit([draw.randrange(model.spec.vocab_size) for _ in range(tokens - answer)],
                                            max_tokens=answer, temperature=0.0, ignore_end=True) for draw in draws]
                texts = [[token.id for token in one] for one in answers]
                results.append((texts, time.perf_counter() - started, scheduler.counts()))
        (texts, seconds, counts), (alone, beside, _) = results
        require(texts == alone, f"at {part:.0%} of the pages")
        found.append(Demand(part, requests, seconds, beside, counts["again_seconds"], counts["pauses"],
                            counts["spilled_pages"], counts["restored_pages"]))
    return found


def again_of(counts: dict[str, Any]) -> dict[str, float]:
    """The part of the time of all passes that went into tokens computed again, and those tokens by what they were."""
    kinds = ("lost", "answers_again", "cuts_again")
    return {"share": again_share(counts), **{f"{kind}_tokens": counts[f"{kind}_tokens"] for kind in kinds}}


def require(same: bool, where: str) -> None:
    """Ends the program if answers differ: the times would then compare different work."""
    if not same:
        raise SystemExit(f"the answers differ {where}")


def measured(arguments: argparse.Namespace) -> dict[str, Any]:
    """All tables, as JSON takes them."""
    options = {"device": arguments.device, "threads": arguments.threads, "vram": arguments.vram,
               "context": arguments.tokens}
    with Model.load(arguments.model, **options) as model:
        tokens = arguments.tokens or model.plan.context * 9 // 10
        replay = Replay(model, arguments.turns, tokens, arguments.answer)
        replay.kept()  # warms up
        kept = replay.kept()
        prompts, again = replay.prompts(kept), again_of(replay.counts)
        cold = replay.anew(prompts, None)
        with tempfile.TemporaryDirectory() as folder:
            restart = replay.anew(prompts, folder)
        rest = [replay.rest_alone(turn, number) for number, turn in enumerate(kept)]
    for name, turns in (("after a cold start", cold), ("after a restart", restart)):
        require([turn.answer for turn in turns] == [turn.answer for turn in kept], name)
    of_requests = demands(arguments.model, {**options, "context": tokens}, max(PAGE, tokens // 4), arguments.answer)
    return {"again": again,
            "turns": [{"prompt": turn.prompt, "before": turn.prompt - len(question), "reused": turn.reused,
                       "after_restart": again.reused, "seconds": turn.seconds, "rest_seconds": alone,
                       "cold_seconds": new.seconds, "restart_seconds": again.seconds}
                      for turn, question, again, new, alone
                      in zip(kept, replay.questions, restart, cold, rest, strict=True)],
            "demands": [asdict(demand) for demand in of_requests]}


def show(found: dict[str, Any]) -> None:
    """Prints the tables."""
    print("| turn | prompt | before | from the cache | after a restart | first token, ms | of the rest alone, ms |"
          " cold, ms | after a restart, ms |")
    print("| ---: " * 9 + "|")
    for number, turn in enumerate(found["turns"], 1):
        times = (turn["seconds"], turn["rest_seconds"], turn["cold_seconds"], turn["restart_seconds"])
        counts = (number, turn["prompt"], turn["before"], turn["reused"], turn["after_restart"])
        print("| " + " | ".join([*(f"{count:,}" for count in counts), *(f"{1e3 * one:.1f}" for one in times)]) + " |")
    sums = {name: sum(turn[name] for turn in found["turns"]) for name in ("seconds", "rest_seconds", "cold_seconds")}
    print(f"\nall turns: {sums['seconds'] / sums['rest_seconds']:.2f} x the rest alone,"
          f" {sums['cold_seconds'] / sums['seconds']:.2f} x faster than cold")
    again = found["again"]
    print(f"computing again took {again['share']:.1%} of the time of passes: {again['answers_again_tokens']:,} tokens"
          f" of answers, {again['cuts_again_tokens']:,} of prompts after their last page,"
          f" {again['lost_tokens']:,} lost\n")
    print("| demand | requests | s | with room for all, s | computing again, s | pauses | pages spilled, restored |")
    print("| ---: " * 7 + "|")
    for one in found["demands"]:
        print(f"| {one['part']:.0%} | {one['requests']} | {one['seconds']:.2f} | {one['beside_seconds']:.2f} |"
              f" {one['again_seconds']:.2f} | {one['pauses']} | {one['spilled_pages']}, {one['restored_pages']} |")


def main(given: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("-m", "--model", help="default: the bundled model")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--vram")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--answer", type=int, default=16, help="tokens of each answer")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(given)
    found = measured(arguments)
    show(found)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
