// Numbers as people read them: three significant digits, a unit, and a dash where there is nothing.

export const NOTHING = "–";

const digits3 = (value) =>
  value >= 99.95 ? value.toFixed(0) : value >= 9.995 ? value.toFixed(1) : value.toFixed(2);

/** Seconds as [number, unit]. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return [NOTHING, ""];
  if (seconds === 0) return ["0", "ms"];
  if (seconds < 0.9995e-3) return [digits3(seconds * 1e6), "µs"];
  if (seconds < 0.9995) return [digits3(seconds * 1e3), "ms"];
  if (seconds < 59.95) return [digits3(seconds), "s"];
  return [digits3(seconds / 60), "min"];
}

const STEPS = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];

function scaled(value, unit) {
  for (const [size, prefix] of STEPS) {
    if (value >= size * 0.9995) return [digits3(value / size), prefix + unit];
  }
  return [value === 0 ? "0" : digits3(value), unit];
}

/** A rate: [number, unit], with a factor in the number below a million: 12.3, 1,234, 1.23 M. */
export function rate(value, unit) {
  if (value === null || value === undefined) return [NOTHING, unit];
  if (value >= 999_950) {
    const [number, prefix] = scaled(value, "");
    return [number + prefix, unit];
  }
  return [value >= 99.95 ? count(value) : value === 0 ? "0" : digits3(value), unit];
}

export const bytes = (value) =>
  value === null || value === undefined ? [NOTHING, ""] : scaled(value, "B");

export const bytesPerSecond = (value) =>
  value === null || value === undefined ? [NOTHING, ""] : scaled(value, "B/s");

/** A whole number with thousands set off. */
export function count(value) {
  if (value === null || value === undefined) return NOTHING;
  return Math.round(value).toString().replace(/\B(?=(\d{3})+$)/g, ",");
}

/** A large count in few characters: 950, 12.3k, 4.56M. */
export function shortCount(value) {
  if (value === null || value === undefined) return NOTHING;
  return value < 10_000 ? count(value) : scaled(value, "").join("");
}

/** A share of 1. Never rounds what is not whole up to 100 %, nor what is there down to 0. */
export function percent(share) {
  if (share === null || share === undefined) return [NOTHING, ""];
  if (share === 0 || share === 1) return [String(share * 100), "%"];
  const shown = Math.min(99.9, Math.max(0.1, share * 100));
  return [shown.toFixed(1), "%"];
}

/** A round number for an axis: 80.0 ms is 80 ms there. */
export const rounded = (text) => text.replace(/\.0+(?=\D|$)/, "");

export const joined = ([number, unit]) => (unit ? `${number} ${unit}` : number);

export function timeOfDay(unixS) {
  const date = new Date(unixS * 1000);
  return [date.getHours(), date.getMinutes(), date.getSeconds()]
    .map((part) => String(part).padStart(2, "0")).join(":");
}

/** How long ago, in words that do not change every second for long. */
export function ago(seconds) {
  if (seconds < 1.5) return "just now";
  if (seconds < 60) return `${Math.floor(seconds)} s ago`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ago`;
  return `${Math.floor(seconds / 3600)} h ago`;
}
