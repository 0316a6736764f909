// The verdict of the balance, in words.

import { write } from "./elements.js";
import { count, known, rate } from "./format.js";

const SILENT_AFTER = 15_000_000;
const FRESH = 5_000_000;

export const total = (items, name) => items.reduce((sum, item) => sum + (known(item?.[name]) ? item[name] : 0), 0);

export function verdictOf({ balance, processes, now }) {
  if (!balance) return { kind: "unknown", text: "waiting for the audit" };
  const channels = balance.channels ?? [];
  const hops = balance.hops ?? [];
  const missing = total(hops.length ? hops : channels, "missing");
  const silent = now - (processes.audit?.at ?? now);
  const unknown = total(channels, "unknown_seconds");
  const findings = balance.discrepancies ?? [];
  const [doubt, ...more] = balance.doubts ?? [];
  if (missing) return { kind: "missing", text: `${count(missing)} missing` };
  if (findings.length) return { kind: "missing", text: `${count(findings.length)} ${findings.length === 1 ? "finding" : "findings"}` };
  if (silent > SILENT_AFTER) return { kind: "unknown", text: `the audit has not reported for ${count(silent / 1e6)} s` };
  if (doubt) return { kind: "unknown", text: `not known: ${doubt.text}${more.length ? `, and ${count(more.length)} more` : ""}` };
  if (!total(channels, "records") && !total(channels, "claimed")) return { kind: "unknown", text: "no records counted yet" };
  if (unknown) return { kind: "unknown", text: `${rate(unknown)} s unknown` };
  if (balance.verdict === "whole") return { kind: "whole", text: "every record accounted for" };
  return { kind: "unknown", text: "waiting for the audit" };
}

export function showVerdict(pill, { kind, text }) {
  pill.dataset.verdict = kind;
  write(pill.querySelector("span"), text);
}

// The time of the balance, if it is not current.
export function asOf({ at, as_of: then }) {
  if (!known(then) || !known(at) || at - then <= FRESH) return "";
  const [day, time] = utc(then);
  return `as of ${day === utc(at)[0] ? "" : `${day} `}${time} UTC`;
}

// [day, time] of a timestamp in microseconds.
function utc(micros) {
  const date = new Date(micros / 1_000);
  return Number.isNaN(date.getTime()) ? ["", "–"] : date.toISOString().split(/[T.]/);
}
