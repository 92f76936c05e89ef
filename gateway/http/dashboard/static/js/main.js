// Puts the page together: data from the connection into the store, from the store into the panels.

import { Calls } from "./calls.js";
import { Cluster } from "./cluster.js";
import { Connection } from "./connection.js";
import { byId, element, setText } from "./dom.js";
import { timeOfDay } from "./format.js";
import { IndexTable } from "./index_table.js";
import { makeCharts } from "./panels.js";
import { Plans } from "./plans.js";
import { States } from "./states.js";
import { Stats } from "./stats.js";
import { Store } from "./store.js";
import { Targets } from "./targets.js";
import { setUpTheme } from "./theme.js";

const store = new Store();
const states = new States();
const targets = new Targets(() => connection.open());
const panels = [targets, new Stats(byId("stats")), ...makeCharts(), new Cluster(byId("cluster")), new Plans(byId("plans")), new IndexTable(byId("index")), new Calls(byId("calls"))];

function render() {
  const state = store.now;
  if (state === null || document.hidden) return;
  setText(byId("model"), state.gateway.model);
  if (document.title !== `${state.gateway.model} · Baton`) document.title = `${state.gateway.model} · Baton`;
  showEmpty(state);
  showScope(state.scope);
  for (const panel of panels) panel.update(state);
}

function showEmpty(state) {
  const { began, refused } = state.counts;
  byId("empty").hidden = began + refused + state.num_running > 0;
  const body = JSON.stringify({ model: state.gateway.model, messages: [{ role: "user", content: "Hello" }], stream: true });
  const quoted = body.replaceAll("'", "'\\''"); // for a shell's single quotes
  setText(byId("curl"), `curl -N ${location.origin}/v1/chat/completions -H 'Content-Type: application/json' -d '${quoted}'`);
}

/** Whose figures these are, where they are not all gateways'. */
function showScope({ is_shared: isShared, alone_since_unix_s: since }) {
  byId("alone").hidden = isShared;
  if (!isShared) setText(byId("alone-text"), `Since ${timeOfDay(since)} the figures are of this gateway's requests alone, and other gateways' are missing.`);
}

function setUpDefinitions() {
  const dialog = byId("definitions");
  byId("open-definitions").addEventListener("click", () => {
    byId("definition-list").replaceChildren(...(store.now?.definitions ?? []).flatMap(([term, meaning]) =>
      [element("dt", {}, term), element("dd", {}, meaning)]));
    dialog.showModal();
  });
  byId("close-definitions").addEventListener("click", () => dialog.close());
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
}

function setUpCopy() {
  const button = byId("copy-curl");
  button.hidden = !navigator.clipboard; // only where the page came over TLS or from this host
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(byId("curl").textContent);
    setText(button, "Copied");
    setTimeout(() => setText(button, "Copy"), 1500);
  });
}

const connection = new Connection({
  targets: () => targets.query(),
  onState: (state, reason) => states.show(state, reason),
  onData: (kind, data) => {
    states.sawData(data.now_unix_s);
    store.take(kind, data);
    render();
  },
});

setUpTheme();
setUpDefinitions();
setUpCopy();
document.addEventListener("visibilitychange", render);
connection.open();
