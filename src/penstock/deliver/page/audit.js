// The audit page: polls the status, and shows its balance.

import { get, poll } from "./poll.js";
import { element, keep, write } from "./elements.js";
import { Flow, outcomeName } from "./flow.js";
import { count, known, lapse } from "./format.js";
import { Heat } from "./heat.js";
import { OUTCOMES } from "./sankey.js";
import { showFindings, showLatencies, showSheet } from "./sheet.js";
import { Tip } from "./tip.js";
import { asOf, showVerdict, total, verdictOf } from "./verdict.js";

const PREFIXES = { whole: "Whole: ", missing: "Not whole: " };
const byId = (id) => document.getElementById(id);
const tip = new Tip(byId("tip"));
const flow = new Flow(byId("flow"), byId("outcomes"), tip);
const heat = new Heat(byId("heat"), byId("states"), tip);

function show(status) {
  const { kind, text } = verdictOf(status);
  showVerdict(byId("verdict"), { kind, text: `${PREFIXES[kind] ?? ""}${text}` });
  showConnection("live", "live");
  if (!status.balance) return;
  const { hops, paths, channels, alarms, ...rest } = status.balance;
  const balance = { ...rest, hops: hops ?? [], paths: paths ?? [], channels: channels ?? [], alarms: alarms ?? [] };
  const senders = balance.channels.some(({ worst, by_sender: all }) => worst?.length || all?.length);
  byId("flow-card").hidden = byId("sheet-card").hidden = !balance.hops.length;
  byId("heat-card").hidden = !senders;
  byId("latency-card").hidden = !balance.hops.some(({ latency, step }) => latency || step);
  write(byId("sum"), sum(balance));
  write(byId("as-of"), asOf(balance));
  showAlarms(balance.alarms, status.now);
  flow.show(balance);
  heat.show({ ...balance, at: balance.at ?? status.now });
  showSheet(byId("sheet"), balance);
  showFindings(byId("findings"), balance);
  showLatencies(byId("latencies"), balance);
}

// The records of the sources, in one sentence.
function sum({ hops, channels }) {
  const sources = hops.filter(({ reads }) => !reads);
  if (!sources.length) return channels.length ? "" : "No channel is audited.";
  const parts = OUTCOMES.map((outcome) => [outcomeName(outcome), total(sources.map((hop) => ({ ...hop, ...hop.outcomes })), outcome)]);
  const shown = parts.filter(([, value]) => value).map(([name, value]) => `${count(value)} ${name}`);
  const who = sources.length === 1 ? "One source" : `${count(sources.length)} sources`;
  return `${who}, ${count(total(sources, "due"))} records due${shown.length ? `: ${shown.join(", ")}` : ""}.`;
}

function showAlarms(alarms, now) {
  const list = byId("alarms");
  list.hidden = !alarms.length;
  keep(list, alarms, {
    key: ({ name, stage }) => JSON.stringify([name, stage]),
    make: () => {
      const item = element("li");
      item.append(element("b"), element("span"), element("small"));
      return item;
    },
    show: (item, { name, stage, text, since }) => {
      write(item.children[0], name);
      write(item.children[1], text || stage);
      // In minutes: screen readers read the list again whenever it changes.
      const age = known(since) ? (now - since) / 1_000 : NaN;
      write(item.children[2], !known(age) ? "" : age < 120_000 ? "just now" : `for ${lapse(age)}`);
    },
  });
}

function showConnection(state, text) {
  const line = byId("connection");
  line.dataset.state = state;
  write(line.querySelector("span"), text);
}

poll(async () => show(await get("/status")), (trouble) => showConnection("lost", trouble));
