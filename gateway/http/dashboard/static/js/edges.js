// The arrows between the cards: gateways to prefill, prefill to decode; drawn only, the cards say it too.

import { keyed, setAttribute, svg } from "./dom.js";

const MIN_WIDTH = 1;
const MAX_WIDTH = 5;
const IS_ALIVE = new Set(["ready", "draining"]);

/** The share of the traffic that an edge carries, as a stroke's width. */
const widthOf = (share) => MIN_WIDTH + (MAX_WIDTH - MIN_WIDTH) * Math.sqrt(share);

function edgesOf(state) {
  const named = new Map(state.engines.filter((e) => e.state !== "gone").map((e) => [e.role + e.name, e]));
  const most = Math.max(1, ...state.transfers.map((t) => t.bytes));
  const isBusy = state.rates.began_per_s > 0;
  const edges = [];
  for (const engine of state.engines) {
    if (engine.role === "prefill" && IS_ALIVE.has(engine.state)) {
      for (const { gateway, began_per_s: began } of state.scope.gateways) {
        edges.push({ from: gateway, to: engine.incarnation, width: 1.5, isBusy: began > 0, kind: "ask" });
      }
    }
    for (const source of engine.role === "decode" && IS_ALIVE.has(engine.state) ? engine.links : []) {
      edges.push({ from: source, to: engine.incarnation, width: MIN_WIDTH, isBusy: false, kind: "kv" });
    }
  }
  for (const transfer of state.transfers) {
    const source = named.get(`prefill${transfer.source}`);
    const puller = named.get(`decode${transfer.puller}`);
    const edge = edges.find((e) => e.kind === "kv" && e.from === source?.incarnation && e.to === puller?.incarnation);
    if (edge === undefined) continue;
    edge.width = widthOf(transfer.bytes / most);
    edge.isBusy = isBusy;
  }
  return edges;
}

/** The cards' places, relative to `place`. */
function boxes(place) {
  const origin = place.getBoundingClientRect();
  const found = new Map();
  for (const card of place.querySelectorAll(".card")) {
    const box = card.getBoundingClientRect();
    found.set(card.dataset.key, {
      left: box.left - origin.left, right: box.right - origin.left, middle: (box.top + box.bottom) / 2 - origin.top,
    });
  }
  return found;
}

function path(from, to) {
  const bend = (to.left - from.right) / 2;
  return `M${from.right},${from.middle} C${from.right + bend},${from.middle} ${to.left - bend},${to.middle} ${to.left},${to.middle}`;
}

export function drawEdges(layer, place, state) {
  let canvas = layer.firstElementChild;
  if (canvas === null) {
    canvas = svg("svg", { width: "100%", height: "100%" });
    layer.append(canvas);
  }
  const at = boxes(place);
  // On a narrow screen the columns are below each other: no arrows there.
  const edges = edgesOf(state).filter(({ from, to }) => at.has(from) && at.has(to) && at.get(to).left > at.get(from).right);
  keyed(canvas, edges, (edge) => `${edge.from}>${edge.to}`,
    () => svg("g", {}, svg("path", { class: "wire" }), svg("path", { class: "flow" })),
    (group, edge) => {
      const d = path(at.get(edge.from), at.get(edge.to));
      setAttribute(group, "class", `edge ${edge.kind} ${edge.isBusy ? "busy" : ""}`);
      for (const line of group.children) setAttribute(line, "d", d);
      setAttribute(group.firstElementChild, "stroke-width", edge.width.toFixed(2));
    });
}
