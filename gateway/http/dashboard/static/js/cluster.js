// The cluster as it is: a card for each gateway and each engine, and who passes KV to whom.
// An engine that is gone stays, grey: the server keeps it in the list.

import { drawEdges } from "./edges.js";
import { element, keyed, setAttribute, setStyle, setText } from "./dom.js";
import { ago, bytesPerSecond, count, duration, joined, percent, rate } from "./format.js";

const STATES = {
  ready: ["Ready", "good"],
  draining: ["Draining", "fair"],
  starting: ["Starting", "fair"],
  unlinked: ["Not answering", "bad"],
  gone: ["Gone", "gone"],
};

const MANY_CARDS = 6; // of a column
const MOST_LINKS = 6; // of a card
const MORE = ""; // no engine's name

const ROLES = { prefill: "Prefill", decode: "Decode" };

/** "cuda:0,1" as people say it. */
function deviceName(device) {
  if (device === "cpu") return "CPU";
  return device.startsWith("cuda:") ? `GPU ${device.slice(5).replaceAll(",", ", ")}` : device;
}

const fact = (name, key) => {
  const value = element("dd", {}, "–");
  return [element("div", { class: key }, element("dt", {}, name), value), value];
};

/** The card's parts are kept on it, to be updated in place. */
function makeCard(kind, facts) {
  const parts = { name: element("h4"), badge: element("span", { class: "badge" }), sub: element("p", { class: "small sub" }) };
  parts.facts = Object.fromEntries(Object.entries(facts).map(([key, name]) => [key, fact(name, key)]));
  parts.fill = element("i");
  parts.fillText = element("span");
  parts.links = element("ul", { class: "links small" });
  const meter = element("div", { class: "fill" }, element("span", {}, "KV cache"), parts.fillText,
    element("div", { class: "meter", "aria-hidden": true }, parts.fill));
  const card = element("article", { class: `card ${kind}` },
    element("header", {}, parts.name, parts.badge), parts.sub,
    element("dl", { class: "facts" }, ...Object.values(parts.facts).map(([node]) => node)),
    kind === "gateway" ? null : meter, kind === "decode" ? parts.links : null);
  card.parts = parts;
  return card;
}

// What steps with decodes take at most, how many of the last half minute did, and the longest of a hundred.
const PROMISE = { promise: "Promise", kept_share: "Kept", step_p99_s: "Step p99" };

const FACTS = {
  prefill: { num_running: "Running", num_waiting: "Waiting", waiting_tokens: "Queue", credit_blocks: "Credit", ...PROMISE },
  decode: { num_running: "Running", num_waiting: "Waiting", free_blocks: "Free blocks", ...PROMISE },
  gateway: { rps: "Requests", running: "Running", output: "Output" },
};

const UNITS = { waiting_tokens: " tok", credit_blocks: " blocks" };

/** An engine without a promise computes prompts at full speed, or decodes alone. */
function promiseText({ state, tbt_target_s: target, is_promise_withdrawn: isWithdrawn }) {
  if (state !== "ready" && state !== "draining") return "–";
  if (target === null) return "none";
  return joined(duration(target)) + (isWithdrawn ? ", ending" : "");
}

function factText(engine, key) {
  if (key === "promise") return promiseText(engine);
  if (key === "kept_share") return joined(percent(engine.kept_share));
  if (key === "step_p99_s") return joined(duration(engine.step_p99_s));
  return engine[key] === null ? "–" : count(engine[key]) + (UNITS[key] ?? "");
}

function updateEngine(card, engine, state) {
  const { parts } = card;
  const [word, tone] = STATES[engine.state] ?? [engine.state, "fair"];
  setAttribute(card, "data-state", engine.state);
  setText(parts.name, engine.name);
  setText(parts.badge, word);
  setAttribute(parts.badge, "data-tone", tone);
  const place = [deviceName(engine.device), engine.address].filter(Boolean).join(" · ");
  const back = engine.restarts ? `, restarted ${count(engine.restarts)}×` : "";
  const since = engine.state === "ready" ? back : `, ${ago(state.now_unix_s - engine.since_unix_s)}${back}`;
  const [drafted, accepted] = engine.draft_means ?? [];
  const drafts = drafted ? `, ${accepted.toFixed(1)} of ${drafted.toFixed(1)} drafts a step accepted` : "";
  setText(parts.sub, place + since + drafts);
  for (const [key, [, value]] of Object.entries(parts.facts)) {
    setText(value, factText(engine, key));
  }
  const used = engine.free_blocks === null ? null : 1 - engine.free_blocks / engine.pool_blocks;
  const inHost = engine.host_blocks ? `, and ${count(engine.host_blocks)} blocks in host memory` : "";
  setText(parts.fillText, used === null ? "unknown" : joined(percent(Math.max(0, used))) + inHost);
  setStyle(parts.fill, "--share", (used ?? 0).toFixed(4));
  setAttribute(parts.fill, "data-tone", used > 0.98 ? "bad" : used > 0.9 ? "fair" : "plain");
  if (engine.role === "decode") updateLinks(parts.links, engine, state);
}

