/** Requests to the server that sent this page, with an API key if it needs one. */

const KEY = "mlserve-api-key"; // in sessionStorage: gone with the tab
const UNAUTHORISED = 401;

/** What the server, or the way to it, refused. `status` is 0 if no answer came. */
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export class Api {
  #askForKey;

  /** `askForKey(isWrong)` resolves to a key, or to null if there is none to be had. */
  constructor(askForKey) {
    this.#askForKey = askForKey;
  }

  /** A response that is a success. With `quiet`, nobody is asked for a key. Throws `ApiError`; `AbortError` if aborted. */
  async fetch(path, { quiet = false, ...options } = {}) {
    for (;;) {
      const key = sessionStorage.getItem(KEY);
      const response = await this.#send(path, options, key);
      if (response.ok) return response;
      if (response.status !== UNAUTHORISED || quiet) throw await errorOf(response);
      // While this request was on its way, another may have got a key.
      if (sessionStorage.getItem(KEY) !== key) continue;
      const given = await this.#askForKey(key !== null);
      if (given === null) throw new ApiError(UNAUTHORISED, "This server needs an API key.");
      sessionStorage.setItem(KEY, given);
    }
  }

  async json(path, options) {
    return (await this.fetch(path, options)).json();
  }

  async #send(path, options, key) {
    const headers = { ...options.headers };
    if (key !== null) headers.Authorization = `Bearer ${key}`;
    try {
      return await fetch(path, { ...options, headers });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError(0, "The server can't be reached.");
    }
  }
}

async function errorOf(response) {
  const body = await response.json().catch(() => null); // a proxy's page is no JSON
  return new ApiError(response.status, body?.error?.message ?? `The server answered ${response.status}.`);
}

/** The dialogue that asks for a key: a function for `Api`. All that ask at one time get one answer. */
export function keyDialog(dialog) {
  const form = dialog.querySelector("form");
  const input = dialog.querySelector("#key");
  const problem = dialog.querySelector("#key-problem");
  let asking = null;
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    dialog.close(input.value.trim());
  });
  dialog.querySelector("#key-cancel").addEventListener("click", () => dialog.close(""));
  dialog.addEventListener("cancel", () => (dialog.returnValue = "")); // the Escape key

  return (isWrong) => {
    asking ??= new Promise((resolve) => {
      dialog.showModal();
      problem.hidden = !isWrong; // shown after it opened, so that it is read out
      dialog.addEventListener("close", () => resolve(dialog.returnValue || null), { once: true });
    }).finally(() => {
      asking = null;
      input.value = dialog.returnValue = ""; // the page keeps no other copy of the key
    });
    return asking;
  };
}
