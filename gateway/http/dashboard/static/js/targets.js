// The SLO targets: edited in the form, kept in the page's address, so that a link carries them.

import { byId, setAttribute } from "./dom.js";

const SPANS = ["300", "3600"]; // seconds, of which the first is usual
const FIELDS = { ttft_ms: "ttft-target", tbt_ms: "tbt-target" };

const isTarget = (text) => Number(text) > 0 && Number(text) <= 3_600_000;

/** The targets and the span in the address; the gateway has its own for those that are not there. */
function fromAddress() {
  const asked = new URLSearchParams(location.search);
  const values = Object.fromEntries(Object.keys(FIELDS)
    .filter((name) => isTarget(asked.get(name)))
    .map((name) => [name, String(Number(asked.get(name)))]));
  return SPANS.includes(asked.get("span_s")) ? { ...values, span_s: asked.get("span_s") } : values;
}

export class Targets {
  /** `onChange` is called when a valid target was entered. */
  constructor(onChange) {
    this.values = fromAddress();
    for (const [name, id] of Object.entries(FIELDS)) {
      const input = byId(id);
      input.addEventListener("change", () => {
        const isGood = isTarget(input.value);
        input.setAttribute("aria-invalid", String(!isGood));
        if (!isGood) return;
        this.values[name] = String(Number(input.value));
        this.#keep();
        onChange();
      });
    }
    for (const span of SPANS) {
      byId(`span-${span}`).addEventListener("click", () => {
        this.values.span_s = span;
        this.#keep();
        this.#showSpan(span);
        onChange();
      });
    }
    this.#showSpan(this.values.span_s ?? SPANS[0]);
    byId("targets").addEventListener("submit", (event) => event.preventDefault());
  }

  /** Show what the gateway judged by, unless it is being edited. */
  update({ slo }) {
    for (const [name, id] of Object.entries(FIELDS)) {
      const text = String(Number((slo[name.replace("_ms", "_slo_s")] * 1000).toPrecision(6)));
      const input = byId(id);
      const isEdited = input === document.activeElement || input.getAttribute("aria-invalid") === "true";
      if (!isEdited && input.value !== text) input.value = text;
    }
  }

  #showSpan(shown) {
    for (const span of SPANS) setAttribute(byId(`span-${span}`), "aria-pressed", String(span === shown));
  }

  query() {
    return new URLSearchParams(this.values).toString();
  }

  #keep() {
    const address = new URL(location.href);
    for (const [name, value] of Object.entries(this.values)) address.searchParams.set(name, value);
    history.replaceState(null, "", address);
  }
}
