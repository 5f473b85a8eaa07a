// Shown while the service has no runs: its addresses, and a first program.
import { make } from "./shared/dom.js";

const snippet = address => `from gristmill import RolloutClient

with RolloutClient("${address}", run="my-run") as client:
    client.create_run({
        "train_batch_size": 2, "n_samples_per_prompt": 2, "policy_mini_batch_size": 1,
        "dp_size": 1, "micro_batch": {"max_tokens": 16384},
    })
    for uid in client.begin_groups(["prompt-1", "prompt-2"]):
        for sample in range(2):
            with client.trajectory(uid, sample, policy_version=0) as trajectory:
                trajectory.step([1, 2, 3], [4, 5 + sample], reward=float(sample), is_last_step=True)
`;

export function welcome(grpcAddress) {
  const text = snippet(grpcAddress), http = location.href.replace(/#.*$/, "").replace(/\/$/, "");
  const copied = make("span", { role: "status", class: "quiet small" });
  const copy = make("button", { onclick: async () => {
    try {
      await navigator.clipboard.writeText(text);
      copied.textContent = "copied";
    } catch {
      copied.textContent = "the browser does not allow copying; select the text";
    }
  } }, "Copy");
  return make("section", { "aria-label": "No runs yet", class: "welcome" }, make("h1", {}, "No runs yet"),
    make("p", {}, "A run appears here when it is created. Rollout workers and trainers connect to this service at ",
      make("code", {}, grpcAddress), " (gRPC) and ", make("code", {}, http), " (HTTP)."),
    make("div", { class: "bar" }, make("h2", {}, "A first run"), copy, copied),
    make("pre", { tabindex: "0", "aria-label": "A first run" }, make("code", {}, text)));
}