/** What the arrows show, as text: those that passed most, and how many there are beside. */
function updateLinks(list, engine, state) {
  const sources = new Map(state.engines.map((e) => [e.incarnation, e.name]));
  const linked = engine.links.map((incarnation) => sources.get(incarnation)).filter(Boolean);
  const passed = new Map(state.transfers.filter((t) => t.puller === engine.name).map((t) => [t.source, t]));
  const bytesOf = (name) => passed.get(name)?.bytes ?? 0;
  const names = [...new Set([...linked, ...passed.keys()])].sort().sort((a, b) => bytesOf(b) - bytesOf(a));
  const rest = names.length - MOST_LINKS;
  keyed(list, rest > 0 ? [...names.slice(0, MOST_LINKS), MORE] : names, (name) => name,
    () => element("li", {}, element("span"), element("span", { class: "link-rate" })),
    (item, name) => {
      if (name === MORE) {
        setText(item.children[0], `and ${count(rest)} more`);
        return;
      }
      const edge = passed.get(name);
      setText(item.children[0], `from ${name}`);
      setText(item.children[1], edge
        ? `${joined(bytesPerSecond(edge.gbytes_per_s === null ? null : edge.gbytes_per_s * 1e9))} · ${edge.transport}`
        : linked.includes(name) ? "linked" : "no link");
    });
}

function updateGateway(card, gateway) {
  const { parts } = card;
  const { is_own: isOwn, is_ready: isReady, is_draining: isDraining } = gateway;
  setText(parts.name, gateway.name);
  setText(parts.badge, isDraining ? "Shutting down" : isReady ? "Ready" : "No pair of engines");
  setAttribute(parts.badge, "data-tone", isDraining ? "gone" : isReady ? "good" : "bad");
  setText(parts.sub, [`version ${gateway.version}`, isOwn ? "this page's" : ""].filter(Boolean).join(" · "));
  setText(parts.facts.rps[1], joined(rate(gateway.began_per_s, "/s")));
  setText(parts.facts.running[1], count(gateway.num_running));
  setText(parts.facts.output[1], joined(rate(gateway.output_tokens_per_s, "tok/s")));
}

export class Cluster {
  constructor(place) {
    this.edges = element("div", { class: "edges", "aria-hidden": true });
    this.gateways = element("div", { class: "cards" });
    this.columns = { gateway: this.#column("Gateways", this.gateways) };
    this.cards = {};
    for (const role of Object.keys(ROLES)) {
      this.cards[role] = element("div", { class: "cards" });
      this.columns[role] = this.#column(ROLES[role], this.cards[role]);
    }
    place.append(this.edges, ...Object.values(this.columns));
    this.place = place;
    new ResizeObserver(() => this.state && drawEdges(this.edges, this.place, this.state)).observe(place);
  }

  #column(name, cards) {
    this.notes ??= {};
    this.notes[name] = element("span", { class: "small" });
    return element("div", { class: "column" }, element("h3", { class: "column-name" }, name, " ", this.notes[name]), cards);
  }

  update(state) {
    this.state = state;
    const { gateways } = state.scope;
    const numReady = gateways.filter((gateway) => gateway.is_ready).length;
    setText(this.notes.Gateways, `${numReady} of ${gateways.length} ready`);
    keyed(this.gateways, gateways, (gateway) => gateway.gateway, () => makeCard("gateway", FACTS.gateway), updateGateway);
    for (const role of Object.keys(ROLES)) {
      const engines = state.engines.filter((engine) => engine.role === role);
      const ready = engines.filter((engine) => engine.state === "ready").length;
      setText(this.notes[ROLES[role]], engines.length ? `${ready} of ${engines.length} ready` : "none seen yet");
      keyed(this.cards[role], engines, (e) => e.incarnation,
        () => makeCard(role, FACTS[role]), (card, engine) => updateEngine(card, engine, state));
    }
    const longest = Math.max(...[this.gateways, ...Object.values(this.cards)].map((cards) => cards.children.length));
    setAttribute(this.place, "data-many", longest > MANY_CARDS);
    drawEdges(this.edges, this.place, state);
  }
}
