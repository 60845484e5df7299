/** Images that go with the next message: dropped, pasted or picked; shown small, with a button that takes each off. */

const MAX_SIDE = 2048; // pixels; larger images are made smaller here, since models don't see more

export class Attachments {
  #list;
  #images = []; // {name, url}
  #onProblem;

  /** `list` is where they are shown; `onProblem` is told of files that are no images. */
  constructor(list, onProblem) {
    this.#list = list;
    this.#onProblem = onProblem;
  }

  /** All of them, which are then no longer here. */
  take() {
    const images = this.#images;
    this.#images = [];
    this.#show();
    return images;
  }

  /** Images that were taken, again. */
  giveBack(images) {
    this.#images.unshift(...images);
    this.#show();
  }

  get isEmpty() {
    return this.#images.length === 0;
  }

  async addFiles(files) {
    for (const file of files) {
      const name = file.name || "image";
      try {
        this.#images.push({ name, url: await dataUrl(file) });
      } catch {
        this.#onProblem(`${name} can't be read as an image.`);
      }
    }
    this.#show();
  }

  /** Take images that are dropped on, or pasted into, an element. Text that is pasted is left alone. */
  listen(element) {
    element.addEventListener("dragover", (event) => {
      if (!event.dataTransfer.types.includes("Files")) return;
      event.preventDefault();
      element.classList.add("dropping");
    });
    element.addEventListener("dragleave", (event) => {
      if (!element.contains(event.relatedTarget)) element.classList.remove("dropping");
    });
    element.addEventListener("drop", (event) => {
      element.classList.remove("dropping");
      if (!event.dataTransfer.files.length) return;
      event.preventDefault();
      this.addFiles([...event.dataTransfer.files]);
    });
    element.addEventListener("paste", (event) => {
      if (!event.clipboardData.files.length) return;
      event.preventDefault();
      this.addFiles([...event.clipboardData.files]);
    });
  }

  #show() {
    this.#list.hidden = this.isEmpty;
    this.#list.replaceChildren(...this.#images.map((image) => this.#item(image)));
  }

  #item(image) {
    const item = document.createElement("li");
    const remove = document.createElement("button");
    remove.type = "button";
    remove.textContent = "×";
    remove.setAttribute("aria-label", `Remove ${image.name}`);
    remove.addEventListener("click", () => {
      this.#images = this.#images.filter((other) => other !== image);
      this.#show();
      (this.#list.querySelector("button") ?? document.querySelector("#prompt")).focus();
    });
    item.append(picture(image), remove);
    return item;
  }
}

/** An `<img>` of an attached image. */
export function picture({ name, url }) {
  const element = document.createElement("img");
  element.src = url;
  element.alt = `Attached image ${name}`;
  return element;
}

/** The file as it is if it is small enough, otherwise drawn smaller. Throws if it is no image. */
async function dataUrl(file) {
  const bitmap = await createImageBitmap(file);
  const shrink = MAX_SIDE / Math.max(bitmap.width, bitmap.height);
  if (shrink >= 1) return readAsDataUrl(file);
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(bitmap.width * shrink));
  canvas.height = Math.max(1, Math.round(bitmap.height * shrink));
  const context = canvas.getContext("2d");
  context.imageSmoothingQuality = "high";
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL(file.type === "image/jpeg" ? "image/jpeg" : "image/png");
}

function readAsDataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result));
    reader.addEventListener("error", () => reject(reader.error));
    reader.readAsDataURL(file);
  });
}
