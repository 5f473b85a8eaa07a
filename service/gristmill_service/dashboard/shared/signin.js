// Asks for a token where the service does. The browser keeps it in a cookie that no script reads.
import { make } from "./dom.js";

let asking = null;

export function signIn() {
  if (asking) return;
  const words = make("p", { class: "small quiet", role: "status" }, "This service needs a token; one with the role viewer shows runs.");
  const token = make("input", { type: "password", name: "token", autocomplete: "current-password", required: "", "aria-label": "Token" });
  const form = make("form", { method: "dialog" }, make("h2", {}, "Sign in"), words, token, make("button", { type: "submit" }, "Sign in"));
  asking = make("dialog", { "aria-label": "Sign in" }, form);
  form.addEventListener("submit", async event => {
    event.preventDefault();
    const answer = await fetch("v1/session", {
      method: "POST", headers: { "Content-Type": "application/json", Prefer: "errors=body" }, body: JSON.stringify({ token: token.value.trim() }),
    });
    if (answer.ok && !answer.headers.has("Gristmill-Status")) location.reload();
    else words.textContent = (await answer.json()).error.message;
  });
  document.body.append(asking);
  asking.showModal();
}
