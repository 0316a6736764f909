// The senders of each source channel as cells, colored by state.

import { element, keep, write } from "./elements.js";
import { count, durationText, known, lapse } from "./format.js";

export const STATES = ["missing", "silent", "slow", "disorder", "whole"];
const LABELS = { disorder: "disorder or duplicates" };
const SILENT_AFTER = 60_000_000;
const SLOW_TIMES = 4;
const SLOW_MS = 50;
const NAMED = 120;
const MOST = 2_000;
const inOrder = new Intl.Collator("en", { numeric: true }).compare;

export class Heat {
  constructor(parent, legend, tip) {
    this.parent = parent;
    this.tip = tip;
    this.details = new Map();
    legend.replaceChildren(...STATES.map((state) => {
      const item = element("li", "", LABELS[state] ?? state);
      item.dataset.state = state;
      return item;
    }));
  }

  show({ channels, at }) {
    const sources = channels.filter((channel) => channel.kind === "source" && (channel.worst ?? channel.by_sender));
    keep(this.parent, sources, {
      key: ({ channel }) => channel,
      make: () => this.block(),
      show: (block, channel) => this.showChannel(block, channel, at),
    });
    this.tip.refresh();
  }

  block() {
    const block = element("div", "senders");
    const cells = element("ul", "cells");
    cells.addEventListener("keydown", (event) => walk(cells, event));
    block.append(element("h3"), cells, element("p", "hint"));
    return block;
  }

  showChannel(block, channel, at) {
    const [title, cells, rest] = block.children;
    const entries = withStates(channel, at).slice(0, MOST);
    write(title, `${channel.channel} · ${count(channel.senders)} ${channel.senders === 1 ? "sender" : "senders"}`);
    cells.setAttribute("aria-label", `senders of ${channel.channel}`);
    cells.classList.toggle("dense", entries.length > NAMED);
    keep(cells, entries, {
      key: ({ key }) => key,
      make: (entry) => this.cell(entry.key),
      show: (cell, entry) => {
        this.details.set(entry.key, entry);
        cell.dataset.state = entry.state;
        cell.setAttribute("aria-label", `${entry.sender}, epoch ${entry.epoch}: ${entry.label}`);
        write(cell.children[0], entry.name);
        write(cell.children[1], entry.label);
      },
    });
    // One tab stop; arrow keys move between cells.
    if (cells.children.length && !cells.querySelector("[tabindex='0']")) cells.children[0].tabIndex = 0;
    write(rest, others(channel, entries));
  }

  cell(key) {
    const cell = element("li");
    cell.tabIndex = -1;
    cell.append(element("b"), element("span"));
    this.tip.attach(cell, () => explanation(this.details.get(key)));
    return cell;
  }
}

// Each epoch of a sender with its state, the worst first; equal ones by name, so that cells keep their positions.
export function withStates(channel, at) {
  const entries = channel.worst ?? channel.by_sender ?? [];
  const newest = Math.max(-Infinity, ...entries.map((entry) => entry.newest).filter(known));
  const last = new Map();
  const restarted = new Set();
  for (const { sender, epoch } of entries) {
    if (last.has(sender)) restarted.add(sender);
    last.set(sender, Math.max(epoch, last.get(sender) ?? epoch));
  }
  return entries.map((entry) => {
    const quiet = known(entry.newest) ? at - entry.newest : NaN;
    // Silent while other senders are not. Only the last epoch of a sender can be silent.
    const silent = quiet > SILENT_AFTER && at - newest <= SILENT_AFTER && last.get(entry.sender) === entry.epoch;
    const usual = channel.latency?.mean;
    const mean = entry.latency?.mean;
    const slow = known(mean) && known(usual) && mean > usual * SLOW_TIMES && mean - usual > SLOW_MS;
    const state = entry.missing ? "missing" : silent ? "silent" : slow ? "slow" : entry.duplicates || entry.reordered ? "disorder" : "whole";
    const label = {
      missing: `${count(entry.missing)} missing`,
      silent: `silent ${lapse(quiet / 1_000)}`,
      slow: `slow ${durationText(mean)}`,
      disorder: entry.duplicates ? `${count(entry.duplicates)} duplicates` : `${count(entry.reordered)} out of order`,
      whole: "whole",
    }[state];
    const name = restarted.has(entry.sender) ? `${entry.sender}/${entry.epoch}` : entry.sender;
    return { ...entry, name, state, label, quiet, key: JSON.stringify([channel.channel, entry.sender, entry.epoch]) };
  }).sort((a, b) => STATES.indexOf(a.state) - STATES.indexOf(b.state) || inOrder(a.sender, b.sender) || a.epoch - b.epoch);
}

function others(channel, entries) {
  const more = (channel.senders ?? 0) - new Set(entries.map(({ sender }) => sender)).size;
  if (more <= 0) return "";
  const fine = entries.length === 0 || entries.some(({ state }) => state === "whole");
  return `and ${count(more)} ${more === 1 ? "other" : "others"}, ${fine ? "in order" : "none of them worse than these"}`;
}

function explanation(entry) {
  const facts = [
    ["records", count(entry.records)],
    ["distinct", count(entry.distinct)],
    ["numbers", known(entry.first) && `${entry.first}–${entry.last}`],
    ["missing", count(entry.missing)],
    ["duplicates", count(entry.duplicates)],
    ["out of order", known(entry.reordered) && count(entry.reordered)],
    ["last seen", known(entry.quiet) && `${lapse(entry.quiet / 1_000)} ago`],
    ...["min", "mean", "max"].map((name) => [`latency ${name}`, known(entry.latency?.[name]) && durationText(entry.latency[name])]),
  ];
  return { title: entry.sender, notes: [`epoch ${entry.epoch}: ${entry.label}`], facts: facts.filter(([, value]) => value) };
}

function walk(cells, event) {
  const all = [...cells.children];
  const at = all.indexOf(document.activeElement);
  const perRow = all.filter((cell) => cell.offsetTop === all[0].offsetTop).length;
  const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: perRow, ArrowUp: -perRow, Home: -at, End: all.length - 1 - at }[event.key];
  const next = all[at + step];
  if (at < 0 || !next) return;
  event.preventDefault();
  all[at].tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
}
