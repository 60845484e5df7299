/** Which hue stands for what. The colours themselves are in page.css, for light and dark screens. */

const NUM_HUES = 8; // --hue-1 to --hue-8; with more adapters than that they repeat
const BASE = "--hue-base";
const IMAGE = "--hue-image";

export class Palette {
  #hues = new Map(); // adapter -> CSS variable; once given, it stays

  /** The CSS variable of an adapter, by its name or its digest; null is the base model. */
  ofAdapter(adapter) {
    if (adapter === null) return BASE;
    if (!this.#hues.has(adapter)) this.#hues.set(adapter, `--hue-${(this.#hues.size % NUM_HUES) + 1}`);
    return this.#hues.get(adapter);
  }

  ofImage() {
    return IMAGE;
  }

  /** Have an element's `--hue`, which style sheets use, be that of a variable. */
  static paint(element, variable) {
    element.style.setProperty("--hue", `var(${variable})`);
  }
}
