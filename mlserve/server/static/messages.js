/** The conversation on the screen. What people and models wrote goes in as text, never as markup. */

import { picture } from "./attachments.js";
import { Palette } from "./palette.js";

const NEAR_PX = 80; // so close to the end, the log follows what comes

export class MessageLog {
  #element;
  #welcome;
  #palette;

  constructor(element, palette) {
    this.#element = element;
    this.#welcome = element.querySelector("#welcome");
    this.#palette = palette;
  }

  clear() {
    this.#element.replaceChildren(this.#welcome);
  }

  addQuestion(text, images) {
    const message = this.#add("question", "You");
    if (images.length) {
      const row = document.createElement("div");
      row.className = "pictures";
      row.append(...images.map(picture));
      message.append(row);
    }
    if (text) message.append(textBlock(text));
    this.#scrollToEnd();
    return message;
  }

  /** An answer to come. `adapter` is null for the base model. */
  addAnswer(name, adapter) {
    const message = this.#add("answer", name);
    Palette.paint(message, this.#palette.ofAdapter(adapter));
    return new AnswerMessage(message, () => this.#follow());
  }

  addError(text) {
    const message = document.createElement("p");
    message.className = "error";
    message.setAttribute("role", "alert");
    message.textContent = text;
    this.#element.append(message);
    this.#scrollToEnd();
  }

  clearErrors() {
    for (const message of this.#element.querySelectorAll(".error")) message.remove();
  }

  /** Take messages off again. */
  remove(...messages) {
    for (const message of messages) message.remove();
    if (!this.#element.querySelector("article")) this.#element.prepend(this.#welcome);
  }

  #add(kind, author) {
    this.#welcome.remove();
    const message = document.createElement("article");
    message.className = kind;
    const heading = document.createElement("h3");
    heading.textContent = author;
    message.append(heading);
    this.#element.append(message);
    return message;
  }

  #follow() {
    const { scrollHeight, scrollTop, clientHeight } = this.#element;
    if (scrollHeight - scrollTop - clientHeight < NEAR_PX) this.#scrollToEnd();
  }

  #scrollToEnd() {
    this.#element.scrollTop = this.#element.scrollHeight;
  }
}

/** An answer that comes piece by piece. Screen readers read it when it is whole. */
class AnswerMessage {
  #text = document.createTextNode("");
  #onGrowth;

  constructor(element, onGrowth) {
    this.element = element;
    this.#onGrowth = onGrowth;
    element.setAttribute("aria-busy", "true");
    const block = textBlock("");
    block.append(this.#text);
    element.append(block);
    onGrowth();
  }

  get text() {
    return this.#text.data;
  }

  append(text) {
    this.#text.appendData(text);
    this.#onGrowth();
  }

  /** The answer has ended; `figures` is what is known of it, an array of texts. */
  end(figures, cachedShare = null) {
    const line = document.createElement("p");
    line.className = "measured";
    if (cachedShare !== null) line.append(shareBar(cachedShare));
    for (const figure of figures) {
      const part = document.createElement("span");
      part.textContent = figure;
      line.append(part);
    }
    this.element.append(line);
    this.element.removeAttribute("aria-busy");
    this.#onGrowth();
  }
}

function textBlock(text) {
  const block = document.createElement("div");
  block.className = "text";
  block.textContent = text;
  return block;
}

/** The share of the prompt that was cached, drawn; the same stands beside it in words. */
function shareBar(share) {
  const bar = document.createElement("span");
  bar.className = "share";
  bar.setAttribute("aria-hidden", "true");
  bar.style.setProperty("--share", share);
  return bar;
}
