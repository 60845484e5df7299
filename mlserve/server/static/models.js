/** The list of models to pick from: the base model and its adapters. */

export class ModelPicker {
  #select;
  #api;
  #palette;

  constructor(select, api, palette) {
    this.#select = select;
    this.#api = api;
    this.#palette = palette;
  }

  /** Offer what the server has now; what was picked stays picked. Returns the base model's card. Throws `ApiError`. */
  async load() {
    const { data: models } = await this.#api.json("/v1/models");
    const picked = this.name;
    this.#select.replaceChildren(...models.map(option));
    if (models.some(({ id }) => id === picked)) this.#select.value = picked;
    // In the order of the list, so that an adapter's hue doesn't hang on who answered first.
    for (const { id, parent } of models) if (parent !== null) this.#palette.ofAdapter(id);
    return models.find(({ parent }) => parent === null);
  }

  get isEmpty() {
    return this.#select.options.length === 0;
  }

  /** What requests call the one that is picked. */
  get name() {
    return this.#select.value;
  }

  /** The adapter that is picked; null for the base model. */
  get adapter() {
    return this.#select.selectedOptions[0].dataset.adapter ?? null;
  }
}

function option({ id, parent }) {
  const element = new Option(parent === null ? `${id} (base)` : id, id);
  if (parent !== null) element.dataset.adapter = id;
  return element;
}
