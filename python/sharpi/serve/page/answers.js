// Asks the server for answers and writes them into chats as they come. Each chat has at most one answer under way, and
// several chats may be answered at once, so a reader can look at another chat meanwhile.

import { ApiFailure, complete } from "./api.js";
import { add, ancestry, asPrompt } from "./conversation.js";
import { saveChat } from "./storage.js";

const SAVE_EVERY = 1500; // ms; a page that is closed in mid-answer loses no more

export class Answers {
  #running = new Map();
  #changed;

  /** changed(chat, message) is called whenever a message has changed, and once more when it has ended. */
  constructor(changed) {
    this.#changed = changed;
  }

  /** The chat that is being answered under this id: the object that grows, not the one that is stored. */
  chat(id) {
    return this.#running.get(id)?.chat;
  }

  message(id) {
    return this.#running.get(id)?.message;
  }

  get count() {
    return this.#running.size;
  }

  stop(id) {
    this.#running.get(id)?.aborter.abort();
  }

  /** Stops an answer whose chat is deleted, so that its end does not store the chat again. */
  drop(id) {
    const run = this.#running.get(id);
    if (run) run.dropped = true;
    this.stop(id);
  }

  /** Answers the message `asked` of a chat. options: model, system, and the sampling fields of the request. */
  async start(chat, asked, { model, system, fields }) {
    const message = add(chat, asked.id, { role: "assistant", model, thoughts: "", state: "reading" });
    const run = { chat, message, aborter: new AbortController(), saved: Date.now(), clock: clock() };
    this.#running.set(chat.id, run);
    this.#changed(chat, message);
    try {
      const turn = { model: model || undefined, messages: asPrompt(ancestry(chat, asked), system), ...fields };
      for await (const piece of complete(turn, run.aborter.signal)) this.#take(run, piece);
      message.state = message.finish === "length" ? "length" : "done";
    } catch (error) {
      message.state = error.name === "AbortError" ? "stopped" : "failed";
      if (message.state === "failed") Object.assign(message, problem(error));
    }
    measure(message, run.clock);
    chat.changed = Date.now();
    this.#running.delete(chat.id);
    if (!run.dropped) await saveChat(chat).catch(() => {});
    this.#changed(chat, message);
  }

  #take(run, piece) {
    const { message, clock: times } = run;
    const [choice] = piece.choices ?? [];
    const delta = choice?.delta ?? {};
    const thought = delta.reasoning_content ?? delta.reasoning ?? "";
    const said = delta.content ?? "";
    if (thought || said) times.first ??= performance.now();
    if (thought) {
      times.thinking ??= performance.now();
      message.thoughts += thought;
      message.state = "thinking";
    }
    if (thought || (said && message.state === "thinking")) message.thoughtMs = performance.now() - times.thinking;
    if (said) {
      message.text += said;
      message.state = "writing";
    }
    if (choice?.finish_reason) message.finish = choice.finish_reason;
    if (piece.prompt_progress) message.progress = piece.prompt_progress;
    if (piece.usage || piece.timings) message.counts = { ...message.counts, ...counts(piece) };
    this.#changed(run.chat, message);
    if (Date.now() - run.saved > SAVE_EVERY) {
      run.saved = Date.now();
      saveChat(run.chat).catch(() => {});
    }
  }
}

function clock() {
  return { begun: performance.now(), first: null, thinking: null };
}

function problem(error) {
  return error instanceof ApiFailure ? { error: error.message, status: error.status }
    : { error: `The page failed: ${error.message}`, status: 0 };
}

/** The figures of a piece; fields that the server leaves out stay as they were. */
function counts({ usage, timings }) {
  const found = {
    prompt: usage?.prompt_tokens,
    cached: usage?.prompt_tokens_details?.cached_tokens ?? timings?.cache_n,
    tokens: usage?.completion_tokens ?? timings?.predicted_n,
    thinking: usage?.completion_tokens_details?.reasoning_tokens,
    rate: timings?.predicted_per_second ?? perSecond(timings?.predicted_n, timings?.predicted_ms),
    promptRate: timings?.prompt_per_second ?? perSecond(timings?.prompt_n, timings?.prompt_ms),
  };
  return Object.fromEntries(Object.entries(found).filter(([, value]) => Number.isFinite(value)));
}

function perSecond(tokens, ms) {
  return tokens > 0 && ms > 0 ? (tokens / ms) * 1000 : undefined;
}

function measure(message, { begun, first }) {
  const now = performance.now();
  message.totalMs = now - begun;
  if (first === null) return;
  message.firstMs = first - begun;
  const written = (message.counts?.tokens ?? 0) - 1;
  if (written > 0) message.counts.rate ??= perSecond(written, now - first);
}
