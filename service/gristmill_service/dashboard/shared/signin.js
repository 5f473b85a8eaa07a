// Asks for a token if the service requires one. The browser stores it in a cookie that scripts cannot read.
import { make } from "./dom.js";

let asking = null;

export function signIn() {
  if (asking) return;
  const words = make("p", { class: "small quiet", role: "status" }, "This service requires a token. A token with the role viewer can view runs.");
  const token = make("input", { type: "password", name: "token", autocomplete: "current-password", required: "", "aria-label": "Token" });
  const form = make("form", { method: "dialog" }, make("h2", {}, "Sign in"), words, token, make("button", { type: "submit" }, "Sign in"));
  asking = make("dialog", { "aria-label": "Sign in" }, form);
  form.addEventListener("submit", async event => {
    event.preventDefault();
    const answer = await fetch("v1/session", {
      method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ token: token.value.trim() }),
    });
    if (answer.ok) location.reload();
    else words.textContent = (await answer.json().catch(() => null))?.error.message ?? `the service answered ${answer.status}`;
  });
  document.body.append(asking);
  asking.showModal();
}
