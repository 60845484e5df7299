/** The view of the block pool: asks the server what its blocks hold, as long as somebody can see it. */

import { cameIntoUse, count, describe, expand } from "./blocks.js";
import { BlockGrid } from "./grid.js";
import { Palette } from "./palette.js";

const BUSY_MS = 500; // between two looks while answers run or blocks change
const IDLE_MS = 2000;
const LIVELY_MS = 5000; // so long after a change it is still busy
const REST = 4; // times as long as it took to look, since the engine does nothing else in that time
const FORBIDDEN = 403;
const TIP_GAP = 6; // CSS pixels between a block and the words about it

export class PoolView {
  #root;
  #api;
  #palette;
  #grid;
  #cells = [];
  #shown = ""; // the map that #cells came from
  #chosen = null;
  #changedAt = -Infinity;
  #isAnswering = false;
  #isRefused = false;
  #isPoked = false;
  #endPause = () => {};

  constructor(root, api, palette) {
    this.#root = root;
    this.#api = api;
    this.#palette = palette;
    this.#grid = new BlockGrid(this.#find("blocks"), palette);
    this.#listen();
  }

  /** Whether an answer runs on this page. */
  set isAnswering(value) {
    this.#isAnswering = value;
    this.look();
  }

  /** Look now, rather than at the end of the pause. */
  look() {
    this.#isPoked = true;
    this.#endPause();
  }

  /** Begin to look, for as long as the page is there. */
  async start() {
    for (;;) {
      this.#isPoked = false;
      const began = performance.now();
      if (this.#isSeen()) await this.#update();
      if (!this.#isPoked) await this.#pause(REST * (performance.now() - began));
    }
  }

  #isSeen() {
    return !document.hidden && !this.#isRefused && this.#root.checkVisibility();
  }

  /** Until it is time to look again; while nobody sees it, until `look`. */
  async #pause(leastMs) {
    const isBusy = this.#isAnswering || performance.now() - this.#changedAt < LIVELY_MS;
    let timer;
    await new Promise((resolve) => {
      this.#endPause = resolve;
      if (this.#isSeen()) timer = setTimeout(resolve, Math.max(leastMs, isBusy ? BUSY_MS : IDLE_MS));
    });
    clearTimeout(timer);
  }

  async #update() {
    try {
      const ask = (path) => this.#api.json(path, { quiet: true, signal: AbortSignal.timeout(10_000) });
      const [stats, map] = await Promise.all([ask("/v1/cache"), ask("/v1/cache/blocks")]);
      this.#show(map, stats);
      this.#tell(null);
    } catch (error) {
      this.#isRefused = error.status === FORBIDDEN;
      this.#tell(this.#isRefused ? "The map needs an administrator's API key." : error.message);
    }
  }

  /** Say what is wrong, or that nothing is; the same thing only once. */
  #tell(problem) {
    const place = this.#find("pool-problem");
    place.hidden = problem === null;
    if (place.textContent !== (problem ?? "")) place.textContent = problem ?? "";
  }

  #show(map, stats) {
    const cells = expand(map);
    const counts = count(cells);
    this.#find("num-in-use").textContent = counts.states.in_use;
    this.#find("num-cached").textContent = counts.states.cached;
    this.#find("num-free").textContent = counts.states.free;
    this.#find("hit-rate").textContent = `${Math.round(100 * stats.hit_rate)} %`;
    this.#find("num-evicted").textContent = stats.num_evicted;
    const state = JSON.stringify(map);
    if (state === this.#shown) return;
    this.#shown = state;
    if (this.#cells.length) this.#changedAt = performance.now();
    const fresh = cameIntoUse(this.#cells, cells);
    this.#cells = cells;
    this.#showContents(counts);
    this.#grid.show(cells, fresh);
    this.#choose(this.#chosen !== null && this.#chosen < cells.length ? this.#chosen : null);
    this.#find("blocks").setAttribute("aria-valuemax", cells.length);
  }

  #showContents({ owners, images }) {
    const names = [...owners.keys()].sort((a, b) => (a === null ? -1 : b === null ? 1 : a.localeCompare(b)));
    const entries = names.map((owner) =>
      this.#entry(this.#palette.ofAdapter(owner), owner ?? "base model", owners.get(owner)),
    );
    if (images) entries.push(this.#entry(this.#palette.ofImage(), "images", images, "image"));
    if (!entries.length) entries.push("Nothing yet.");
    this.#find("contents").replaceChildren(...entries);
  }

  #entry(hue, name, number, kind = "text") {
    const entry = document.createElement("li");
    const swatch = document.createElement("span");
    swatch.className = `swatch in-use ${kind}`;
    Palette.paint(swatch, hue);
    const amount = document.createElement("span");
    amount.className = "amount";
    amount.textContent = number;
    entry.append(swatch, `${name} `, amount);
    return entry;
  }

  #listen() {
    const canvas = this.#find("blocks");
    const point = (event) => this.#choose(this.#grid.placeAt(event.offsetX, event.offsetY));
    canvas.addEventListener("pointermove", point);
    canvas.addEventListener("pointerdown", point);
    canvas.addEventListener("pointerleave", (event) => {
      if (event.pointerType !== "touch") this.#choose(null); // a finger leaves when it is lifted
    });
    canvas.addEventListener("focus", () => this.#choose(this.#chosen ?? 0));
    canvas.addEventListener("blur", () => this.#choose(null));
    canvas.addEventListener("keydown", (event) => this.#onKey(event));
    canvas.setAttribute("aria-valuemin", 1);
    canvas.setAttribute("aria-valuenow", 1);
    document.addEventListener("visibilitychange", () => this.look());
    // Its size is 0 while it is not shown.
    new ResizeObserver(() => {
      this.#grid.fit();
      this.look();
    }).observe(this.#find("map"));
  }

  #onKey(event) {
    const columns = this.#grid.columns;
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns };
    const last = this.#cells.length - 1;
    const here = this.#chosen ?? 0;
    const place = { Home: 0, End: last }[event.key] ?? here + steps[event.key];
    if (Number.isNaN(place) || last < 0) return;
    event.preventDefault();
    if (place < 0 || place > last) return;
    this.#choose(place);
    const { y, size } = this.#grid.boxOf(place);
    const map = this.#find("map");
    map.scrollTop = Math.max(y + size - map.clientHeight, Math.min(y, map.scrollTop));
  }

  /** Frame a block and say what it holds, on the screen and to screen readers. */
  #choose(place) {
    const chosen = place !== null && place < this.#cells.length ? place : null;
    this.#chosen = chosen;
    this.#grid.choose(chosen);
    const tip = this.#find("tip");
    tip.hidden = chosen === null;
    if (chosen === null) return;
    const words = `Block ${chosen + 1}: ${describe(this.#cells[chosen])}`;
    const canvas = this.#find("blocks");
    canvas.setAttribute("aria-valuenow", chosen + 1);
    canvas.setAttribute("aria-valuetext", words);
    tip.textContent = words;
    const { x, y, size } = this.#grid.boxOf(chosen);
    const room = canvas.parentElement.clientWidth - tip.offsetWidth;
    const isLow = y > canvas.offsetHeight / 2;
    tip.style.left = `${Math.max(0, Math.min(x, room))}px`;
    tip.style.top = `${isLow ? y - tip.offsetHeight - TIP_GAP : y + size + TIP_GAP}px`;
  }

  #find(id) {
    return this.#root.querySelector(`#${id}`);
  }
}
