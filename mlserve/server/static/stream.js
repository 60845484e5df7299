/** One answer, streamed. */

import { ApiError } from "./api.js";

const END = "[DONE]";

/** The data of each server-sent event of a body. An event ends at an empty line; what else events may have isn't used. */
export async function* readEvents(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      pending += value.replaceAll("\r", "");
      const events = pending.split("\n\n");
      pending = events.pop();
      for (const event of events) {
        const lines = event.split("\n").filter((line) => line.startsWith("data:"));
        if (lines.length) yield lines.map((line) => line.slice("data:".length).trimStart()).join("\n");
      }
    }
  } finally {
    await reader.cancel().catch(() => {}); // of an aborted body it throws again what was thrown before
  }
}

/**
 * Ask for an answer, and call `onText` with each piece of it.
 *
 * Returns `{reason, usage, images, firstMs, tokensPerSecond}`: why it ended, and the figures. A rate counts the tokens
 * after the first, over the time since the first. Throws `ApiError`, and `AbortError` when `signal` says stop.
 */
export async function streamAnswer(api, request, signal, onText) {
  const started = performance.now();
  let first = null;
  let last = null;
  const answer = { reason: null, usage: null, images: [] };
  const response = await api.fetch("/v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...request, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  let isWhole = false;
  for await (const data of readEvents(response.body)) {
    isWhole = data === END;
    if (isWhole) break;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(response.status, chunk.error.message);
    const choice = chunk.choices[0];
    const text = choice?.delta.content;
    if (text || choice?.finish_reason) {
      last = performance.now();
      first ??= last;
    }
    if (text) onText(text);
    answer.reason = choice?.finish_reason ?? answer.reason;
    answer.usage = chunk.usage ?? answer.usage;
    answer.images = chunk.images ?? answer.images;
  }
  if (!isWhole) throw new ApiError(0, "The connection broke before the answer was whole.");
  const numLater = (answer.usage?.completion_tokens ?? 0) - 1;
  const tokensPerSecond = numLater > 0 && last > first ? (1000 * numLater) / (last - first) : null;
  return { ...answer, firstMs: first === null ? null : first - started, tokensPerSecond };
}
