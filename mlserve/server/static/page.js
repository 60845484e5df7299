/** Puts the page together. */

import { Api, keyDialog } from "./api.js";
import { Chat } from "./chat.js";
import { Palette } from "./palette.js";
import { PoolView } from "./pool.js";

/** On narrow screens one of the two views is shown. */
function switchViews(body) {
  const buttons = [...body.querySelectorAll(".views button")];
  for (const button of buttons) {
    button.addEventListener("click", () => {
      body.dataset.view = button.dataset.view;
      for (const each of buttons) each.setAttribute("aria-pressed", each === button);
    });
  }
}

/** `<details>` that close like a menu: by Escape, and by a click elsewhere. */
function closeLikeMenu(details) {
  details.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !details.open) return;
    event.stopPropagation();
    details.open = false;
    details.querySelector("summary").focus();
  });
  document.addEventListener("pointerdown", (event) => {
    if (!details.contains(event.target)) details.open = false;
  });
}

function nameModel({ id }) {
  document.querySelector("#served").textContent = id;
  document.title = `${id} · mlserve`;
}

const api = new Api(keyDialog(document.querySelector("#key-dialog")));
const palette = new Palette();
const pool = new PoolView(document.querySelector("#pool"), api, palette);
const chat = new Chat(document.querySelector("#chat"), api, palette, pool, nameModel);
switchViews(document.body);
closeLikeMenu(document.querySelector("#settings"));
document.querySelector("#prompt").focus();
await chat.load();
pool.start();
// Adapters come and go while nobody looks.
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) chat.load();
});
