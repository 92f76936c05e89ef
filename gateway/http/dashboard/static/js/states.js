// The connection's state in words: at the top always, and as a notice where something is wrong.

import { byId, setText } from "./dom.js";
import { timeOfDay } from "./format.js";

const SHORT = { connecting: "Connecting", live: "Live", stale: "Stale", disconnected: "Disconnected" };

const REASONS = {
  locked: ["Not logged in.", "The session has ended, or this key may not see the figures."],
  503: ["Too many viewers.", "This gateway shows its page to a bounded number of browsers. Trying again."],
  400: ["The gateway refused the targets.", "Correct them below."],
  unreachable: ["The gateway cannot be reached.", "Trying again every few seconds; the page goes on by itself."],
};

export class States {
  constructor() {
    this.state = "connecting";
    this.lastData = null;
  }

  /** When data came, in the gateway's time. */
  sawData(unixS) {
    this.lastData = unixS;
  }

  show(state, reason) {
    // While nothing answers, silence is not news.
    if (state === "stale" && (this.state === "disconnected" || this.state === "connecting")) return;
    if (state === this.state && reason === this.reason) return;
    this.state = state;
    this.reason = reason;
    document.body.dataset.state = state;
    setText(byId("state-text"), SHORT[state]);
    byId("notice").hidden = state === "live" || state === "connecting";
    const [title, text] = state === "stale"
      ? ["No new data for more than 3 seconds.", "The connection is open, but the gateway is silent."]
      : REASONS[reason] ?? ["The gateway answers with an error.", `Status ${reason}. Trying again.`];
    const since = this.lastData === null ? "" : ` The figures below are from ${timeOfDay(this.lastData)}.`;
    setText(byId("notice-title"), title);
    setText(byId("notice-text"), text + since);
    byId("notice-link").hidden = reason !== "locked";
  }
}
