// The stages of a request: their names for people, their colours, and where they lie in a bar.

export const STAGES = [
  { key: "gateway_queue", name: "gateway queue", token: "gateway" },
  { key: "prefill_queue", name: "prefill queue", token: "prefill-soft" },
  { key: "prefill", name: "prefill", token: "prefill" },
  { key: "kv_transfer", name: "KV transfer", token: "transfer" },
  { key: "decode_queue", name: "decode admission", token: "decode-soft" },
  { key: "first_decode", name: "first decode", token: "decode" },
];

/** A call's bar from 0 to 1: its stages one after the other, then the decode until its end. */
export function barParts(call) {
  const total = call.e2e_s || 1e-6;
  const parts = [];
  let at = 0;
  for (const { key, token } of STAGES) {
    const seconds = call.stages[key];
    if (!seconds) continue;
    const to = Math.min(1, at + seconds / total);
    parts.push({ token, from: at, to });
    at = to;
  }
  if (at < 1) parts.push({ token: call.is_finished ? "tail" : "failed", from: at, to: 1 });
  return parts;
}
