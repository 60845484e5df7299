/** The conversation: what was said, who answers next, and the one answer that runs. */

import { Attachments } from "./attachments.js";
import { MessageLog } from "./messages.js";
import { ModelPicker } from "./models.js";
import { streamAnswer } from "./stream.js";

export class Chat {
  #root;
  #api;
  #pool;
  #onBase;
  #models;
  #log;
  #attachments;
  #prompt;
  #history = []; // messages as the API takes them
  #running = null; // the AbortController of the answer that runs

  /** `pool` is told when answers run, `onBase` gets the base model's card. */
  constructor(root, api, palette, pool, onBase) {
    this.#root = root;
    this.#api = api;
    this.#pool = pool;
    this.#onBase = onBase;
    this.#prompt = this.#find("prompt");
    this.#models = new ModelPicker(this.#find("model"), api, palette);
    this.#log = new MessageLog(this.#find("log"), palette);
    this.#attachments = new Attachments(this.#find("attachments"), (problem) => this.#log.addError(problem));
    this.#listen();
  }

  /** Ask the server which models it has. Returns whether it said. */
  async load() {
    try {
      const base = await this.#models.load();
      if (base.takes_images) this.#allowImages();
      this.#onBase(base);
      return true;
    } catch (error) {
      this.#log.addError(error.message);
      return false;
    }
  }

  #allowImages() {
    const field = this.#root.querySelector(".attach");
    if (!field.hidden) return;
    field.hidden = false;
    this.#attachments.listen(this.#root);
    const files = this.#find("files");
    files.addEventListener("change", async () => {
      await this.#attachments.addFiles([...files.files]);
      files.value = ""; // so that the same file can be picked again
      this.#prompt.focus();
    });
  }

  #listen() {
    this.#find("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    this.#prompt.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.#send();
    });
    this.#prompt.addEventListener("input", () => this.#fitPrompt());
    this.#find("stop").addEventListener("click", () => this.#stop());
    this.#root.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.#stop();
    });
    this.#find("new-chat").addEventListener("click", () => this.#startAnew());
  }

  #startAnew() {
    this.#stop();
    this.#history = [];
    this.#log.clear();
    this.#prompt.focus();
  }

  #stop() {
    this.#running?.abort();
  }

  async #send() {
    const text = this.#prompt.value.trim();
    if (this.#running || !(text || !this.#attachments.isEmpty) || !this.#areSettingsValid()) return;
    if (this.#models.isEmpty && !(await this.load())) return;
    const turn = this.#ask(text, this.#attachments.take());
    const running = new AbortController();
    this.#setRunning(running);
    try {
      const request = { model: turn.model, messages: this.#messages(), ...this.#limits() };
      const measured = await streamAnswer(this.#api, request, running.signal, (piece) => {
        if (!turn.answer.text) this.#pool.look(); // the prompt's blocks are in use now, cached or not
        turn.answer.append(piece);
      });
      this.#keep(turn, ...inWords(measured));
    } catch (error) {
      this.#onFailure(turn, error);
    } finally {
      this.#setRunning(null);
    }
  }

  /** Put the question into the log and into the history, and an empty answer behind it. */
  #ask(text, images) {
    const { name: model, adapter } = this.#models;
    this.#prompt.value = "";
    this.#fitPrompt();
    this.#log.clearErrors();
    const parts = images.map(({ url }) => ({ type: "image_url", image_url: { url } }));
    const content = images.length ? [...parts, ...(text ? [{ type: "text", text }] : [])] : text;
    this.#history.push({ role: "user", content });
    const question = this.#log.addQuestion(text, images);
    return { history: this.#history, model, text, images, question, answer: this.#log.addAnswer(model, adapter) };
  }

  #keep(turn, figures, cachedShare) {
    turn.history.push({ role: "assistant", content: turn.answer.text });
    turn.answer.end(figures, cachedShare);
  }

  /** What has come of an answer is kept. If nothing has, the question goes back to where it was written. */
  #onFailure(turn, error) {
    const isStop = error.name === "AbortError";
    if (turn.answer.text) {
      this.#keep(turn, [isStop ? "stopped" : "broken off"]);
    } else {
      turn.history.pop();
      this.#log.remove(turn.question, turn.answer.element);
      if (turn.history === this.#history) this.#giveBack(turn);
    }
    if (!isStop) this.#log.addError(error.message);
  }

  #giveBack({ text, images }) {
    this.#prompt.value = [text, this.#prompt.value].filter(Boolean).join("\n");
    this.#fitPrompt();
    this.#attachments.giveBack(images);
  }

  #setRunning(running) {
    this.#running = running;
    this.#find("send").hidden = running !== null;
    this.#find("stop").hidden = running === null;
    // The button that had the focus may be the one that is gone.
    if (document.activeElement === document.body) this.#prompt.focus();
    this.#pool.isAnswering = running !== null;
  }

  #messages() {
    const system = this.#find("system").value.trim();
    return [...(system ? [{ role: "system", content: system }] : []), ...this.#history];
  }

  #limits() {
    return {
      temperature: this.#find("temperature").valueAsNumber,
      max_tokens: this.#find("max-tokens").valueAsNumber,
    };
  }

  #areSettingsValid() {
    const fields = [this.#find("temperature"), this.#find("max-tokens")];
    const wrong = fields.find((field) => !field.checkValidity());
    if (!wrong) return true;
    this.#find("settings").open = true; // the browser says what is wrong, at the field
    wrong.reportValidity();
    return false;
  }

  /** As high as its text, within what the style sheet allows. */
  #fitPrompt() {
    this.#prompt.style.height = "auto";
    this.#prompt.style.height = `${this.#prompt.scrollHeight + 2}px`;
  }

  #find(id) {
    return this.#root.querySelector(`#${id}`);
  }
}

/** What was measured of an answer as texts, and which share of its prompt was cached. */
function inWords({ reason, usage, images, firstMs, tokensPerSecond }) {
  const { prompt_tokens: prompt, completion_tokens: completion, prompt_tokens_details: details } = usage;
  const cached = details.cached_tokens;
  const words = [`${cached} of ${prompt} prompt tokens cached`];
  if (firstMs !== null) words.push(`first token after ${inSeconds(firstMs)}`);
  if (tokensPerSecond !== null) words.push(`${tokensPerSecond.toFixed(1)} tokens/s`);
  if (reason === "length") words.push(`ended at ${completion} tokens, the most it may have`);
  for (const image of images) {
    if (image && image.canonical !== image.digest) words.push(`taken for an image like it (distance ${image.distance})`);
  }
  return [words, cached / prompt];
}

function inSeconds(ms) {
  return ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`;
}
