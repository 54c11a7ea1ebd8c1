// Numbers, times and sizes as people read them.

import { now } from "./server.js";

const UNITS = [
  [86400, "day"],
  [3600, "hour"],
  [60, "minute"],
  [1, "second"],
];

export const plural = (count, noun) => `${number(count)} ${noun}${count === 1 ? "" : "s"}`;

/** Share of the queries to the server that got no answer in time; null if nothing was asked. */
export const fallbackShare = (offloads, fallbacks) => (offloads + fallbacks ? fallbacks / (offloads + fallbacks) : null);

/** The time since `at` (UTC seconds), in the largest whole unit: `3 minutes ago`. */
export function ago(at) {
  if (at === null || at === undefined) return "never";
  const passed = now() - at;
  if (passed < 0) return passed > -60 ? "now" : clock(at);
  for (const [seconds, unit] of UNITS) {
    if (passed >= seconds) return `${plural(Math.floor(passed / seconds), unit)} ago`;
  }
  return "now";
}

/** A length of time: `2.5 s`, `14 min`, `3 h`. */
export function lasting(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 120) return `${trimmed(seconds, seconds < 10 ? 1 : 0)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86400)} days`;
}

/** A moment in the reader's own time zone. */
export const clock = (at) =>
  new Date(1000 * at).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "medium" });

export const number = (value) =>
  value === null || value === undefined ? "–" : Math.round(value).toLocaleString("en-US");

/** A count in little room: `950`, `12.4 k`, `3.1 M`. */
export function short(value) {
  if (value === null || value === undefined) return "–";
  if (Math.abs(value) < 10000) return number(value);
  if (Math.abs(value) < 1e6) return `${trimmed(value / 1e3, 1)} k`;
  return `${trimmed(value / 1e6, 1)} M`;
}

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let step = 0;
  while (value >= 1000 && step < units.length - 1) {
    value /= 1000;
    step += 1;
  }
  return `${trimmed(value, step > 0 && value < 100 ? 1 : 0)} ${units[step]}`;
}

export function ms(value) {
  if (value === null || value === undefined) return "–";
  if (value < 1) return `${trimmed(1000 * value, 0)} µs`;
  return value < 1000 ? `${trimmed(value, value < 10 ? 2 : 1)} ms` : `${trimmed(value / 1000, 2)} s`;
}

/** A share in [0, 1] as per cent. */
export function percent(share, digits = 1) {
  if (share === null || share === undefined || Number.isNaN(share)) return "–";
  return `${trimmed(100 * share, share === 1 || share === 0 ? 0 : digits)} %`;
}

export const trimmed = (value, digits) => String(Number(value.toFixed(digits)));
