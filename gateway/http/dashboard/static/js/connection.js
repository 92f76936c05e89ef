// The way to the gateway: server-sent events, polling where those do not get through, and again
// after every loss. Says in which state it is; knows nothing of what the data means.
//
//   connecting ──data──► live ──3 s without──► stale ──data──► live
//        ▲                └─────── lost ───────► disconnected ──┐
//        └──────────────────── a second later ──────────────────┘

const STALE_MS = 3000;
const GIVE_UP_MS = 7000; // after stale: a dead network ends no stream, so we do
const RETRY_MS = [500, 1000, 2000, 4000];
const POLL_MS = 1000;

const API = new URL("../../api/", import.meta.url);

export class Connection {
  /** `onData(kind, data)`, `onState(state, reason)`; `targets()` gives the query's text. */
  constructor({ targets, onData, onState }) {
    this.targets = targets;
    this.onData = onData;
    this.onState = onState;
    this.source = null;
    this.timer = 0;
    this.watchdog = 0;
    this.failures = 0;
    this.serial = 0; // what belongs to an older attempt is dropped
    this.hadEvents = false;
  }

  open() {
    const serial = ++this.serial;
    clearTimeout(this.timer);
    this.source?.close();
    this.hadEvents = false;
    const source = new EventSource(new URL(`stream?${this.targets()}`, API));
    this.source = source;
    for (const kind of ["snapshot", "update"]) {
      source.addEventListener(kind, (event) => {
        if (serial !== this.serial) return;
        this.hadEvents = true;
        this.#arrived(kind, event.data);
      });
    }
    source.addEventListener("error", () => {
      if (serial !== this.serial) return;
      source.close();
      // The gateway ends each stream after some minutes: no failure, so come back at once.
      if (this.hadEvents && this.failures === 0) this.#retry(250);
      else this.#poll(serial);
      this.hadEvents = false;
      this.failures += 1;
    });
    this.#watch();
  }

  #arrived(kind, text) {
    this.failures = 0;
    this.#watch();
    this.onState("live", "");
    this.onData(kind, JSON.parse(text));
  }

  #watch() {
    clearTimeout(this.watchdog);
    this.watchdog = setTimeout(() => {
      this.onState("stale", "");
      this.watchdog = setTimeout(() => this.open(), GIVE_UP_MS);
    }, STALE_MS);
  }

  #retry(afterMs) {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.open(), afterMs);
  }

  /** The stream failed: an ordinary request tells why, or brings the data in its place. */
  async #poll(serial) {
    let reason = "";
    try {
      const response = await fetch(new URL(`snapshot?${this.targets()}`, API), {
        cache: "no-store",
        signal: AbortSignal.timeout(STALE_MS),
      });
      if (serial !== this.serial) return;
      if (response.ok) {
        const text = await response.text();
        const failures = this.failures;
        this.#arrived("snapshot", text);
        this.failures = failures;
        // Every tenth time the stream is tried again.
        if (failures % 10 === 0) this.#retry(POLL_MS);
        else this.timer = setTimeout(() => { this.failures += 1; this.#poll(serial); }, POLL_MS);
        return;
      }
      reason = response.status === 401 || response.status === 403 ? "locked" : String(response.status);
    } catch {
      reason = "unreachable";
    }
    if (serial !== this.serial) return;
    clearTimeout(this.watchdog);
    this.onState("disconnected", reason);
    this.#retry(RETRY_MS[Math.min(this.failures, RETRY_MS.length - 1)]);
  }
}
