// Speaks to the server that the page came from, and to no other.

import { remembered } from "./storage.js";

/** What went wrong, in words for the reader. status: of HTTP; 0 if there was no answer. */
export class ApiFailure extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

async function request(path, options = {}) {
  const key = remembered("key", "");
  const headers = { ...(options.body && { "Content-Type": "application/json" }),
    ...(key && { Authorization: `Bearer ${key}` }) };
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store", credentials: "same-origin" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiFailure("The server does not answer. Is it still running?");
  }
  if (!response.ok) throw await failure(response);
  return response;
}

async function failure(response) {
  if (response.status === 401) {
    return new ApiFailure("The server asks for an API key. Enter it in the settings.", response.status);
  }
  const said = messageOf(await response.json().catch(() => null));
  return new ApiFailure(said || `The server answered with status ${response.status}.`, response.status);
}

function messageOf(body) {
  const error = body?.error ?? body;
  return typeof error === "string" ? error : error?.message;
}

/** The answer's JSON, or nothing if the server does not offer that or cannot now. */
async function maybe(path) {
  try {
    return await (await request(path)).json();
  } catch (error) {
    if (error.status === 401) throw error;
    return null;
  }
}

export async function models() {
  const found = await (await request("v1/models")).json();
  return (found?.data ?? []).map(({ id }) => id).filter((id) => typeof id === "string");
}

export function properties(model) {
  return maybe(`props?model=${encodeURIComponent(model)}`);
}

export function slots(model) {
  return maybe(`slots?model=${encodeURIComponent(model)}`);
}

/** The objects of an answer as they come. */
export async function* complete(turn, signal) {
  const body = JSON.stringify({ ...turn, stream: true, stream_options: { include_usage: true }, return_progress: true,
    timings_per_token: true });
  const response = await request("v1/chat/completions", { method: "POST", body, signal });
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const piece = JSON.parse(data);
    if (piece.error) throw new ApiFailure(messageOf(piece), response.status);
    yield piece;
  }
  throw new ApiFailure("The connection ended before the answer did.");
}

/** The data of server-sent events; comments, which keep the connection open, are passed over. */
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { done, value } = await reader.read().catch(lost);
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines.map((each) => each.replace(/\r$/, ""))) {
        if (line.startsWith("data:")) data.push(line.slice(5).trimStart());
        else if (!line && data.length) {
          yield data.join("\n");
          data = [];
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function lost(error) {
  throw error.name === "AbortError" ? error : new ApiFailure("The connection to the server was lost.");
}
