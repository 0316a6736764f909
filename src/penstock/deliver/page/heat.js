// The senders of each source channel as cells: what is troubled is seen at once, and has a name.

import { element, keep, write } from "./elements.js";
import { count, durationText, known, lapse } from "./format.js";

export const STATES = ["missing", "silent", "slow", "disorder", "whole"];
const WORDS = { disorder: "disorder or duplicates" };
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
    this.told = new Map();
    legend.replaceChildren(...STATES.map((state) => {
      const item = element("li", "", WORDS[state] ?? state);
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
    const lives = judged(channel, at).slice(0, MOST);
    write(title, `${channel.channel} · ${count(channel.senders)} ${channel.senders === 1 ? "sender" : "senders"}`);
    cells.setAttribute("aria-label", `senders of ${channel.channel}`);
    cells.classList.toggle("dense", lives.length > NAMED);
    keep(cells, lives, {
      key: ({ key }) => key,
      make: (life) => this.cell(life.key),
      show: (cell, life) => {
        this.told.set(life.key, life);
        cell.dataset.state = life.state;
        cell.setAttribute("aria-label", `${life.sender}, life ${life.epoch}: ${life.words}`);
        write(cell.children[0], life.name);
        write(cell.children[1], life.words);
      },
    });
    // One stop for the tabulator; arrows go on from there.
    if (cells.children.length && !cells.querySelector("[tabindex='0']")) cells.children[0].tabIndex = 0;
    write(rest, others(channel, lives));
  }

  cell(key) {
    const cell = element("li");
    cell.tabIndex = -1;
    cell.append(element("b"), element("span"));
    this.tip.explains(cell, () => explanation(this.told.get(key)));
    return cell;
  }
}

// Each life of a sender with its state, the worst first; equals in the order of their names, so that cells stay put.
export function judged(channel, at) {
  const lives = channel.worst ?? channel.by_sender ?? [];
  const newest = Math.max(-Infinity, ...lives.map((life) => life.newest).filter(known));
  const last = new Map();
  const reborn = new Set();
  for (const { sender, epoch } of lives) {
    if (last.has(sender)) reborn.add(sender);
    last.set(sender, Math.max(epoch, last.get(sender) ?? epoch));
  }
  return lives.map((life) => {
    const quiet = known(life.newest) ? at - life.newest : NaN;
    // Who is silent while others speak. A life that another one follows has nothing more to say.
    const silent = quiet > SILENT_AFTER && at - newest <= SILENT_AFTER && last.get(life.sender) === life.epoch;
    const usual = channel.latency?.mean;
    const mean = life.latency?.mean;
    const slow = known(mean) && known(usual) && mean > usual * SLOW_TIMES && mean - usual > SLOW_MS;
    const state = life.missing ? "missing" : silent ? "silent" : slow ? "slow" : life.duplicates || life.reordered ? "disorder" : "whole";
    const words = {
      missing: `${count(life.missing)} missing`,
      silent: `silent ${lapse(quiet / 1_000)}`,
      slow: `slow ${durationText(mean)}`,
      disorder: life.duplicates ? `${count(life.duplicates)} doubled` : `${count(life.reordered)} out of order`,
      whole: "whole",
    }[state];
    const name = reborn.has(life.sender) ? `${life.sender}/${life.epoch}` : life.sender;
    return { ...life, name, state, words, quiet, key: JSON.stringify([channel.channel, life.sender, life.epoch]) };
  }).sort((a, b) => STATES.indexOf(a.state) - STATES.indexOf(b.state) || inOrder(a.sender, b.sender) || a.epoch - b.epoch);
}

function others(channel, lives) {
  const more = (channel.senders ?? 0) - new Set(lives.map(({ sender }) => sender)).size;
  if (more <= 0) return "";
  const fine = lives.length === 0 || lives.some(({ state }) => state === "whole");
  return `and ${count(more)} ${more === 1 ? "other" : "others"}, ${fine ? "in order" : "none of them more troubled than these"}`;
}

function explanation(life) {
  const facts = [
    ["records", count(life.records)],
    ["distinct", count(life.distinct)],
    ["numbers", known(life.first) && `${life.first}–${life.last}`],
    ["missing", count(life.missing)],
    ["doubled", count(life.duplicates)],
    ["out of order", known(life.reordered) && count(life.reordered)],
    ["heard", known(life.quiet) && `${lapse(life.quiet / 1_000)} ago`],
    ...["min", "mean", "max"].map((name) => [`latency ${name}`, known(life.latency?.[name]) && durationText(life.latency[name])]),
  ];
  return { title: life.sender, notes: [`life ${life.epoch}: ${life.words}`], facts: facts.filter(([, value]) => value) };
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
