/** The blocks as cells on a canvas. */

const MIN_PITCH = 4; // CSS pixels from one cell to the next
const MAX_PITCH = 24;
const DETAILED_PITCH = 8; // from here on there is room for outlines and signs
const CACHED_ALPHA = 0.3;
const MAX_CANVAS = 32_000; // device pixels that browsers draw, along each side
const FADE_MS = 1400;

export class BlockGrid {
  #canvas;
  #context;
  #palette;
  #cells = [];
  #pitch = MAX_PITCH;
  #columns = 1;
  #fresh = new Map(); // place -> when its ring began
  #chosen = null;
  #hasFrame = false;
  #isCalm = matchMedia("(prefers-reduced-motion: reduce)");

  constructor(canvas, palette) {
    this.#canvas = canvas;
    this.#context = canvas.getContext("2d");
    this.#palette = palette;
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#draw());
  }

  get columns() {
    return this.#columns;
  }

  /** Show these cells, and for a moment a ring around the `fresh` ones. */
  show(cells, fresh) {
    const before = this.#cells;
    this.#cells = cells;
    const now = performance.now();
    for (const place of fresh) this.#fresh.set(place, now);
    if (before.length === cells.length) this.#draw(before);
    else this.fit();
    this.#animate();
  }

  /** Choose a size of cells with which all fill the width, and if possible not more than the height they have. */
  fit() {
    const { clientWidth: width, clientHeight: height } = this.#canvas.parentElement;
    if (!width || !this.#cells.length) return;
    let pitch = MAX_PITCH;
    const numRows = () => Math.ceil(this.#cells.length / Math.floor(width / pitch));
    while (pitch > MIN_PITCH && numRows() * pitch > height) pitch -= 1;
    this.#pitch = pitch;
    this.#columns = Math.floor(width / pitch);
    const scale = Math.min(devicePixelRatio, MAX_CANVAS / (numRows() * pitch));
    this.#canvas.width = this.#columns * pitch * scale;
    this.#canvas.height = numRows() * pitch * scale;
    this.#canvas.style.width = `${this.#columns * pitch}px`;
    this.#canvas.style.height = `${numRows() * pitch}px`;
    this.#context.scale(scale, scale);
    this.#draw();
  }

  /** The place of the cell at a point of the canvas in CSS pixels, or null. */
  placeAt(x, y) {
    const column = Math.floor(x / this.#pitch);
    const place = Math.floor(y / this.#pitch) * this.#columns + column;
    return column >= 0 && column < this.#columns && place >= 0 && place < this.#cells.length ? place : null;
  }

  /** Where a cell is on the canvas, in CSS pixels. */
  boxOf(place) {
    const pitch = this.#pitch;
    return { x: (place % this.#columns) * pitch, y: Math.floor(place / this.#columns) * pitch, size: pitch };
  }

  /** Frame a cell, or none. */
  choose(place) {
    const before = this.#chosen;
    this.#chosen = place;
    const colours = this.#colours();
    for (const each of [before, place]) if (each !== null) this.#drawCell(each, colours);
  }

  #animate() {
    if (this.#hasFrame || !this.#fresh.size) return;
    this.#hasFrame = true;
    requestAnimationFrame((now) => {
      this.#hasFrame = false;
      const colours = this.#colours();
      for (const [place, since] of [...this.#fresh]) {
        if (now - since > FADE_MS) this.#fresh.delete(place);
        if (place < this.#cells.length) this.#drawCell(place, colours, now);
      }
      this.#animate();
    });
  }

  /** Draw all cells, or those that look other than `before`. */
  #draw(before = []) {
    const colours = this.#colours();
    this.#cells.forEach((cell, place) => {
      if (looksOther(cell, before[place])) this.#drawCell(place, colours);
    });
  }

  /** What CSS variables are now, each looked up once. */
  #colours() {
    const style = getComputedStyle(this.#canvas);
    const known = new Map();
    return (variable) => {
      if (!known.has(variable)) known.set(variable, style.getPropertyValue(variable));
      return known.get(variable);
    };
  }

  #drawCell(place, colours, now = performance.now()) {
    const context = this.#context;
    const cell = this.#cells[place];
    const { x, y, size } = this.boxOf(place);
    const isDetailed = size >= DETAILED_PITCH;
    const gap = isDetailed ? 1.5 : 0.5;
    const side = size - 2 * gap;
    const path = new Path2D();
    path.roundRect(x + gap, y + gap, side, side, isDetailed ? side / 5 : 0);
    context.clearRect(x, y, size, size);
    if (cell.state === "free") {
      this.#outline(path, colours("--hue-free"), 1);
    } else {
      this.#fill(path, cell, colours, isDetailed);
      if (isDetailed && cell.image !== null) this.#sign(x + size / 2, y + size / 2, side, cell, colours);
    }
    const age = now - (this.#fresh.get(place) ?? -Infinity);
    if (place === this.#chosen) this.#outline(path, colours("--text"), 2.5);
    else if (age < FADE_MS) this.#outline(path, colours("--text"), 2, this.#isCalm.matches ? 1 : 1 - age / FADE_MS);
  }

  #fill(path, cell, colours, isDetailed) {
    const context = this.#context;
    const hue = colours(cell.image === null ? this.#palette.ofAdapter(cell.owner) : this.#palette.ofImage());
    context.fillStyle = hue;
    context.globalAlpha = cell.state === "cached" ? CACHED_ALPHA : 1;
    context.fill(path);
    context.globalAlpha = 1;
    if (isDetailed && cell.state === "cached") this.#outline(path, hue, 1);
  }

  /** Images have a diamond, and in it the hue of the adapter that read them: they are told by shape too. */
  #sign(x, y, side, cell, colours) {
    this.#diamond(x, y, side / 2.6, colours("--panel"));
    if (cell.owner !== null) this.#diamond(x, y, side / 4, colours(this.#palette.ofAdapter(cell.owner)));
  }

  #diamond(x, y, radius, colour) {
    const context = this.#context;
    context.beginPath();
    context.moveTo(x, y - radius);
    context.lineTo(x + radius, y);
    context.lineTo(x, y + radius);
    context.lineTo(x - radius, y);
    context.fillStyle = colour;
    context.fill();
  }

  #outline(path, colour, width, alpha = 1) {
    const context = this.#context;
    context.globalAlpha = alpha;
    context.strokeStyle = colour;
    context.lineWidth = width;
    context.stroke(path);
    context.globalAlpha = 1;
  }
}

function looksOther(cell, before) {
  return cell.state !== before?.state || cell.owner !== before.owner || cell.image !== before.image;
}
